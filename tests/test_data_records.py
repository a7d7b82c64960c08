"""Records: .jsonl and .parquet files, alone and beside plain text, and the same through `datasets`."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from normexp.data import Source, hf
from normexp.fields import UserError
from tests.test_data import open_text, spell

DOCUMENTS = ["first\nof two lines", "", "naïve € \U00010400", "a", 'quoted "and" \\ slashed', "last"]
JOINED = "\x1e".join(DOCUMENTS).encode()
HF = {
    "config": None, "revision": None, "split": "train", "column": "text", "streaming": True, "documents": None,
    "tokenizer": "bytes", "vocab_size": 4096, "shape": "packed", "validation": 0.5, "context": 4,
}  # fmt: skip


def write_jsonl(path: Path, documents: list[object], column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(documents)))
    return path


def write_parquet(path: Path, documents: list[object], column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": range(len(documents)), column: documents}), path)
    return path


WRITERS = {"a.jsonl": write_jsonl, "a.parquet": write_parquet}


def open_hf(name, cache, **changes) -> Source:
    return hf(name=str(name), cache=cache, **{**HF, **changes})


def content(source: Source) -> bytes:
    """Of a source of bytes."""
    return np.concatenate([source._train.ids, source._validation.ids]).astype(np.uint8).tobytes()


@pytest.fixture
def open_bytes(tmp_path):
    return lambda path, **changes: open_text(
        path, tmp_path / "cache", **{"tokenizer": "bytes", "validation": 0.5, "context": 4, **changes}
    )


# What is read


@pytest.mark.parametrize("name", WRITERS)
def test_the_text_is_the_records_joined(open_bytes, tmp_path, name):
    source = open_bytes(WRITERS[name](tmp_path / name, DOCUMENTS))
    assert content(source) == JOINED
    assert source.sha256 == hashlib.sha256(b"records\x1e" + JOINED).hexdigest()


def test_the_text_counts_and_not_the_files(open_bytes, tmp_path):
    paths = [
        write_jsonl(tmp_path / "one" / "a.jsonl", DOCUMENTS),
        write_parquet(tmp_path / "two" / "a.PARQUET", DOCUMENTS, column="story"),
        write_jsonl(tmp_path / "three" / "1.jsonl", DOCUMENTS[:2]).parent,
    ]
    write_parquet(tmp_path / "three" / "2.parquet", DOCUMENTS[2:])
    columns = ["text", "story", "text"]
    sources = [open_bytes(path, column=column) for path, column in zip(paths, columns, strict=True)]
    assert len({source.sha256 for source in sources}) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_lines_of_plain_text_are_records_beside_records(open_bytes, tmp_path):
    write_jsonl(tmp_path / "mixed" / "b.jsonl", ["re\ncord"])
    (tmp_path / "mixed" / "a.txt").write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    (tmp_path / "mixed" / "c.json").write_text('{"plain": 1}')
    assert content(open_bytes(tmp_path / "mixed")) == b'one\x1etwo\x1e\x1ere\ncord\x1e{"plain": 1}'


def test_the_same_bytes_as_plain_text_are_another_corpus(open_bytes, tmp_path):
    (tmp_path / "a.txt").write_bytes(JOINED)
    plain, records = (open_bytes(path) for path in (tmp_path / "a.txt", write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)))
    assert content(plain) == content(records)
    assert plain.sha256 == hashlib.sha256(JOINED).hexdigest() != records.sha256


def test_blank_lines_carriage_returns_and_a_byte_order_mark_are_no_text(open_bytes, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "some"}\r\n\r\n  \n{"text": " text", "more": [1]}')
    assert content(open_bytes(tmp_path / "a.jsonl")) == b"some\x1e text"


@pytest.mark.parametrize("tokenizer", ["characters", "bytes", "bpe"])
def test_padded_rows_are_records(open_bytes, tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", ["ab\ncd", "x", "", "yz", "held", "out"])
    source = open_bytes(path, tokenizer=tokenizer, shape="padded", validation=8 / 20, context=8)
    rows = source.batch(0, 1, 50)
    if tokenizer == "bpe":  # "ab", newline, "cd"; "x"; "yz"; each with its end
        assert rows.mask.sum(1).unique().tolist() == [1, 3]
        return
    letters = {"characters": sorted(set("\n\x1eabcdxyzheldout")), "bytes": list(map(chr, range(256)))}[tokenizer]
    assert set(spell(rows.targets, letters)) == {"b\ncd\x1e", "\x1e", "z\x1e"}
    assert spell(source.validation(2, 1)[0].targets, letters) == ["eld\x1e", "ut"]


def test_a_record_may_hold_a_nul_and_its_separator_counts_as_one(open_bytes, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["nul\0nul", "one\x1etwo", "held out"])
    source = open_bytes(path, tokenizer="characters", shape="padded", validation=0.4)
    assert source._train.starts.size == 3
    assert source.vocab_size == len(set("nul\0nul\x1eone\x1etwo\x1eheld out"))


# Refusals


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{bad", "line 3 is no JSON object; give one a line"),
        (b'["text"]', "line 3 is no JSON object"),
        (b"[" * 100_000, "line 3 is no JSON object"),
        (b'{"text": "caf\xe9"}', "line 3 is no JSON object"),
        (b'{"tex": "x", "id": 1}', r"line 3 has no column text \(it has: tex, id\); give data\.column=<name>"),
        (b"{}", r"line 3 has no column text \(it has: \)"),
        (b'{"text": null}', r"line 3 has no text in data\.column=text \(it is null\)"),
        (b'{"text": 3}', r"line 3 has no text in data\.column=text \(it is of type int\)"),
        (b'{"text": "\\ud800"}', r"line 3 has half a surrogate pair in data\.column=text"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(open_bytes, tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "good"}\n')
    with pytest.raises(UserError, match=rf"^data\.path=.*a\.jsonl: {message}") as refusal:
        open_bytes(tmp_path / "a.jsonl")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (["good", None], r"row 2 has no text in data\.column=text \(it is null\)"),
        ([1, 2], r"row 1 has no text in data\.column=text \(it is of type int\)"),
        ([["a"], ["b"]], r"row 1 has no text in data\.column=text \(it is of type list\)"),
    ],
)
def test_a_bad_row_is_refused_by_its_number(open_bytes, tmp_path, documents, message):
    with pytest.raises(UserError, match=rf"^data\.path=.*a\.parquet: {message}"):
        open_bytes(write_parquet(tmp_path / "a.parquet", documents))


def test_bad_tables_and_bad_text_beside_them_are_refused(open_bytes, tmp_path):
    table = write_parquet(tmp_path / "mixed" / "a.parquet", DOCUMENTS)
    with pytest.raises(
        UserError, match=r"a\.parquet: its table has no column txt \(it has: id, text\); give data\.col"
    ):
        open_bytes(table, column="txt")
    for octets, problem in [
        (b"caf\xe9!", "byte 3 is not UTF-8"),
        ("utf-16".encode("utf-16-le"), "byte 1 is not UTF-8"),
    ]:
        (tmp_path / "mixed" / "b.txt").write_bytes(octets)
        with pytest.raises(UserError, match=rf"b\.txt: {problem} .*beside records; convert the file or move it away"):
            open_bytes(tmp_path / "mixed")
    table.write_bytes(b"PAR1 but no more")
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read as parquet \(.+\)$"):
        open_bytes(table)
    assert not (tmp_path / "cache").exists()


def test_records_without_text_are_too_short(open_bytes, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    for tokenizer in ("characters", "bytes", "bpe"):
        with pytest.raises(UserError, match="the training part has 0 tokens"):
            open_bytes(tmp_path / "a.jsonl", tokenizer=tokenizer)


# Local files through `datasets`


@pytest.fixture
def local(tmp_path) -> dict[str, Path]:
    """Names that mean the same records."""
    return {
        "jsonl folder": write_jsonl(tmp_path / "jsonl" / "a.jsonl", DOCUMENTS).parent,
        "parquet folder": write_parquet(tmp_path / "parquet" / "a.parquet", DOCUMENTS).parent,
        "file": write_jsonl(tmp_path / "file" / "a.jsonl", DOCUMENTS),
        "glob": write_parquet(tmp_path / "glob" / "1.parquet", DOCUMENTS[:4]).parent / "*.parquet",
        "second of glob": write_parquet(tmp_path / "glob" / "2.parquet", DOCUMENTS[4:]),
    }


@pytest.mark.parametrize("name", ["jsonl folder", "parquet folder", "file", "glob"])
def test_datasets_reads_local_files_as_data_text_does(open_bytes, tmp_path, local, name):
    source = open_hf(local[name], tmp_path / "cache")
    assert content(source) == JOINED
    assert source.sha256 == open_bytes(local["jsonl folder"]).sha256
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"bytes-v2-{source.sha256}"]


def test_datasets_reads_the_same_without_streaming_and_leaves_no_copy(tmp_path, local, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home")
    assert content(open_hf(local["glob"], tmp_path / "cache", streaming=False)) == JOINED
    part = open_hf(local["jsonl folder"], tmp_path / "cache", streaming=False, split="train[2:4]")
    assert content(part) == "\x1e".join(DOCUMENTS[2:4]).encode()
    open_hf(local["file"], tmp_path / "cache")
    assert not (tmp_path / "home").exists()


def test_the_number_of_documents_is_limited(tmp_path, local):
    assert content(open_hf(local["glob"], tmp_path / "cache", documents=3)) == "\x1e".join(DOCUMENTS[:3]).encode()


def test_a_local_file_that_changes_is_read_again(tmp_path, local):
    before = open_hf(local["file"], tmp_path / "cache").sha256
    write_jsonl(local["file"], [*DOCUMENTS, "more"])
    assert open_hf(local["file"], tmp_path / "cache").sha256 != before


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("", {}, r"data\.name=: is empty; give the name"),
        ("./missing", {}, r"data\.name=\./missing: .* does not exist; give a folder or a glob"),
        ("{root}/*.csv", {}, r"data\.name=.*\.csv: finds 0 files"),
        ("{root}/*/a.*", {}, r"data\.name=.*: finds \d files, but not all of them are parquet, or all jsonl"),
        ("{root}", {}, r"data\.name=.*: holds the results folder"),
        (
            "{root}/file",
            {"split": "tset"},
            r"data\.split=tset: does not fit data\.name=.*Available splits: \['train'\]",
        ),
        ("{root}/file", {"config": "x"}, r"data\.config=x: does not fit data\.name=.*Available: \['default'\]"),
        ("{root}/file", {"revision": "x"}, r"data\.revision=x: local files have no revisions; give null"),
        ("{root}/file/*", {"config": "x"}, r"data\.config=x: only a folder or a dataset on the hub has one; give null"),
        ("{root}/rowless", {}, r"data\.name=.*rowless: holds a parquet file without rows; leave it out"),
        ("{root}/file", {"column": "txt"}, r"its table has no column txt \(it has: id, text\); give data\.column"),
        ("{root}/file", {"column": "id"}, r"document 1 has no text in data\.column=id \(it is of type int\)"),
        ("{root}/file", {"context": 99}, r"the training part has \d+ tokens, but model\.context=99 needs 100"),
        ("{root}/none", {}, r"data\.name=.*none: cannot be read by `datasets` \(EmptyDatasetError: "),
        ("{root}/bad", {}, r"data\.name=.*bad: cannot be read by `datasets` \(ArrowInvalid: JSON parse error"),
    ],
)
def test_what_datasets_cannot_read_is_refused_in_one_line(tmp_path, local, name, changes, message):
    (tmp_path / "none").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.jsonl").write_text("{bad\n")
    (tmp_path / "rowless").mkdir()
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "rowless" / "a.parquet")
    with pytest.raises(UserError, match=message) as refusal:
        open_hf(name.format(root=tmp_path), tmp_path / "cache", **changes)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "cache").exists()
