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
    pale: str  # at the lowest loss
    full: str  # at the highest
    hatch: str  # keeps verdicts apart in grey print, where lightness is the loss
    hatch_color: str


VERDICTS = {
    "trained": TileStyle("#C9EADF", GREEN, "", GREEN),
    "unstable": TileStyle("#FBF7C4", "#D6C600", "..", "#8F8600"),
    "undecided": TileStyle("#EEEEEE", "#ABABAB", "--", "#8A8A8A"),
    "collapsed": TileStyle("#F8D9C2", VERMILLION, "////", "#F39A59"),
    "diverged": TileStyle("#4A4A4A", "#2B2B2B", "xxxx", "#6A6A6A"),
}
NORMS = {
    "bn": LineStyle(VERMILLION, "-", "s"),
    "ln": LineStyle(BLUE, "--", "o"),
    "rms": LineStyle(GREEN, "-.", "^"),
}
DASHES: tuple[Dash, ...] = ("-", ":", "--")
FURTHER = [LineStyle(color, dash, "D") for dash in DASHES for color in (ORANGE, PURPLE, SKY, BLACK, GREY)]


def shade(verdict: str, level: float) -> str:
    """The colour of a verdict at a loss, from 0 (the lowest: pale) to 1 (the highest: full)."""
    pale, full, _, _ = VERDICTS[verdict]
    mixed = [round((1 - level) * low + level * high) for low, high in zip(_rgb(pale), _rgb(full), strict=True)]
    return "#{:02X}{:02X}{:02X}".format(*mixed)


def ink(ground: str) -> str:
    """Black or white, whichever is easier to read on it."""
    return max(("black", BLACK), ("white", "#FFFFFF"), key=lambda named: contrast(named[1], ground))[0]


def contrast(one: str, other: str) -> float:
    """Of two colours, from 1 to 21 (WCAG 2.2); text needs 4.5."""
    dark, light = sorted(map(_luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(color: str) -> float:
    parts = [part / 255 for part in _rgb(color)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _rgb(color: str) -> list[int]:
    return [int(color[start : start + 2], 16) for start in (1, 3, 5)]


def line_styles(names: Sequence[str]) -> dict[str, LineStyle]:
    """The style of each norm: the same for the three common ones in every report."""
    further = iter(FURTHER * (1 + len(names) // len(FURTHER)))
    return {name: NORMS.get(name) or next(further) for name in names}
