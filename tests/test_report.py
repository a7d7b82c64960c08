"""The command: which files it writes, which it removes, and what a mistake gets."""

import itertools
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from normexp.report import build
from normexp.report.__main__ import main
from normexp.report.build import OWN_FILES
from tests import fake_runs


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


def test_cells_with_other_data_have_their_curves_and_no_comparison(tmp_path):
    """A field that one corpus lacks, a number among them, is no axis; losses over other tokens have no difference."""
    for seed in (0, 1):
        fake_runs.write_run(tmp_path / "runs", fake_runs.config("ln", "pre", 6, 0, seed))
        for share in (0.1, 0.2):
            node = fake_runs.config("ln", "pre", 6, 0, seed, data__validation=share, data__tokenizer="bytes")
            node["data"]["_target_"], node["cell"]["data"] = "normexp.data.text", "text"
            fake_runs.write_run(tmp_path / "runs", node)
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    report = (tmp_path / "out" / "REPORT.md").read_text()
    assert "- **varied**: data: kjv, text; data.tokenizer: bytes, characters; data.validation: 0.1, 0.2, –\n" in report
    assert not (tmp_path / "out" / "tables" / "comparisons.csv").exists()
    figures = {path.name.partition("-")[0] for path in (tmp_path / "out" / "figures").glob("*.png")}
    assert figures == {"phase_diagram", "loss_curves", "gradient_heatmap", "gradient_profile"}


def test_a_number_that_one_norm_lacks_is_an_axis_of_the_others(tmp_path):
    fake_runs.write_run(tmp_path / "runs", fake_runs.config("ln", "pre", 6, 0, 0))
    for momentum in (0.1, 0.2):
        fake_runs.write_run(tmp_path / "runs", fake_runs.config("bn", "pre", 6, 0, 0, norm__momentum=momentum))
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "figures" / "loss_norm_momentum.png").is_file()


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


def test_nothing_of_an_earlier_report_stays_beside_a_new_one(tmp_path):
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    for lr, batch_size in itertools.product((1e-3, 3e-3), (1, 2)):
        node = fake_runs.config("ln", "pre", 2, 0, 0, optim__lr=lr, train__batch_size=batch_size, train__steps=2)
        fake_runs.write_run(tmp_path / "many", node)
    fake_runs.write_run(tmp_path / "one", fake_runs.config("rms", "pre", 6, 0, 0))
    assert main([str(tmp_path / "many"), "--out", str(out)]) == 0
    written = files_of(out)
    assert {"figures/loss_train_batch_size.png", "figures/gradient_profile-batch-size-2.pdf"} < written
    assert all(map(OWN_FILES.fullmatch, written))
    others = {"figures/mine.png", "figures/phase_diagram-annotated.png", "tables/mine.csv", "notes.md", "bench/map.csv"}
    for name in others:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    assert main([str(tmp_path / "none"), "--out", str(out)]) == 2
    assert files_of(out) == written | others  # a mistake removes nothing
    for folder in (out, fresh):
        assert main([str(tmp_path / "one"), "--out", str(folder)]) == 0
    assert files_of(out) == files_of(fresh) | others


@pytest.mark.parametrize("name", ["REPORT.md", "report.html", "tables/runs.csv", "figures/loss_curves.png"])
def test_files_that_are_no_reports_are_not_overwritten(tmp_path, capsys, name):
    fake_runs.write_run(tmp_path / "one", fake_runs.config("rms", "pre", 6, 0, 0))
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")
    assert main([str(tmp_path / "one"), "--out", str(out)]) == 2
    told = f"normexp.report: cannot write into {out}: its {name} is of no report; give another folder with --out, or re"
    assert capsys.readouterr().err.startswith(told)
    assert files_of(out) == {name}
    assert (out / name).read_text() == "mine"


def test_a_report_that_was_broken_off_is_made_anew(tmp_path, monkeypatch):
    fake_runs.write_run(tmp_path / "one", fake_runs.config("rms", "pre", 6, 0, 0))
    command = [str(tmp_path / "one"), "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patched:
        patched.setattr(build, "draw", lambda *_: sys.exit(130))
        with pytest.raises(SystemExit):
            main(command)
    assert (tmp_path / "out" / "tables" / "runs.csv").is_file()
    assert "broken off" in (tmp_path / "out" / "REPORT.md").read_text()
    assert main(command) == 0
    assert "broken off" not in (tmp_path / "out" / "REPORT.md").read_text()


def test_a_report_whose_clearing_was_broken_off_is_made_anew(tmp_path, monkeypatch):
    fake_runs.write_run(tmp_path / "one", fake_runs.config("rms", "pre", 6, 0, 0))
    command, gone, unlink = [str(tmp_path / "one"), "--out", str(tmp_path / "out")], [], Path.unlink
    assert main(command) == 0

    def third_fails(path):
        gone.append(path)
        if len(gone) == 3:
            sys.exit(130)
        unlink(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", third_fails)
        with pytest.raises(SystemExit):
            main(command)
    assert main(command) == 0


def files_of(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


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
