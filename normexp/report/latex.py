r"""A table -> LaTeX, for a stock pdflatex: \usepackage{booktabs,longtable}. A wide one belongs on a landscape page."""

from __future__ import annotations

import re
import unicodedata

from normexp.report.formats import Table, show

PAGE = 40  # rows: more of them do not fit on one page

GREEK = re.findall(
    r"(\S)(\w+)",
    "αalpha βbeta γgamma δdelta εepsilon ζzeta ηeta θtheta ιiota κkappa λlambda μmu νnu ξxi πpi ρrho σsigma τtau "
    "υupsilon φphi χchi ψpsi ωomega ΓGamma ΔDelta ΘTheta ΛLambda ΞXi ΠPi ΣSigma ΦPhi ΨPsi ΩOmega",
)
SIGNS = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "\n": " ",
    "\xa0": "~",
    "–": "--",
    "—": "---",
    "…": r"\dots{}",
    "−": "$-$",
    "∞": r"$\infty$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "±": r"$\pm$",
    "≤": r"$\le$",
    "≥": r"$\ge$",
    "≠": r"$\ne$",
    "≈": r"$\approx$",
    "→": r"$\to$",
    "∈": r"$\in$",
    "√": r"$\surd$",
    "µ": r"$\mu$",
    **{sign: f"$\\{name}$" for sign, name in GREEK},
    **{sign: f"$_{{{digit}}}$" for digit, sign in enumerate("₀₁₂₃₄₅₆₇₈₉")},
    **{sign: f"$^{{{digit}}}$" for digit, sign in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    "⁻": "$^{-}$",
}


def latex(value: str) -> str:
    return "".join(SIGNS.get(sign) or _known(sign) for sign in value)


def _known(sign: str) -> str:
    """ASCII and the accented letters of Latin-1, which any LaTeX knows; another character by its number."""
    base = unicodedata.normalize("NFD", sign)[0]
    plain = sign.isascii() or (sign <= "ÿ" and base.isascii() and base.isalpha())
    return sign if plain and sign.isprintable() else f"[U+{ord(sign):04X}]"


def to_latex(table: Table) -> str:
    """A `tabular` in a `table`; a `longtable` that repeats its head where the rows are more than a page holds."""
    rows = [" & ".join(latex(show(row.get(c.key), c.write)) for c in table.columns) + r" \\" for row in table.rows]
    head = [r"\toprule", " & ".join(latex(column.title) for column in table.columns) + r" \\", r"\midrule"]
    named = [rf"\caption{{{latex(table.title)}. {latex(table.note)}}}", rf"\label{{tab:{table.name}}}"]
    columns = "l" * len(table.columns)
    if len(rows) > PAGE:
        lines = [r"\begingroup\small", rf"\begin{{longtable}}{{{columns}}}", *named, r"\\", *head, r"\endhead"]
        lines += [r"\bottomrule", r"\endfoot", *rows, r"\end{longtable}", r"\endgroup"]
    else:
        lines = [r"\begin{table}", r"\centering", r"\small", rf"\begin{{tabular}}{{{columns}}}", *head, *rows]
        lines += [r"\bottomrule", r"\end{tabular}", *named, r"\end{table}"]
    return "\n".join(lines) + "\n"
