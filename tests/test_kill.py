"""kill -9 at random moments: the same command again ends with the numbers of an undisturbed run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests import tiny


def start(folder: Path, steps: int, every: int) -> subprocess.Popen:
    limits = [f"train.steps={steps}", f"train.checkpoint_every={every}", "train.eval_batches=2", "train.eval_every=50"]
    command = [sys.executable, "-m", "normexp.train", "norm=bn", "model.depth=2", "model.dropout=0.1", *limits]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    where = {"cwd": folder, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*command, f"results={folder}"], **where)


def finish(process: subprocess.Popen) -> str:
    """What it printed."""
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()
    return printed.decode()


def outcome(folder: Path) -> tuple[list[dict], dict, dict]:
    (run,) = folder.glob("runs/*")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    weights = torch.load(run / "checkpoint.pt", weights_only=True)["model"]
    return tiny.numbers(rows), weights, json.loads((run / "summary.json").read_text())


def last_logged_step(folder: Path) -> int:
    for metrics in folder.glob("runs/*/metrics.jsonl"):
        lines = metrics.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        return json.loads(whole[-1])["step"] if whole else -1
    return -1


def killed_again_and_again(folder: Path, kills: int, steps: int, every: int) -> int:
    """Kills the run `kills` times, each after a random further stretch of steps; returns how many landed."""
    draw, landed = random.Random(0), 0
    for index in range(kills):
        process = start(folder, steps, every)
        aim = (index + draw.random()) * steps / (kills + 1)
        while process.poll() is None and last_logged_step(folder) < aim:
            time.sleep(0.01)
        time.sleep(draw.random() * 0.2)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            landed += 1
        process.wait()
    return landed


@pytest.mark.parametrize(
    ("kills", "steps", "every"),
    [
        (2, 240, 7),
        pytest.param(10, 1500, 20, marks=pytest.mark.slow),
        pytest.param(100, 4000, 10, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_as_an_undisturbed_one(kills, steps, every, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    undisturbed = start(whole, steps, every)
    landed = killed_again_and_again(broken, kills, steps, every)
    finish(undisturbed)
    printed = finish(start(broken, steps, every))
    (rows, weights, summary), (rows_again, weights_again, summary_again) = outcome(whole), outcome(broken)
    assert landed == kills
    assert [row["step"] for row in rows_again] == list(range(steps + 1))
    assert rows_again == rows
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
    assert summary_again["val_loss"] == summary["val_loss"]
    assert summary_again["status"] == "finished"
    offline = max(broken.glob("runs/*/wandb/offline-run-*"))  # the newest, which holds the rows of all starts
    assert "wandb sync " in printed
    assert str(offline) in printed
