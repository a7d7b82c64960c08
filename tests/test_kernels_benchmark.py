"""The benchmark's claims about itself: who is timed, who is not and why, and what is called noise."""

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

from normexp.kernels import timing

CPU, SCRIPTS = torch.device("cpu"), Path(__file__).parent.parent / "scripts"
QUICK = argparse.Namespace(rounds=2, calls=1)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench_kernels, bench_norms = load("bench_kernels"), load("bench_norms")


class Wrong(torch.autograd.Function):
    """The right sum and norm, with a gradient that is not theirs."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return 1.1 * dy


def test_who_is_wrong_or_fails_is_named_and_not_timed(monkeypatch):
    ours = bench_kernels.ours("add_rms_norm", "torch")

    def failing(*operands):
        raise RuntimeError("no kernel\nfor this device")

    others = {
        "torch": failing,
        "liger": lambda *operands: tuple(Wrong.apply(output) for output in ours(*operands)),
        "quack": lambda *operands: ours(*operands)[0],
    }
    every = {"eager": ours, "ours": ours} | others
    monkeypatch.setattr(bench_kernels, "providers", lambda *_: (every, {"compile": "left out"}))
    missing: dict[str, list[str]] = {}
    rows = bench_kernels.measure_problem("add_rms_norm", 8, 16, CPU, QUICK, missing)
    assert {row["provider"] for row in rows} == {"eager", "ours"}
    assert all(shapes == ["8 × 16"] for shapes in missing.values())
    *others, without_the_sum = sorted(missing, key=lambda why: why.startswith("quack"))
    assert set(others) == {
        "torch add_rms_norm: RuntimeError: no kernel for this device",
        "liger add_rms_norm: wrong dx, dresidual, dweight",
        "compile add_rms_norm: left out",
    }
    assert without_the_sum.startswith("quack add_rms_norm: ")


def test_a_gpus_absent_providers_are_named(monkeypatch):
    for name in "liger_kernel", "quack":
        monkeypatch.setitem(sys.modules, name, None)
    _, missing = bench_kernels.providers("rms_norm", 1024, torch.device("cuda"))
    assert [name for name, reason in missing.items() if "Error" in reason] == ["liger", "quack"]


def test_quack_is_asked_for_the_sum_where_there_is_one(monkeypatch):
    asked = []
    module = ModuleType("quack.rmsnorm")
    module.rmsnorm = lambda x, weight, *, residual, eps, prenorm: asked.append(prenorm)
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.rmsnorm", module)
    x = torch.ones(2, 4)
    bench_kernels.quack("rms_norm")(x, None, x[0], None)
    bench_kernels.quack("add_rms_norm")(x, x, x[0], None)
    assert asked == [False, True]
    found, missing = bench_kernels.providers("layer_norm", 1024, torch.device("cuda"))
    assert "quack" not in found
    assert missing["quack"] == "has no such op"


def test_a_saving_within_its_quartiles_of_nothing_is_noise():
    assert timing.saving([-0.1, 0.1, 0.2, -0.2]) == "within noise"
    assert timing.saving([0.1, 0.2, 0.3]) == "+20% (+15% … +25%)"
    times = {"linear": [3.0, 1.0, 2.0], "norm + linear": [2.0, 3.0, 2.0], "folded": [2.0, 2.0, 2.0]}
    assert bench_norms.saved_of_the_norm(times, "") is None  # it costs nothing that can be seen
    assert bench_norms.saved_of_the_norm(times | {"norm + linear": [5.0] * 3}, "") == [3 / 2, 3 / 4, 3 / 3]


def test_the_record_says_how_it_was_made():
    facts = timing.facts(CPU, "0123abc")
    assert facts["git_commit"] == "0123abc"
    assert {"command", "date", "device", "dtype", "versions"} < facts.keys()
    assert "0123abc" in timing.head(facts)
