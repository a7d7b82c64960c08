"""The phase diagram: cells as tiles in the colours of their seeds' verdicts, darker where the loss is higher."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from normexp import stats
from normexp.report.canvas import COLORBAR, LEFT, RAMP, Axes, Layout, Sheet, text_width, verdict_key
from normexp.report.figure import Drawing, Missing, file_name, seeds_of, setting, statistics_of
from normexp.report.marks import Segment, tile_axes, tile_text, verdict_tile
from normexp.report.palette import VERDICTS, shade
from normexp.report.study import Frame, Study, Values, at, learned, levels, losses, missing, split, text, verdict_counts

TILE = (0.9, 0.56)  # inches, at least
LONGEST = 24  # characters of a label
NAMES = {"warmup_steps": "warmup", "lr": "learning rate"}
UNITS = {"warmup_steps": "warmup (steps)", "depth": "depth (blocks)", "lr": "learning rate"}
HOW = (
    "Tile: share of the seeds by verdict, each the darker the higher their mean loss; mean final validation loss (nats "
    "per token); seeds that train / seeds run; –: not run."
)
PARTLY = " *: mean of the finite losses only."
LEVELS = [step / 99 for step in range(100)]

Axis = tuple[str, list[object]]  # a factor and its levels


@dataclass(frozen=True)
class Scale:
    """Losses -> 0 (the lowest of all runs) to 1 (what a model without context reaches, and whatever is above it)."""

    low: float  # nats per token
    high: float

    @staticmethod
    def of(finished: Frame) -> Scale:
        guess = [float(value) for value in finished.get("unigram_entropy", []) if not missing(value)]
        high = max(guess, default=math.log(float(finished["vocab_size"].max())))
        low = min(losses(finished))
        return Scale(low if low < high else high - 1, high)

    def level(self, loss: float) -> float:
        return 1.0 if math.isnan(loss) else min(max((loss - self.low) / (self.high - self.low), 0.0), 1.0)


def phase_diagrams(study: Study) -> Iterator[Drawing | Missing]:
    """Depth over warmup for each norm and placement; over what else varies where they do not."""
    if not study.varying:
        yield Missing("phase_diagram", "needs two cells")
    elif not study.apart("norm", "placement"):
        yield _norms_by_placement(study)
    else:
        yield from _diagrams(study, *_axes(study))


def _axes(study: Study) -> tuple[str, str]:
    """The factors up and across: depth and warmup, or what varies in their place."""
    free = [factor for factor in study.apart("norm", "placement") if factor not in ("depth", "warmup_steps")]
    across = "warmup_steps" if "warmup_steps" in study.varying or not free else free.pop(0)
    return "depth" if "depth" in study.varying or not free else free.pop(0), across


def _diagrams(study: Study, up: str, across: str) -> Iterator[Drawing]:
    scale = Scale.of(study.finished)
    varying = [NAMES.get(factor, factor) for factor in (up, across) if factor in study.varying]
    for values, part in split(study.finished, study.apart("norm", "placement", up, across)):
        norms, placements = levels(part, "norm"), levels(part, "placement")
        ups, acrosses = levels(part, up), levels(part, across)
        layout = Layout(
            title=f"Which cells train: {' × '.join(varying)}",
            subtitle=_subtitle(study, values, part),
            rows=[text(norm) for norm in norms],
            columns=[text(placement) for placement in placements],
            x_label=UNITS.get(across, across),
            y_label=UNITS.get(up, up),
            keys=[verdict_key(verdict) for verdict in verdict_counts(part)],
            colorbar=COLORBAR + RAMP * len(VERDICTS),
            left=_left(ups),
            stretch=False,
        )
        sheet = Sheet(layout, (_width(acrosses) * len(acrosses), TILE[1] * len(ups)))
        for axes, norm, placement in sheet.panels(norms, placements):
            cells = part[(part["norm"] == norm) & (part["placement"] == placement)]
            _tiles(axes, cells, (across, acrosses), (up, ups), scale)
        sheet.share_axes()
        _loss_scale(sheet, scale, part)
        yield Drawing(file_name("phase_diagram", values), sheet)


def _norms_by_placement(study: Study) -> Drawing:
    norms, placements = study.levels("norm")[::-1], study.levels("placement")
    layout = Layout(
        title="Which cells train: norm × placement",
        subtitle=_subtitle(study, {}, study.finished),
        rows=[""],
        columns=[""],
        x_label="placement",
        y_label="norm",
        keys=[verdict_key(verdict) for verdict in verdict_counts(study.finished)],
        colorbar=COLORBAR + RAMP * len(VERDICTS),
        left=_left(norms),
        stretch=False,
    )
    sheet = Sheet(layout, (_width(placements) * len(placements), TILE[1] * len(norms)))
    scale = Scale.of(study.finished)
    _tiles(sheet.axes[0][0], study.finished, ("placement", placements), ("norm", norms), scale)
    _loss_scale(sheet, scale, study.finished)
    return Drawing("phase_diagram", sheet)


def _left(values: list[object]) -> float:
    """Inches for tick labels that are names."""
    return max(LEFT, 0.75 + max(text_width(_label(value)) for value in values))


def _width(values: list[object]) -> float:
    """Inches of a tile, whose label stands below it."""
    return max(TILE[0], 0.2 + max(text_width(_label(value)) for value in values))


def _label(value: object) -> str:
    """The end of a long one, such as a path."""
    label = text(value)
    return label if len(label) <= LONGEST else f"…{label[1 - LONGEST :]}"


def _subtitle(study: Study, values: Values, part: Frame) -> str:
    partly = any(_is_partly_finite(losses(cell)) for _, cell in split(part, study.factors))
    how = HOW + (PARTLY if partly else "") + statistics_of(part)
    return f"{setting(study, values)}; {seeds_of(part, study.factors)}. {how}"


def _is_partly_finite(values: list[float]) -> bool:
    return 0 < sum(map(math.isfinite, values)) < len(values)


def _loss_scale(sheet: Sheet, scale: Scale, part: Frame) -> None:
    ramps = [[shade(verdict, level) for level in LEVELS] for verdict in verdict_counts(part)]
    sheet.ramps(ramps, (scale.low, scale.high), f"mean loss (nats per token),\ncut off at {scale.high:.2f}")


def _tiles(axes: Axes, cells: Frame, x: Axis, y: Axis, scale: Scale) -> None:
    tile_axes(axes, [_label(value) for value in x[1]], [_label(value) for value in y[1]])
    for column, x_value in enumerate(x[1]):
        for row, y_value in enumerate(y[1]):
            _tile(axes, column, row, at(cells, {x[0]: x_value, y[0]: y_value}), scale)


def _tile(axes: Axes, column: int, row: int, cell: Frame, scale: Scale) -> None:
    if cell.empty:
        tile_text(axes, column, row, ("", "–"), [])
        return
    segments = _segments(cell, scale)
    verdict_tile(axes, column, row, segments)
    tile_text(axes, column, row, (_loss_text(cell), f"{learned(cell)}/{len(cell)}"), segments)


def _segments(cell: Frame, scale: Scale) -> list[Segment]:
    means = {verdict: stats.mean(losses(at(cell, {"verdict": verdict}))).value for verdict in verdict_counts(cell)}
    colors = {verdict: shade(verdict, scale.level(loss)) for verdict, loss in means.items()}
    return [Segment(verdict, count, colors[verdict]) for verdict, count in verdict_counts(cell).items()]


def _loss_text(cell: Frame) -> str:
    loss = stats.mean(losses(cell)).value
    return "not finite" if math.isnan(loss) else f"{loss:.2f}" + ("*" if _is_partly_finite(losses(cell)) else "")
