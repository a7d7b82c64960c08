"""What all figures share: how cells are laid out over panels and files, and what a subtitle must name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from normexp.report.canvas import Sheet
from normexp.report.study import TOLD, Frame, Study, Values, at, factor_text, learned, levels, slug, split, text

BATCH = ("train.batch_size", "train.grad_accum", "model.context")
LARGEST = 40  # panels in one file
LONGEST = 150  # characters of a file's name


@dataclass(frozen=True)
class Drawing:
    name: str  # of its files
    sheet: Sheet


@dataclass(frozen=True)
class Missing:
    """A figure that the runs do not support, or that would be too much."""

    name: str
    why: str


def setting(study: Study, values: Values) -> str:
    """What holds for the whole figure: its own values, then what never varies; the init is always told."""
    known = study.fixed | values
    told = [factor_text(name, value) for name, value in known.items() if name not in TOLD or name in values]
    if "train.steps" in known:
        told.append(f"{known['train.steps']} steps")
    if {*BATCH} <= known.keys():
        told.append(f"{known['train.batch_size'] * known['train.grad_accum']} × {known['model.context']} tokens a step")
    told += [f"{name} by norm and placement" for name in study.nested]
    return ", ".join(told)


def seeds_of(part: Frame, factors: tuple[str, ...]) -> str:
    sizes = sorted({len(cell) for _, cell in split(part, factors)})
    count = "–".join(str(size) for size in sizes[:: max(1, len(sizes) - 1)])
    return f"n\xa0=\xa0{count} seed{'s' if sizes[-1] > 1 else ''} a cell"


def statistics_of(part: Frame) -> str:
    """A sentence for figures of losses, where the verdict is by another loss than the one that they show."""
    column = "val_loss_batch_stats"
    names = levels(part[part[column].notna()], "norm") if column in part else []
    told = ", ".join(map(text, names))
    return f" {told}: verdict by batch statistics, loss by running ones." if names else ""


def train_text(cell: Frame) -> str:
    """How a panel says whether what it shows trains: it is a mean over seeds that may differ."""
    return f"{learned(cell)}/{len(cell)} train"


def across(study: Study, *used: str) -> str:
    """The factor that goes over the columns of panels: the first that varies and has no other place."""
    free = sorted(study.apart(*used), key=["lr", "warmup_steps"].__contains__, reverse=True)
    return next(iter(free), "warmup_steps" if "warmup_steps" not in used else "init")


@dataclass(frozen=True)
class Grid:
    """The cells of one file: panels over (row factors) × (column factor)."""

    values: Values  # what the file is of
    rows: list[Values]
    column: str
    columns: list[object]
    part: Frame

    def at(self, place: tuple[int, int]) -> Frame:
        return at(self.part, self.rows[place[0]] | {self.column: self.columns[place[1]]})

    @property
    def row_labels(self) -> list[str]:
        return [" · ".join(text(value) for value in row.values()) for row in self.rows]

    @property
    def column_labels(self) -> list[str]:
        """None where there is one column: the subtitle has it."""
        return [factor_text(self.column, value) if len(self.columns) > 1 else "" for value in self.columns]


def grids(study: Study, rows: tuple[str, ...], *within: str) -> Iterator[Grid]:
    """One grid a file. `within` are the factors that the panels themselves show."""
    column = across(study, *rows, *within)
    for values, part in split(study.finished, study.apart(*rows, *within, column)):
        labels = [row for row, _ in split(part, rows)]
        columns = levels(part, column)
        height = max(1, LARGEST // len(columns))
        for start in range(0, len(labels), height):
            page = {"page": start // height + 1} if len(labels) > height else {}
            yield Grid(values | page, labels[start : start + height], column, columns, part)


def file_name(kind: str, values: Values) -> str:
    """Whatever varies, and where that is too much for a file's name, a digest in the place of its end."""
    name = "-".join(filter(None, [kind, slug(values)]))
    if len(name) <= LONGEST:
        return name
    return f"{name[: LONGEST - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
