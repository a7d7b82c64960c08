"""Run folders -> one tidy table, one row a run; and the history of a run.

A run that is still running or was interrupted has a row like any other (its `status` says so, its torn last line is
left out). A run that cannot be trusted gets no row: it comes back in `Runs.damaged` with the reason.
In every number `inf` stands for a logged non-finite value and NaN for a value that was not logged.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray
from pandas.api.types import is_object_dtype

STATUSES = ("running", "interrupted", "finished", "failed")
VERDICTS = ("trained", "unstable", "undecided", "collapsed", "diverged")
LEARNED = ("trained", "unstable")  # `unstable` has learned too, with spikes on the way
RUN_FILES = ("summary.json", "config.yaml", "metrics.jsonl")
RUN_NAME = re.compile(r".+-L\d+-w\d+-s\d+-[0-9a-f]{10}")

# Short names for the fields that every table and figure speaks of, and where config.yaml keeps them.
FACTORS = {
    "norm": "cell.norm",
    "placement": "cell.placement",
    "depth": "model.depth",  # blocks
    "warmup_steps": "optim.warmup_steps",  # steps
    "lr": "optim.lr",
    "init": "model.init",
    "seed": "seed",
}


class NothingToRead(Exception):
    """The path given by the user leads to no run; the message is one line."""


class _Damage(Exception):
    """Why a run folder cannot be trusted."""


@dataclass(frozen=True)
class Damaged:
    folder: Path
    reason: str


@dataclass(frozen=True)
class Absent:
    """A cell that a sweep lists and that has no run folder."""

    overrides: str
    reason: str


@dataclass(frozen=True)
class Source:
    """What a path leads to: the run folders, and the sweep that lists them if there is one."""

    path: Path
    folders: tuple[Path, ...]
    sweep: dict[str, Any] = field(default_factory=dict)
    absent: tuple[Absent, ...] = ()


@dataclass(frozen=True)
class Runs:
    source: Source
    table: pd.DataFrame
    histories: dict[str, pd.DataFrame]  # run_id -> the kept columns of its history
    damaged: tuple[Damaged, ...]


def locate(path: Path) -> Source:
    """A sweep folder, a results root, a runs root or one run folder -> its run folders."""
    path = path.absolute()
    if not path.is_dir():
        raise NothingToRead(f"{path}: {'is a file, not a folder of runs' if path.exists() else 'no such folder'}")
    if (path / "sweep.json").is_file():
        return _locate_sweep(path)
    if _holds_run(path):
        return Source(path, (path,))
    root = path / "runs" if (path / "runs").is_dir() else path
    folders = tuple(sorted(f for f in root.iterdir() if f.is_dir() and (_holds_run(f) or RUN_NAME.fullmatch(f.name))))
    if not folders:
        raise NothingToRead(f"{path}: no run in it{_hint(path)}")
    return Source(path, folders)


def _holds_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in RUN_FILES)


def _hint(path: Path) -> str:
    sweeps = sorted(f.parent.name for f in path.glob("*/sweep.json"))
    return f"; give one of its sweeps: {', '.join(sweeps)}" if sweeps else ""


def _locate_sweep(path: Path) -> Source:
    try:
        sweep = strict_json((path / "sweep.json").read_text(encoding="utf-8"))
        cells = [(" ".join(cell["overrides"]), cell.get("run_id"), cell) for cell in sweep["cells"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NothingToRead(f"{path / 'sweep.json'}: not a list of cells ({error!r})") from None
    runs = path.parent.parent / "runs"
    folders = {str(run_id): runs / str(run_id) for _, run_id, _ in cells if run_id}
    absent = [
        Absent(overrides, str(cell.get("error") or ("no run folder yet" if run_id else "no run id: refused")))
        for overrides, run_id, cell in cells
        if not run_id or not folders[str(run_id)].is_dir()
    ]
    present = tuple(folder for folder in folders.values() if folder.is_dir())
    if not present:
        raise NothingToRead(f"{path}: none of its {len(cells)} cells has a run folder under {runs}")
    return Source(path, present, sweep, tuple(absent))


def read(source: Source, keep: re.Pattern[str]) -> Runs:
    """All runs of a source; of each history the columns whose whole path matches `keep`."""
    rows, histories, damaged = [], {}, []
    for folder in source.folders:
        try:
            row = _row(folder)
            histories[row["run_id"]] = _history(folder, keep, row["status"], row.get("steps"))
            rows.append(row)
        except _Damage as damage:
            damaged.append(Damaged(folder, str(damage)))
    return Runs(source, pd.DataFrame(rows), histories, tuple(damaged))


def history(folder: Path) -> pd.DataFrame:
    """Every logged number of one run: a row a step, a column a path. Raises NothingToRead on a damaged file."""
    try:
        return _history(folder, re.compile(".*"), _row(folder)["status"], None)
    except _Damage as damage:
        raise NothingToRead(f"{folder}: {damage}") from None


def write_parquet(table: pd.DataFrame, path: Path) -> None:
    """Parquet columns have one type each: a column that mixes types (a field of one norm only) is kept as text."""
    plain = table.copy()
    for name in (column for column in plain if is_object_dtype(plain[column])):
        kinds = {type(value) for value in plain[name] if not _missing(value)}
        if len(kinds) > 1:
            plain[name] = [None if _missing(value) else str(value) for value in plain[name]]
    plain.to_parquet(path, index=False)


def _missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def strict_json(text: str) -> Any:
    """JSON without the NaN and Infinity that Python would let through."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not strict JSON")


# --- one run's row ---------------------------------------------------------------------------------------------------


def _row(folder: Path) -> dict[str, Any]:
    summary = _summary(folder)
    config = _config(folder)
    factors = {name: config.get(path) for name, path in FACTORS.items()}
    if lacking := [FACTORS[name] for name, value in factors.items() if value is None]:
        raise _Damage(f"config.yaml has no {', '.join(lacking)}")
    for name, value in (config | factors).items():
        if (name in FACTORS or name.startswith("cell.")) and summary.get(name, value) != value:
            raise _Damage(f"config.yaml says {name} {value!r}, summary.json {summary[name]!r}")
    written = (folder / "summary.json").stat().st_mtime  # seconds; tells a newer run of a cell from an older one
    return config | summary | factors | {"folder": str(folder), "written": written}


def _summary(folder: Path) -> dict[str, Any]:
    try:
        summary = strict_json(_text(folder / "summary.json"))
    except ValueError as error:
        raise _Damage(f"summary.json is not strict JSON ({error})") from None
    if not isinstance(summary, dict):
        raise _Damage("summary.json is not an object")
    if summary.get("status") not in STATUSES:
        raise _Damage(f"summary.json has status {summary.get('status')!r}, not one of {', '.join(STATUSES)}")
    if summary.get("run_id") != folder.name:
        raise _Damage(f"summary.json belongs to run {summary.get('run_id')!r}")
    if summary["status"] == "finished":
        _check_finished(summary)
    nonfinite = summary.pop("nonfinite", None) or []
    flat = dict(flatten(summary))
    return flat | {name: math.inf for name in nonfinite if flat.get(name, 0) is None}


def _check_finished(summary: dict[str, Any]) -> None:
    if summary.get("verdict") not in VERDICTS:
        raise _Damage(f"summary.json has verdict {summary.get('verdict')!r}, not one of {', '.join(VERDICTS)}")
    if lacking := [name for name in ("val_loss", "vocab_size") if name not in summary]:
        raise _Damage(f"summary.json has no {', '.join(lacking)}")


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = yaml.load(_text(folder / "config.yaml"), Loader=_Loader)
    except yaml.YAMLError as error:
        raise _Damage(f"config.yaml is not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(config, dict):
        raise _Damage("config.yaml is not a mapping")
    return dict(flatten(config))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _Damage(f"{path.name} is missing") from None
    except UnicodeDecodeError as error:
        raise _Damage(f"{path.name} is not UTF-8 (byte {error.start})") from None


def flatten(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings -> (dotted path, leaf); a list is a leaf, as JSON text, so that cells can be compared by it."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        elif key != "_partial_":
            yield f"{prefix}{key}", json.dumps(value) if isinstance(value, list) else value


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the C one where libyaml is built in
    """YAML 1.1 reads `1e-3` as text; 1.2, which OmegaConf follows, as a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
)


# --- one run's history -----------------------------------------------------------------------------------------------


def _history(folder: Path, keep: re.Pattern[str], status: str, steps: int | None) -> pd.DataFrame:
    finished = status == "finished"
    lines = _lines(folder / "metrics.jsonl", finished)
    rows = [_parse(line, number) for number, line in enumerate(lines, 1)]
    logged = [row["step"] for row in rows]
    if any(later <= earlier for earlier, later in pairwise(logged)):
        raise _Damage("metrics.jsonl has steps that do not increase")
    if finished and steps is not None and (not logged or logged[-1] < steps):
        raise _Damage(f"metrics.jsonl ends at step {logged[-1] if logged else 'none'}, summary.json says {steps}")
    return pd.DataFrame(_columns(rows, keep), index=pd.Index(logged, name="step", dtype="int64"))


def _lines(path: Path, finished: bool) -> list[str]:
    """A file cut off in the middle of a line is what a killed run leaves; a finished run has no excuse."""
    if not finished and not path.exists():
        return []
    *lines, torn = _text(path).split("\n")
    if torn and finished:
        raise _Damage(f"{path.name} ends in a torn line though the run is finished")
    return lines


def _parse(line: str, number: int) -> dict[str, Any]:
    try:
        row = strict_json(line)
    except ValueError as error:
        raise _Damage(f"metrics.jsonl line {number} is not strict JSON ({error})") from None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise _Damage(f"metrics.jsonl line {number} has no step")
    return row


def _columns(rows: list[dict[str, Any]], keep: re.Pattern[str]) -> dict[str, NDArray[np.float64]]:
    kept = {path for path in {path for row in rows for path in row} if path != "nonfinite" and keep.fullmatch(path)}
    columns = {path: np.full(len(rows), np.nan) for path in sorted(kept)}
    for index, row in enumerate(rows):
        for path in row.keys() & kept:
            columns[path][index] = _number(row, path)
    return columns


def _number(row: dict[str, Any], path: str) -> float:
    value = row[path]
    if value is None:
        return math.inf if path in row.get("nonfinite", ()) else math.nan
    if type(value) not in (int, float):
        raise _Damage(f"metrics.jsonl step {row['step']}: {path} is {value!r}, not a number")
    return float(value)
