"""Verdicts: the history of a run -> trained, unstable, collapsed, diverged or undecided, with the first bad step.

Numpy only: a verdict can be taken again from `metrics.jsonl` alone.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MARGIN = 0.05  # nats: how near a loss must be to H₁, or above the start, to count
PLATEAU = 0.03  # nats between the last quarter's mean training loss and the quarter before
RATIO_FLOOR = 0.05  # layer ratio that marks the start of a collapse
SPIKE_SIGMAS, SPIKE_WINDOW, SPIKE_SHARE = 6.0, 64, 0.01

Row = Mapping[str, Any]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Verdict:
    verdict: str
    reason: str
    first_bad_step: int | None = None
    first_bad_layer: str | None = None


@dataclass(frozen=True)
class History:
    """Columns of a run's rows; NaN where a value is missing or was not finite."""

    rows: Sequence[Row]
    steps: Floats
    loss: Floats  # training loss of each step, nats per token
    grad_norm: Floats
    val_loss: float  # final, the one that decides: with batch statistics where there are any
    initial_loss: float  # validation before the first step, likewise
    by_batch: bool  # whether these two are with batch statistics

    @staticmethod
    def of(rows: Sequence[Row]) -> "History":
        trained = [row for row in rows if "train/loss" in row]
        validated = [value for row in rows if (value := deciding_loss(row)) is not None]
        return History(
            rows=trained,
            steps=column(trained, "step"),
            loss=column(trained, "train/loss"),
            grad_norm=column(trained, "grad_norm/total"),
            val_loss=validated[-1] if validated else math.nan,
            initial_loss=validated[0] if validated else math.nan,
            by_batch=any("val/loss_batch_stats" in row for row in rows),
        )

    def judged(self) -> NDArray[np.bool_]:
        """The steps whose gradient norm tells of the run: not those where a finite loss times its scale overflowed."""
        scaled = np.isfinite(column(self.rows, "train/loss_scale"))
        return ~(scaled & np.isfinite(self.loss) & ~np.isfinite(self.grad_norm))

    def loss_against(self, bound: float) -> tuple[str, str]:
        """The final loss and a bound that it is compared with, in as many digits as tell them apart."""
        digits = next((n for n in range(3, 9) if f"{self.val_loss:.{n}f}" != f"{bound:.{n}f}"), 9)
        by = " by batch statistics" if self.by_batch else ""
        return f"validation loss {self.val_loss:.{digits}f}{by}", f"{bound:.{digits}f}"


def deciding_loss(row: Row) -> float | None:
    """A row's validation loss, BatchNorm's with batch statistics; NaN if not finite, None where it has none."""
    for path in ("val/loss_batch_stats", "val/loss"):
        if path in row:
            return math.nan if row[path] is None else float(row[path])
    return None


def column(rows: Sequence[Row], path: str) -> Floats:
    return np.array([math.nan if row.get(path) is None else row[path] for row in rows], dtype=np.float64)


def judge(rows: Sequence[Row], *, unigram_entropy: float, vocab_size: int, warmup_steps: int) -> Verdict:
    """The first of these that holds, for the rows of a run in the order of their steps:

    diverged: a non-finite final validation loss, a last quarter without one finite step, or a final loss more than
    0.05 above min(initial loss, ln V), unless it has only come down from an initial loss above ln V;
    collapsed: a final loss above min(H₁, ln V) − 0.05 on a plateau, after the warmup;
    undecided: above that, but still moving, in the warmup, or still on its way down to ln V;
    unstable: learned, with a spike score of loss or gradient norm above 0.01;
    trained: the rest.
    """
    history = History.of(rows)
    if not len(history.steps) or not any(deciding_loss(row) is not None for row in rows):
        return Verdict("undecided", "no step or no validation was recorded")
    guess = min((unigram_entropy, "H₁"), (math.log(vocab_size), "ln V"))  # the best one that reads no context
    ceiling = min(x for x in (history.initial_loss, math.log(vocab_size)) if not math.isnan(x)) + MARGIN
    return (
        _diverged(history, ceiling)
        or _collapsed(history, *guess, ceiling, warmup_steps)
        or _unstable(history)
        or Verdict(
            "trained", f"{history.loss_against(guess[0])[0]}, {guess[0] - history.val_loss:.3f} below {guess[1]}"
        )
    )


def _diverged(history: History, ceiling: float) -> Verdict | None:
    bad = ~(np.isfinite(history.loss) & np.isfinite(history.grad_norm))
    frozen = bool(bad[-max(len(bad) // 4, 1) :].all())
    if frozen or math.isnan(history.val_loss):
        first = int(np.argmax(bad)) if bad.any() else len(bad) - 1
        count = f"loss or gradient not finite at {int(bad.sum())} of {len(bad)} steps"
        reason = f"{count}, the whole last quarter included" if frozen else "the final validation loss is not finite"
        return Verdict("diverged", reason, int(history.steps[first]), non_finite_layer(history.rows[first]))
    if history.val_loss > ceiling:
        below = np.flatnonzero(history.loss <= ceiling)
        if not len(below) and history.val_loss < history.initial_loss:  # which was above ln V
            return None
        first = int(history.steps[min(below[-1] + 1, len(bad) - 1)]) if len(below) else int(history.steps[0])
        loss, bound = history.loss_against(ceiling)
        reason = f"{loss} ends above min(initial, ln V) + {MARGIN} = {bound}"
        return Verdict("diverged", reason, first)
    return None


def non_finite_layer(row: Row) -> str | None:
    """The layer where a non-finite gradient arose: it spreads towards the input, so the last one that has it.

    None where the loss is not finite either: then it arose in the forward pass.
    """
    bad = row.get("nonfinite", [])
    layers = [path.removeprefix("grad_norm/") for path in bad if re.fullmatch(r"grad_norm/(?!total$)\w+", path)]
    ends = {"embed": 0, "final_norm": 2, "head": 3}  # the blocks stand between, in the order of their names
    return None if "train/loss" in bad or not layers else max(layers, key=lambda name: (ends.get(name, 1), name))


def _collapsed(history: History, guess: float, name: str, ceiling: float, warmup_steps: int) -> Verdict | None:
    if history.val_loss <= guess - MARGIN:
        return None
    loss, bound = history.loss_against(guess - MARGIN)
    above = f"{loss} is not below {name} − {MARGIN} = {bound}"
    if history.val_loss > ceiling:
        return Verdict("undecided", f"{above}, nor yet below ln V + {MARGIN}, where it has not been")
    if history.steps[-1] <= warmup_steps:
        return Verdict("undecided", f"{above}, and the warmup is not over")
    quarter = len(history.loss) // 4
    if quarter == 0:
        return Verdict("undecided", f"{above}, after {len(history.loss)} steps only")
    change = finite_mean(history.loss[-quarter:]) - finite_mean(history.loss[-2 * quarter : -quarter])
    if not abs(change) < PLATEAU:
        return Verdict("undecided", f"{above}, but the training loss still moves ({change:+.3f} nats in a quarter)")
    step, layer = first_collapsed_layer(history.rows)
    return Verdict("collapsed", f"on a plateau: {above}", step, layer)


def finite_mean(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def first_collapsed_layer(rows: Sequence[Row]) -> tuple[int | None, str | None]:
    """The first step at which the layer ratio falls below 0.05, and the block with the smallest gradient there."""
    for row in rows:
        ratio = row.get("layer_ratio")
        if ratio is not None and ratio < RATIO_FLOOR:
            blocks = {path: value for path, value in row.items() if re.fullmatch(r"grad_norm/layer_\d+", path)}
            finite = {path: value for path, value in blocks.items() if value is not None}
            layer = min(finite, key=finite.__getitem__).removeprefix("grad_norm/") if finite else None
            return int(row["step"]), layer
    return None, None


def _unstable(history: History) -> Verdict | None:
    every, judged = np.ones(len(history.loss), bool), history.judged()
    for name, values, kept in (("loss", history.loss, every), ("gradient norm", history.grad_norm, judged)):
        spikes = spike_mask(values[kept])
        if spikes.size and spikes.mean() > SPIKE_SHARE:
            first = int(history.steps[kept][np.argmax(spikes)])
            return Verdict("unstable", f"the {name} spikes at {int(spikes.sum())} of {len(spikes)} steps", first)
    return None


def spike_mask(values: Floats, sigmas: float = SPIKE_SIGMAS, window: int = SPIKE_WINDOW) -> NDArray[np.bool_]:
    """Steps whose value is not finite, or above mean + kσ of the w finite values before it (OLMo-core, one-sided).

    The first w steps have no full window and are never spikes, unless not finite.
    """
    spikes = ~np.isfinite(values)
    finite = values[~spikes]
    if len(finite) > window:
        before = np.lib.stride_tricks.sliding_window_view(finite, window)[:-1]
        high = finite[window:] > before.mean(axis=1) + sigmas * before.std(axis=1)
        spikes[np.flatnonzero(~spikes)[window:]] = high
    return spikes


def spike_score(values: Floats) -> float:
    """Share of steps that are spikes."""
    return float(spike_mask(values).mean()) if len(values) else 0.0
