"""The numbers of summary.json from the rows of metrics.jsonl."""

import json
import math

import pytest

from normexp.summary import read_rows, summarise

ABOUT = {"unigram_entropy": 3.0, "vocab_size": 65, "bytes_per_token": 2.0, "warmup_steps": 0, "entropy_rate": None}


def rows(validation: dict[int, float | None], steps: int = 8) -> list[dict]:
    """A run whose training loss falls from 4 to 2, with a validation at the given steps."""
    found = [{"step": 0, "tokens": 0, "time": 0.0}]
    for step in range(1, steps + 1):
        loss = {"train/loss": 4 - 2 * step / steps, "grad_norm/total": 1.0}
        found.append({"step": step, "tokens": 10 * step, "time": 0.5 * step, **loss})
    for step, loss in validation.items():
        found[step]["val/loss"] = loss
    return found


def test_the_numbers_of_a_trained_run():
    summary = summarise(rows({0: 4.2, 4: 1.8, 8: 2.0}), **ABOUT)
    assert summary["verdict"] == "trained"
    assert (summary["val_loss"], summary["best_val_loss"], summary["initial_loss"]) == (2.0, 1.8, 4.2)
    assert summary["val_step"] == 8
    assert summary["bits_per_byte"] == pytest.approx(2.0 / math.log(2) / 2)
    assert (summary["steps"], summary["tokens"], summary["seconds"], summary["tokens_per_second"]) == (8, 80, 4.0, 20.0)
    assert summary["skipped_steps"] == 0
    assert summary["val_loss_batch_stats"] is None


def test_the_best_loss_is_one_that_training_reached():
    assert summarise(rows({0: 4.2, 8: 9.0}), **ABOUT)["best_val_loss"] == 9.0


def test_a_loss_that_is_not_finite_is_nan_and_the_best_one_is_kept():
    summary = summarise(rows({0: 4.2, 4: 2.5, 8: None}), **ABOUT)
    assert math.isnan(summary["val_loss"])
    assert summary["best_val_loss"] == 2.5
    assert summary["verdict"] == "diverged"


def test_the_last_validation_stands_with_its_step():
    summary = summarise(rows({0: 4.2, 4: 1.8}), **ABOUT)
    assert (summary["val_loss"], summary["val_step"], summary["steps"]) == (1.8, 4, 8)


def test_skipped_steps_are_counted():
    some = rows({0: 4.2, 8: 2.0})
    some[3] |= {"train/loss": None, "nonfinite": ["train/loss"]}
    some[5] |= {"grad_norm/total": None, "nonfinite": ["grad_norm/total"]}
    assert summarise(some, **ABOUT)["skipped_steps"] == 2


def test_batch_statistics_decide_where_there_are_any():
    some = rows({0: 9.0, 8: 6.0})
    some[0]["val/loss_batch_stats"], some[8]["val/loss_batch_stats"] = 4.2, 2.3
    summary = summarise(some, **ABOUT)
    assert (summary["val_loss"], summary["val_loss_batch_stats"], summary["initial_loss"]) == (6.0, 2.3, 4.2)
    assert summary["verdict"] == "trained"


def test_the_excess_over_a_known_entropy_rate():
    summary = summarise(rows({0: 4.2, 8: 2.0}), **ABOUT | {"entropy_rate": 1.75})
    assert (summary["entropy_rate"], summary["excess_loss"]) == (1.75, 0.25)
    assert summarise(rows({0: 4.2, 8: 2.0}), **ABOUT)["excess_loss"] is None
    assert summarise([], **ABOUT | {"entropy_rate": 1.75})["excess_loss"] is None


def test_a_run_without_a_step_has_no_numbers():
    summary = summarise([], **ABOUT)
    assert (summary["verdict"], summary["val_loss"], summary["steps"]) == ("undecided", None, 0)
    assert summary["val_step"] is None


def test_rows_are_read_up_to_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_rows(path) == []
    path.write_text(json.dumps({"step": 0}) + "\n" + json.dumps({"step": 1}) + "\n" + '{"step": 2, "lo')
    assert read_rows(path) == [{"step": 0}, {"step": 1}]
