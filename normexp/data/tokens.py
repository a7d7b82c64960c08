"""Tokenisers: bytes to ids, once per corpus; the ids lie in a memory-mapped cache under the corpus's hash.

N: tokens, V: vocabulary.
"""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from normexp.fields import UserError

Tokenizer = Literal["characters", "bytes"]
Ids = NDArray[Any]  # unsigned integers of the smallest width that holds V
Integers = NDArray[np.int64]

BYTE_ORDER_MARK = "\ufeff"
VERSION = 1  # raised when a tokeniser or the files of the cache change


class Tokens(NamedTuple):
    ids: Ids  # (N,)
    widths: Integers  # (V,) bytes of text behind each id
    end: int  # the id that closes a document; -1: no id does


def _characters(content: bytes) -> Tokens:
    """Ids in the order of code points. UnicodeDecodeError where the content is not UTF-8 text."""
    zero = content.find(0)
    if zero >= 0:  # valid UTF-8, but the mark of a binary file or of UTF-16
        raise UnicodeDecodeError("utf-8", content, zero, zero + 1, "NUL byte")
    text = content.decode().removeprefix(BYTE_ORDER_MARK).replace("\n" + BYTE_ORDER_MARK, "\n")
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    occurs = np.zeros(0x110000, bool)
    occurs[codes] = True
    alphabet = np.flatnonzero(occurs)
    rank = np.zeros(occurs.size, np.min_scalar_type(max(alphabet.size - 1, 0)))
    rank[alphabet] = np.arange(alphabet.size)
    widths = np.array([len(chr(code).encode()) for code in alphabet], np.int64)
    return Tokens(rank[codes], widths, int(rank[ord("\n")]) if occurs[ord("\n")] else -1)


def _bytes(content: bytes) -> Tokens:
    return Tokens(np.frombuffer(content, np.uint8), np.ones(256, np.int64), ord("\n"))


_TOKENIZERS: dict[str, Callable[[bytes], Tokens]] = {"characters": _characters, "bytes": _bytes}


def cached(
    cache: Path, sha256: str, tokenizer: Tokenizer, read: Callable[[], bytes], accept: Callable[[Tokens], object]
) -> Tokens:
    """The memory-mapped tokens of the text with this hash. Where the folder `cache` lacks them the text is read, and
    written there once `accept` has not raised."""
    entry = cache / f"{tokenizer}-v{VERSION}-{sha256}"
    if not entry.is_dir():
        tokens = _TOKENIZERS[tokenizer](read())
        accept(tokens)
        _store(entry, tokens)
    return _load(entry)


def _store(entry: Path, tokens: Tokens) -> None:
    """All of it or nothing: written beside `entry` and renamed. Of two processes that do so at once, one wins."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=entry.parent, prefix=".writing-") as folder:
            finished = Path(folder) / "entry"  # a folder of its own, since the temporary one is closed to other users
            finished.mkdir()
            about = {"widths": tokens.widths.tolist(), "end": tokens.end}
            _write(finished / "tokens.json", lambda stream: stream.write(json.dumps(about).encode()))
            _write(finished / "ids.npy", lambda stream: np.save(stream, tokens.ids))
            finished.rename(entry)
    except OSError as error:
        if not entry.is_dir():  # else the other process was first, with the same tokens
            raise UserError(f"results: cannot write the token cache {entry} ({error.strerror})") from None


def _write(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    with path.open("wb") as stream:
        write(stream)
        stream.flush()
        os.fsync(stream.fileno())  # else a power cut may leave the new name on an empty file


def _load(entry: Path) -> Tokens:
    try:
        about = json.loads((entry / "tokens.json").read_text())
        ids = np.asarray(np.load(entry / "ids.npy", mmap_mode="r"))  # still mapped; a plain array indexes faster
        return Tokens(ids, np.array(about["widths"], np.int64), about["end"])
    except (OSError, ValueError, KeyError, EOFError):
        raise UserError(f"results: the token cache {entry} is damaged; delete it and repeat the command") from None
