"""The source of known entropy rate."""

import numpy as np
import pytest

from normexp.data import Source, kjv, markov, synthetic
from normexp.fields import UserError

DEFAULTS = {
    "symbols": 32, "order": 2, "concentration": 0.1, "tokens": 100_000, "source_seed": 0, "shape": "packed",
    "validation": 0.1, "context": 16,
}  # fmt: skip


def draw(**changes) -> Source:
    return synthetic(**{**DEFAULTS, **changes}, cache=None)


def ids(source: Source) -> np.ndarray:
    return np.concatenate([source._train.ids, source._validation.ids]).astype(np.int64)


def contexts(tokens: np.ndarray, symbols: int, order: int) -> np.ndarray:
    """Of each token from the `order`-th on."""
    powers = symbols ** np.arange(order - 1, -1, -1)
    return np.lib.stride_tricks.sliding_window_view(tokens, order)[:-1] @ powers


def chances(symbols: int = 32, order: int = 2, concentration: float = 0.1, source_seed: int = 0) -> np.ndarray:
    random = np.random.RandomState(np.random.Philox(key=source_seed))
    return markov._rows(random, symbols, order, concentration)


def test_the_entropy_rate_by_hand():
    rows = np.array([[0.9, 0.1], [0.5, 0.5]])
    stationary = markov._stationary(rows, 1.0)
    assert stationary == pytest.approx([5 / 6, 1 / 6], abs=1e-12)
    by_hand = -(5 * (0.9 * np.log(0.9) + 0.1 * np.log(0.1)) + np.log(0.5)) / 6
    assert markov.entropy_rate(rows, stationary) == pytest.approx(by_hand, abs=1e-12)
    certain = np.array([[0.0, 1.0], [0.5, 0.5]])  # a chance of 0 costs nothing
    assert markov.entropy_rate(certain, markov._stationary(certain, 1.0)) == pytest.approx(2 / 3 * np.log(2), abs=1e-12)


@pytest.mark.parametrize(("symbols", "order"), [(3, 1), (4, 2), (3, 3)])
def test_the_stationary_distribution_is_the_eigenvector_of_the_contexts(symbols, order):
    rows = chances(symbols, order, 0.5)
    number = symbols**order
    step = np.zeros((number, number))
    for context in range(number):
        for symbol in range(symbols):
            step[context, (context * symbols + symbol) % number] += rows[context, symbol]
    values, vectors = np.linalg.eig(step.T)
    expected = np.real(vectors[:, np.argmax(np.real(values))])
    assert markov._stationary(rows, 0.5) == pytest.approx(expected / expected.sum(), abs=1e-10)


@pytest.mark.parametrize(("symbols", "order", "concentration"), [(32, 2, 0.1), (32, 1, 0.02), (5, 3, 1.0), (2, 4, 0.3)])
def test_the_tokens_are_of_the_chain(symbols, order, concentration):
    settings = {"symbols": symbols, "order": order, "concentration": concentration}
    source, rows = draw(**settings), chances(**settings)
    tokens = ids(source)
    costs = -np.log(rows[contexts(tokens, symbols, order), tokens[order:]])
    # Costs of a chain are correlated; blocks of 1000 tokens are not.
    means = costs[: costs.size // 1000 * 1000].reshape(-1, 1000).mean(1)
    assert abs(means.mean() - source.entropy_rate) < 4 * means.std() / len(means) ** 0.5
    assert np.isfinite(costs).all()
    frequent = np.bincount(contexts(tokens, symbols, order), minlength=len(rows)) / (tokens.size - order)
    assert np.abs(frequent - markov._stationary(rows, concentration)).sum() < 0.1


def test_a_model_that_counts_comes_near_the_entropy_rate_from_above():
    excess = []
    for number in (50_000, 400_000):
        source = draw(symbols=8, tokens=number)
        train, held_out = (np.asarray(part.ids).astype(np.int64) for part in (source._train, source._validation))
        counts = np.full((64, 8), 0.1)
        np.add.at(counts, (contexts(train, 8, 2), train[2:]), 1)
        guess = counts / counts.sum(1, keepdims=True)
        chain = chances(8)
        where = contexts(held_out, 8, 2), held_out[2:]
        excess.append(np.log(chain[where] / guess[where]).mean())
        assert np.log(guess[where]).mean() == pytest.approx(-source.entropy_rate, abs=0.05)
    assert excess[0] > excess[1] > 0


def test_golden_tokens():
    """They change only with the way that a chain is drawn, which changes every number of every run on it."""
    source = draw()
    assert source.sha256[:16] == "1fe8bd5c2d6374a1"
    assert ids(source)[:8].tolist() == [16, 17, 10, 14, 5, 21, 17, 24]
    assert source.entropy_rate == pytest.approx(1.72207, abs=1e-5)


def test_a_longer_text_begins_as_a_shorter_one_and_a_seed_gives_another():
    assert (ids(draw(tokens=5000)) == ids(draw())[:5000]).all()
    other = draw(source_seed=1)
    assert (other.sha256, other.entropy_rate) != (draw().sha256, draw().entropy_rate)


def test_a_symbol_ends_a_document():
    source = draw(shape="padded", context=64)
    batch = source.batch(0, 1, 50)
    lengths = batch.mask.sum(1)
    ended = lengths < 64
    assert ended.any()
    assert (batch.targets[range(50), lengths - 1][ended] == 0).all()
    assert source.entropy_rate is None  # the least loss of such rows is another


def test_text_has_no_known_entropy_rate(tmp_path):
    assert kjv(tokenizer="bytes", vocab_size=4096, shape="packed", context=8, cache=tmp_path).entropy_rate is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": 5}, r"^data\.order=5: needs a table of data\.symbols=32 to the power of 6, .* lower one of them"),
        ({"order": 10**9}, r"^data\.order=1000000000: needs a table"),
        ({"symbols": 4, "concentration": 0.01}, r"^data\.concentration=0\.01: the chain keeps to a part .* raise it"),
        ({"tokens": 50}, r"^data\.tokens=50 .*: the validation part has 5 tokens, but model\.context=16 needs 17"),
        ({"symbols": 2, "order": 1, "concentration": 0.01}, r"data\.concentration=0\.01: "),
    ],
)
def test_what_cannot_be_drawn_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        draw(**changes)
