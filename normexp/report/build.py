"""From a path to all files of its report."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from normexp import results
from normexp.report import document, page
from normexp.report.facts import facts, uncounted
from normexp.report.figure import Missing
from normexp.report.figures import draw
from normexp.report.formats import Table, to_csv, to_latex, to_markdown
from normexp.report.study import study
from normexp.report.tables import tables

KEPT = re.compile(r"train/loss|val/loss|grad_norm/(total|layer_\d+)|layer_ratio")


@dataclass(frozen=True)
class Built:
    counted: int  # finished runs
    read: int  # readable runs
    uncounted: list[tuple[str, str]]  # what is not counted, and why
    missing: list[Missing]
    files: list[Path]  # those to open first


def build(path: Path, out: Path, command: str) -> Built:
    """Writes REPORT.md, report.html, tables/ and figures/ under `out`. Raises results.NothingToRead."""
    runs = results.read(results.locate(path), KEPT)
    cells = study(runs)
    made = tables(cells)
    out.mkdir(parents=True, exist_ok=True)
    _write_tables(made, out / "tables")
    if len(runs.table):
        results.write_parquet(runs.table, out / "tables" / "runs.parquet")
    drawn, missing = draw(cells, out / "figures")
    title = f"{runs.source.sweep.get('name') or path.resolve().name}: which cells train"
    told, left_out = facts(cells, command), uncounted(cells)
    text = document.render(title, told, made, drawn, missing, left_out)
    (out / "REPORT.md").write_text(text, encoding="utf-8")
    web = page.render(title, cells, told, made, drawn, missing, left_out, out / "figures")
    (out / "report.html").write_text(web, encoding="utf-8")
    return Built(len(cells.finished), len(runs.table), left_out, missing, [out / "REPORT.md", out / "report.html"])


def _write_tables(made: list[Table], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for table in made:
        for ending, render in (("csv", to_csv), ("md", to_markdown), ("tex", to_latex)):
            (folder / f"{table.name}.{ending}").write_text(render(table), encoding="utf-8")
