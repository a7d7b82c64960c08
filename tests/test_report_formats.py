"""A table as CSV, Markdown, HTML and LaTeX."""

import csv
import io
import math
import re
import shutil
import subprocess

import pytest

from normexp import results, stats
from normexp.report.formats import Column, Table, fixed, show, significant, to_csv, to_html, to_markdown
from normexp.report.latex import to_latex
from normexp.report.study import study
from normexp.report.tables import tables
from tests import fake_runs

TABLE = Table(
    "example",
    "An example",
    "50 % of it",
    [Column("run_id", "run"), Column("loss", "loss (nats)"), Column("lr", "lr")],
    [
        {"run_id": "<b>a_b|c", "loss": stats.Estimate(2.3456, (2.3, 2.4), 3, "student", ""), "lr": 1e-5},
        {"run_id": "x&y", "loss": stats.mean([2.0]), "lr": None},
    ],
)


def test_csv_has_a_column_a_number():
    first, second = csv.DictReader(io.StringIO(to_csv(TABLE)))
    assert first == {
        "run_id": "<b>a_b|c", "loss": "2.3456", "loss_low": "2.3", "loss_high": "2.4", "loss_n": "3",
        "loss_method": "student", "loss_note": "", "lr": "1e-05",
    }  # fmt: skip
    assert (second["loss_low"], second["loss_n"], second["loss_note"]) == ("", "1", "one value: no interval")


def test_markdown_and_latex_show_value_interval_and_n_with_text_escaped():
    text = to_markdown(TABLE)
    assert r"| \<b\>a_b\|c | 2.346 [2.300, 2.400] (n=3) | 1e-5 |" in text
    assert "2.000 (n=1; one value: no interval) | – |" in text
    latex = to_latex(TABLE)
    assert r"\textless{}b\textgreater{}a\_b\textbar{}c & 2.346 [2.300, 2.400] (n=3) & 1e-5 \\" in latex
    assert r"x\&y" in latex
    assert r"50 \% of it" in latex
    for rule in (r"\toprule", r"\midrule", r"\bottomrule"):
        assert latex.count(rule) == 1


def test_what_spans_decades_is_written_by_its_figures():
    values = [1.5e-4, 0.000123456, 3e-3, 1.12345, 300.0, 0.0, math.inf, -math.inf, math.nan]
    shown = ["0.00015", "0.000123", "0.003", "1.12", "300", "0", "∞", "−∞", "–"]
    assert [show(value, significant(3)) for value in values] == shown
    assert show(stats.Estimate(1.5e-4, (1e-5, 0.02), 3, "", ""), significant(3)) == "0.00015 [1e-5, 0.02] (n=3)"
    assert [fixed(2)(value) for value in (2.345, 0.001234, math.inf, math.nan)] == ["2.35", "0.0012", "∞", "–"]


def test_a_table_of_one_value_among_three_says_one_value():
    assert show(stats.mean([math.inf, 2.0, math.inf])) == "2.000 (n=1; 2 non-finite left out; one value: no interval)"


# --- LaTeX -----------------------------------------------------------------------------------------------------------

SIGNS = "H₁ − 0.05 ≤ σ × γ… ≥ μ±1 ≈ ∞ → 10⁻³ · 4–5 — ° é ü ç 中 ∕ \\ & % $ # _ { } ~ ^ < > | \n\n\xa0\t'`\" ¿ ß ø"


def latex_table(count):
    rows = [{"run_id": f"{SIGNS} {index}", "loss": 2.0, "lr": 1e-5} for index in range(count)]
    return Table(f"of_{count}", f"Signs: {SIGNS}", SIGNS, [*TABLE.columns, Column("sign", SIGNS)], rows)


def test_latex_has_no_sign_that_a_stock_pdflatex_refuses():
    text = to_latex(latex_table(1))
    assert set(re.findall(r"[^ -~\n]", text)) == {"é", "ü", "ç"}
    assert r"H$_{1}$ $-$ 0.05 $\le$ $\sigma$ $\times$ $\gamma$\dots{} $\ge$ $\mu$$\pm$1" in text
    assert "[U+4E2D]" in text


def test_more_rows_than_a_page_make_a_longtable():
    short, long = to_latex(latex_table(40)), to_latex(latex_table(41))
    assert ("longtable" in short, r"\begin{table}" in short) == (False, True)
    assert r"\begin{table}" not in long
    assert long.index(r"\endhead") < long.index(r"\endfoot") < long.index(" 40 & ") < long.index(r"\end{longtable}")


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex (apt-get install texlive-latex-recommended)")
def test_pdflatex_takes_every_table(tmp_path):
    made = [TABLE, latex_table(3), latex_table(120)]
    nodes = fake_runs.grid("bn ln rms", "pre post", (6,), (0, 50), 2)
    sweep = fake_runs.write_sweep(tmp_path, "small", nodes)
    made += tables(study(results.read(results.locate(sweep), re.compile(".*"))))
    packages = r"\documentclass{article}\usepackage{booktabs,longtable}\begin{document}"
    text = "\n".join([packages, *map(to_latex, made), r"\end{document}", ""])
    (tmp_path / "all.tex").write_text(text, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    for _ in range(2):  # longtable measures its columns in the first
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
        assert done.returncode == 0, "\n".join(line for line in done.stdout.splitlines() if line.startswith("!"))


def test_html_carries_the_plain_value_and_escapes():
    page = to_html(TABLE)
    assert '<td data-value="2.3456">2.346 [2.300, 2.400] (n=3)</td>' in page
    assert '<a href="#run=%3Cb%3Ea_b%7Cc">&lt;b&gt;a_b|c</a>' in page
    assert "<b>" not in page
