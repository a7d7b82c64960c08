"""Colours, dashes and hatches that survive colour-blindness and grey print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Dash = Literal["-", "--", "-.", ":"]
Color = str | tuple[float, float, float, float]

# Okabe and Ito's palette.
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, BLACK, GREY = "#0072B2", "#D55E00", "#CC79A7", "#000000", "#777777"


class LineStyle(NamedTuple):
    color: str
    dash: Dash
    marker: str


class TileStyle(NamedTuple):
    color: str
    hatch: str  # keeps verdicts apart in grey print, where GREEN and VERMILLION are equally dark
    hatch_color: str
    ink: str  # of the text on it


VERDICTS = {
    "trained": TileStyle(GREEN, "", GREEN, "white"),
    "unstable": TileStyle(YELLOW, "..", "#9C9420", "black"),
    "undecided": TileStyle("#DDDDDD", "", "#DDDDDD", "black"),
    "collapsed": TileStyle(VERMILLION, "////", "#F39A59", "white"),
    "diverged": TileStyle("#2B2B2B", "xxxx", "#555555", "white"),
}
NORMS = {
    "bn": LineStyle(VERMILLION, "-", "s"),
    "ln": LineStyle(BLUE, "--", "o"),
    "rms": LineStyle(GREEN, "-.", "^"),
}
DASHES: tuple[Dash, ...] = ("-", ":", "--")
FURTHER = [LineStyle(color, dash, "D") for dash in DASHES for color in (ORANGE, PURPLE, SKY, BLACK, GREY)]


def line_styles(names: Sequence[str]) -> dict[str, LineStyle]:
    """The style of each norm: the same for the three common ones in every report."""
    further = iter(FURTHER * (1 + len(names) // len(FURTHER)))
    return {name: NORMS.get(name) or next(further) for name in names}
