"""The user's own text: what is read, and what is refused."""

import hashlib

import numpy as np
import pytest

from normexp.data import Source, corpora, kjv
from normexp.fields import UserError
from tests.test_data import open_text, same

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PROSE = "And the light shineth in darkness;\nand the darkness\n\ncomprehended it not.\n"


@pytest.fixture
def read(tmp_path):
    """A function that makes a source of the text, or the bytes, given."""

    def read(content: str | bytes, **settings) -> Source:
        (tmp_path / "corpus.txt").write_bytes(content.encode() if isinstance(content, str) else content)
        return open_text(tmp_path / "corpus.txt", tmp_path / "cache", **settings)

    return read


# What is read


def test_hash_is_of_the_content_and_not_of_the_path(tmp_path):
    one, other = tmp_path / "one.txt", tmp_path / "deep" / "other.txt"
    other.parent.mkdir()
    one.write_text(PROSE)
    other.write_text(PROSE)
    sources = [open_text(path, tmp_path / "cache") for path in (one, other, other.parent)]
    assert {source.sha256 for source in sources} == {hashlib.sha256(PROSE.encode()).hexdigest()}
    assert len(list((tmp_path / "cache").iterdir())) == 1
    other.write_text(PROSE + "!")
    assert open_text(other, tmp_path / "cache").sha256 != sources[0].sha256


def test_folder_is_its_files_in_order_without_hidden_ones(tmp_path):
    folder = tmp_path / "books"
    contents = {"b.txt": "second", "a/z.txt": "first", "c": "third\n", ".DS_Store": "\0", ".git/config": "hidden"}
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    whole = b"first\nsecond\nthird\n"
    source = open_text(folder, tmp_path / "cache", tokenizer="bytes", validation=0.5, context=4)
    assert source.sha256 == hashlib.sha256(whole).hexdigest()
    assert source.train_tokens + source.validation_tokens == len(whole)


def test_path_may_be_relative_and_hold_any_sign(tmp_path, monkeypatch):
    (tmp_path / "a=b, c d.txt").write_text(PROSE)
    monkeypatch.chdir(tmp_path)
    assert open_text("a=b, c d.txt", tmp_path / "cache").vocab_size == len(set(PROSE))


# Refusals


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (b"", {}, r"is empty \(files: 1, bytes: 0\)"),
        (b"ten bytes.", {}, r"the training part has 8 tokens, but model\.context=8 needs 9"),
        (b"x" * 100, {"validation": 0.05}, r"the validation part has 5 tokens, but model\.context=8 needs 9"),
        (b"x" * 100, {"validation": 0.08}, r"the validation part has 8 tokens, but model\.context=8 needs 9"),
        (b"x" * 100, {"validation": 0.001}, r"the validation part has 0 tokens"),
        (b"x" * 100, {"validation": 0.95}, r"the training part has 5 tokens"),
        (
            b"abc\n" * 5,
            {"shape": "padded", "validation": 0.05},
            r"the validation part has 1 tokens, but .* a document of 2",
        ),
        (b"a\n\n\nb", {"shape": "padded", "validation": 0.01}, r"the validation part has 0 tokens"),
        (b"caf\xe9 au lait, s'il vous plait", {}, r"byte 3 is not UTF-8 text \(invalid continuation byte\)"),
        (PROSE.encode("utf-16"), {}, r"byte \d+ is not UTF-8 text"),
        (PROSE.encode("utf-16-le"), {}, r"byte 1 is not UTF-8 text \(NUL byte\)"),
        (b"in the middle\0of a line" * 9, {}, r"byte 13 is not UTF-8 text \(NUL byte\)"),
        (b"lone \xed\xa0\x80 surrogate" * 9, {}, r"byte 5 is not UTF-8 text"),
        (b"cut in the middle of a sign \xe2\x82", {}, r"byte 28 is not UTF-8 text"),
        (
            b"x" * 5000,
            {"validation": 0.5},
            r"the last 50 % of the text, holds nearly one token only \(0\.000 nats each",
        ),
        (
            b"some plain words. " * 500 + bytes(range(1, 127)) * 20,
            {"validation": 0.2},
            r"the last 20 % of the text, is unlike .* a token costs \d\.\d+ nats, by a uniform guess 4\.836",
        ),
    ],
)
def test_bad_text_is_refused_in_one_line_before_anything_is_written(read, tmp_path, content, settings, message):
    with pytest.raises(UserError, match=message) as refusal:
        read(content, **settings)
    assert str(refusal.value).startswith("data.path=")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("content", [PROSE.encode("utf-16"), PROSE.encode() + b"\xe9\0\xed\xa0\x80", bytes(range(256))])
def test_any_bytes_are_read_as_bytes(read, content):
    source = read(content, tokenizer="bytes", validation=0.5)
    parts = [source._train.ids, source._validation.ids]
    assert np.concatenate(parts).astype(np.uint8).tobytes() == content


def test_shortest_text_that_is_enough(read):
    source = read("x" * 18, validation=0.5, context=8)
    assert same(source.batch(0, 1, 2), source.batch(5, 6, 2))
    with pytest.raises(UserError, match="8 tokens"):
        read("x" * 17, validation=0.5, context=8)


def test_context_is_checked_when_the_cache_is_warm(read):
    read("x" * 18, validation=0.5, context=8)
    with pytest.raises(UserError, match=r"model\.context=9 needs 10"):
        read("x" * 18, validation=0.5, context=9)


def test_kjv_context_longer_than_a_part(tmp_path):
    with pytest.raises(UserError, match=r"data=kjv: the validation part has 513230 tokens"):
        kjv(vocab_size=4096, tokenizer="characters", shape="packed", context=513_230, cache=tmp_path / "cache")


def test_missing_path(tmp_path):
    (tmp_path / "empty").mkdir()
    for path, message in [
        (tmp_path / "missing.txt", "neither a file nor a folder"),
        ("", "is empty; give a file or a folder"),
        ("x" * 5000, "neither a file nor a folder"),
        ("~nobody-of-that-name/x", "neither a file nor a folder"),
        ("/dev/zero", "neither a file nor a folder"),
        (tmp_path / "empty", r"is empty \(files: 0, bytes: 0\)"),
    ]:
        with pytest.raises(UserError, match=message):
            open_text(path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("tokenizer", ["characters", "bytes"])
def test_what_is_no_plain_text_is_not_read_as_such(tmp_path, tokenizer):
    books = tmp_path / "books"
    books.mkdir()
    (books / "a.txt").write_text(PROSE)
    (books / "settings.json").write_text(PROSE)  # in a folder of other text it is text
    open_text(books, tmp_path / "cache", tokenizer=tokenizer)
    with pytest.raises(UserError, match=r"^data\.path=\S*/settings\.json: is JSON; call it \.jsonl if each line is a"):
        open_text(books / "settings.json", tmp_path / "cache", tokenizer=tokenizer)
    (books / "b.txt.GZ").write_text(PROSE)
    for path in (books, books / "b.txt.GZ"):
        with pytest.raises(UserError, match=r"^data\.path=\S*/books/b\.txt\.GZ: is packed; unpack it$"):
            open_text(path, tmp_path / "cache", tokenizer=tokenizer)


def test_bad_byte_is_named_in_its_file(tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "a.txt").write_bytes(BYTE_ORDER_MARK + b"good text\n")
    (folder / "b.txt").write_bytes(b"")
    (folder / "c.txt").write_bytes(b"bad at \xff seven")
    with pytest.raises(UserError, match=r"c\.txt: byte 7 is not UTF-8 text \(invalid start byte\)"):
        open_text(folder, tmp_path / "cache")


def test_byte_order_marks_are_no_characters(tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "a.txt").write_bytes(BYTE_ORDER_MARK + b"aaaaaaaa")
    (folder / "b.txt").write_bytes(BYTE_ORDER_MARK + b"bbbbbbbb")
    source = open_text(folder, tmp_path / "cache", validation=0.5, context=4)
    assert (source.vocab_size, source.train_tokens + source.validation_tokens) == (3, 17)


def test_results_inside_the_corpus_are_refused(tmp_path):
    (tmp_path / "corpus.txt").write_text(PROSE)
    with pytest.raises(UserError, match="holds the results folder"):
        open_text(tmp_path, tmp_path / "results" / "cache")


def test_text_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    (tmp_path / "corpus.txt").write_text(PROSE)
    monkeypatch.setattr(corpora, "_sha256", lambda files: hashlib.sha256(b"as it was").hexdigest())
    with pytest.raises(UserError, match="changed while it was being read"):
        open_text(tmp_path / "corpus.txt", tmp_path / "cache")
