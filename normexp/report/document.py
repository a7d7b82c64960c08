"""REPORT.md: the facts, the figures, the tables."""

from __future__ import annotations

from normexp.report.facts import Facts
from normexp.report.figure import Drawing, Missing
from normexp.report.formats import Table, markdown, to_markdown

HOW = """Shares of seeds have Wilson's 95 % interval, means Student's t, medians over seeds the range of the seeds. At
n = 10 and normal values Student's interval covers the mean in 95 % of 10,000 draws, BCa bootstrap in 90 %; at n = 3 in
95 % and 73 %: hence Student, with BCa beside it from 20 seeds on, where neither is better for all shapes. Student's
interval knows no bounds: where seeds differ much it may reach a loss below zero, or below what any seed has. That says
that the mean is not known, not that such losses occur: read the seeds in the table of runs then. So too where some
seeds of a cell train and some do not: their mean describes neither; read the share."""
SIGN = "## How the numbers are made"  # by which a folder is known to hold a report
RUNS = "All of them: [tables/runs.csv](tables/runs.csv); with curves: [report.html](report.html)."


def render(
    title: str,
    facts: Facts,
    tables: list[Table],
    drawn: list[Drawing],
    missing: list[Missing],
    uncounted: list[tuple[str, str]],
) -> str:
    parts = [f"# {markdown(title)}", "\n".join(f"- **{name}**: {_fact(name, value)}" for name, value in facts)]
    shown = [table for table in tables if table.name != "runs"]
    if uncounted:
        parts += ["## Not counted", "\n".join(f"- {_code(what)}: {markdown(why)}" for what, why in uncounted)]
    parts += [part for table in shown[:1] for part in _table(table)]
    parts += ["## Figures", *(_figure(drawing) for drawing in drawn)]
    parts += ["\n".join(f"- not drawn: {figure.name} ({figure.why})" for figure in missing)] if missing else []
    parts += [part for table in shown[1:] for part in _table(table)]
    parts += ["## Runs", RUNS, SIGN, HOW]
    return "\n\n".join(parts) + "\n"


def _fact(name: str, value: str) -> str:
    return _code(value) if name in ("made by", "reported by") else markdown(value)


def _code(value: str) -> str:
    return "`" + value.replace("`", "'").replace("\n", " ") + "`"


def _figure(drawing: Drawing) -> str:
    layout = drawing.sheet.layout
    return f"![{markdown(layout.title)}](figures/{drawing.name}.png)\n\n*{markdown(layout.subtitle)}*"


def _table(table: Table) -> list[str]:
    return [f"## {table.title}", markdown(table.note), to_markdown(table)]
