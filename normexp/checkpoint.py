"""Checkpoints that survive a kill at any moment: whole files only, and the one before is kept.

Beside `checkpoint.pt` stand `checkpoint.previous.pt`, the one before it, and, where reading found damage,
`checkpoint.damaged.pt`. They hold tensors and plain Python only, so they load with `weights_only=True`.
"""

import logging
import os
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

warn = logging.getLogger(__name__).warning

PLAIN = {type(None), bool, int, float, str, torch.Tensor, torch.nn.Parameter}


def save(path: Path, state: dict[str, Any]) -> None:
    """Replaces the file at `path`; whenever the process dies, `load` finds this state or the one before.

    TypeError names what is neither a tensor nor plain. OSError if it cannot be written, with the old files untouched.
    """
    for place, kind in _foreign(state, "state"):
        raise TypeError(f"{place} is a {kind}; a checkpoint holds tensors and plain Python only")
    fresh = path.with_name(f"{path.name}.writing")
    try:
        _write(fresh, state)
        if path.exists():
            path.replace(_beside(path, "previous"))
        fresh.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise OSError(error.errno, f"cannot save the checkpoint: {error.strerror}", str(path)) from None
    finally:
        fresh.unlink(missing_ok=True)


def load(path: Path) -> dict[str, Any] | None:
    """The newest undamaged state, on the CPU; None without one. Damage is warned of, and the file is set aside (of two
    damaged ones, the older)."""
    for candidate in (path, _beside(path, "previous")):
        if candidate.exists():
            try:
                return _read(candidate)
            except (PermissionError, MemoryError):
                raise
            except Exception as error:  # damage shows in as many ways as it has places
                aside = candidate.replace(_beside(path, "damaged"))
                warn("%s is damaged (%s); kept as %s", candidate, str(error).splitlines()[0], aside.name)
    if _beside(path, "damaged").exists():
        warn("%s: no undamaged checkpoint is left; the run begins anew", path.parent)
    return None


def _write(path: Path, state: dict[str, Any]) -> None:
    with path.open("wb") as stream:
        try:
            torch.save(state, stream)
        except RuntimeError as error:  # torch's own complaint about a write that failed
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        stream.flush()
        os.fsync(stream.fileno())


def _read(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        # Of a tensor whose entry is marked as a folder, torch leaves the memory as it was; no checksum covers that.
        folders = (entry.filename for entry in archive.infolist() if entry.external_attr & 0x10)
        broken = archive.testzip() or next(folders, None)
    if broken is not None:
        raise zipfile.BadZipFile(f"checksum of {broken}")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _foreign(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Where a value holds something that `weights_only=True` may refuse, and the type of it."""
    if type(value) in (dict, OrderedDict):
        for name, item in value.items():
            if type(name) not in (str, int):
                yield f"the key {name!r} of {place}", type(name).__qualname__
            yield from _foreign(item, f"{place}[{name!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _foreign(item, f"{place}[{index}]")
    elif type(value) not in PLAIN:
        yield place, f"{type(value).__module__}.{type(value).__qualname__}"


def _beside(path: Path, word: str) -> Path:
    return path.with_name(f"{path.stem}.{word}{path.suffix}")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
