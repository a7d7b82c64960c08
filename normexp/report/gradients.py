"""Gradient norms of the blocks: over steps as a heat map, and over the blocks at chosen steps."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from normexp.report import canvas, marks
from normexp.report.canvas import Axes, Layout, Sheet
from normexp.report.figure import Drawing, Grid, Missing, file_name, grids, seeds_of, setting, train_text
from normexp.report.palette import Color
from normexp.report.study import Frame, Study

LAYER = re.compile(r"grad_norm/layer_(\d+)")
SMALLEST = 1e-30  # a gradient that underflowed to 0 is drawn at the low end
STEPS = (1, 5, 20, 50, 200)  # and the last one logged
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Norms:
    """Geometric mean over the seeds; `inf` where a seed's norm was not finite."""

    steps: Array  # (S,)
    values_LS: Array  # block × step


Place = tuple[int, int]  # row and column in the grid
Cells = dict[Place, Norms]


def gradient_figures(study: Study) -> Iterator[Drawing | Missing]:
    if not any(blocks(history) for history in study.runs.histories.values()):
        yield Missing("gradient_heatmap", "no run logged gradient norms by layer")
        yield Missing("gradient_profile", "no run logged gradient norms by layer")
        return
    for grid in grids(study, ("norm", "placement")):
        places = itertools.product(range(len(grid.rows)), range(len(grid.columns)))
        norms = {place: layer_norms(study, grid.at(place)) for place in places}
        cells = {place: known for place, known in norms.items() if known.values_LS.size}
        if cells:
            yield _heatmap(study, grid, cells)
            yield _profile(study, grid, cells)


def layer_norms(study: Study, cell: Frame) -> Norms:
    logs: list[Frame] = []
    for run_id in cell["run_id"]:
        history = study.runs.histories[run_id]
        norms = history[blocks(history)].dropna(how="all").clip(lower=SMALLEST)
        logs.append(norms.transform(np.log))
    if not logs:
        return Norms(np.empty(0), np.empty((0, 0)))
    mean = pd.concat(logs).groupby(level=0).mean()
    return Norms(mean.index.to_numpy(dtype=np.float64), np.exp(mean.to_numpy(dtype=np.float64)).T)


def blocks(history: Frame) -> list[str]:
    """The paths of the blocks' gradient norms, from the first block to the last."""
    found = [match for path in history.columns if (match := LAYER.fullmatch(str(path)))]
    return [match[0] for match in sorted(found, key=lambda match: int(match[1]))]


def _heatmap(study: Study, grid: Grid, cells: Cells) -> Drawing:
    depth = _depth(cells)
    everything = np.concatenate([norms.values_LS.ravel() for norms in cells.values()])
    colors, scale = canvas.log_colors(everything[np.isfinite(everything)])
    layout = Layout(
        title="Gradient norm by block and step",
        subtitle=f"{_caption(study, grid)} Black: not finite.",
        rows=grid.row_labels,
        columns=grid.column_labels,
        x_label="step (log scale)",
        y_label="block",
        colorbar=canvas.COLORBAR,
    )
    sheet = Sheet(layout, (1.9, min(1.5, max(0.75, 0.13 * depth))))
    for axes, place in sheet.places():
        marks.step_axis(axes, max(norms.steps[-1] for norms in cells.values()))
        marks.block_axis(axes, "y", depth)
        if place in cells:
            marks.heat(axes, cells[place].steps, cells[place].values_LS, cmap=colors, norm=scale)
            marks.corner(axes, train_text(grid.at(place)))
    sheet.share_axes()
    sheet.colorbar(colors, scale, "gradient norm")
    return Drawing(file_name("gradient_heatmap", grid.values), sheet)


def _profile(study: Study, grid: Grid, cells: Cells) -> Drawing:
    depth = _depth(cells)
    logged = np.unique(np.concatenate([norms.steps for norms in cells.values()]))
    steps = [*(step for step in STEPS if step in logged and step < logged[-1]), int(logged[-1])]
    styles = list(zip(steps, canvas.shades(len(steps)), "osD^vP", strict=False))
    layout = Layout(
        title="Gradient norm by block at chosen steps",
        subtitle=_caption(study, grid),
        rows=grid.row_labels,
        columns=grid.column_labels,
        x_label="block",
        y_label="gradient norm (log scale)",
        keys=[canvas.line_key(f"step {step}", color, "-", mark) for step, color, mark in styles],
    )
    sheet = Sheet(layout, (1.9, 1.2))
    for axes, place in sheet.places():
        axes.set_yscale("log")
        axes.yaxis.minorticks_off()
        marks.block_axis(axes, "x", depth)
        if place in cells:
            marks.corner(axes, train_text(grid.at(place)))
        for step, color, mark in styles:
            _line(axes, cells.get(place), step, color, mark)
    sheet.share_limits()
    sheet.whole_decades()
    return Drawing(file_name("gradient_profile", grid.values), sheet)


def _caption(study: Study, grid: Grid) -> str:
    what = "geometric mean. Norm of a block's gradient before clipping; block 0 follows the embedding."
    return f"{setting(study, grid.values)}; {seeds_of(grid.part, study.factors)}, {what}"


def _depth(cells: Cells) -> int:
    return max(len(norms.values_LS) for norms in cells.values())


def _line(axes: Axes, norms: Norms | None, step: int, color: Color, mark: str) -> None:
    if norms is None or step not in norms.steps:
        return
    values = norms.values_LS[:, norms.steps == step][:, 0]
    finite = np.where(np.isfinite(values), values, np.nan)
    axes.plot(range(len(finite)), finite, color=color, marker=mark, markersize=3, linewidth=1)
