"""The sheet that figures are drawn on: panels laid out in inches under a header. Only importer of matplotlib.

Sizes are fixed in inches, so that titles, labels and legends have room of their own however many panels there are.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, LogNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.textpath import TextPath
from numpy.typing import NDArray

from normexp.report.palette import VERDICTS, Color, Dash

__all__ = ["Axes", "Key", "Layout", "Sheet"]

T = TypeVar("T")
U = TypeVar("U")
Key = Line2D | Patch  # an entry of a legend

STYLE: dict[str, Any] = {
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.frameon": False,
    "hatch.linewidth": 0.7,
    "lines.linewidth": 1.4,
    "pdf.fonttype": 42,  # TrueType: journals refuse matplotlib's default, Type 3
}
# Inches.
LEFT, RIGHT, BOTTOM, GAP_X, GAP_Y = 1.05, 0.3, 0.55, 0.2, 0.26
COLORBAR, RAMP = 0.95, 0.09  # a scale with its labels; a further ramp in it
NARROWEST, LOWEST = 6.4, 2.2  # a title must fit across the sheet, an axis label along the panels
TITLE, LINE, KEY_ROW, HEADINGS = 0.42, 0.165, 0.2, 0.47
KEY = 0.52  # a legend's entry without its text
ROW_LABEL = 0.42  # from the left edge


@contextmanager
def style() -> Iterator[None]:
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]  # its keys are a Literal of 300 names
        yield


def line_key(label: str, color: Color, dash: Dash, marker: str) -> Key:
    return Line2D([], [], color=color, linestyle=dash, marker=marker, markersize=4, label=label)


def band_key(label: str) -> Key:
    return Patch(facecolor="#999999", alpha=0.35, edgecolor="none", label=label)


def verdict_key(verdict: str) -> Key:
    _, full, hatch, hatch_color = VERDICTS[verdict]
    return Patch(facecolor=full, hatch=hatch * 2, edgecolor=hatch_color, linewidth=0, label=verdict)


@dataclass(frozen=True)
class Layout:
    """What stands around the panels. `rows` and `columns` are the labels of the panels' rows and columns."""

    title: str
    subtitle: str
    rows: Sequence[str]
    columns: Sequence[str]
    x_label: str
    y_label: str
    keys: Sequence[Key] = ()
    colorbar: float = 0.0  # inches, for a scale to the right of the panels
    left: float = LEFT  # inches, for the labels of the y axis
    stretch: bool = True  # few panels are made larger until they fill the smallest sheet


class Sheet:
    """A figure with a grid of panels, `axes[row][column]`, each `panel` = (width, height) inches."""

    def __init__(self, layout: Layout, panel: tuple[float, float]) -> None:
        rows, columns = len(layout.rows), len(layout.columns)
        around = layout.left + (columns - 1) * GAP_X + (layout.colorbar or RIGHT)
        self.width = max(around + columns * panel[0], NARROWEST)
        wide, tall = (self.width - around) / columns, max(panel[1], LOWEST / rows)
        self.layout, self.panel = layout, (wide, tall) if layout.stretch else panel
        self.inner = columns * self.panel[0] + (columns - 1) * GAP_X
        self.subtitle = textwrap.wrap(layout.subtitle, int(self.width * 15.6))
        self.key_columns = _key_columns([text_width(str(key.get_label())) for key in layout.keys], self.width)
        key_rows = -(-len(layout.keys) // self.key_columns)
        self.header = TITLE + LINE * len(self.subtitle) + KEY_ROW * key_rows + HEADINGS
        self.height = self.header + rows * self.panel[1] + (rows - 1) * GAP_Y + BOTTOM
        self.figure = Figure(figsize=(self.width, self.height))
        FigureCanvasAgg(self.figure)
        self.axes = [[self._panel(row, column) for column in range(columns)] for row in range(rows)]
        self._write_header()
        self._label()

    def _at(self, x: float, y: float) -> tuple[float, float]:
        """Inches from the upper left corner -> figure fractions."""
        return x / self.width, 1 - y / self.height

    def _panel(self, row: int, column: int) -> Axes:
        left = self.layout.left + column * (self.panel[0] + GAP_X)
        x, y = self._at(left, self.header + row * (self.panel[1] + GAP_Y) + self.panel[1])
        return self.figure.add_axes((x, y, self.panel[0] / self.width, self.panel[1] / self.height))

    def _write_header(self) -> None:
        self.figure.text(*self._at(0.12, 0.12), self.layout.title, va="top", size=11.5, weight="bold")
        subtitle = "\n".join(self.subtitle)
        self.figure.text(*self._at(0.12, 0.39), subtitle, va="top", size=8.5, color="#444444", linespacing=1.32)
        if self.layout.keys:
            self.figure.legend(
                handles=list(self.layout.keys),
                loc="upper left",
                bbox_to_anchor=self._at(0.02, TITLE + LINE * len(self.subtitle)),
                ncols=self.key_columns,
                handlelength=2.0,
                columnspacing=1.4,
                borderaxespad=0.2,
            )

    def _label(self) -> None:
        for axes, label in zip(self.axes[0], self.layout.columns, strict=True):
            shown, size = fitted(label, self.panel[0] + GAP_X / 2)
            axes.set_title(shown, size=size, weight="bold", pad=13)
        place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "center"}
        left = (ROW_LABEL - self.layout.left) * 72
        for (axes, *_), label in zip(self.axes, self.layout.rows, strict=True):
            shown, size = fitted(label, self.panel[1] + GAP_Y / 2)
            axes.annotate(shown, (0, 0.5), (left, 0), **place, va="center", rotation=90, weight="bold", size=size)
        middle = self.layout.left + self.inner / 2
        self.figure.text(*self._at(middle, self.height - 0.12), self.layout.x_label, ha="center", va="bottom")
        panels = (self.header + self.height - BOTTOM) / 2
        self.figure.text(*self._at(0.14, panels), self.layout.y_label, rotation=90, ha="center", va="center")

    def panels(self, rows: Sequence[T], columns: Sequence[U]) -> Iterator[tuple[Axes, T, U]]:
        for line, row in zip(self.axes, rows, strict=True):
            for axes, column in zip(line, columns, strict=True):
                yield axes, row, column

    def places(self) -> Iterator[tuple[Axes, tuple[int, int]]]:
        for axes, row, column in self.panels(range(len(self.axes)), range(len(self.axes[0]))):
            yield axes, (row, column)

    def share_axes(self) -> None:
        """The panels have the same limits: tick labels at the left and bottom edges only."""
        for axes, (row, column) in self.places():
            axes.tick_params(labelleft=column == 0, labelbottom=row == len(self.axes) - 1)

    def share_limits(self, top: float = math.inf) -> None:
        """Gives all panels the widest limits of those that show something, y up to `top` at most."""
        filled = [axes for axes, _ in self.places() if axes.has_data()]
        if filled:
            x, y = ([axes.get_xlim() for axes in filled], [axes.get_ylim() for axes in filled])
            low, high = min(low for low, _ in y), max(high for _, high in y)
            if high > top:  # the margin below belongs to what is cut off, too
                low, high = max(low, min(axes.dataLim.ymin for axes in filled) - 0.05 * top), top
            for axes, _ in self.places():
                axes.set_xlim(min(left for left, _ in x), max(right for _, right in x))
                axes.set_ylim(low, high)
        self.share_axes()

    def whole_decades(self) -> None:
        """For panels with shared limits and a logarithmic y axis: at least one tick inside, and no odd ends."""
        low, high = self.axes[0][0].get_ylim()
        for axes, _ in self.places():
            axes.set_ylim(10.0 ** np.floor(np.log10(low)), 10.0 ** np.ceil(np.log10(high)))

    def colorbar(self, colors: Colormap, norm: LogNorm, label: str) -> None:
        axes = self._beside(0.13)
        bar = self.figure.colorbar(ScalarMappable(norm, colors), cax=axes, extend="both", extendfrac=0.03)
        bar.set_label(label)
        bar.ax.yaxis.set_minor_formatter("")
        bar.outline.set_linewidth(0.4)

    def ramps(self, ramps: Sequence[Sequence[Color]], ends: tuple[float, float], label: str) -> None:
        """One scale for several colours: each ramp, from the low end to the high one, beside the others."""
        axes = self._beside(RAMP * len(ramps))
        picture = np.array([[to_rgb(color) for color in ramp] for ramp in ramps]).transpose(1, 0, 2)
        axes.imshow(picture, aspect="auto", origin="lower", extent=(0, len(ramps), *ends), interpolation="nearest")
        axes.set(xticks=[], ylabel=label)
        axes.yaxis.set_label_position("right")
        axes.yaxis.tick_right()
        axes.grid(False)

    def _beside(self, width: float) -> Axes:
        """A scale to the right of the panels, `width` inches wide."""
        tall = min(self.height - self.header - BOTTOM, 3.2)
        x, y = self._at(self.layout.left + self.inner + 0.18, self.header + tall)
        return self.figure.add_axes((x, y, width / self.width, tall / self.height))

    def save(self, folder: Path, name: str) -> None:
        """PNG for the screen, PDF for the paper; no date in either, so that the same runs give the same files."""
        folder.mkdir(parents=True, exist_ok=True)
        self.figure.savefig(folder / f"{name}.png", dpi=150, metadata={"Software": None})
        self.figure.savefig(folder / f"{name}.pdf", metadata={"CreationDate": None})


def text_width(text: str) -> float:
    """Inches, in the font of labels."""
    return float(TextPath((0, 0), text, size=STYLE["font.size"]).get_extents().width) / 72 if text else 0.0


def fitted(label: str, room: float) -> tuple[str, float]:
    """A bold label and its size in points: smaller, and at last cut short, where `room` inches are too few."""
    largest, smallest, bold = 9.0, 6.5, 1.13
    size = min(largest, STYLE["font.size"] * room / (bold * text_width(label) or 1.0))
    if size < smallest:
        return label[: int(len(label) * size / smallest) - 1] + "…", smallest
    return label, size


def _key_columns(widths: Sequence[float], width: float) -> int:
    """As many columns of a legend as fit; matplotlib fills them one after the other, each as wide as its widest."""
    for columns in range(len(widths), 1, -1):
        rows = -(-len(widths) // columns)
        widest = [max(widths[start : start + rows]) for start in range(0, len(widths), rows)]
        if len(widest) == columns and sum(KEY + wide for wide in widest) < width:
            return columns
    return 1


def log_colors(finite: NDArray[np.float64]) -> tuple[Colormap, LogNorm]:
    """Cividis over at least one decade: its lightness rises evenly, for any eye and in grey. Black: not finite."""
    low, high = np.log10(np.quantile(finite, [0.005, 0.995])) if len(finite) else (-1.0, 0.0)
    spare = max(0.0, 1.0 - (high - low)) / 2
    colors = matplotlib.colormaps["cividis"].with_extremes(bad="black")
    return colors, LogNorm(10.0 ** (low - spare), 10.0 ** (high + spare))


def shades(count: int) -> list[Color]:
    """`count` colours from dark to light, for an ordered factor; the lightest is still seen on white."""
    return [matplotlib.colormaps["viridis"](0.85 * index / max(count - 1, 1)) for index in range(count)]
