"""From run folders to cells, tables and files: what is counted, what each number says, what a mistake gets."""

import csv
import io
import json
import math
import re
import resource
import subprocess
import sys

import pytest

from normexp import results, stats
from normexp.report.__main__ import main
from normexp.report.formats import Column, Table, to_csv, to_html, to_latex, to_markdown
from normexp.report.study import study
from normexp.report.tables import tables
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
    first = fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, 0))
    second = fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, 0, telemetry__every=5))
    found = cells_of(tmp_path)
    assert len(found.finished) == 1
    assert {*found.twins[0]} == {first.name, second.name}


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


def test_every_number_of_one_seed_says_that_it_has_no_interval(tmp_path):
    fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, 0))
    (row,) = table_of(tmp_path, "cells").rows
    estimates = [value for value in row.values() if isinstance(value, stats.Estimate)]
    assert len(estimates) >= 4
    assert {(found.interval, found.note) for found in estimates} == {(None, "one seed: no interval")}


def test_the_gap_between_running_and_batch_statistics(tmp_path):
    for seed, batch in enumerate((2.1, 2.15)):
        folder = fake_runs.write_run(tmp_path, fake_runs.config("bn", "pre", 2, 0, seed), final=2.2)
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps(summary | {"val_loss_batch_stats": batch}))
    (row,) = table_of(tmp_path, "cells").rows
    assert row["statistics_gap"].value == pytest.approx(0.075)


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


# --- formats ---------------------------------------------------------------------------------------------------------

TABLE = Table(
    "example",
    "An example",
    "50 % of it",
    [Column("run_id", "run"), Column("loss", "loss (nats)"), Column("lr", "lr")],
    [
        {"run_id": "<b>a_b|c", "loss": stats.Estimate(2.3456, (2.3, 2.4), 3, "student", ""), "lr": 1e-5},
        {"run_id": "x&y", "loss": stats.mean([2.0]), "lr": None},
    ],
)


def test_csv_has_a_column_a_number():
    first, second = csv.DictReader(io.StringIO(to_csv(TABLE)))
    assert first == {
        "run_id": "<b>a_b|c", "loss": "2.3456", "loss_low": "2.3", "loss_high": "2.4", "loss_n": "3",
        "loss_method": "student", "loss_note": "", "lr": "1e-05",
    }  # fmt: skip
    assert (second["loss_low"], second["loss_n"], second["loss_note"]) == ("", "1", "one seed: no interval")


def test_markdown_and_latex_show_value_interval_and_n_with_text_escaped():
    text = to_markdown(TABLE)
    assert r"| \<b\>a_b\|c | 2.346 [2.300, 2.400] (n=3) | 1e-5 |" in text
    assert "2.000 (n=1; one seed: no interval) | – |" in text
    latex = to_latex(TABLE)
    assert r"\textless{}b\textgreater{}a\_b|c & 2.346 [2.300, 2.400] (n=3) & 1e-5 \\" in latex
    assert r"x\&y" in latex
    assert r"50 \% of it" in latex
    for rule in (r"\toprule", r"\midrule", r"\bottomrule"):
        assert latex.count(rule) == 1


def test_html_carries_the_plain_value_and_escapes():
    page = to_html(TABLE)
    assert '<td data-value="2.3456">2.346 [2.300, 2.400] (n=3)</td>' in page
    assert '<a href="#run=%3Cb%3Ea_b%7Cc">&lt;b&gt;a_b|c</a>' in page
    assert "<b>" not in page


# --- the command -----------------------------------------------------------------------------------------------------


def test_a_sweep_gets_every_file(tmp_path, capsys):
    nodes = fake_runs.grid("ln rms", "pre post", (2, 6), (0, 200), 2)
    sweep = fake_runs.write_sweep(tmp_path / "results", "small", nodes, missing=1)
    damaged = tmp_path / "results" / "runs" / fake_runs.run_id(nodes[0])
    (damaged / "summary.json").write_text("{")
    assert main([str(sweep)]) == 0
    told = capsys.readouterr().out
    made = {str(path.relative_to(sweep)) for path in sweep.rglob("*") if path.is_file()}
    for name in ("map", "cells", "warmup", "comparisons", "runs"):
        assert {f"tables/{name}.{ending}" for ending in ("csv", "md", "tex")} <= made
    assert {"REPORT.md", "report.html", "tables/runs.parquet"} <= made
    for name in (
        "phase_diagram",
        "loss_curves-depth-2",
        "gradient_heatmap-depth-6",
        "gradient_profile-depth-6",
        "loss_depth",
    ):
        assert (sweep / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (sweep / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    report = (sweep / "REPORT.md").read_text()
    for text in (told, report, (sweep / "report.html").read_text()):
        assert damaged.name in text
        assert "summary.json is not strict JSON" in text
        assert "norm=rms seed=1" in text  # the cell that has not started
        assert re.search(r"lr_sensitivity.*needs two values of lr", text)
    linked = re.findall(r"\]\(([^)]+)\)", report)
    assert linked
    assert all((sweep / link).is_file() for link in linked)
    assert "0123456789abcdef" in report
    assert "python -m normexp.train -m +sweep=small" in report


def test_out_is_written_and_path_is_left_alone(tmp_path):
    folder = fake_runs.write_run(tmp_path / "runs", fake_runs.config("rms", "pre", 6, 0, 0))
    before = sorted(folder.iterdir())
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "report.html").is_file()
    assert sorted(folder.iterdir()) == before


def test_the_same_runs_give_the_same_figures(tmp_path):
    fake_runs.write_run(tmp_path / "runs", fake_runs.config("rms", "pre", 6, 0, 0))
    for name in ("a", "b"):
        main([str(tmp_path / "runs"), "--out", str(tmp_path / name)])
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name / "figures").iterdir()} for name in "ab"
    )
    assert first == second
    assert len(first) == 6


def test_runs_none_of_which_is_finished_are_reported_with_exit_code_1(tmp_path, capsys):
    fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, 0), status="running")
    assert main([str(tmp_path)]) == 1
    assert "0 of 1 readable runs counted" in capsys.readouterr().out
    assert "not drawn: all figures (no run is finished)" in (tmp_path / "REPORT.md").read_text()


def test_a_folder_of_damaged_runs_only_is_reported_too(tmp_path):
    folder = fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, 0))
    (folder / "summary.json").unlink()
    assert main([str(tmp_path)]) == 1
    assert "summary.json is missing" in (tmp_path / "REPORT.md").read_text()


@pytest.mark.parametrize(
    ("path", "reason"), [("none", "no such folder"), ("file", "is a file"), ("empty", "no run in it")]
)
def test_a_mistake_gets_one_line_exit_code_2_and_nothing_is_created(tmp_path, path, reason):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    command = [sys.executable, "-m", "normexp.report", str(tmp_path / path), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert str(tmp_path / path) in done.stderr
    assert reason in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_an_output_folder_that_is_a_file_is_a_mistake(tmp_path, capsys):
    fake_runs.write_run(tmp_path / "runs", fake_runs.config("ln", "pre", 2, 0, 0))
    (tmp_path / "out").write_text("")
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_help_does_not_wait_for_the_figures_library():
    code = "import sys, runpy; sys.argv[1:] = ['--help']\ntry: runpy.run_module('normexp.report', run_name='__main__')"
    code += "\nfinally: print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip().endswith("False")


@pytest.mark.slow
def test_a_sweep_of_162_runs_takes_less_than_30_seconds_of_one_core(tmp_path):
    sweep = fake_runs.write_sweep(tmp_path, "depth_warmup", fake_runs.grid())
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "normexp.report", str(sweep)], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    taken = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{taken:.1f} s")
    assert taken < 30
