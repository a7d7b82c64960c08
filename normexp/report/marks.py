"""What is drawn inside a panel: tiles, bands, heat maps, and the axes that go with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from normexp.report.palette import GREY, VERDICTS, ink

if TYPE_CHECKING:
    from normexp.report.canvas import Axes

Array = NDArray[np.float64]


def tile_axes(axes: Axes, columns: Sequence[str], rows: Sequence[str]) -> None:
    """Unit tiles centred on whole numbers, named along both axes."""
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(-0.5, len(rows) - 0.5))
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)


class Segment(NamedTuple):
    """A part of a tile: the seeds with one verdict."""

    verdict: str
    seeds: int
    color: str


def verdict_tile(axes: Axes, column: int, row: int, segments: Sequence[Segment]) -> None:
    """The tile at (column, row), divided in proportion to the verdicts."""
    tall, wide = 0.94, 0.96
    left = column - wide / 2
    for verdict, seeds, color in segments:
        _, _, hatch, hatch_color = VERDICTS[verdict]
        width = wide * seeds / sum(segment.seeds for segment in segments)
        box: dict[str, Any] = {"color": color, "hatch": hatch, "edgecolor": hatch_color, "linewidth": 0}
        axes.bar(left, tall, width, row - tall / 2, align="edge", **box)
        left += width


def tile_text(axes: Axes, column: int, row: int, lines: Sequence[str], segments: Sequence[Segment]) -> None:
    """A bold line over a plain one, on a ground that keeps hatches and edges out of it."""
    options: dict[str, Any] = {"ha": "center", "color": GREY}
    if segments:
        ground = segments[0].color if len(segments) == 1 else "#FFFFFF"
        box = {"facecolor": ground, "edgecolor": "none", "alpha": 0.85, "boxstyle": "round,pad=0.15"}
        options |= {"color": ink(ground), "bbox": box}
    axes.text(column, row + 0.03, lines[0], va="bottom", size=9.5, weight="bold", **options)
    axes.text(column, row - 0.08, lines[1], va="top", size=8, **options)


def reference(axes: Axes, level: float) -> None:
    if math.isfinite(level):
        axes.axhline(level, color=GREY, linestyle=(0, (1, 1.5)), linewidth=1)


def number_axis(axes: Axes, values: Sequence[float], *, logarithmic: bool) -> None:
    """The x axis with a tick at each value that was run, and no others."""
    if logarithmic:
        axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}".replace("e-0", "e-") for value in values])
    axes.xaxis.minorticks_off()


def step_axis(axes: Axes, last: float) -> None:
    """Logarithmic steps: collapse happens early."""
    axes.set_xscale("log")
    decades = [10**power for power in range(int(math.log10(last)) + 1)]
    axes.set_xticks(decades, [f"{decade:,}" for decade in decades])
    axes.xaxis.minorticks_off()
    axes.set_xlim(0.9, last * 1.1)


def block_axis(axes: Axes, which: str, depth: int) -> None:
    ticks = range(0, depth, -(-depth // 4))
    axes.set(**{f"{which}lim": (-0.5, depth - 0.5), f"{which}ticks": ticks})


def corner(axes: Axes, text: str) -> None:
    """A remark above the panel's upper right corner."""
    axes.text(1, 1.02, text, transform=axes.transAxes, ha="right", va="bottom", size=7, color=GREY)


def heat(axes: Axes, steps: Array, values_LS: Array, **colors: Any) -> None:
    """Rows of blocks over steps of unequal distance: each reaches half way to its neighbours on the log scale."""
    middles = np.sqrt(steps[1:] * steps[:-1])
    edges = np.concatenate([[steps[0] * 0.9], middles, [steps[-1] * 1.1]])
    blocks = np.arange(len(values_LS) + 1) - 0.5
    axes.pcolormesh(edges, blocks, np.ma.masked_invalid(values_LS), rasterized=True, **colors)
    axes.grid(False)
