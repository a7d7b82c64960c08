"""The phase diagram: which cells train, as tiles coloured by the verdicts of the seeds, with the loss in them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from normexp import stats
from normexp.report.canvas import LEFT, Axes, Key, Layout, Sheet, text_width, verdict_key
from normexp.report.figure import Drawing, Missing, file_name, seeds_of, setting
from normexp.report.marks import tile_axes, tile_text, verdict_tile
from normexp.report.palette import VERDICTS
from normexp.report.study import Frame, Study, at, learned, levels, losses, split, text, verdict_counts

TILE = (0.9, 0.56)  # inches
NAMES = {"warmup_steps": "warmup", "lr": "learning rate"}
UNITS = {"warmup_steps": "warmup (steps)", "depth": "depth (blocks)", "lr": "learning rate"}
HOW = "Tile: share of the seeds by verdict; mean final validation loss (nats per token); seeds that train / seeds run."

Axis = tuple[str, list[object]]  # a factor and its levels


def phase_diagrams(study: Study) -> Iterator[Drawing | Missing]:
    """Depth over warmup for each norm and placement; over what else varies where they do not."""
    if not study.varying:
        yield Missing("phase_diagram", "needs two cells")
    elif not study.others("norm", "placement"):
        yield _norms_by_placement(study)
    else:
        yield from _diagrams(study, *_axes(study))


def _axes(study: Study) -> tuple[str, str]:
    """The factors up and across: depth and warmup, or what varies in their place."""
    free = [factor for factor in study.others("norm", "placement") if factor not in ("depth", "warmup_steps")]
    across = "warmup_steps" if "warmup_steps" in study.varying or not free else free.pop(0)
    return "depth" if "depth" in study.varying or not free else free.pop(0), across


def _diagrams(study: Study, up: str, across: str) -> Iterator[Drawing]:
    varying = [NAMES.get(factor, factor) for factor in (up, across) if factor in study.varying]
    for values, part in split(study.finished, study.others("norm", "placement", up, across)):
        norms, placements = levels(part, "norm"), levels(part, "placement")
        ups, acrosses = levels(part, up), levels(part, across)
        layout = Layout(
            title=f"Which cells train: {' × '.join(varying)}",
            subtitle=f"{setting(study, values)}; {seeds_of(part, study.factors)}. {HOW}",
            rows=[text(norm) for norm in norms],
            columns=[text(placement) for placement in placements],
            x_label=UNITS.get(across, across),
            y_label=UNITS.get(up, up),
            keys=_keys(part),
            left=_left(ups),
            stretch=False,
        )
        sheet = Sheet(layout, (TILE[0] * len(acrosses), TILE[1] * len(ups)))
        for axes, norm, placement in sheet.panels(norms, placements):
            cells = part[(part["norm"] == norm) & (part["placement"] == placement)]
            _tiles(axes, cells, (across, acrosses), (up, ups))
        sheet.share_axes()
        yield Drawing(file_name("phase_diagram", values), sheet)


def _norms_by_placement(study: Study) -> Drawing:
    norms, placements = study.levels("norm")[::-1], study.levels("placement")
    layout = Layout(
        title="Which cells train: norm × placement",
        subtitle=f"{setting(study, {})}; {seeds_of(study.finished, study.factors)}. {HOW}",
        rows=[""],
        columns=[""],
        x_label="placement",
        y_label="norm",
        keys=_keys(study.finished),
        left=_left(norms),
        stretch=False,
    )
    sheet = Sheet(layout, (1.1 * len(placements), TILE[1] * len(norms)))
    _tiles(sheet.axes[0][0], study.finished, ("placement", placements), ("norm", norms))
    return Drawing("phase_diagram", sheet)


def _left(values: list[object]) -> float:
    """Inches for tick labels that are names."""
    return max(LEFT, 0.75 + max(text_width(text(value)) for value in values))


def _keys(part: Frame) -> list[Key]:
    return [verdict_key(verdict) for verdict in VERDICTS if verdict in set(part["verdict"])]


def _tiles(axes: Axes, cells: Frame, x: Axis, y: Axis) -> None:
    tile_axes(axes, [text(value) for value in x[1]], [text(value) for value in y[1]])
    for column, x_value in enumerate(x[1]):
        for row, y_value in enumerate(y[1]):
            _tile(axes, column, row, at(cells, {x[0]: x_value, y[0]: y_value}))


def _tile(axes: Axes, column: int, row: int, cell: Frame) -> None:
    counts = verdict_counts(cell)
    if cell.empty:
        tile_text(axes, column, row, ("", "no run"), counts)
        return
    loss = stats.mean(losses(cell)).value
    verdict_tile(axes, column, row, counts)
    lines = ("not finite" if math.isnan(loss) else f"{loss:.2f}", f"{learned(cell)}/{len(cell)}")
    tile_text(axes, column, row, lines, counts)
