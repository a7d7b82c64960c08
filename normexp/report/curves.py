"""Loss over steps with bands over the seeds, and final loss over a factor (learning rate, depth, …)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd

from normexp.report import canvas, marks
from normexp.report.canvas import Axes, Key, Layout, Sheet
from normexp.report.figure import Drawing, Grid, Missing, file_name, grids, seeds_of, setting, statistics_of
from normexp.report.palette import LineStyle, line_styles
from normexp.report.study import Frame, Study, levels, losses, missing, split, text

PANEL = (2.0, 1.5)  # inches
WINDOW = 10  # steps


def loss_curves(study: Study) -> Iterator[Drawing | Missing]:
    for grid in grids(study, ("placement",), "norm"):
        styles = line_styles(study.levels("norm"))
        entropy, top = _entropy(grid.part), 1.5 * math.log(float(grid.part["vocab_size"].max()))
        layout = Layout(
            title="Training loss",
            subtitle=f"{setting(study, grid.values)}; {seeds_of(grid.part, study.factors)}. Line: mean over the seeds "
            f"of the mean of the last {WINDOW} steps; band: range of the seeds; ×: a seed's last finite loss, where "
            f"others follow. Cut off at {top:.1f}, 1.5 ln V.",
            rows=grid.row_labels,
            columns=grid.column_labels,
            x_label="step",
            y_label="training loss (nats per token)",
            keys=_keys(grid, styles, entropy),
        )
        sheet = Sheet(layout, PANEL)
        for axes, place in sheet.places():
            for values, cell in split(grid.at(place), ("norm",)):
                _curve(axes, smoothed(study, cell), styles[values["norm"]])
            marks.reference(axes, entropy)
        sheet.share_limits(top)
        yield Drawing(file_name("loss_curves", grid.values), sheet)


def _entropy(part: Frame) -> float:
    values = {value for value in part.get("unigram_entropy", []) if not missing(value)}
    return float(values.pop()) if len(values) == 1 else math.nan


def _keys(grid: Grid, styles: dict[str, LineStyle], entropy: float) -> list[Key]:
    keys = [canvas.line_key(text(norm), *styles[norm]) for norm in levels(grid.part, "norm")]
    if math.isfinite(entropy):
        keys.append(canvas.line_key(f"unigram entropy {entropy:.2f}", "#777777", ":", ""))
    return [*keys, canvas.band_key("range of the seeds")]


def smoothed(study: Study, cell: Frame) -> Frame:
    """Steps × seeds of one cell: running means over the finite training losses; NaN after a seed's last finite one."""
    seeds = {}
    for run_id in cell["run_id"]:
        history = study.runs.histories[run_id]
        if "train/loss" in history:
            loss = history["train/loss"].dropna()
            finite = loss.where(np.isfinite(loss))
            seeds[run_id] = finite.rolling(WINDOW, min_periods=1).mean().where(finite.bfill().notna())
    return pd.DataFrame(seeds)


def _curve(axes: Axes, seeds: Frame, style: LineStyle) -> None:
    if seeds.empty:
        return
    color, dash, _ = style
    steps = seeds.index.to_numpy()
    axes.fill_between(steps, seeds.min(axis=1), seeds.max(axis=1), color=color, alpha=0.22, linewidth=0)
    axes.plot(steps, seeds.mean(axis=1), color=color, linestyle=dash)
    for _, seed in seeds.items():
        finite = seed.dropna()
        if len(finite) and finite.index[-1] < seeds.index[-1]:
            axes.plot(finite.index[-1], finite.iloc[-1], "x", color=color, markersize=6, markeredgewidth=1.6)


# --- final loss over a factor ----------------------------------------------------------------------------------------


def loss_against(study: Study, factor: str, name: str, title: str, axis: str) -> Iterator[Drawing | Missing]:
    """Final validation loss over a numeric factor. A diverged run stands at ln V, where a model knows nothing."""
    if factor not in study.varying:
        yield Missing(name, f"needs two values of {factor}")
        return
    for grid in grids(study, ("placement",), "norm", factor):
        styles = line_styles(study.levels("norm"))
        entropy, ceiling = _entropy(grid.part), math.log(float(grid.part["vocab_size"].iloc[0]))
        at = [level for level in levels(grid.part, factor) if level is not None]
        if not at:  # a field that these cells lack
            continue
        logarithmic = at[0] > 0 and at[-1] / at[0] >= 8
        layout = Layout(
            title=title,
            subtitle=f"{setting(study, grid.values)}; {seeds_of(grid.part, study.factors)}. Points: seeds; line: their "
            f"mean; ×: diverged or above ln V = {ceiling:.2f}, drawn and counted there.{statistics_of(grid.part)}",
            rows=grid.row_labels,
            columns=grid.column_labels,
            x_label=axis + (" (log scale)" if logarithmic else ""),
            y_label="final validation loss (nats per token)",
            keys=_keys(grid, styles, entropy),
        )
        sheet = Sheet(layout, PANEL)
        for axes, place in sheet.places():
            for values, cell in split(grid.at(place), ("norm",)):
                _against(axes, cell, factor, ceiling, styles[values["norm"]])
            marks.reference(axes, entropy)
            marks.number_axis(axes, at, logarithmic=logarithmic)
        sheet.share_limits()
        yield Drawing(file_name(name, grid.values), sheet)


def _against(axes: Axes, cell: Frame, factor: str, ceiling: float, style: LineStyle) -> None:
    color, dash, marker = style
    cell = cell[cell[factor].notna()]
    diverged = (cell["verdict"] == "diverged").to_numpy()
    loss = np.minimum(np.where(diverged, np.inf, losses(cell)), ceiling)
    x = cell[factor].to_numpy(dtype=float)
    by_x = pd.Series(loss).groupby(x)
    axes.fill_between(by_x.mean().index, by_x.min(), by_x.max(), color=color, alpha=0.18, linewidth=0)
    axes.plot(by_x.mean().index, by_x.mean(), color=color, linestyle=dash)
    below = loss < ceiling
    axes.plot(x[below], loss[below], marker, color=color, markersize=3.6, markeredgecolor="white", markeredgewidth=0.4)
    axes.plot(x[~below], loss[~below], "x", color=color, markersize=6, markeredgewidth=1.6)
