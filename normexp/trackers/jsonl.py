"""The metrics file of a run. A row is one logged step: `step`, and numbers by slash path."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Self

from normexp.fields import UserError

Row = Mapping[str, float | int | list[str] | None]


class Jsonl:
    """The metrics file of a run: one strict JSON object per line, steps strictly rising.

    Opening keeps the rows up to `last_step` (-1: none) and drops later ones and a torn last line. UserError names a
    line before them that is damaged or does not follow on the step before it. `last_step` is then the step of the last
    row that was kept, -1 without one.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self.path = path
        self._kept, self.last_step = _intact_part(path, last_step) if last_step >= 0 and path.exists() else (0, -1)
        self._file = path.open("ab", buffering=0)
        self._file.truncate(self._kept)
        self._size = self._kept

    def history(self) -> Iterator[Row]:
        """The rows that were kept at the opening."""
        with self.path.open("rb") as stream:
            position = 0
            while position < self._kept:
                line = stream.readline()
                position += len(line)
                yield json.loads(line)

    def write(self, rows: Iterable[Row]) -> None:
        """Appends the rows. A number that is not finite becomes null, its path is listed in `nonfinite`.
        OSError if they cannot be written; the file is then as it was."""
        lines, step = [], self.last_step
        for row in rows:
            if not isinstance(row["step"], int) or row["step"] <= step:
                raise ValueError(f"{self.path}: step {row['step']} after step {step}")
            step = row["step"]
            lines.append(_strict_json(row) + "\n")
        data = "".join(lines).encode()
        try:
            self._append(data)
        except OSError as error:
            self._file.truncate(self._size)
            raise self._named(error) from None
        self._size, self.last_step = self._size + len(data), step

    def sync(self) -> None:
        """All rows are on the disk afterwards: without it they survive a kill, but no loss of power."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._named(error) from None

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, f"cannot write metrics: {error.strerror}", str(self.path))

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _strict_json(row: Row) -> str:
    try:
        return json.dumps(row, allow_nan=False)
    except ValueError:
        bad = [path for path, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        return json.dumps({**row, **dict.fromkeys(bad), "nonfinite": _named(row, bad)}, allow_nan=False)


def _named(row: Row, bad: list[str]) -> list[str]:
    already = row.get("nonfinite")
    return sorted({*bad, *(already if isinstance(already, list) else [])})


def _intact_part(path: Path, last_step: int) -> tuple[int, int]:
    """Length in bytes of the rows up to `last_step`, and the step of the last of them."""
    length, step = 0, -1
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            found = _step_of(line)
            if step == last_step or (found is not None and found > last_step):
                break
            if found != step + 1:
                if found is None and not stream.read(1):
                    break  # the last line: a kill tore it
                raise UserError(f"{path} line {number}: is damaged; repair it, or delete {path.parent} to begin anew")
            length, step = length + len(line), found
    return length, step


def _step_of(line: bytes) -> int | None:
    """None if the line is no whole row."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
