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
OUTSIDE = ("results", "device", "tracker", "hydra")  # overrides that leave a sweep the same


@dataclass(frozen=True)
class Cell:
    overrides: tuple[str, ...]
    folder: Path | None  # of its run; None where the config was refused
    error: str | None

    def record(self) -> dict[str, Any]:
        """How the cell stands, read from its run folder."""
        summary = RunFolder(self.folder).summary() if self.folder else {}
        return {
            "overrides": list(self.overrides),
            "run_id": self.folder.name if self.folder else None,
            "status": "refused" if self.folder is None else summary.get("status", "not run"),
            "verdict": summary.get("verdict"),
            "folder": str(self.folder) if self.folder else None,
            "error": self.error or summary.get("error"),
        }


def plan(cells: Sequence[tuple[list[str], T]], folder_of: Callable[[T], Path]) -> list[Cell]:
    """`folder_of` gives a cell's run folder or refuses its config. A fault that no cell is free of is raised."""
    planned: list[Cell] = []
    faults: list[Exception] = []
    for overrides, config in cells:
        try:
            planned.append(Cell(tuple(overrides), folder_of(config), None))
        except Exception as error:  # of one cell, perhaps in the user's own code: the others run
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            planned.append(Cell(tuple(overrides), None, reason))
            faults.append(error)
    if len(faults) == len(planned):
        raise faults[0]
    return planned


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
