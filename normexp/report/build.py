"""From a path to all files of its report."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from pathlib import Path

from normexp import results
from normexp.report import document, page
from normexp.report.facts import facts, uncounted
from normexp.report.figure import Missing
from normexp.report.figures import draw
from normexp.report.formats import Table, to_csv, to_markdown
from normexp.report.latex import to_latex
from normexp.report.study import study
from normexp.report.tables import tables

# Every name that a report writes, and no other; a figure's ends in `-factor-value` where there are several of a kind.
OWN_FILES = re.compile(
    r"REPORT\.md|report\.html|tables/runs\.parquet"
    r"|tables/(map|cells|warmup|learning_rates|comparisons|runs)\.(csv|md|tex)"
    r"|figures/(phase_diagram|loss_curves|gradient_heatmap|gradient_profile|lr_sensitivity|loss_depth"
    r"|loss_(norm|placement|model|data|optim|train)_\w+)(-[A-Za-z0-9]+-[A-Za-z0-9.-]*)?\.(png|pdf)"
)
KEPT = re.compile(r"train/loss|val/loss|grad_norm/(total|layer_\d+)|layer_ratio|quant_error/.+")


@dataclass(frozen=True)
class Built:
    counted: int  # finished runs
    read: int  # readable runs
    uncounted: list[tuple[str, str]]  # what is not counted, and why
    missing: list[Missing]
    files: list[Path]  # those to open first


def build(path: Path, out: Path, command: str) -> Built:
    """Writes REPORT.md, report.html, tables/ and figures/ under `out`. Raises results.NothingToRead, and OSError where
    `out` cannot be written or holds somebody's own files of these names."""
    runs = results.read(results.locate(path), KEPT)
    cells = study(runs)
    made = tables(cells)
    _refuse_others(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "REPORT.md").write_text(f"Being written, or broken off.\n\n{document.SIGN}\n", encoding="utf-8")
    _remove_earlier(out)
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


def _refuse_others(out: Path) -> None:
    """Files of a report's names where no REPORT.md of ours stands: they would be removed or overwritten."""
    page = out / "REPORT.md"
    if page.is_file() and document.SIGN in page.read_text(encoding="utf-8", errors="replace"):
        return
    if there := _earlier(out):
        name = there[0].relative_to(out)
        raise FileExistsError(errno.EEXIST, f"its {name} is of no report; give another folder with --out, or remove it")


def _remove_earlier(out: Path) -> None:
    """An earlier report's files: a figure that this one does not draw would stand beside it as if it belonged to it."""
    for file in _earlier(out):
        if file != out / "REPORT.md":  # which says whose the others are, should this be broken off
            file.unlink()


def _earlier(out: Path) -> list[Path]:
    found = [*out.glob("*"), *out.glob("tables/*"), *out.glob("figures/*")]
    return sorted(file for file in found if file.is_file() and OWN_FILES.fullmatch(file.relative_to(out).as_posix()))


def _write_tables(made: list[Table], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for table in made:
        for ending, render in (("csv", to_csv), ("md", to_markdown), ("tex", to_latex)):
            (folder / f"{table.name}.{ending}").write_text(render(table), encoding="utf-8")
