"""The user's files as bytes. Plain text is joined by newlines, and its documents are lines. Records, those of .jsonl
and .parquet files, may hold newlines, so they are joined by RECORD; lines of plain text beside them are records too."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from normexp.fields import UserError

BYTE_ORDER_MARK = "\ufeff"
RECORD = "\x1e"  # ASCII's record separator; a record that holds one itself counts as two
LINE = "\n"

CHUNK = 1 << 20  # bytes read at once
ROWS = 1024  # of a parquet file, likewise
PACKED = {".7z", ".bz2", ".gz", ".lz4", ".tar", ".tgz", ".xz", ".zip", ".zst"}


def find(path: str, cache: Path) -> list[Path]:
    """The file, or the files under the folder, at `path`."""
    if not path:
        raise UserError("data.path=: is empty; give a file or a folder")
    root = Path(os.path.expanduser(path)).absolute()
    if not (os.path.isfile(root) or os.path.isdir(root)):  # of os.path, since Path.is_file may raise
        raise UserError(f"data.path={path}: {root} is neither a file nor a folder; give one that exists")
    refuse_results_inside(root, f"data.path={path}", cache)
    files = [root] if root.is_file() else _under(root)
    for file in files:
        _refuse_other_kind(file, f"data.path={file if file != root else path}", alone=file == root)
    if not sum(file.stat().st_size for file in files):
        raise UserError(f"data.path={path}: is empty (files: {len(files)}, bytes: 0); give text")
    return files


def _refuse_other_kind(file: Path, name: str, alone: bool) -> None:
    """What would be read as plain text and is none: packed files, and a corpus of JSON; that in a folder of other
    files may be text like theirs."""
    if file.suffix.lower() in PACKED:
        raise UserError(f"{name}: is packed; unpack it")
    if alone and file.suffix.lower() == ".json":
        raise UserError(f"{name}: is JSON; call it .jsonl if each line is a record, or give data=hf data.name={file}")


def refuse_results_inside(root: Path, name: str, cache: Path) -> None:
    if cache.resolve().is_relative_to(root.resolve()):
        raise UserError(f"{name}: holds the results folder, so each run would change it; give another folder")


def reader(files: list[Path], column: str) -> tuple[str, Callable[[], Iterator[bytes]]]:
    """What separates the documents of the joined text, and a function that reads it in chunks."""
    if any(_kind(file) for file in files):
        return RECORD, lambda: join(_documents(files, column))
    return LINE, partial(_chunks, files)


def join(documents: Iterable[str]) -> Iterator[bytes]:
    for index, document in enumerate(documents):
        yield ((RECORD if index else "") + document).encode()


def locate(files: list[Path], offset: int) -> tuple[Path, int]:
    """The file, and the offset in it, of an offset in joined plain text."""
    for file in files[:-1]:
        size = file.stat().st_size
        if offset <= size:
            return file, offset
        offset -= size + 1
    return files[-1], offset


def chunks(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                yield chunk
    except OSError as error:
        raise UserError(f"data.path={file}: cannot be read ({error.strerror})") from None


def decoded(content: bytes) -> str:
    """UnicodeDecodeError where it is not UTF-8, or holds a NUL: valid, but the mark of a binary file or of UTF-16."""
    zero = content.find(0)
    if zero >= 0:
        raise UnicodeDecodeError("utf-8", content, zero, zero + 1, "NUL byte")
    return content.decode()


def text_of(record: Any, where: str, column: str) -> str:
    """The text in a record's column, from row or line `where`."""
    if column not in record:
        found = ", ".join(list(record)[:20])
        raise UserError(f"{where} has no column {column} (it has: {found}); give data.column=<name>")
    value = record[column]
    if not isinstance(value, str):
        kind = "null" if value is None else f"of type {type(value).__name__}"
        raise UserError(f"{where} has no text in data.column={column} (it is {kind}); leave that record out")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where} has half a surrogate pair in data.column={column}; leave that record out") from None
    return value


def _under(folder: Path) -> list[Path]:
    """Sorted by relative path; regular files that are not hidden and lie in no hidden folder."""
    paths = {file.relative_to(folder): file for file in folder.rglob("*") if file.is_file()}
    return [paths[path] for path in sorted(paths) if not any(name.startswith(".") for name in path.parts)]


def _chunks(files: list[Path]) -> Iterator[bytes]:
    for index, file in enumerate(files):
        if index:
            yield LINE.encode()
        yield from chunks(file)


def _documents(files: list[Path], column: str) -> Iterator[str]:
    for file in files:
        read = _kind(file)
        yield from read(file, column) if read else _lines(file)


def _lines(file: Path) -> list[str]:
    """Of plain text beside records."""
    content = b"".join(chunks(file))
    try:
        return decoded(content).removeprefix(BYTE_ORDER_MARK).split(LINE)
    except UnicodeDecodeError as error:
        raise UserError(
            f"data.path={file}: byte {error.start} is not UTF-8 text ({error.reason}), which all must be beside "
            "records; convert the file or move it away"
        ) from None


def _jsonl(file: Path, column: str) -> Iterator[str]:
    for number, line in enumerate(b"".join(chunks(file)).split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"data.path={file}: line {number}"
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise UserError(f"{where} is no JSON object; give one a line")
        yield text_of(record, where, column)


def _parquet(file: Path, column: str) -> Iterator[str]:
    import pyarrow  # with what it brings, a quarter of a second
    import pyarrow.parquet

    name, row = f"data.path={file}", 0
    try:
        with pyarrow.parquet.ParquetFile(file) as content:
            columns = content.schema_arrow.names
            if column not in columns:
                text_of(dict.fromkeys(columns), f"{name}: its table", column)
            for batch in content.iter_batches(ROWS, columns=[column]):
                for record in batch.to_pylist():
                    row += 1
                    yield text_of(record, f"{name}: row {row}", column)
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: column {column} is not UTF-8 text near row {row + 1} ({error.reason})") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{name}: cannot be read as parquet ({str(error).splitlines()[0]})") from None


_KINDS = {".jsonl": _jsonl, ".parquet": _parquet}


def _kind(file: Path) -> Callable[[Path, str], Iterator[str]] | None:
    return _KINDS.get(file.suffix.lower())
