"""Process-wide settings of torch, compilation that does not go on, and what of the machine's speed a model uses."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from normexp import arithmetic, cell, train
from normexp.model import ModelConfig
from normexp.trainer import Trainer
from tests import tiny
from tests.test_trainer import train as fitted

CPU = torch.device("cpu")

RESTLESS_NORM = """
import torch
from torch import nn

class Restless(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()

    def forward(self, x, mask=None):
        index = torch.zeros(2, dtype=torch.long)
        return x + torch.zeros(3).put_(index, torch.ones(2))[2]
"""


@pytest.fixture(autouse=True)
def _settled():
    yield
    arithmetic.settle(CPU, threads=1, deterministic=False, tf32=False)


def test_a_trainer_settles_how_torch_computes():
    tiny.trainer(train=replace(tiny.TRAIN, deterministic=True, tf32=True))
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.get_num_threads() == 1
    tiny.trainer()
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cuda.matmul.allow_tf32


def test_deterministic_runs_have_the_numbers_of_others_on_a_cpu(tmp_path):
    rows = {}
    for wanted in (False, True):
        rows[wanted] = []
        fitted(tiny.trainer("bn", train=replace(tiny.TRAIN, deterministic=wanted)), tmp_path, rows[wanted])
    assert tiny.numbers(rows[False]) == tiny.numbers(rows[True])


def test_an_operation_that_is_not_deterministic_is_refused_by_name(tmp_path, monkeypatch, capfd):
    (tmp_path / "restless.py").write_text(RESTLESS_NORM)
    (tmp_path / "conf" / "norm").mkdir(parents=True)
    (tmp_path / "conf" / "norm" / "restless.yaml").write_text("_target_: restless.Restless\n_partial_: true\n")
    monkeypatch.chdir(tmp_path)
    command = ["--config-dir=conf", "norm=restless", *tiny.SHORT]
    assert train.main([*command, "train.deterministic=true"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: train.deterministic=true: put_ does not have a deterministic implementation; give")
    assert train.main(command) == 0


def test_cublas_is_told_before_cuda_starts(monkeypatch):
    monkeypatch.delenv(arithmetic.WORKSPACE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    arithmetic.settle(torch.device("cuda"), threads=1, deterministic=True, tf32=False)
    assert os.environ[arithmetic.WORKSPACE] == ":4096:8"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    arithmetic.settle(torch.device("cuda"), threads=1, deterministic=True, tf32=False)
    monkeypatch.delenv(arithmetic.WORKSPACE)
    with pytest.raises(arithmetic.UserError, match=r"start with CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        arithmetic.settle(torch.device("cuda"), threads=1, deterministic=True, tf32=False)


def test_flops_of_a_token_by_hand():
    """6 × (2 blocks of 16·(4·16 + 2·64) and a head of 16·11) + 12 · 2 · 16 · 16."""
    config = ModelConfig(**tiny.CONFIG)
    assert arithmetic.flops_per_token(config, 11) == 6 * (2 * 16 * (64 + 128) + 16 * 11) + 12 * 2 * 16 * 16
    gated = arithmetic.flops_per_token(replace(config, mlp="swiglu"), 11)
    assert gated - arithmetic.flops_per_token(config, 11) == 6 * 2 * 16 * 64


def test_the_rate_of_a_matrix_product_is_a_machines():
    assert 1e8 < arithmetic.product_rate(CPU, torch.float32) < 1e15


def test_the_rate_is_the_best_repetition_of_the_best_size(monkeypatch):
    """2 n³ FLOP in so many ms, until the repetitions of one size take 6 ms and more."""
    times = {128: [0.9, 0.5, 0.7], 256: [0.4, 0.5, 0.3], 512: [10.0, 12.0, 11.0]}
    monkeypatch.setattr(arithmetic, "_seconds", lambda product, _: times[len(product())].pop(0) / 1e3)
    assert arithmetic.product_rate(CPU, torch.float32) == pytest.approx(2 * 256**3 / 0.3e-3)
    assert times == {128: [], 256: [], 512: []}


@pytest.mark.slow
def test_compiled_training_is_eager_training_and_its_graphs_are_constant(tmp_path):
    """By inductor: per-layer gradient norms over 20 steps to 1e-4, no graph break, no recompilation, and a second
    process finds the code of the first."""
    program = Path(__file__).with_name("compiled_run.py")
    settings = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    environment = os.environ | settings | {"PYTHONPATH": str(program.parent.parent)}
    runs = [
        subprocess.run([sys.executable, program, tmp_path / name], env=environment, capture_output=True, text=True)
        for name in ("first", "second")
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    print([run.stdout for run in runs])
    assert "hits 0" in runs[0].stdout
    assert "misses 0" in runs[1].stdout


def test_a_product_that_does_not_fit_is_no_number_and_no_fault(monkeypatch):
    def full(*shape, **others):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(arithmetic.torch, "ones", full)
    assert arithmetic.product_rate(CPU, torch.float32) is None


@pytest.mark.parametrize("shape", ["packed", "padded"])
def test_utilisation_is_of_all_that_a_step_computes(shape, tmp_path, monkeypatch):
    """Two runs that compute the same differ by their real tokens only."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cell, "product_rate", lambda *_: 1e9)
    monkeypatch.setattr(Trainer, "step_seconds", property(lambda _: [0.5, 0.25, 0.25], lambda *_: None), raising=False)
    parts = ["train.batch_size=4", "train.grad_accum=2"]
    assert train.main([f"data.shape={shape}", *parts, *tiny.SHORT]) == 0
    (path,) = tmp_path.glob("results/runs/*/summary.json")
    summary = json.loads(path.read_text())
    assert summary["model_flops_utilisation"] == pytest.approx(summary["flops_per_token"] * 8 * 16 / 0.25 / 1e9)
