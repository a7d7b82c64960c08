"""Sweeps: a list of cells in `sweep.json`, whose runs lie in their own run folders and tell how each cell ended."""

import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from normexp.fields import UserError
from normexp.runs import RunFolder, write_atomically

T = TypeVar("T")
ENDED = ("finished", "failed", "interrupted")  # statuses of a run that nobody is at
OUTSIDE = ("results.", "device.", "tracker.", "hydra/launcher.", "hydra.launcher.")  # these leave a sweep the same
ALIKE = "(all the same)"


@dataclass(frozen=True)
class Place:
    """Where a cell's run lies and what it takes."""

    folder: Path
    threads: int  # of the CPU
    work: float  # proportional to the time of its training


@dataclass(frozen=True)
class Cell:
    overrides: tuple[str, ...]
    place: Place | None  # None where the config was refused
    error: str | None  # what its run folder cannot tell

    @property
    def folder(self) -> Path:
        """Of its run; to be asked of a cell that has a place."""
        assert self.place is not None
        return self.place.folder

    @property
    def name(self) -> str:
        """Of its run."""
        return self.folder.name

    def summary(self) -> dict[str, Any]:
        return RunFolder(self.folder).summary() if self.place else {}

    def record(self) -> dict[str, Any]:
        """How the cell stands, read from its run folder."""
        summary = self.summary()
        return {
            "overrides": list(self.overrides),
            "run_id": self.name if self.place else None,
            "status": summary.get("status", "not run") if self.place else "refused",
            "verdict": summary.get("verdict"),
            "val_loss": summary.get("val_loss"),
            "val_loss_batch_stats": summary.get("val_loss_batch_stats"),
            "folder": str(self.folder) if self.place else None,
            "error": self.error or summary.get("error"),
        }


def plan(cells: Sequence[tuple[list[str], T]], place_of: Callable[[T], Place]) -> list[Cell]:
    """`place_of` places a cell's run or refuses its config. A fault that no cell is free of is raised."""
    planned: list[Cell] = []
    faults: list[Exception] = []
    for overrides, config in cells:
        try:
            planned.append(Cell(tuple(overrides), place_of(config), None))
        except Exception as error:  # of one cell, perhaps in the user's own code: the others run
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            planned.append(Cell(tuple(overrides), None, reason))
            faults.append(error)
    if len(faults) == len(planned):
        raise faults[0]
    return planned


def unfinished(cells: Sequence[Cell]) -> list[Cell]:
    """One cell for each run that is still to be made."""
    by_folder = {cell.folder: cell for cell in reversed(cells) if cell.place}
    return [cell for cell in reversed(by_folder.values()) if cell.summary().get("status") != "finished"]


def folder_name(name: str | None, overrides: Sequence[str]) -> str:
    """The sweep's name; with other overrides, or without a name, a short hash of these says which sweep it is."""
    names = {override: override.lstrip("+").partition("=")[0] for override in overrides}
    own = sorted(o for o, name in names.items() if name != "sweep" and not f"{name}.".startswith(OUTSIDE))
    short = hashlib.sha256("\n".join(own).encode()).hexdigest()[:8]
    return "-".join([*([name] if name else []), *([short] if own or not name else [])])


def write(folder: Path, command: Sequence[str], status: str, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """`sweep.json`: the command, and how each cell stands now."""
    records = [cell.record() for cell in cells]
    line = shlex.join(["python", "-m", "normexp.train", *command])
    about = {"name": folder.name, "command": line, "status": status}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "sweep.json", json.dumps(about | {"cells": records}, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"results: cannot write {folder} ({error.strerror}); give another folder") from None
    return records


def table(records: Sequence[Mapping[str, Any]], width: int | None) -> str:
    """One line a cell: the overrides that differ between cells, status, verdict, validation loss and run; below them
    the errors and a count. Names are shortened, and then cut, until a line has `width` columns (None: any)."""
    common = set.intersection(*(set(record["overrides"]) for record in records))
    cells = [[override for override in record["overrides"] if override not in common] for record in records]
    rows = [(record["status"], record["verdict"] or "-", _loss(record), record["run_id"] or "-") for record in records]
    columns = list(zip(*[("status", "verdict", "loss", "run"), *rows], strict=True))
    others = ["  ".join(line) for line in zip(*map(_padded, columns), strict=True)]
    names = _fitted(cells, None if width is None else width - len(others[0]) - 2)
    lines = [f"{name}  {other}".rstrip() for name, other in zip(_padded(["cell", *names]), others, strict=True)]
    if any(record.get("val_loss_batch_stats") is not None for record in records):
        lines.append("loss: by running / by batch statistics, which decide the verdict")
    for own, record in zip(cells, records, strict=True):
        if record["error"]:
            name, error = " ".join(own) or ALIKE, " ".join(record["error"].split())
            lines.append(error if error.startswith(f"{name}:") else f"{name}: {error}")
    counts = Counter(record["verdict"] or record["status"] for record in records)
    return "\n".join([*lines, ", ".join(f"{count} {what}" for what, count in counts.most_common())])


def _loss(record: Mapping[str, Any]) -> str:
    """The last one: of an unfinished run it is an early one."""
    if record["status"] != "finished":
        return "-"
    losses = [record["val_loss"], record["val_loss_batch_stats"]][: 1 + (record["val_loss_batch_stats"] is not None)]
    return " / ".join("not finite" if loss is None else f"{loss:.3f}" for loss in losses)


def _fitted(cells: list[list[str]], width: int | None) -> list[str]:
    """A text for each list of overrides: whole, else with the last part of each name, else cut."""
    whole = [" ".join(cell) or ALIKE for cell in cells]
    if width is None or max(map(len, whole)) <= width:
        return whole
    short = [" ".join(map(_without_group, cell)) or ALIKE for cell in cells]
    return [text if len(text) <= width else f"{text[: max(width, 8) - 1]}…" for text in short]


def _without_group(override: str) -> str:
    name, sign, value = override.partition("=")
    return name.rpartition(".")[2] + sign + value


def _padded(texts: Sequence[str]) -> list[str]:
    return [text.ljust(max(map(len, texts))) for text in texts]
