"""Sweeps: a list of cells in `sweep.json`, whose runs lie in their own run folders and tell how each cell ended."""

import hashlib
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from normexp.fields import UserError
from normexp.runs import RunFolder, write_atomically

T = TypeVar("T")
ENDED = ("finished", "failed", "interrupted")  # statuses of a run that nobody is at
OUTSIDE = ("results", "device", "tracker", "hydra")  # overrides that leave a sweep the same


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
    own = sorted(o for o in overrides if o.lstrip("+").partition("=")[0].split(".")[0].split("/")[0] not in OUTSIDE)
    own = [override for override in own if override.lstrip("+").partition("=")[0] != "sweep"]
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


def table(records: Sequence[dict[str, Any]]) -> str:
    """One line a cell: the overrides that differ between cells, status, verdict, folder, error."""
    common = set.intersection(*(set(record["overrides"]) for record in records))
    rows = [
        (
            " ".join(override for override in record["overrides"] if override not in common) or "(all the same)",
            record["status"],
            record["verdict"] or "-",
            record["folder"] or "-",
            " ".join((record["error"] or "").split()),
        )
        for record in records
    ]
    lines = [("cell", "status", "verdict", "folder", "error" if any(row[-1] for row in rows) else ""), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    padded = [[text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)
