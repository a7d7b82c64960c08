"""A source whose entropy rate is known, so that the excess of a model's loss over the least possible one can be read.

V: symbols, k: order, S = V^k: contexts, the last k symbols as digits in base V.
"""

import hashlib
import itertools
import math
from bisect import bisect
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from normexp.data.batches import Shape, Source
from normexp.data.corpora import OpenUnitInterval
from normexp.data.tokens import Tokens
from normexp.fields import PositiveFloat, PositiveInt, Range, UserError

Symbols = Annotated[int, Range(low=2, high=4096)]
Length = Annotated[int, Range(low=1, high=10**8)]
Seed = Annotated[int, Range(low=0, high=2**63 - 1)]
Floats = NDArray[np.float64]

LARGEST = 22  # log2 of the entries of a transition table
BLOCK = 1 << 20  # random numbers drawn at once
PRECISION = 1e-12  # of the stationary distribution: the sum of the changes in a step
STEPS = 10_000  # that it may take


def synthetic(
    *,
    symbols: Symbols,
    order: PositiveInt,
    concentration: PositiveFloat,
    tokens: Length,
    source_seed: Seed,
    shape: Shape,
    validation: OpenUnitInterval,
    context: PositiveInt,
    cache: Path,  # not used: it is drawn in the time that a cache takes to read
) -> Source:
    """A Markov chain: the chances of the next symbol, given the last k, are drawn from a symmetric Dirichlet
    distribution. Symbol 0 ends a document.

    `entropy_rate` is that of the chain given its last k symbols. Rows of shape packed begin in its midst, so their
    first k - 1 targets cost more even at best; for padded ones, which lack what came before a document, it is None."""
    if (order + 1) * math.log2(symbols) > LARGEST:
        raise UserError(
            f"data.order={order}: needs a table of data.symbols={symbols} to the power of {order + 1}, and it may have "
            f"{2**LARGEST:,} entries; lower one of them"
        )
    # RandomState, since numpy keeps its stream across versions.
    random = np.random.RandomState(np.random.Philox(key=source_seed))
    rows = _rows(random, symbols, order, concentration)
    stationary = _stationary(rows, concentration)
    start = int(np.searchsorted(np.cumsum(stationary), random.random_sample()))
    kind = np.min_scalar_type(symbols - 1)
    ids = np.fromiter(itertools.islice(_walk(random, rows, min(start, len(rows) - 1)), tokens), kind, tokens)
    return Source(
        Tokens(ids, widths=np.ones(symbols, np.int64), end=0),
        name=f"data.tokens={tokens} data.concentration={concentration:g}",
        sha256=hashlib.sha256(ids.tobytes()).hexdigest(),
        shape=shape,
        validation=validation,
        context=context,
        entropy_rate=entropy_rate(rows, stationary) if shape == "packed" else None,
    )


def entropy_rate(rows: Floats, stationary: Floats) -> float:
    """In nats: the entropy of each context's row, weighted by how often the context occurs."""
    logs = np.log(rows, where=rows > 0, out=np.zeros_like(rows))
    return float(-stationary @ (rows * logs).sum(1))


def _rows(random: np.random.RandomState, symbols: int, order: int, concentration: float) -> Floats:
    """(S, V) chances of the next symbol. By logarithms, since Gamma(a) = Gamma(a + 1) U^(1/a) may be too small."""
    size = (symbols**order, symbols)
    logs = np.log(random.standard_gamma(concentration + 1, size))
    logs += np.log1p(-random.random_sample(size)) / concentration
    rows: Floats = np.exp(logs - logs.max(1, keepdims=True))
    return rows / rows.sum(1, keepdims=True)


def _stationary(rows: Floats, concentration: float) -> Floats:
    """(S,) how often each context occurs, by power iteration."""
    contexts, symbols = rows.shape
    state = np.full(contexts, 1 / contexts)
    for _ in range(STEPS):
        before, state = state, (state[:, None] * rows).reshape(symbols, contexts).sum(0)  # the oldest symbol leaves
        state /= state.sum()
        if np.abs(state - before).sum() < PRECISION:
            return state
    raise UserError(
        f"data.concentration={concentration:g}: the chain keeps to a part of its contexts for so long that no text "
        "tells its entropy rate; raise it, or give another data.source_seed"
    )


def _walk(random: np.random.RandomState, rows: Floats, context: int) -> Iterator[int]:
    """One chain without end: each symbol is where a uniform number falls among the borders of its context's row."""
    contexts, symbols = rows.shape
    width = symbols - 1
    borders = np.cumsum(rows, 1)[:, :-1].reshape(-1).data  # a memoryview, which gives plain numbers
    while True:
        for number in random.random_sample(BLOCK).tolist():
            low = context * width
            symbol = bisect(borders, number, low, low + width) - low
            context = (context * symbols + symbol) % contexts
            yield symbol
