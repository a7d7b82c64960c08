"""Intervals, tests and boundaries against known answers, against scipy, and by simulation."""

import math
import random
import statistics
from itertools import pairwise

import numpy as np
import pytest
import scipy.stats

from normexp import stats

DRAWS = 1_000
TRUTH = 2.2  # nats


def coverage(n: int, method: stats.MeanMethod) -> float:
    """Share of the intervals of samples of n normal values that hold their true mean."""
    draw = np.random.default_rng(0)
    intervals = [stats.mean(draw.normal(TRUTH, 0.03, n).tolist(), method).interval for _ in range(DRAWS)]
    return sum(low <= TRUTH <= high for low, high in intervals) / DRAWS


# --- shares ----------------------------------------------------------------------------------------------------------


def test_wilson_and_clopper_pearson_by_hand():
    z = 1.959964
    centre, half = (5 / 8 + z**2 / 16) / (1 + z**2 / 8), z / (1 + z**2 / 8) * math.sqrt(5 / 8 * 3 / 8 / 8 + z**2 / 256)
    assert stats.share(5, 8).interval == pytest.approx((centre - half, centre + half), abs=1e-6)
    low, high = stats.share(3, 3, "clopper-pearson").interval
    assert (low, high) == (pytest.approx(0.025 ** (1 / 3)), 1.0)  # P(3 of 3 | p) = 0.025
    assert stats.share(5, 8).value == 5 / 8


def test_one_seed_has_no_interval_and_says_so():
    for found in (
        stats.share(1, 1),
        stats.mean([2.2]),
        stats.median_over_seeds([50.0]),
        stats.paired({0: 1}, {0: 2}).difference,
    ):
        assert (found.interval, found.n, found.method, found.note) == (None, 1, "", "one value: no interval")
    assert stats.share(0, 0).note == stats.mean([]).note == "no value"


def test_coverage_of_the_shares_at_n_10():
    shares = np.linspace(0.02, 0.98, 193)
    ways = scipy.stats.binom.pmf(np.arange(11)[:, None], 10, shares)
    covered = {}
    for method in ("wilson", "clopper-pearson"):
        low, high = np.array([stats.share(k, 10, method).interval for k in range(11)]).T[:, :, None]
        covered[method] = (ways * ((low <= shares) & (shares <= high))).sum(axis=0)
    assert covered["wilson"].mean() == pytest.approx(0.955, abs=0.001)
    assert covered["wilson"].min() == pytest.approx(0.899, abs=0.001)
    assert covered["clopper-pearson"].mean() == pytest.approx(0.983, abs=0.001)
    assert covered["clopper-pearson"].min() > 0.95  # never below its level


# --- means -----------------------------------------------------------------------------------------------------------


def test_student_against_scipy():
    values = [2.31, 2.35, 2.28, 2.40]
    expected = scipy.stats.t.interval(0.95, 3, np.mean(values), scipy.stats.sem(values))
    found = stats.mean(values)
    assert found.interval == pytest.approx(expected)
    assert (found.value, found.n, found.method) == (pytest.approx(2.335), 4, "student")


def test_bca_against_its_definition():
    """Efron 1987, written again without scipy; the resamples differ, so the ends agree to their noise."""
    values = np.random.default_rng(3).exponential(1.0, 25)
    normal = statistics.NormalDist()
    resampled = np.sort(np.random.default_rng(4).choice(values, (40_000, 25)).mean(axis=1))
    bias = normal.inv_cdf(float((resampled < values.mean()).mean()))
    left_out = (values.sum() - values) / 24
    apart = left_out.mean() - left_out
    acceleration = (apart**3).sum() / (6 * (apart**2).sum() ** 1.5)
    ends = [bias + normal.inv_cdf(q) for q in (0.025, 0.975)]
    quantiles = [normal.cdf(bias + end / (1 - acceleration * end)) for end in ends]
    found = stats.mean(values.tolist(), "bca")
    assert found.interval == pytest.approx(np.quantile(resampled, quantiles), abs=0.02)
    low, high = found.interval
    assert high - found.value > 1.1 * (found.value - low)  # it follows the skew
    assert stats.mean(values.tolist(), "bca") == found  # the same resamples each time


def test_too_few_or_equal_values_have_no_interval_and_say_so():
    assert stats.mean([1.0, 2.0]).interval is not None
    assert stats.mean([1.0, 2.0] * 9 + [1.5], "bca").note == "19 values: too few for this interval"
    assert stats.mean([1.0, 2.0] * 10, "bca").interval is not None
    for method in ("student", "bca"):
        found = stats.mean([2.2] * 20, method)
        assert (found.value, found.interval, found.note) == (pytest.approx(2.2), None, "all equal: no interval")


def test_non_finite_values_are_left_out_and_counted():
    found = stats.mean([2.0, math.inf, 2.2, math.nan])
    assert (found.value, found.n, found.note) == (pytest.approx(2.1), 2, "2 non-finite left out")
    assert stats.mean([2.0, math.inf]).note == "1 non-finite left out; one value: no interval"
    assert stats.mean([math.inf]).note == "1 non-finite left out"


def test_student_covers_what_it_says():
    assert 0.92 <= coverage(10, "student") <= 0.98
    assert 0.92 <= coverage(5, "student") <= 0.98
    assert 0.92 <= coverage(3, "student") <= 0.98


def test_bca_covers_less_which_is_why_it_is_not_the_default(monkeypatch):
    monkeypatch.setattr(stats, "RESAMPLES", 499)
    assert 0.90 <= coverage(20, "bca") <= 0.95  # from here on it is offered
    monkeypatch.setattr(stats, "SMALLEST_BCA", 3)
    assert 0.86 <= coverage(10, "bca") < 0.92
    assert 0.80 <= coverage(5, "bca") < 0.88
    assert 0.68 <= coverage(3, "bca") < 0.78


def test_the_range_of_the_seeds_covers_the_median_as_often_as_it_says():
    draw = random.Random(0)
    for n, stated in ((3, "75%"), (5, "94%")):
        found = [stats.median_over_seeds([draw.lognormvariate(0, 1) for _ in range(n)]) for _ in range(4_000)]
        assert stated in found[0].method
        share = sum(low <= 1 <= high for low, high in (estimate.interval for estimate in found)) / 4_000
        assert share == pytest.approx(1 - 2 ** (1 - n), abs=0.02)


def test_a_median_may_be_infinite():
    found = stats.median_over_seeds([50, math.inf, 200, math.nan])
    assert (found.value, found.interval, found.n, found.note) == (200, (50, math.inf), 3, "1 undefined left out")
    assert stats.median_over_seeds([50.0, math.inf]).value == math.inf  # more than half must reach it
    assert stats.median_over_seeds([1.231, 1.658]).value == pytest.approx(1.4445)
    assert stats.median_over_seeds([50.0, 200.0], upper=True).value == 200.0


# --- pairs -----------------------------------------------------------------------------------------------------------

FIRST = dict(enumerate([2.31, 2.355, 2.28, 2.40, 2.33, 2.366, 2.302, 2.45]))  # no ties among the differences
SECOND = dict(enumerate([2.30, 2.31, 2.30, 2.31, 2.29, 2.30, 2.27, 2.33]))


def test_the_paired_t_test_against_scipy():
    found = stats.paired(FIRST, SECOND | {9: 1.0})  # a seed that only one cell has does not enter
    expected = scipy.stats.ttest_rel(list(FIRST.values()), list(SECOND.values()))
    assert found.p_value == pytest.approx(expected.pvalue)
    assert found.difference.interval == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert (found.difference.n, found.test) == (8, "t")


def test_pairs_follow_the_seeds_and_not_the_order():
    turned = dict(reversed(SECOND.items()))
    assert stats.paired(FIRST, turned) == stats.paired(FIRST, SECOND)


def test_the_signed_rank_test_against_scipy_and_its_interval_by_inversion():
    found = stats.paired(FIRST, SECOND, "wilcoxon")
    differences = np.array([FIRST[seed] - SECOND[seed] for seed in FIRST])
    assert found.p_value == scipy.stats.wilcoxon(differences).pvalue
    low, high = found.difference.interval
    for end, inside in ((low, 1), (high, -1)):  # a shift inside the interval is not rejected at 0.05, one outside is
        rejected = [scipy.stats.wilcoxon(differences - end - side * 1e-6).pvalue <= 0.05 for side in (-inside, inside)]
        assert rejected == [True, False]
    walsh = [(a + b) / 2 for i, a in enumerate(differences) for b in differences[i:]]
    assert found.difference.value == pytest.approx(statistics.median(walsh))


def test_the_signed_rank_test_needs_six_pairs():
    five = {seed: FIRST[seed] for seed in range(5)}
    found = stats.paired(five, SECOND, "wilcoxon")
    assert (found.difference.interval, found.difference.n) == (None, 5)
    assert math.isnan(found.p_value)
    six = stats.paired({seed: 1.0 + 0.1 * seed for seed in range(6)}, dict.fromkeys(range(6), 0.0), "wilcoxon")
    assert six.difference.interval == pytest.approx((1.0, 1.5))  # at n = 6 the range of the differences
    assert six.p_value == pytest.approx(2 / 2**6)


def test_pairs_with_a_non_finite_loss_are_left_out_and_counted():
    found = stats.paired(FIRST | {0: math.inf}, SECOND)
    assert (found.difference.n, found.difference.note) == (7, "1 non-finite pairs left out")
    assert math.isnan(stats.paired({0: math.inf}, {0: 1.0}).p_value)


def test_equal_differences_have_no_test():
    found = stats.paired({0: 2.0, 1: 2.1, 2: 2.2}, {0: 1.9, 1: 2.0, 2: 2.1})
    assert (found.difference.value, found.difference.interval) == (pytest.approx(0.1), None)
    assert math.isnan(found.p_value)


def test_holm_by_hand():
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.6, 0.5]) == [1.0, 1.0]
    kept = stats.holm([0.01, math.nan, 0.02])
    assert (kept[0], kept[2]) == (pytest.approx(0.02), pytest.approx(0.02))  # of two tests, not three
    assert math.isnan(kept[1])
    assert stats.holm([]) == []


# --- learning rates and warmups --------------------------------------------------------------------------------------


def test_lr_sensitivity_by_hand():
    losses = {1e-3: 2.0, 3e-3: 1.8, 1e-2: math.inf}
    assert stats.lr_sensitivity(losses, {1e-3, 3e-3}, 4.0) == pytest.approx((2.0 + 1.8 + 4.0) / 3 - 1.8)
    assert stats.lr_sensitivity({1e-3: 2.0, 3e-3: 9.0}, {1e-3}, 4.0) == pytest.approx(1.0)  # clipped at the ceiling
    assert stats.lr_sensitivity({1e-3: 2.0, 3e-3: 2.0}, {1e-3, 3e-3}, 4.0) == 0


@pytest.mark.parametrize(
    "losses",
    [
        {1e-3: 3.025, 3e-3: 3.026, 1e-2: 3.024},  # collapsed everywhere: below ln V, all alike
        {1e-3: math.inf, 3e-3: 4.2},
        {},
    ],
)
def test_a_seed_that_no_lr_trains_has_no_sensitivity_no_edge_and_no_range(losses):
    assert math.isnan(stats.lr_sensitivity(losses, set(), 4.17))
    assert math.isnan(stats.lr_edge(losses, set()))
    assert all(map(math.isnan, stats.usable_range(losses, set())))


def test_the_best_lr_is_one_at_which_the_seed_learned():
    losses = {1e-3: 3.0, 3e-3: 3.46, 1e-2: 3.6}  # BatchNorm learned at 3e-3 by batch statistics; by running ones 3.46
    assert stats.lr_edge(losses, {3e-3}) == 1e-2
    assert stats.usable_range(losses, {3e-3}) == (3e-3, 3e-3)


def test_the_edge_is_the_first_bad_lr_above_the_best():
    losses = {1e-4: 3.0, 1e-3: 2.0, 3e-3: 2.1, 1e-2: 2.11, 3e-2: math.inf}
    learned = {1e-3, 3e-3, 1e-2}
    assert stats.lr_edge(losses, learned) == 1e-2  # not 1e-4, which has not learned yet; not 3e-3, within 0.1
    assert stats.lr_edge({1e-3: 2.0, 3e-3: 2.05}, {1e-3, 3e-3}) == math.inf


def test_the_usable_range_is_the_unbroken_stretch_around_the_best():
    losses = {1e-4: 2.01, 3e-4: 2.5, 1e-3: 2.015, 3e-3: 2.0, 1e-2: 2.019, 3e-2: 2.03}
    assert stats.usable_range(losses, losses.keys()) == (1e-3, 1e-2)


def test_the_warmup_boundary_lasts():
    assert stats.warmup_boundary({0: False, 50: False, 200: True, 400: True}) == 200
    assert stats.warmup_boundary({0: True, 50: False, 200: True}) == 200  # a lucky run without warmup is no boundary
    assert stats.warmup_boundary({200: True, 0: True, 50: True}) == 0
    assert stats.warmup_boundary({0: True, 50: False}) == math.inf


def test_intervals_shrink_with_n():
    values = np.random.default_rng(1).normal(size=400).tolist()
    widths = [high - low for low, high in (stats.mean(values[:n]).interval for n in (10, 40, 400))]
    assert all(later < earlier for earlier, later in pairwise(widths))
