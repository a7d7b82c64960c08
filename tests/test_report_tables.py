"""From run folders to cells and tables: what is counted, and what each number says."""

import json
import math
import os
import re
import shutil

import pytest

from normexp import results, stats
from normexp.report.build import KEPT
from normexp.report.facts import facts, uncounted
from normexp.report.formats import to_markdown
from normexp.report.study import study
from normexp.report.tables import cells, tables
from tests import fake_runs

ALL = re.compile(".*")


def cells_of(path):
    return study(results.read(results.locate(path), ALL))


def table_of(path, name):
    return next(table for table in tables(cells_of(path)) if table.name == name)


# --- cells -----------------------------------------------------------------------------------------------------------


def test_seeds_are_never_pooled_over_a_field_that_varies(tmp_path):
    for batch_size in (8, 16):
        for seed in range(3):
            fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, seed, train__batch_size=batch_size))
    found = cells_of(tmp_path)
    assert found.varying == ("train.batch_size",)
    assert [(values["train.batch_size"], len(rows)) for values, rows in found.cells()] == [(8, 3), (16, 3)]


def test_a_norms_own_fields_are_no_factor_unless_they_vary_within_it(tmp_path):
    for norm in ("bn", "ln", "rms"):
        fake_runs.write_run(tmp_path, fake_runs.config(norm, "pre", 2, 0, 0))
    assert cells_of(tmp_path).varying == ("norm",)
    fake_runs.write_run(tmp_path, fake_runs.config("bn", "pre", 2, 0, 0, norm__stats="position"))
    found = cells_of(tmp_path)
    assert found.varying == ("norm", "norm.stats")
    assert [(values["norm"], values["norm.stats"]) for values, _ in found.cells()] == [
        ("bn", "batch_time"), ("bn", "position"), ("ln", None), ("rms", None),
    ]  # fmt: skip


def test_what_only_watches_makes_no_cell_and_a_twin_counts_once(tmp_path):
    every = {
        n: fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, 0, telemetry__every=n)) for n in (5, 7)
    }
    for newer, older in ((5, 7), (7, 5)):  # whichever name comes first
        os.utime(every[newer] / "summary.json", (2e9, 2e9))
        os.utime(every[older] / "summary.json", (1e9, 1e9))
        found = cells_of(tmp_path)
        assert found.finished["run_id"].tolist() == [every[newer].name]
        assert found.twins == ((every[older].name, every[newer].name),)


def test_only_finished_runs_count(tmp_path):
    fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, 0))
    for seed, status in ((1, "running"), (2, "interrupted"), (3, "failed")):
        fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, seed), status=status)
    (row,) = table_of(tmp_path, "cells").rows
    assert (row["trains"].n, row["val_loss"].n) == (1, 1)
    assert len(table_of(tmp_path, "runs").rows) == 4


# --- tables ----------------------------------------------------------------------------------------------------------


def test_a_cells_numbers_are_those_of_its_seeds(tmp_path):
    for seed, verdict, loss in (
        (0, "trained", 2.2),
        (1, "unstable", 2.3),
        (2, "collapsed", 3.02),
        (3, "diverged", 9.0),
    ):
        fake_runs.write_run(tmp_path, fake_runs.config("ln", "post", 6, 0, seed), verdict, loss)
    (row,) = table_of(tmp_path, "cells").rows
    assert row["verdicts"] == "1 trained, 1 unstable, 1 collapsed, 1 diverged"
    assert row["trains"] == stats.share(2, 4)
    assert row["trains_exact"] == stats.share(2, 4, "clopper-pearson")
    assert row["val_loss"] == stats.mean([2.2, 2.3, 3.02, math.inf])
    assert (row["first_bad_step"].value, row["first_bad_step"].n) == (5, 2)
    assert row["layer_ratio"].n == 4


def test_the_rounding_error_of_a_cell_is_that_of_its_runs_norms_at_their_last_reading(tmp_path):
    """The median over the norms (0.02, 0.03 and 0.07), then over the seeds; and no column where nothing is rounded."""
    for seed in range(3):
        fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, seed))
    assert "quant_error" not in {column.key for column in table_of(tmp_path, "cells").columns}
    for seed, size in ((0, 1), (1, 2), (2, 4)):
        folder = fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, seed, model__quant="int8"))
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        for place, factor in ((4, 100), (-3, size)):
            sites = {"final_norm": 0.03, "layer_00/norm.attn_in": 0.02, "layer_01/norm.mlp_in": 0.07}
            errors = {f"quant_error/{site}": factor * error for site, error in sites.items()}
            lines[place] = json.dumps(json.loads(lines[place]) | errors)
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    table = cells(study(results.read(results.locate(tmp_path), KEPT)))  # from what a report keeps of a history
    plain, rounded = sorted(table.rows, key=lambda row: "quant_error" in row and row["quant_error"] is not None)
    assert plain.get("quant_error") is None
    assert (rounded["quant_error"].value, rounded["quant_error"].interval) == (0.06, (0.03, 0.12))
    assert "relative rounding error" in next(column.title for column in table.columns if column.key == "quant_error")


def test_every_number_of_one_seed_says_that_it_has_no_interval(tmp_path):
    fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, 0))
    (row,) = table_of(tmp_path, "cells").rows
    estimates = [value for value in row.values() if isinstance(value, stats.Estimate)]
    assert len(estimates) >= 4
    assert {(found.interval, found.note) for found in estimates} == {(None, "one value: no interval")}


def test_batch_norm_shows_both_losses_and_their_gap(tmp_path):
    for seed, batch in enumerate((2.1, 2.15)):
        node = fake_runs.config("bn", "pre", 2, 0, seed)
        fake_runs.write_run(tmp_path, node, final=3.46, val_loss_batch_stats=batch)
        fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, seed), val_loss_batch_stats=None)
    table = table_of(tmp_path, "cells")
    batch_norm, layer_norm = table.rows
    assert (batch_norm["norm"], batch_norm["verdicts"]) == ("bn", "2 trained")
    assert batch_norm["val_loss"].value == 3.46
    assert batch_norm["val_loss_batch_stats"] == stats.mean([2.1, 2.15])
    assert batch_norm["statistics_gap"].value == pytest.approx(1.335)
    assert layer_norm.keys().isdisjoint({"val_loss_batch_stats", "statistics_gap"})
    assert {"val_loss_batch_stats", "statistics_gap"} <= {column.key for column in table.columns}
    for name in ("map", "cells"):
        assert "verdict is by batch statistics; its loss column by running ones" in table_of(tmp_path, name).note
    assert [row["val_loss_batch_stats"] for row in table_of(tmp_path, "runs").rows] == [2.1, 2.15, None, None]


def test_without_batch_norm_there_is_one_loss(tmp_path):
    fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, 0), val_loss_batch_stats=None)
    for name in ("cells", "runs"):
        assert "val_loss_batch_stats" not in {column.key for column in table_of(tmp_path, name).columns}


def test_the_spike_score_is_a_median_with_the_range_of_the_seeds(tmp_path):
    for seed, score in enumerate((0.0, 0.0, 0.0025)):
        fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, seed), loss_spike_score=score)
    (row,) = table_of(tmp_path, "cells").rows
    assert (row["loss_spikes"].value, row["loss_spikes"].interval) == (0, (0, 0.0025))  # Student's t would go below 0
    assert "| 0 [0, 0.0025] (n=3) |" in to_markdown(table_of(tmp_path, "cells"))


def test_the_bootstrap_stands_beside_student_where_there_are_seeds_enough(tmp_path):
    values = [2.2 + 0.01 * (seed % 7) for seed in range(stats.SMALLEST_BCA)]
    for seed, loss in enumerate(values):
        node = fake_runs.config("ln", "pre", 2, 0, seed, train__steps=1)
        fake_runs.write_run(tmp_path, node, final=loss)
    (row,) = table_of(tmp_path, "cells").rows
    assert row["val_loss"] == stats.mean(values)
    bca = row["val_loss_bca"]
    assert (bca.method, bca.n) == ("bca", 20)
    assert bca.interval == pytest.approx(stats.mean(values, "bca").interval, abs=0.002)  # the runs' order differs
    (tmp_path / fake_runs.run_id(node) / "summary.json").unlink()
    assert "val_loss_bca" not in {column.key for column in table_of(tmp_path, "cells").columns}


def test_the_warmup_boundary_of_the_pilots_story(tmp_path):
    sweep = fake_runs.write_sweep(tmp_path, "s", fake_runs.grid("ln", "pre post", (2, 6, 12), (0, 50, 200), 3))
    rows = {(row["placement"], row["depth"]): row for row in table_of(sweep, "warmup").rows}
    assert {place: row["reading"] for place, row in rows.items()} == {
        ("pre", 2): "at or below 0", ("pre", 6): "at or below 0", ("pre", 12): "at or below 0",
        ("post", 2): "at or below 0", ("post", 6): "in (50, 200]", ("post", 12): "above 200",
    }  # fmt: skip
    assert rows["post", 6]["boundary"].interval == (50, 200)  # one seed already trains at 50


def test_a_seed_without_every_warmup_does_not_enter_the_boundary(tmp_path):
    nodes = fake_runs.grid("ln", "post", (6,), (0, 50, 200), 3)
    sweep = fake_runs.write_sweep(tmp_path, "s", nodes, missing=1)  # seed 2 lacks warmup 200
    (row,) = table_of(sweep, "warmup").rows
    assert row["boundary"].n == 2


def test_learning_rates_by_hand(tmp_path):
    losses = {1e-3: ("trained", 2.0), 3e-3: ("trained", 2.01), 1e-2: ("collapsed", 3.0), 3e-2: ("diverged", 9.0)}
    for lr, (verdict, loss) in losses.items():
        for seed in range(2):
            node = fake_runs.config("ln", "post", 6, 0, seed, optim__lr=lr)
            fake_runs.write_run(tmp_path, node, verdict, loss + 0.001 * seed)
    (row,) = table_of(tmp_path, "learning_rates").rows
    first = (2.0 + 2.01 + 3.0 + math.log(65)) / 4 - 2.0
    second = (2.001 + 2.011 + 3.001 + math.log(65)) / 4 - 2.001
    assert row["sensitivity"].value == pytest.approx((first + second) / 2)
    assert row["sensitivity"].interval == pytest.approx(stats.mean([first, second]).interval)
    assert (row["edge"].value, row["lowest"].value, row["highest"].value) == (1e-2, 1e-3, 3e-3)


def test_a_cell_that_collapses_at_every_lr_is_not_called_robust(tmp_path):
    for lr in (1.5e-4, 1e-3, 3e-3):
        for seed in range(3):
            post = ("trained", 2.4) if seed == 2 and lr == 1e-3 else ("collapsed", 3.025)
            for placement, outcome in (("pre", ("trained", 2.2)), ("post", post)):
                fake_runs.write_run(tmp_path, fake_runs.config("ln", placement, 6, 0, seed, optim__lr=lr), *outcome)
    table = table_of(tmp_path, "learning_rates")
    pre, post = table.rows
    assert (pre["placement"], pre["never"], pre["edge"].value) == ("pre", "0 of 3", math.inf)
    assert (post["never"], post["sensitivity"].n, post["edge"].n, post["highest"].n) == ("2 of 3", 1, 1, 1)
    assert post["sensitivity"].value == pytest.approx((3.025 + 2.4 + 3.025) / 3 - 2.4)
    assert (post["edge"].value, post["lowest"].value, post["highest"].value) == (3e-3, 1e-3, 1e-3)
    assert "2 of 6 seeds learn at no LR" in table.note
    shutil.rmtree(tmp_path / fake_runs.run_id(fake_runs.config("ln", "post", 6, 0, 2, optim__lr=1e-3)))
    (_, post) = table_of(tmp_path, "learning_rates").rows  # of two seeds now, which learn nowhere
    assert all(math.isnan(post[key].value) for key in ("sensitivity", "edge", "lowest", "highest"))
    assert "0.00015 [0.00015, 0.00015] (n=3)" in to_markdown(table_of(tmp_path, "learning_rates"))  # usable from


def test_pairs_differ_in_one_thing_and_holm_counts_all_of_them(tmp_path):
    for norm, shift in (("ln", 0.0), ("rms", 0.02)):
        for placement, base in (("pre", 2.2), ("post", 2.3)):
            for seed, noise in enumerate((0.0, 0.011, 0.003)):
                node = fake_runs.config(norm, placement, 6, 0, seed)
                fake_runs.write_run(tmp_path, node, final=base + shift + noise * (1 + shift * 9))
    rows = table_of(tmp_path, "comparisons").rows
    assert [(row["pair"], row["cell"].split(",")[0]) for row in rows] == [
        ("ln − rms", "pre"), ("ln − rms", "post"), ("pre − post", "ln"), ("pre − post", "rms"),
    ]  # fmt: skip
    assert [row["p_holm"] for row in rows] == pytest.approx(stats.holm([row["p"] for row in rows]), nan_ok=True)
    assert rows[0]["difference"].value == pytest.approx(-0.02 - 0.18 * 0.014 / 3)


def test_variants_of_one_norm_are_compared_with_each_other_and_with_other_norms(tmp_path):
    for norm, changes in (("bn", {}), ("bn", {"norm__stats": "position"}), ("ln", {})):
        for seed in range(2):
            fake_runs.write_run(tmp_path, fake_runs.config(norm, "pre", 6, 0, seed, **changes))
    assert [row["pair"] for row in table_of(tmp_path, "comparisons").rows] == [
        "bn norm.stats batch_time − bn norm.stats position",
        "bn norm.stats batch_time − ln",
        "bn norm.stats position − ln",
    ]


def test_a_pair_of_mixed_outcomes_says_that_its_t_interval_is_rough(tmp_path):
    for seed in range(6):
        collapsed = seed < 2
        fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 6, 0, seed), final=2.2 + seed / 100)
        node = fake_runs.config("ln", "post", 6, 0, seed)
        fake_runs.write_run(
            tmp_path, node, "collapsed" if collapsed else "trained", 3.02 if collapsed else 2.3 + seed / 50
        )
    (row,) = table_of(tmp_path, "comparisons").rows
    assert (row["test"], row["difference"].n) == ("wilcoxon", 6)
    (tmp_path / fake_runs.run_id(node) / "summary.json").unlink()  # five pairs left
    (row,) = table_of(tmp_path, "comparisons").rows
    assert row["test"] == "t (rough: some seeds train, some do not)"


def test_the_report_names_the_commits_and_marks_different_ones(tmp_path):
    for seed, commit in enumerate(("a" * 40, "a" * 40, "b" * 40 + "-dirty", None)):
        node = fake_runs.config("ln", "pre", 2, 0, seed, train__steps=1)
        fake_runs.write_run(tmp_path / "runs", node, git_commit=commit)
    rows = table_of(tmp_path, "runs").rows
    assert [row["git_commit"] for row in rows] == ["a" * 40, "a" * 40, "b" * 40 + "-dirty", None]
    told = dict(facts(cells_of(tmp_path), ""))["commit"]
    assert told.startswith("3 DIFFERENT ones")
    assert told.endswith(f"{'a' * 40} (2 runs), {'b' * 40}-dirty (1 runs), unknown (1 runs)")


def test_one_commit_is_told_plainly_and_needs_no_column(tmp_path):
    fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, 0, train__steps=1))
    fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, 1), status="running", git_commit="other")
    assert dict(facts(cells_of(tmp_path), ""))["commit"] == "0123456789abcdef"  # of the runs that count


def test_a_loss_that_is_not_of_the_last_step_says_of_which(tmp_path):
    node = fake_runs.config("ln", "pre", 2, 0, 0, train__steps=3)
    fake_runs.write_run(tmp_path, node)
    assert "val_step" not in table_of(tmp_path, "runs").rows[0]
    fake_runs.write_run(tmp_path, node | {"seed": 1}, val_step=2)
    assert [row["val_step"] for row in table_of(tmp_path, "runs").rows] == [3, 2]


def test_many_left_out_for_one_reason_are_a_number(tmp_path):
    nodes = [fake_runs.config("rms", "pre", 6, 0, seed) for seed in range(8)]
    left_out = uncounted(cells_of(fake_runs.write_sweep(tmp_path, "begun", nodes, missing=7)))
    assert [what for what, _ in left_out][3:] == ["4 more"]
    assert {why for _, why in left_out} == {"not started: no run folder yet"}
    assert len(uncounted(cells_of(fake_runs.write_sweep(tmp_path / "other", "near", nodes[:4], missing=3)))) == 3
