"""A table of plain values and estimates -> CSV, Markdown, LaTeX (booktabs), HTML. Text is escaped for each."""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from normexp.report.study import text
from normexp.stats import Estimate

Value = str | float | int | Estimate | None


@dataclass(frozen=True)
class Column:
    key: str
    title: str  # with the unit
    digits: int | None = None  # after the point; None: 3 of an estimate, four figures of a plain number


@dataclass(frozen=True)
class Table:
    name: str  # of its files
    title: str
    note: str
    columns: Sequence[Column]
    rows: Sequence[dict[str, Value]]


def factor_columns(names: Sequence[str]) -> list[Column]:
    titles = {"warmup_steps": "warmup (steps)", "depth": "depth (blocks)"}
    return [Column(name, titles.get(name, name.replace("first_bad_", "first bad "))) for name in names]


def show(value: Value, digits: int | None = None) -> str:
    """An estimate as `2.31 [2.28, 2.34] (n=3)`, without an interval as `2.31 (n=1; one seed: no interval)`."""
    if isinstance(value, float) and digits is not None:
        return _number(value, digits)
    if not isinstance(value, Estimate):
        return text(value)
    digits = 3 if digits is None else digits
    if value.interval is None:
        return f"{_number(value.value, digits)} (n={value.n}; {value.note})"
    low, high = (_number(end, digits) for end in value.interval)
    note = f"; {value.note}" if value.note else ""
    return f"{_number(value.value, digits)} [{low}, {high}] (n={value.n}{note})"


def _number(value: float, digits: int) -> str:
    if not math.isfinite(value):
        return "–" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if value and abs(value) < 10.0**-digits:
        return text(float(f"{value:.2g}"))
    return f"{value:.{digits}f}"


def to_csv(table: Table) -> str:
    """One column a number: an estimate becomes its value, low, high, n, method and note."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    parts = {column.key: _has_estimate(table, column.key) for column in table.columns}
    ends = ("", "_low", "_high", "_n", "_method", "_note")
    writer.writerow([key + end for key, wide in parts.items() for end in (ends if wide else ends[:1])])
    for row in table.rows:
        writer.writerow([cell for key, wide in parts.items() for cell in _csv_cells(row.get(key), wide)])
    return out.getvalue()


def _has_estimate(table: Table, key: str) -> bool:
    return any(isinstance(row.get(key), Estimate) for row in table.rows)


def _csv_cells(value: Value, wide: bool) -> list[object]:
    if isinstance(value, Estimate):
        return [value.value, *(value.interval or ("", "")), value.n, value.method, value.note]
    return ["" if value is None else value, *[""] * (5 if wide else 0)]


def to_markdown(table: Table) -> str:
    lines = [[column.title for column in table.columns], ["---"] * len(table.columns)]
    lines += [[show(row.get(column.key), column.digits) for column in table.columns] for row in table.rows]
    return "\n".join("| " + " | ".join(markdown(cell) for cell in line) + " |" for line in lines) + "\n"


def markdown(value: str) -> str:
    """Escapes what would become markup; an underscore inside a word and a bracket that is no link stay readable."""
    value = re.sub(r"([\\|*`<>]|(?<!\w)_|_(?!\w))", r"\\\1", value)
    return value.replace("](", "\\](").replace("\n", " ")


LATEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "–": "--",
    "−": "$-$",
    "∞": r"$\infty$",
}


def latex(value: str) -> str:
    return "".join(LATEX.get(sign, sign) for sign in value)


def to_latex(table: Table) -> str:
    r"""A booktabs `tabular` in a `table`; the document needs \usepackage{booktabs}."""
    rows = [" & ".join(latex(show(row.get(c.key), c.digits)) for c in table.columns) + r" \\" for row in table.rows]
    head = " & ".join(latex(column.title) for column in table.columns) + r" \\"
    lines = [r"\begin{table}", r"\centering", r"\small", rf"\begin{{tabular}}{{{'l' * len(table.columns)}}}"]
    lines += [r"\toprule", head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\caption{{{latex(table.title)}. {latex(table.note)}}}", rf"\label{{tab:{table.name}}}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def to_html(table: Table) -> str:
    """Cells carry the plain value in `data-value`, by which the page sorts; a run is a link to its curves."""
    head = "".join(
        f'<th scope="col" data-column="{html.escape(column.key)}">{html.escape(column.title)}</th>'
        for column in table.columns
    )
    body = "".join(
        f"<tr>{''.join(_html_cell(column, row.get(column.key)) for column in table.columns)}</tr>\n"
        for row in table.rows
    )
    return f'<table id="table-{table.name}"><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>'


def _html_cell(column: Column, value: Value) -> str:
    shown = html.escape(show(value, column.digits))
    plain = value.value if isinstance(value, Estimate) else value
    if column.key == "run_id":
        shown = f'<a href="#run={quote(str(value))}">{shown}</a>'
    if column.key == "verdict" and value is not None:
        shown = f'<span class="verdict {shown}">{shown}</span>'
    return f'<td data-value="{"" if plain is None else html.escape(str(plain))}">{shown}</td>'
