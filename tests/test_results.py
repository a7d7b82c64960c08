"""Run folders of every state -> the table, and what is said of those that cannot be trusted."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from normexp import results
from tests import fake_runs

EVERYTHING = re.compile(".*")


def read(path: Path) -> results.Runs:
    return results.read(results.locate(path), EVERYTHING)


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fake_runs.write_run(tmp_path / "runs", fake_runs.config("ln", "post", 3, 50, 1))


def test_a_run_becomes_one_row_of_config_and_summary(folder: Path) -> None:
    runs = read(folder)
    assert runs.damaged == ()
    (row,) = runs.table.to_dict("records")
    short = {name: row[name] for name in results.FACTORS}
    assert short == {
        "norm": "ln",
        "placement": "post",
        "depth": 3,
        "warmup_steps": 50,
        "lr": 0.003,
        "init": "xavier",
        "seed": 1,
    }
    assert row["model.depth"] == 3
    assert row["norm._target_"] == "normexp.norms.LayerNorm"
    assert row["optim.betas"] == "[0.9, 0.98]"
    assert row["versions.torch"] == "2.13.0"
    assert row["verdict"] == "trained"
    assert row["val_loss"] == 2.2
    assert row["val_step"] == 400
    assert row["written"] == (folder / "summary.json").stat().st_mtime


def test_the_history_holds_every_logged_number(folder: Path) -> None:
    history = results.history(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert history.index.tolist() == [line["step"] for line in lines] == list(range(401))
    assert set(history.columns) == {path for line in lines for path in line} - {"nonfinite"}
    line = lines[20]
    assert history.loc[20, "grad_norm/layer_02/mlp.out"] == line["grad_norm/layer_02/mlp.out"]
    assert math.isnan(history.loc[21, "grad_norm/layer_02/mlp.out"])  # not logged at step 21


def test_a_non_finite_number_is_told_from_one_that_was_not_logged(tmp_path: Path) -> None:
    folder = fake_runs.write_run(tmp_path, fake_runs.config("bn", "pre", 2, 0, 0), "diverged")
    runs = read(folder)
    history = runs.histories[folder.name]
    assert np.isinf(history.loc[101:, "train/loss"]).all()
    assert np.isfinite(history.loc[1:100, "train/loss"]).all()
    assert math.isnan(history.loc[0, "train/loss"])
    assert runs.table["val_loss"].tolist() == [math.inf]


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_an_unfinished_run_has_a_row_and_its_torn_line_is_left_out(tmp_path: Path, status: str) -> None:
    folder = fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, 0), status=status)
    text = (folder / "metrics.jsonl").read_text()
    assert not text.endswith("\n")
    runs = read(tmp_path)
    assert runs.table["status"].tolist() == [status]
    assert len(runs.histories[folder.name]) == text.count("\n")


def test_a_run_that_has_logged_nothing_yet_is_read(tmp_path: Path) -> None:
    folder = fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, 0), status="running")
    (folder / "metrics.jsonl").unlink()
    assert len(read(tmp_path).histories[folder.name]) == 0


def test_sweep_runs_root_results_root_and_run_lead_to_the_same_rows(tmp_path: Path) -> None:
    sweep = fake_runs.write_sweep(tmp_path, "small", fake_runs.grid("ln", "pre post", (2,), (0,), 2))
    (tmp_path / "runs" / "figures").mkdir()  # not a run, and not taken for one
    expected = sorted(read(sweep).table["run_id"])
    assert len(expected) == 4
    assert sorted(read(tmp_path).table["run_id"]) == expected
    assert sorted(read(tmp_path / "runs").table["run_id"]) == expected
    assert read(tmp_path / "runs" / expected[0]).table["run_id"].tolist() == expected[:1]
    assert read(sweep).source.sweep["name"] == "small"


def test_a_sweep_reads_its_own_cells_only_and_names_those_without_a_run(tmp_path: Path) -> None:
    sweep = fake_runs.write_sweep(tmp_path, "small", fake_runs.grid("ln", "pre", (2,), (0,), 3), missing=1)
    fake_runs.write_run(tmp_path / "runs", fake_runs.config("rms", "post", 2, 0, 0))
    edit_json(
        sweep / "sweep.json", lambda s: s["cells"].append({"overrides": ["lr=-1"], "run_id": None, "error": "bad"})
    )
    runs = read(sweep)
    assert runs.table["norm"].tolist() == ["ln", "ln"]
    assert [(absent.overrides, absent.reason) for absent in runs.source.absent] == [
        ("norm=ln seed=2", "no run folder yet"),
        ("lr=-1", "bad"),
    ]


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no summary": (lambda f: (f / "summary.json").unlink(), "summary.json is missing"),
    "no config": (lambda f: (f / "config.yaml").unlink(), "config.yaml is missing"),
    "no metrics": (lambda f: (f / "metrics.jsonl").unlink(), "metrics.jsonl is missing"),
    "empty": (lambda f: [path.unlink() for path in f.iterdir()], "summary.json is missing"),
    "cut summary": (lambda f: (f / "summary.json").write_text('{"run_id": "'), "summary.json is not strict JSON"),
    "NaN in summary": (lambda f: (f / "summary.json").write_text('{"val_loss": NaN}'), "NaN is not strict JSON"),
    "list summary": (lambda f: (f / "summary.json").write_text("[]"), "summary.json is not an object"),
    "bytes": (lambda f: (f / "config.yaml").write_bytes(b"\xff\xfe"), "config.yaml is not UTF-8"),
    "not YAML": (lambda f: (f / "config.yaml").write_text("a: [1"), "config.yaml is not YAML"),
    "list config": (lambda f: (f / "config.yaml").write_text("- 1"), "config.yaml is not a mapping"),
    "status": (lambda f: edit_json(f / "summary.json", lambda s: s.update(status="done")), "status 'done'"),
    "verdict": (lambda f: edit_json(f / "summary.json", lambda s: s.update(verdict=None)), "verdict None"),
    "no loss": (lambda f: edit_json(f / "summary.json", lambda s: s.pop("val_loss")), "no val_loss"),
    "another run": (lambda f: edit_json(f / "summary.json", lambda s: s.update(run_id="x")), "belongs to run 'x'"),
    "other seed": (
        lambda f: edit_json(f / "summary.json", lambda s: s.update(seed=7)),
        "config.yaml says seed 1, summary.json 7",
    ),
    "other norm": (lambda f: edit_json(f / "summary.json", lambda s: s["cell"].update(norm="bn")), "cell.norm 'ln'"),
    "torn line": (lambda f: append(f, '{"step": 401'), "torn line"),
    "NaN in metrics": (lambda f: append(f, '{"step": 401, "train/loss": NaN}\n'), "line 402 is not strict JSON"),
    "no step": (lambda f: append(f, "{}\n"), "line 402 has no step"),
    "text": (lambda f: append(f, '{"step": 401, "train/loss": "2"}\n'), "step 401: train/loss is '2'"),
    "step twice": (lambda f: append(f, '{"step": 400}\n'), "steps that do not increase"),
    "early end": (lambda f: edit_json(f / "summary.json", lambda s: s.update(steps=500)), "ends at step 400"),
}


def append(folder: Path, text: str) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(text)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_run_is_named_and_has_no_row(tmp_path: Path, folder: Path, name: str) -> None:
    whole = fake_runs.write_run(tmp_path / "runs", fake_runs.config("rms", "pre", 2, 0, 0))
    damage, reason = DAMAGES[name]
    damage(folder)
    runs = read(tmp_path)
    assert runs.table["run_id"].tolist() == [whole.name]
    (damaged,) = runs.damaged
    assert damaged.folder == folder
    assert reason in damaged.reason
    assert "\n" not in damaged.reason


def test_a_path_without_runs_is_the_users_mistake_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "sweeps" / "one").mkdir(parents=True)
    (tmp_path / "sweeps" / "one" / "sweep.json").write_text('{"cells": []}')
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "sweep.json").write_text("{}")
    cases = {"none": "no such folder", "file": "is a file", "empty": "no run in it", "sweeps": "one of its sweeps: one"}
    for name, reason in (cases | {"sweeps/one": "none of its 0 cells", "bad": "not a list of cells"}).items():
        with pytest.raises(results.NothingToRead, match=reason) as mistake:
            results.locate(tmp_path / name)
        assert "\n" not in str(mistake.value)


def test_yaml_numbers_are_read_as_the_writer_meant_them(tmp_path: Path) -> None:
    folder = fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, 0, optim__lr=1e-5))
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("lr: 1.0e-05", "lr: 1e-5"))
    runs = read(tmp_path)
    assert runs.damaged == ()
    assert runs.table["lr"].tolist() == [1e-5]


def test_parquet_gives_the_table_back_with_mixed_columns_as_text(tmp_path: Path) -> None:
    for norm, mask in (("bn", True), ("ln", "yes"), ("rms", None)):
        fake_runs.write_run(tmp_path, fake_runs.config(norm, "pre", 2, 0, 0, norm__mask=mask))
    table = read(tmp_path).table
    results.write_parquet(table, tmp_path / "runs.parquet")
    back = pd.read_parquet(tmp_path / "runs.parquet").set_index("norm")
    assert back.loc[["bn", "ln"], "norm.mask"].tolist() == ["True", "yes"]
    assert pd.isna(back.loc["rms", "norm.mask"])
    assert back["val_loss"].tolist() == table["val_loss"].tolist()
    assert set(back.columns) | {"norm"} == set(table.columns)


def test_reading_needs_neither_torch_nor_hydra_nor_wandb_nor_matplotlib() -> None:
    heavy = "{'torch', 'hydra', 'omegaconf', 'wandb', 'matplotlib', 'triton', 'datasets'}"
    code = f"import sys, normexp.results, normexp.stats, normexp.report; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
