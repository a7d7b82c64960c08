"""Numbers with their intervals: shares of seeds, means, paired differences, learning-rate and warmup boundaries.

Measured coverage of the 95 % intervals of a mean (normal values, 10,000 draws; tests/test_stats.py repeats 1,000):

    n     Student t   BCa bootstrap
    10    0.949       0.896
    5     0.947       0.838
    3     0.951       0.726

    20    0.948       0.919
    20    0.921       0.914       exponential values: skewed
    20    0.918       0.969       four of five at 2.2 ± 0.03, the others at 3.03 ± 0.003: some seeds collapse

BCa cannot know the tails of so few values, so Student's t is the default of every table; from 20 values on, where
neither is better for all shapes, BCa stands beside it (the last three rows: 4,000 draws). Wilson is the default for
shares: at n = 10, over shares from 0.02 to 0.98, it covers 0.955 on average and 0.899 at worst; Clopper-Pearson never
falls below its level and is wider, 0.983 and 0.961.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import scipy.stats
from numpy.typing import NDArray

LEVEL = 0.95
RESAMPLES = 9_999  # bootstrap resamples; drawn from a fixed seed, so that a report repeats itself
SMALLEST_BCA = 20  # values: below it the bootstrap covers too little
SMALLEST_WILCOXON = 6  # below six pairs the exact two-sided p-value cannot reach 0.05

Interval = tuple[float, float]
ShareMethod = Literal["wilson", "clopper-pearson"]
MeanMethod = Literal["student", "bca"]
PairedTest = Literal["t", "wilcoxon"]


@dataclass(frozen=True)
class Estimate:
    value: float  # NaN where nothing can be said
    interval: Interval | None
    n: int  # the values that entered
    method: str  # how the interval was made; "" without one
    note: str  # why there is no interval, or what was left out


def share(successes: int, n: int, method: ShareMethod = "wilson", level: float = LEVEL) -> Estimate:
    """successes / n with a binomial interval."""
    if n < 2:
        return Estimate(successes / n if n else math.nan, None, n, "", _too_few(n))
    scipy_name: Literal["wilson", "exact"] = "wilson" if method == "wilson" else "exact"
    found = scipy.stats.binomtest(successes, n).proportion_ci(level, method=scipy_name)
    return Estimate(successes / n, (float(found.low), float(found.high)), n, method, "")


def mean(values: Sequence[float], method: MeanMethod = "student", level: float = LEVEL) -> Estimate:
    """The mean of the finite values; how many were left out stands in the note."""
    finite = np.array([value for value in values if math.isfinite(value)], dtype=np.float64)
    left_out = _left_out(len(values) - len(finite), "non-finite")
    average = float(finite.mean()) if len(finite) else math.nan
    if problem := _no_spread(finite, SMALLEST_BCA if method == "bca" else 2):
        note = _join(left_out, problem) if len(finite) else left_out or problem
        return Estimate(average, None, len(finite), "", note)
    interval = (_bca if method == "bca" else _student)(finite, level)
    return Estimate(average, interval, len(finite), method, left_out)


def _too_few(n: int) -> str:
    return {0: "no value", 1: "one value: no interval"}.get(n, f"{n} values: too few for this interval")


def _no_spread(values: NDArray[np.float64], smallest: int) -> str:
    if len(values) < smallest:
        return _too_few(len(values))
    rounding = 1e-12 * float(np.abs(values).max())
    return "all equal: no interval" if np.ptp(values) <= rounding else ""


def _left_out(count: int, what: str) -> str:
    return f"{count} {what} left out" if count else ""


def _join(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def _student(values: NDArray[np.float64], level: float) -> Interval:
    half = float(scipy.stats.t.ppf((1 + level) / 2, len(values) - 1)) * float(scipy.stats.sem(values))
    return float(values.mean()) - half, float(values.mean()) + half


def _bca(values: NDArray[np.float64], level: float) -> Interval:
    """Bias-corrected and accelerated bootstrap (Efron 1987)."""
    found = scipy.stats.bootstrap(
        (values,), np.mean, confidence_level=level, n_resamples=RESAMPLES, method="BCa", rng=np.random.default_rng(0)
    ).confidence_interval
    return float(found.low), float(found.high)


def median_over_seeds(values: Sequence[float], upper: bool = False) -> Estimate:
    """The median with the range of the seeds; `inf` (never, beyond the grid) is a value like any other.

    The range of n independent draws covers the population's median with probability 1 - 2^(1-n), whatever the
    distribution: 75 % at n = 3, 94 % at n = 5. The `upper` median is one of the values, as those on a grid must be.
    """
    known = sorted(value for value in values if not math.isnan(value))
    left_out = _left_out(len(values) - len(known), "undefined")
    if len(known) < 2:
        return Estimate(known[0] if known else math.nan, None, len(known), "", _join(left_out, _too_few(len(known))))
    covered = f"range of the seeds ({1 - 2 ** (1 - len(known)):.0%} for the median)"
    middle = statistics.median_high(known) if upper else statistics.median(known)
    return Estimate(middle, (known[0], known[-1]), len(known), covered, left_out)


# --- paired differences ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paired:
    difference: Estimate  # first - second over the seeds they share
    test: PairedTest
    p_value: float  # two-sided, uncorrected; NaN where the test does not exist


def paired(
    first: Mapping[int, float], second: Mapping[int, float], test: PairedTest = "t", level: float = LEVEL
) -> Paired:
    """Differences seed by seed.

    `t`: mean difference, Student's interval, paired t-test. `wilcoxon`: Hodges-Lehmann estimate, the exact interval
    from the ordered Walsh averages, signed-rank test; from six pairs on.
    """
    shared = sorted(first.keys() & second.keys())
    values = np.array([first[seed] - second[seed] for seed in shared], dtype=np.float64)
    finite = values[np.isfinite(values)]
    left_out = _left_out(len(values) - len(finite), "non-finite pairs")
    if test == "wilcoxon":
        return _signed_rank(finite, left_out, level)
    estimate = mean(finite.tolist(), level=level)
    p_value = float(scipy.stats.ttest_1samp(finite, 0.0).pvalue) if estimate.interval else math.nan
    return Paired(replace(estimate, note=_join(left_out, estimate.note)), "t", p_value)


def _signed_rank(values: NDArray[np.float64], left_out: str, level: float) -> Paired:
    n = len(values)
    if problem := _no_spread(values, SMALLEST_WILCOXON):
        middle = float(np.median(values)) if n else math.nan
        return Paired(Estimate(middle, None, n, "", _join(left_out, problem)), "wilcoxon", math.nan)
    walsh = np.sort([(values[i] + values[j]) / 2 for i in range(n) for j in range(i, n)])
    outside = _signed_rank_quantile(n, (1 - level) / 2)
    interval = (float(walsh[outside - 1]), float(walsh[-outside])) if outside else None
    estimate = Estimate(float(np.median(walsh)), interval, n, "hodges-lehmann" if interval else "", left_out)
    return Paired(estimate, "wilcoxon", float(scipy.stats.wilcoxon(values).pvalue))


def _signed_rank_quantile(n: int, tail: float) -> int:
    """The largest k with P(W < k) <= tail, exactly: the interval goes from the k-th lowest to the k-th highest Walsh
    average; 0 where n is too small for this tail."""
    ways = np.ones(1)  # ways[w]: sets of ranks 1..i that sum to w
    for rank in range(1, n + 1):
        ways = np.pad(ways, (0, rank)) + np.pad(ways, (rank, 0))
    return int(np.searchsorted(np.cumsum(ways) / 2.0**n, tail, side="right"))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down p-values (1979), in the given order; NaN (no test) stays NaN and does not count."""
    tested = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    corrected, largest = [math.nan] * len(p_values), 0.0
    for place, (p, index) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - place) * p))
        corrected[index] = largest
    return corrected


# --- one seed over a grid of learning rates or warmups ---------------------------------------------------------------
# `learned`: the LRs at which the verdict says so; the best LR is one of them. Without one every number is NaN: a seed
# that stands at H₁ < ln V at every LR would otherwise look like the most robust.


def lr_sensitivity(losses: Mapping[float, float], learned: Collection[float], ceiling: float) -> float:
    """S = mean over the LRs of min(loss, ceiling) - best (2309.14322); losses and ceiling (ln V) in nats.

    A diverged run enters as `inf` and counts as the ceiling.
    """
    clipped = [min(loss, ceiling) for loss in losses.values()]
    if not learned or min(clipped) >= ceiling:
        return math.nan
    return statistics.fmean(clipped) - min(clipped)


def lr_edge(losses: Mapping[float, float], learned: Collection[float], margin: float = 0.1) -> float:
    """The lowest LR above the best one whose loss exceeds the best by `margin` nats; `inf`: none in the grid.

    Only LRs above the best one count: a low LR that has not learned yet is no edge of stability.
    """
    best = _best_lr(losses, learned)
    beyond = [lr for lr, loss in losses.items() if lr > best and loss > losses[best] + margin]
    return math.nan if math.isnan(best) else min(beyond, default=math.inf)


def usable_range(losses: Mapping[float, float], learned: Collection[float], margin: float = 0.02) -> Interval:
    """Lowest and highest LR of the unbroken stretch of learned ones around the best, within `margin` nats of it."""
    best = _best_lr(losses, learned)
    if math.isnan(best):
        return math.nan, math.nan
    grid = sorted(losses)
    usable = [lr in learned and losses[lr] <= losses[best] + margin for lr in grid]
    low = high = grid.index(best)
    while low > 0 and usable[low - 1]:
        low -= 1
    while high + 1 < len(grid) and usable[high + 1]:
        high += 1
    return grid[low], grid[high]


def _best_lr(losses: Mapping[float, float], learned: Collection[float]) -> float:
    known = {lr: losses[lr] for lr in learned if math.isfinite(losses[lr])}
    return min(known, key=known.__getitem__, default=math.nan)


def warmup_boundary(trains: Mapping[int, bool]) -> float:
    """The shortest warmup (steps) from which on every longer one tried trains too; `inf`: not even the longest."""
    boundary = math.inf
    for warmup in sorted(trains, reverse=True):
        if not trains[warmup]:
            break
        boundary = warmup
    return boundary
