"""Rows of tokens, drawn by a pure function of seed and step.

B: rows, T: context, in tokens. N: tokens of a part, V: vocabulary.
"""

import math
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normexp.data.tokens import Ids, Integers, Tokens
from normexp.fields import UserError

Shape = Literal["packed", "padded"]

IGNORED = -100  # the target that cross entropy leaves out
PAD = 0  # pads need an id that the embedding knows; the mask, not the id, marks them
BLOCK = 1 << 24  # tokens counted at once
SLACK = 0.05  # nats: the margin of the verdicts
ENOUGH = 1000  # tokens that show what a text is like


class Batch(NamedTuple):
    """Targets are the inputs one position on. Pads have the target IGNORED and the mask False."""

    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64
    mask: Tensor | None  # (B, T) bool, True at real tokens; None: all are real

    def real_targets(self) -> int:
        """How many targets are not IGNORED."""
        return self.targets.numel() if self.mask is None else int((self.targets != IGNORED).sum())


class Source:
    """Training and validation batches of one corpus. Its last tokens, `validation` of all (a fraction) unless the
    tokeniser has drawn the border, are for validation: no training row holds one. UserError, which calls the corpus
    `name`, where a part is too short.

    sha256: of the corpus's bytes, so the same text has the same hash wherever it lies.
    unigram_entropy: in nats, of the tokens that validation rows can have as targets, under the add-one-smoothed unigram
        distribution of the training part. UserError where a uniform guess would do better (the parts have little in
        common) or where it is so low that nothing is left to learn, unless the part is too short to tell.
    bytes_per_token: of the validation part; bits per byte = nats per token / ln 2 / bytes_per_token.
    entropy_rate: in nats per token, the least loss that any model can have; None where it is not known.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        name: str,
        sha256: str,
        shape: Shape,
        validation: float,
        context: int,
        entropy_rate: float | None = None,
    ) -> None:
        border = tokens.ids.size - round(tokens.ids.size * validation) if tokens.border is None else tokens.border
        parts = {"training": tokens.ids[:border], "validation": tokens.ids[border:]}
        rows = {part: _SHAPES[shape](ids, context, tokens.end) for part, ids in parts.items()}
        for part, ids in parts.items():
            if rows[part].count <= 0:
                raise UserError(f"{name}: the {part} part has {ids.size} tokens, but {rows[part].needs}")
        self._train, self._validation = rows.values()
        self.sha256 = sha256
        self.entropy_rate = entropy_rate
        self.vocab_size = tokens.widths.size
        self.train_tokens, self.validation_tokens = (ids.size for ids in parts.values())
        train, held_out = (_counts(ids, self.vocab_size) for ids in (parts["training"], self._validation.targets()))
        self.unigram_entropy = float(-held_out @ np.log((train + 1) / (train + 1).sum()) / held_out.sum())
        self.bytes_per_token = float(held_out @ tokens.widths / held_out.sum())
        if held_out.sum() >= ENOUGH:
            self._refuse_odd_validation(name, validation)

    def _refuse_odd_validation(self, name: str, share: float) -> None:
        entropy, uniform = self.unigram_entropy, math.log(self.vocab_size)
        part = f"the validation part, the last {100 * share:.3g} % of the text,"
        if entropy > uniform + SLACK:
            raise UserError(
                f"{name}: {part} is unlike the training part: by that one's frequencies a token costs {entropy:.3f} "
                f"nats, by a uniform guess {uniform:.3f}; give text of one kind, in files whose order does not matter"
            )
        if entropy < SLACK:
            raise UserError(f"{name}: {part} holds nearly one token only ({entropy:.3f} nats each); give other text")

    def batch(self, seed: int, step: int, rows: int) -> Batch:
        """Rows drawn uniformly with replacement; the first n are the same whatever `rows`. 0 <= seed, step < 2^64."""
        # Raw words, since numpy keeps the stream of a bit generator across versions but not that of its distributions.
        # The remainder favours small choices by at most count / 2^64.
        words = np.random.Philox(key=np.array([seed, step], np.uint64)).random_raw(rows)
        return self._train.take(np.remainder(words, np.uint64(self._train.count)).astype(np.int64))

    def validation(self, rows: int, batches: int) -> list[Batch]:
        """The same evenly spaced rows on every call; they overlap or repeat where more are asked for than there are."""
        choices = np.arange(rows * batches) * self._validation.count // (rows * batches)
        return [self._validation.take(chosen) for chosen in choices.reshape(batches, rows)]


class _Packed:
    """Windows of T + 1 tokens that start anywhere in a continuous stream."""

    def __init__(self, ids: Ids, context: int, end: int) -> None:
        self.ids, self.count = ids, ids.size - context
        self.needs = f"model.context={context} needs {context + 1}; lower it, or let that part have more text"
        self.offsets = np.arange(context + 1)

    def targets(self) -> Ids:
        """All tokens: but for the first, each one is a target of some window."""
        return self.ids

    def take(self, starts: Integers) -> Batch:
        window = self.ids[starts[:, None] + self.offsets].astype(np.int64)
        return Batch(_tensor(window[:, :-1]), _tensor(window[:, 1:]), None)


class _Padded:
    """One document per row, from its first token to its end, cut at T + 1 tokens or padded on the right. A document too
    short to have a target (an empty line) is left out."""

    def __init__(self, ids: Ids, context: int, end: int) -> None:
        closes = np.flatnonzero(ids == end) + 1
        borders = np.unique(np.concatenate(([0], closes, [ids.size])))
        starts, lengths = borders[:-1], np.diff(borders)
        self.starts, self.lengths = starts[lengths > 1], lengths[lengths > 1]
        self.ids, self.count = ids, self.starts.size
        self.needs = "data.shape=padded needs a document of 2 or more; let that part have more text"
        self.offsets = np.arange(context + 1)

    def targets(self) -> Ids:
        """The tokens that rows predict: not a document's first, nor those beyond T + 1."""
        change = np.zeros(self.ids.size + 1, np.int8)
        np.add.at(change, self.starts + 1, 1)
        np.add.at(change, self.starts + np.minimum(self.lengths, self.offsets.size), -1)
        return self.ids[np.cumsum(change[:-1], dtype=np.int8).astype(bool)]

    def take(self, documents: Integers) -> Batch:
        positions = self.starts[documents, None] + self.offsets
        window = self.ids[np.minimum(positions, self.ids.size - 1)].astype(np.int64)
        mask = self.offsets[1:] < self.lengths[documents, None]
        tokens, targets = np.where(mask, window[:, :-1], PAD), np.where(mask, window[:, 1:], IGNORED)
        return Batch(_tensor(tokens), _tensor(targets), torch.from_numpy(mask))


_SHAPES: dict[str, type[_Packed] | type[_Padded]] = {"packed": _Packed, "padded": _Padded}


def _counts(ids: Ids, size: int) -> Integers:
    """(V,) how often each id occurs, in blocks, since bincount widens all that it is given to int64."""
    blocks = (ids[start : start + BLOCK] for start in range(0, ids.size, BLOCK))
    return sum((np.bincount(block, minlength=size) for block in blocks), np.zeros(size, np.int64))


def _tensor(values: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
