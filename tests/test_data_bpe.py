"""Byte-level BPE, learned from the training part."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from normexp.data import bpe, corpora, kjv, tokens
from normexp.data.tokens import Encoding, _bpe
from normexp.fields import UserError, cast
from tests.test_data import open_text

PROSE = "".join(f"line {number} of the prose, which is naïve:\n\n" for number in range(200))


def kjv_text() -> str:
    return "\n".join(verse["text"] for verse in corpora._kjv_verses())


def spelt(found: tokens.Tokens) -> list[bytes]:
    """The bytes behind each token."""
    learned = Tokenizer.from_str(found.learned)
    return [found_bytes(learned.id_to_token(token)) for token in found.ids.tolist()]


def found_bytes(token: str) -> bytes:
    """GPT-2's alphabet: a printable byte of Latin-1 is itself, the others are counted up from 256."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [octet for octet in range(256) if octet not in plain]
    return bytes(ord(sign) if ord(sign) < 256 else others[ord(sign) - 256] for sign in token)


def tokenize(text: str, *, vocab_size: int = 300, validation: float = 0.3, separator: str = "\n") -> tokens.Tokens:
    return _bpe(text.encode(), Encoding("bpe", vocab_size, validation, separator))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tokens")


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), st.sampled_from("\n\x1e"))
def test_every_text_comes_back_and_no_token_lies_across_the_border(text, separator):
    text = text.replace("\ufeff", "")  # byte order marks at the beginnings of files are left out
    found = tokenize(text, separator=separator)
    spellings = spelt(found)
    assert b"".join(spellings) == text.encode()
    assert [len(spelling) for spelling in spellings] == found.widths[found.ids].tolist()
    train = b"".join(spellings[: found.border])
    assert train.decode() == text[: len(train.decode())]
    assert 0 <= len(train) - (len(text.encode()) - round(len(text.encode()) * 0.3)) <= 3  # moved on to a character


def test_what_separates_documents_is_a_token_of_its_own():
    found = tokenize("a\n\n\nb \n\n" * 100, vocab_size=400)
    newlines = [spelling for spelling in spelt(found) if b"\n" in spelling]
    assert newlines == [b"\n"] * 500
    assert (found.ids == found.end).sum() == 500
    records = tokenize("a\n\n\nb.\x1e" * 100, vocab_size=400, separator="\x1e")
    assert {spelling for spelling in spelt(records) if b"\x1e" in spelling} == {b"\x1e"}
    assert any(len(spelling) > 1 and b"\n" in spelling for spelling in spelt(records))


def test_it_learns_from_the_training_part_only():
    texts = [PROSE + PROSE[:2000], PROSE + "Of quite other words. " * 100]
    border = len(PROSE.encode())
    one, other = (tokenize(text, validation=1 - border / len(text.encode())) for text in texts)
    assert one.border == other.border > 1000
    assert (one.ids[: one.border] == other.ids[: other.border]).all()
    assert one.learned == other.learned != tokenize(texts[1], validation=0.01).learned


def test_the_vocabulary_is_as_large_as_asked_for_if_the_text_has_as_much(tmp_path):
    (tmp_path / "a.txt").write_text(kjv_text()[:100_000])
    sizes = [
        open_text(tmp_path / "a.txt", tmp_path / "c", tokenizer="bpe", vocab_size=n).vocab_size for n in (256, 777)
    ]
    assert sizes == [256, 777]
    assert tokenize("abc", vocab_size=4096).widths.size < 260
    with pytest.raises(UserError, match=r"data\.vocab_size=255: must be an integer in \[256, "):
        cast(255, tokens.VocabSize, "data.vocab_size")


def test_kjv_parts_meet_at_acts(cache):
    source = kjv(tokenizer="bpe", vocab_size=4096, shape="packed", context=64, cache=cache)
    (entry,) = cache.iterdir()
    learned = Tokenizer.from_file(str(entry / "tokenizer.json"))
    text, border = kjv_text(), 3_624_221  # characters before Acts
    train, held_out = (learned.decode(np.asarray(part.ids).tolist()) for part in (source._train, source._validation))
    assert (train, held_out) == (text[:border], text[border:])
    assert source.vocab_size == 4096
    assert source.bytes_per_token == pytest.approx(513_230 / source.validation_tokens)
    # It changes only with the library's way to learn, and then runs with bpe are of another experiment.
    digest = hashlib.sha256(np.asarray(source._train.ids).astype("<u2").tobytes()).hexdigest()
    assert (source.train_tokens, digest[:16]) == (903_643, "b018db79dec2c23c")


def test_bits_per_byte_are_those_of_the_text(tmp_path):
    (tmp_path / "a.txt").write_text(PROSE)
    source = open_text(tmp_path / "a.txt", tmp_path / "cache", tokenizer="bpe", vocab_size=400, validation=0.5)
    size = len(PROSE.encode())
    assert source.bytes_per_token * source.validation_tokens == pytest.approx(size - (size - round(size * 0.5)))
    assert source.bytes_per_token > 2


def test_any_number_of_threads_learns_the_same(monkeypatch):
    documents, found = kjv_text()[:200_000].split("\n"), set()
    for parallel in ["true", "true", "true", "false"]:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
        learned = bpe.learn(documents, 2000)
        found.add((learned.to_str(), bpe.encode(learned, documents, bpe.byte(learned, 10)).tobytes()))
    assert len(found) == 1


def test_tokens_and_tokeniser_are_cached_together(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(PROSE)

    def read(**changes):
        return open_text(tmp_path / "a.txt", tmp_path / "cache", tokenizer="bpe", **changes)

    first = read()
    (entry,) = (tmp_path / "cache").iterdir()
    assert sorted(path.name for path in entry.iterdir()) == ["SHA256SUMS", "ids.npy", "tokenizer.json", "tokens.json"]
    assert json.loads((entry / "tokens.json").read_text())["border"] == first.train_tokens
    others = [read(vocab_size=300), read(validation=0.3)]
    assert len({entry.name, *(path.name for path in (tmp_path / "cache").iterdir())}) == 3
    monkeypatch.setattr(bpe, "learn", lambda *_: pytest.fail("learned again"))
    assert (read().train_tokens, read().vocab_size) == (first.train_tokens, first.vocab_size)
    assert read(validation=0.3).train_tokens == others[1].train_tokens


@pytest.mark.parametrize("content", [b"caf\xe9 au lait" * 20, "of two bytes".encode("utf-16-le") * 20])
def test_bytes_that_are_no_text_are_refused(tmp_path, content):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UserError, match=r"^data\.path=.*a\.txt: byte \d is not UTF-8 .* give data\.tokenizer=bytes$"):
        open_text(tmp_path / "a.txt", tmp_path / "cache", tokenizer="bpe")
    assert not (tmp_path / "cache").exists()
