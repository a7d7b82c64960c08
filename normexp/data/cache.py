"""What is made of a text once: folders of files, each there whole or not at all, and checked whenever it is found."""

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from normexp.fields import UserError

Write = Callable[[IO[bytes]], object]

SUMS = "SHA256SUMS"  # of the other files, as `sha256sum -c` reads them
UNFINISHED = ".writing-"  # begins the name of a folder that is being written, or was when a kill came
LOCK = "lock"  # in it: held by its writer
YOUNG = 60.0  # seconds in which a writer has made the folder and its lock
OLD = 86_400.0  # seconds after which nobody writes in a folder without a lock


def store(entry: Path, files: Mapping[str, Write]) -> None:
    """All of it or nothing: written beside `entry` and renamed. Of two processes that do so at once, one wins."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        _clear(entry.parent)
        with (
            tempfile.TemporaryDirectory(dir=entry.parent, prefix=UNFINISHED) as folder,
            (Path(folder) / LOCK).open("wb") as lock,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX)
            finished = Path(folder) / "entry"  # a folder of its own, since the temporary one is closed to other users
            finished.mkdir()
            for name, write in files.items():
                _write(finished / name, write)
            sums = "".join(f"{_sha256(finished / name)}  {name}\n" for name in files)
            _write(finished / SUMS, lambda stream: stream.write(sums.encode()))
            finished.rename(entry)
    except OSError as error:
        if not entry.is_dir():  # else the other process was first
            raise UserError(f"results: cannot write the cache {entry} ({error.strerror})") from None


def check(entry: Path) -> None:
    """UserError where a file is no longer what was stored."""
    try:
        sums = [line.split("  ", 1) for line in (entry / SUMS).read_text().splitlines()]
        there = {SUMS, *(name for _, name in sums)} == {path.name for path in entry.iterdir()}
        whole = there and all(_sha256(entry / name) == sha256 for sha256, name in sums)
    except PermissionError as error:
        raise UserError(f"results: the cache {entry} cannot be read ({error.strerror})") from None
    except (OSError, ValueError):
        whole = False
    if not whole:
        raise UserError(f"results: the cache {entry} is damaged; delete it and repeat the command")


def _write(path: Path, write: Write) -> None:
    with path.open("wb") as stream:
        write(stream)
        stream.flush()
        os.fsync(stream.fileno())  # else a power cut may leave the new name on an empty file


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _clear(folder: Path) -> None:
    """Removes what killed processes left unfinished."""
    for left in folder.glob(f"{UNFINISHED}*"):
        if not (left / LOCK).exists() and _age(left) > OLD:
            shutil.rmtree(left, ignore_errors=True)
        with suppress(OSError), (left / LOCK).open("rb+") as lock:  # of another user; of one who has just ended
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _age(left) > YOUNG:
                shutil.rmtree(left, ignore_errors=True)


def _age(folder: Path) -> float:
    """Seconds since something was last made in it; 0 where it is gone."""
    try:
        return time.time() - folder.stat().st_mtime
    except OSError:
        return 0.0
