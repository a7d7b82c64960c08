"""Tokenisers: bytes to ids, once per corpus; the ids lie in a memory-mapped cache under the corpus's hash.

N: tokens, V: vocabulary.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from normexp.data import bpe
from normexp.data.cache import Write, check, store
from normexp.data.files import BYTE_ORDER_MARK, LINE, decoded
from normexp.fields import Range

Tokenizer = Literal["characters", "bytes", "bpe"]
VocabSize = Annotated[int, Range(low=256, high=65_536)]
Ids = NDArray[Any]  # unsigned integers of the smallest width that holds V
Integers = NDArray[np.int64]

VERSION = 2  # raised when a tokeniser or the files of the cache change


class Encoding(NamedTuple):
    """What a text's tokens depend on, but for the text."""

    tokenizer: Tokenizer
    vocab_size: int  # of bpe, at most
    validation: float  # the share at the end of the text, from which bpe learns nothing
    separator: str  # of documents, one ASCII character

    def name(self) -> str:
        learned = f"-{self.vocab_size}-{self.validation!r}" if self.tokenizer == "bpe" else ""
        return f"{self.tokenizer}{learned}-v{VERSION}"


class Tokens(NamedTuple):
    ids: Ids  # (N,)
    widths: Integers  # (V,) bytes of text behind each id
    end: int  # the id that closes a document; -1: no id does
    border: int | None = None  # of the training and the validation part, where no token may lie across it
    learned: str = ""  # what the `tokenizers` library writes of a trained tokeniser


def _text(content: bytes, separator: str) -> str:
    """UnicodeDecodeError where plain text is not UTF-8; records are."""
    if separator != LINE:
        return content.decode()
    return decoded(content).removeprefix(BYTE_ORDER_MARK).replace(LINE + BYTE_ORDER_MARK, LINE)


def _characters(content: bytes, encoding: Encoding) -> Tokens:
    """Ids in the order of code points."""
    codes = np.frombuffer(_text(content, encoding.separator).encode("utf-32-le"), np.uint32)
    occurs = np.zeros(0x110000, bool)
    occurs[codes] = True
    alphabet = np.flatnonzero(occurs)
    rank = np.zeros(occurs.size, np.min_scalar_type(max(alphabet.size - 1, 0)))
    rank[alphabet] = np.arange(alphabet.size)
    widths = np.array([len(chr(code).encode()) for code in alphabet], np.int64)
    end = ord(encoding.separator)
    return Tokens(rank[codes], widths, int(rank[end]) if occurs[end] else -1)


def _bytes(content: bytes, encoding: Encoding) -> Tokens:
    return Tokens(np.frombuffer(content, np.uint8), np.ones(256, np.int64), ord(encoding.separator))


def _bpe(content: bytes, encoding: Encoding) -> Tokens:
    """Documents are encoded one by one, so that the separator stays a token of its own."""
    octets = _text(content, encoding.separator).encode()
    border = len(octets) - round(len(octets) * encoding.validation)
    while octets[border : border + 1] and octets[border] & 0xC0 == 0x80:  # within a character
        border += 1
    train, held_out = (part.decode().split(encoding.separator) for part in (octets[:border], octets[border:]))
    learned = bpe.learn(train, encoding.vocab_size)
    end = bpe.byte(learned, ord(encoding.separator))
    parts = [bpe.encode(learned, documents, end) for documents in (train, held_out)]
    return Tokens(np.concatenate(parts), bpe.widths(learned), end, parts[0].size, learned.to_str())


_TOKENIZERS: dict[str, Callable[[bytes, Encoding], Tokens]] = {
    "characters": _characters,
    "bytes": _bytes,
    "bpe": _bpe,
}


def cached(
    cache: Path, sha256: str, encoding: Encoding, read: Callable[[], bytes], accept: Callable[[Tokens], object]
) -> Tokens:
    """The memory-mapped tokens of the text with this hash. Where the folder `cache` lacks them the text is read, and
    written there once `accept` has not raised."""
    entry = cache / f"{encoding.name()}-{sha256}"
    if entry.is_dir():
        check(entry)
    else:
        tokens = _TOKENIZERS[encoding.tokenizer](read(), encoding)
        accept(tokens)
        store(entry, _files(tokens))
    return _load(entry)


def _files(tokens: Tokens) -> dict[str, Write]:
    about: dict[str, Any] = {"widths": tokens.widths.tolist(), "end": tokens.end}
    files: dict[str, Write] = {}
    if tokens.border is not None:
        about["border"] = tokens.border
    if tokens.learned:
        files["tokenizer.json"] = lambda stream: stream.write(tokens.learned.encode())
    files["tokens.json"] = lambda stream: stream.write(json.dumps(about).encode())
    return files | {"ids.npy": lambda stream: np.save(stream, tokens.ids)}


def _load(entry: Path) -> Tokens:
    about = json.loads((entry / "tokens.json").read_text())
    ids = np.asarray(np.load(entry / "ids.npy", mmap_mode="r"))  # still mapped; a plain array indexes faster
    return Tokens(ids, np.array(about["widths"], np.int64), about["end"], about.get("border"))
