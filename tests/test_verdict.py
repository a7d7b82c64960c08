"""Verdicts on histories made by hand, one for each rule and each side of its thresholds."""

import math

import numpy as np
import pytest

from normexp.summary import summarise
from normexp.verdict import History, judge, non_finite_layer, spike_mask, spike_score

H1, VOCABULARY = 3.024, 65
SUMMARY = {
    "unigram_entropy": H1, "vocab_size": VOCABULARY, "bytes_per_token": 1.0, "warmup_steps": 0, "entropy_rate": None,
}  # fmt: skip


def history(loss, val, *, initial=4.4, grad_norm=None, batch_stats=None, ratios=None):
    rows = [{"step": 0, "val/loss": initial}]
    for index, value in enumerate(loss):
        row = {
            "step": index + 1,
            "train/loss": value,
            "grad_norm/total": 1.0 if grad_norm is None else grad_norm[index],
        }
        nonfinite = [path for path in ("train/loss", "grad_norm/total") if not math.isfinite(row[path])]
        row = {path: None if path in nonfinite else value for path, value in row.items()}
        rows.append(row | ({"nonfinite": nonfinite} if nonfinite else {}) | (ratios or {}).get(index + 1, {}))
    rows[-1] |= {"val/loss": val} | ({} if batch_stats is None else {"val/loss_batch_stats": batch_stats})
    return rows


def verdict(rows, warmup_steps=0):
    return judge(rows, unigram_entropy=H1, vocab_size=VOCABULARY, warmup_steps=warmup_steps)


FALLING = list(np.linspace(4.4, 2.2, 200))
FLAT = [4.4] + [3.03] * 199


def test_trained():
    result = verdict(history(FALLING, 2.2))
    assert (result.verdict, result.first_bad_step) == ("trained", None)
    assert result.reason == "validation loss 2.200, 0.824 below H₁"


@pytest.mark.parametrize(("val", "expected"), [(2.98, "collapsed"), (2.97, "trained"), (3.03, "collapsed")])
def test_collapsed_stands_within_a_margin_of_the_unigram_entropy(val, expected):
    assert verdict(history(FLAT, val)).verdict == expected


def test_a_loss_must_beat_a_uniform_guess_too():
    """H₁ is above ln V where the validation text is unlike the training text."""
    flat = judge(history(FLAT, 4.16), unigram_entropy=9.9, vocab_size=65, warmup_steps=0)
    assert (flat.verdict, flat.reason.endswith("is not below ln V − 0.05 = 4.124")) == ("collapsed", True)
    learnt = judge(history(FALLING, 2.2), unigram_entropy=9.9, vocab_size=65, warmup_steps=0)
    assert learnt.reason == "validation loss 2.200, 1.974 below ln V"


def test_a_loss_and_its_bound_are_told_apart():
    assert "2.97403 is not below H₁ − 0.05 = 2.97400" in verdict(history(FLAT, 2.97403)).reason
    assert "3.025 is not below H₁ − 0.05 = 2.974" in verdict(history(FLAT, 3.025)).reason
    ceiling = math.log(65) + 0.05
    assert f"{ceiling + 3e-6:.6f} ends above min(initial, ln V)" in verdict(history(FLAT, ceiling + 3e-6)).reason


def test_collapsed_names_the_first_vanished_layer():
    ratios = {
        3: {"layer_ratio": 0.2, "grad_norm/layer_00": 0.2, "grad_norm/layer_01": 1.0},
        4: {"layer_ratio": 0.0501, "grad_norm/layer_00": 0.05, "grad_norm/layer_01": 1.0},
        5: {"layer_ratio": 0.0499, "grad_norm/layer_00": 0.04, "grad_norm/layer_01": 0.03, "grad_norm/layer_02": 1.0},
        9: {"layer_ratio": 0.01, "grad_norm/layer_00": 0.01, "grad_norm/layer_01": 1.0},
    }
    result = verdict(history(FLAT, 3.02, ratios=ratios))
    assert (result.verdict, result.first_bad_step, result.first_bad_layer) == ("collapsed", 5, "layer_01")


def test_undecided_while_falling_or_warming_up():
    falling = list(np.linspace(4.4, 3.1, 200))
    assert verdict(history(falling, 3.1)).verdict == "undecided"
    assert verdict(history(FLAT, 3.02), warmup_steps=200).verdict == "undecided"
    assert verdict(history(FLAT, 3.02), warmup_steps=199).verdict == "collapsed"
    assert verdict(history([4.4, 4.0], 4.0)).verdict == "undecided"
    assert verdict([]).verdict == "undecided"


def test_diverged_ends_above_its_start_or_the_uniform_loss():
    rising = [3.0] * 50 + list(np.linspace(3.0, 8.0, 150))
    result = verdict(history(rising, 8.0))
    assert result.verdict == "diverged"
    expected = 50 + math.ceil((math.log(65) + 0.05 - 3.0) / 5.0 * 149) + 1
    assert result.first_bad_step == expected
    assert verdict(history(FLAT, math.log(65) + 0.051)).verdict == "diverged"
    assert verdict(history(FLAT, math.log(65) + 0.049)).verdict == "collapsed"
    assert verdict(history(FLAT, 3.5, initial=3.4)).verdict == "diverged"


def test_a_slow_descent_from_above_the_uniform_loss_is_no_divergence():
    """Some initial weights give a loss above ln V: a small learning rate leaves it there for long."""
    slow = list(np.linspace(4.65, 4.47, 200))
    result = verdict(history(slow, 4.545, initial=4.65))
    assert (result.verdict, result.first_bad_step) == ("undecided", None)
    assert result.reason.endswith("nor yet below ln V + 0.05, where it has not been")
    never = verdict(history(slow, 4.66, initial=4.65))
    assert (never.verdict, never.first_bad_step) == ("diverged", 1)
    assert verdict(history([4.0, *slow], 4.545, initial=4.65)).verdict == "diverged"  # it had been there


def test_diverged_when_the_end_is_not_finite():
    loss = FALLING[:150] + [math.nan] * 50
    rows = history(loss, 2.5)
    result = verdict(rows)
    assert (result.verdict, result.first_bad_step, result.first_bad_layer) == ("diverged", 151, None)
    assert "50 of 200" in result.reason
    assert verdict(history(FALLING[:151] + [math.nan] * 49, 2.5)).verdict == "unstable"  # not the whole last quarter
    assert verdict(history(FALLING, None)).verdict == "diverged"
    assert verdict(history([4.4, 4.0, math.nan], 4.0)).verdict == "diverged"  # a quarter is one step at least


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (["embed", "layer_00", "layer_01", "layer_01/mlp.out"], "layer_01"),
        (["embed", "final_norm", "layer_00", "layer_11"], "final_norm"),  # as metrics.jsonl sorts them
        (["embed", "final_norm", "head", "layer_00"], "head"),
        (["layer_09", "layer_10"], "layer_10"),
        (["embed"], "embed"),
        ([], None),
    ],
)
def test_a_bad_gradient_is_traced_to_where_it_arose(bad, expected):
    row = {"nonfinite": ["grad_norm/total", *(f"grad_norm/{layer}" for layer in bad)]}
    assert non_finite_layer(row) == expected
    assert non_finite_layer({"nonfinite": [*row["nonfinite"], "train/loss"]}) is None  # the forward pass itself


@pytest.mark.parametrize("where", [70, 199])
def test_one_skipped_step_is_no_divergence(where):
    grad_norm = [1.0] * 200
    grad_norm[where] = math.inf
    assert verdict(history(FALLING, 2.2, grad_norm=grad_norm)).verdict == "trained"


@pytest.mark.parametrize(("change", "expected"), [(0.0299, "collapsed"), (0.0301, "undecided"), (-0.0301, "undecided")])
def test_a_plateau_moves_less_than_its_threshold(change, expected):
    """200 steps: the last 50 against the 50 before."""
    loss = [3.2] * 100 + [3.03 + change] * 50 + [3.03] * 50
    assert verdict(history(loss, 3.02)).verdict == expected
    assert verdict(history([4.4] + [math.nan] * 149 + [3.03] * 50, 3.02)).verdict == "undecided"
    assert verdict(history([*FLAT[:120], math.nan, *FLAT[121:]], 3.02)).verdict == "collapsed"


def test_a_plateau_takes_four_steps():
    assert verdict(history([3.03] * 4, 3.02)).verdict == "collapsed"
    assert verdict(history([3.03] * 3, 3.02)).reason.endswith("after 3 steps only")


@pytest.mark.parametrize(("spikes", "expected"), [(2, "trained"), (3, "unstable")])
def test_more_than_one_step_of_a_hundred_makes_a_run_unstable(spikes, expected):
    loss = np.array(FALLING)
    loss[[64, 130, 196][:spikes]] = 50  # none in another's window
    rows = history(list(loss), 2.2)
    assert verdict(rows).verdict == expected
    summary = summarise(rows, **SUMMARY)
    assert (summary["loss_spike_score"], summary["grad_spike_score"]) == (spikes / 200, 0)


def test_batch_statistics_decide_for_batch_norm():
    rows = history(FALLING, 6.5, batch_stats=2.3)
    assert verdict(rows).verdict == "trained"
    assert History.of(rows).val_loss == 2.3
    assert verdict(rows).reason == "validation loss 2.300 by batch statistics, 0.724 below H₁"
    assert "3.010 by batch statistics is not below" in verdict(history(FLAT, 2.2, batch_stats=3.01)).reason


def test_unstable_counts_spikes_of_loss_or_gradient():
    noise = np.random.default_rng(0)
    loss = np.linspace(3.0, 2.2, 400) + 0.01 * noise.standard_normal(400)
    grad_norm = np.ones(400) + 0.05 * noise.standard_normal(400)
    assert verdict(history(list(loss), 2.2, grad_norm=list(grad_norm))).verdict == "trained"
    grad_norm[[100, 200, 250, 300, 350]] = 50.0
    result = verdict(history(list(loss), 2.2, grad_norm=list(grad_norm)))
    assert (result.verdict, result.first_bad_step) == ("unstable", 101)
    assert "5 of 400" in result.reason


def test_spikes_are_compared_before_they_join_the_window():
    values = np.tile([1.0, 1.2], 50)  # mean 1.1, σ 0.1
    values[80] = 1.1 + 6 * 0.1 + 0.001
    assert np.flatnonzero(spike_mask(values)).tolist() == [80]
    values[80] = 1.1 + 6 * 0.1 - 0.001
    assert not spike_mask(values).any()
    skewed = np.array([0.0, 0.0, 0.0, 4.0] * 16)  # mean 1, σ √3, median 0
    assert [spike_mask(np.append(skewed, 1 + 6 * 3**0.5 + by))[-1] for by in (-0.01, 0.01)] == [False, True]
    values[80] = np.nan
    assert np.flatnonzero(spike_mask(values)).tolist() == [80]
    assert spike_score(values) == 0.01
    assert not spike_mask(np.array([1.0, 99.0])).any()  # no full window


def test_the_window_is_64_steps():
    """A value that stands out of the last 32 steps, but not of the last 64, is no spike; nor is the 64th value."""
    values = np.concatenate([np.tile([0.0, 4.0], 40), np.tile([1.0, 1.01], 20), [3.0]])
    assert not spike_mask(values).any()
    assert spike_mask(values, window=32)[-1]
    assert not spike_mask(np.array([1.0] * 63 + [9.0])).any()
    assert spike_mask(np.array([1.0] * 64 + [9.0])).any()


def test_an_overflow_of_the_loss_scale_is_no_spike():
    """float16 begins with a scale that it has to find; without a scale the same gradients are the run's own."""
    overflowed = [math.inf] * 9 + [1.0] * 191
    rows = history(FALLING, 2.2, grad_norm=overflowed)
    assert verdict(rows).verdict == "unstable"
    scaled = [row | {"train/loss_scale": 1024.0} if row["step"] else row for row in rows]
    assert verdict(scaled).verdict == "trained"
    assert summarise(scaled, **SUMMARY)["grad_spike_score"] == 0
    assert summarise(scaled, **SUMMARY)["skipped_steps"] == 9
    both = history([math.nan] * 9 + FALLING[9:], 2.2, grad_norm=overflowed)
    both = [row | {"train/loss_scale": 1024.0} if row["step"] else row for row in both]
    assert verdict(both).verdict == "unstable"
    assert summarise(both, **SUMMARY)["grad_spike_score"] == 9 / 200


def test_an_overflow_does_not_shift_the_first_spike():
    grad_norm = np.array([math.inf] * 9 + [1.0] * 191)
    grad_norm[[100, 130, 160]] = 50
    rows = history(FALLING, 2.2, grad_norm=list(grad_norm))
    result = verdict([row | {"train/loss_scale": 1024.0} if row["step"] else row for row in rows])
    assert (result.verdict, result.first_bad_step) == ("unstable", 101)
