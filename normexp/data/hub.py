"""Datasets of the Hugging Face hub: the only module that knows `datasets` and `huggingface_hub`, which are imported
when they are needed."""

import functools
import glob
import itertools
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from normexp.data.files import text_of
from normexp.fields import UserError, show

PATIENCE = 3.0  # seconds that the hub has to answer; `datasets` itself tries again for 24
ROWS = 1024  # read at once
KINDS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}  # of local files
BLAME = {
    "data.split": r"(Bad|Unknown|Unrecognized|Invalid) (split|instruction)",
    "data.config": r"BuilderConfig|Config name",
    "data.revision": r"Revision",
}


class Wanted(NamedTuple):
    """What the text depends on."""

    name: str
    config: str | None
    revision: str | None
    split: str
    column: str
    documents: int | None  # the first ones; None: all


def local(name: str) -> Path | None:
    """The folder, file or glob that a name is; None where it is a name on the hub."""
    if not name:
        raise UserError("data.name=: is empty; give the name of a dataset on the hub, or a local folder")
    path = Path(os.path.expanduser(name)).absolute()
    if os.path.exists(path) or glob.has_magic(name):
        return path
    if name.startswith(("/", "./", "../", "~")):
        raise UserError(f"data.name={name}: {path} does not exist; give a folder or a glob of parquet or jsonl files")
    return None


def documents(wanted: Wanted, streaming: bool) -> Iterator[str]:
    path = local(wanted.name)
    offline = path is None and not _online()
    with tempfile.TemporaryDirectory() as scratch:  # else local files leave a copy, or a lock, in the user's cache
        try:
            library = _library(offline)
            builder = _hubs(library, wanted, offline) if path is None else _locals(library, wanted, path, scratch)
            yield from itertools.islice(_texts(wanted, _table(builder, wanted.split, streaming)), wanted.documents)
        except UserError:
            raise
        except Exception as error:  # of many kinds, and each names something that the user gave
            cause = error.__cause__ if "while generating" in str(error) else None  # that alone says nothing
            raise UserError(_explained(wanted, offline, cause or error)) from error


def answers() -> bool:
    """Whether the hub says anything within PATIENCE. In a thread, since a search for its address has no time limit."""
    heard: list[bool] = []

    def ask() -> None:
        try:
            with urlopen(Request(_endpoint(), method="HEAD"), timeout=PATIENCE):
                heard.append(True)
        except HTTPError as error:
            heard.append(error.code < 500)  # else it is a proxy that speaks
        except Exception:
            heard.append(False)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return heard == [True]


@functools.cache
def _online() -> bool:
    return not _told_offline() and answers()


def _told_offline() -> bool:
    said = (os.environ.get(name, "").upper() for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"))
    return any(value in ("1", "ON", "YES", "TRUE") for value in said)


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def _hubs(library: Any, wanted: Wanted, offline: bool) -> Any:
    builder = library.load_dataset_builder(wanted.name, wanted.config, revision=wanted.revision)
    if offline and wanted.revision not in (None, builder.hash):  # the newest copy at hand, of whatever revision
        raise UserError(
            f"data.revision={wanted.revision}: {_silent()}, and the copy at hand is {builder.hash}; connect, or give "
            "that revision"
        )
    return builder


def _locals(library: Any, wanted: Wanted, path: Path, scratch: str) -> Any:
    if wanted.revision is not None:
        raise UserError(f"data.revision={wanted.revision}: local files have no revisions; give null")
    if os.path.isdir(path):
        kinds = {kind for file in Path(path).rglob("*") if (kind := KINDS.get(file.suffix.lower()))}
        if len(kinds) > 1:  # `datasets` would leave one out
            raise UserError(f"data.name={wanted.name}: holds both parquet and jsonl; give a glob of one of them")
        return library.load_dataset_builder(str(path), wanted.config, cache_dir=scratch)
    if wanted.config is not None:
        raise UserError(f"data.config={wanted.config}: only a folder or a dataset on the hub has one; give null")
    files = sorted(glob.glob(str(path), recursive=True))
    kinds = {KINDS.get(Path(file).suffix.lower(), "") for file in files}
    if len(kinds) != 1 or "" in kinds:
        raise UserError(
            f"data.name={wanted.name}: finds {len(files)} files, but not all of them are parquet, or all jsonl; give a "
            "folder or a glob of such files"
        )
    return library.load_dataset_builder(kinds.pop(), data_files={"train": files}, cache_dir=scratch)


def _library(offline: bool) -> Any:
    """`datasets`, told that there is no network: it takes HF_HUB_OFFLINE from the environment at its import only."""
    import datasets
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = offline or _told_offline()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs, it raises as well
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def _table(builder: Any, split: str, streaming: bool) -> Any:
    if streaming:
        return builder.as_streaming_dataset(split=split)
    builder.download_and_prepare()
    return builder.as_dataset(split=split)


def _texts(wanted: Wanted, dataset: Any) -> Iterator[str]:
    number = 0
    for table in dataset.with_format("arrow").iter(ROWS):
        names = table.column_names
        if wanted.column not in names:
            text_of(dict.fromkeys(names), f"data.name={wanted.name}: its table", wanted.column)
        kind = str(table.schema.field(wanted.column).type)
        if kind.startswith("extension<"):  # `datasets` makes JSON of a column of text and something else
            raise UserError(
                f"data.name={wanted.name}: column {wanted.column} is {kind[10:-1]}: not all of it is text; give "
                "data.column, or text alone"
            )
        for record in table.select([wanted.column]).to_pylist():
            number += 1
            yield text_of(record, f"data.name={wanted.name}: document {number}", wanted.column)


def _explained(wanted: Wanted, offline: bool, error: BaseException) -> str:
    reason = show((str(error).splitlines() or [""])[0].rstrip("."))
    for field, pattern in BLAME.items():
        if re.match(pattern, reason):
            value = getattr(wanted, field.removeprefix("data."))
            return f"{field}={show(value)}: does not fit data.name={wanted.name} ({reason})"
    if "BatchSize must be greater than 0" in reason:  # so pyarrow calls it
        return f"data.name={wanted.name}: holds a parquet file without rows; leave it out"
    if offline and (isinstance(error, (ConnectionError, FileNotFoundError)) or "find cache" in reason):
        return (
            f"data.name={wanted.name}: {_silent()}, and `datasets` has no copy of it; connect, or give a local folder "
            "of parquet or jsonl files"
        )
    return (
        f"data.name={wanted.name}: cannot be read by `datasets` ({type(error).__name__}: {reason}); give the name of a "
        "dataset on the hub, or a local folder of parquet or jsonl files"
    )


def _silent() -> str:
    return "HF_HUB_OFFLINE is set" if _told_offline() else f"the hub, {_endpoint()}, does not answer"
