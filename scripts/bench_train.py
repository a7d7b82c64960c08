"""What a training step costs beside what it must: ratios, each of two things measured in turn in this process.

    python scripts/bench_train.py [--steps 800] [--out results/bench]

Prints two tables and writes `train.json`: ratios, each the median over pairs of blocks of steps, one of each side; and
where the time of a step goes, part by part. Run it on an idle machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from normexp import cell, commandline, config, runs
from normexp.model import cross_entropy_sum
from normexp.telemetry import Buffer, Snapshot
from normexp.trackers import Jsonl, Null

BLOCK = 20  # steps: one flush


class Side:
    """A cell in training, with its metrics file and its mirror."""

    def __init__(self, *overrides: str) -> None:
        self.folder = Path(tempfile.mkdtemp())
        composed = commandline.compose([*overrides, f"results={self.folder}"])
        checked = config.load(composed.values, composed.choices, composed.folder)
        source = cell.open_source(checked)
        self.trainer = cell.build_trainer(checked, source, cell.build(checked, source))
        self.buffer, self.local = Buffer(), Jsonl(self.folder / "metrics.jsonl", -1)
        run = runs.RunFolder(self.folder)
        self.mirror = cell.open_mirror(checked, run, self.local, None) if checked.tracker.mode == "offline" else Null()

    def block(self) -> float:
        """Seconds of one block of steps, its flush included."""
        start = time.perf_counter()
        for _ in range(BLOCK):
            self.buffer.add(*self.trainer.take_step())
        rows = self.buffer.flush()
        self.local.write(rows)
        self.mirror.log(rows)
        return time.perf_counter() - start


class Minimal(Side):
    """The same model, batches and optimiser in the loop that one would write by hand: nothing is watched or kept."""

    def block(self) -> float:
        trainer = self.trainer
        start = time.perf_counter()
        for _ in range(BLOCK):
            trainer.step += 1
            batch = trainer.source.batch(trainer.seed, trainer.step, trainer.train.batch_size)
            logits = trainer.model(batch.tokens, batch.mask)
            F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).backward()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start


def parts(side: Side, repeats: int) -> dict[str, float]:
    """Milliseconds of each part of a step, the median over steps that are made part by part."""
    trainer, times = side.trainer, defaultdict(list)
    model, layout = trainer.model, trainer.layout

    def timed_part(name: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        times[name].append(1e3 * (time.perf_counter() - start))
        return result

    for step in range(repeats):
        batch = timed_part("batch", lambda step=step: trainer.source.batch(0, step, trainer.train.batch_size))
        logits = timed_part("forward", lambda batch=batch: model(batch.tokens, batch.mask))
        loss = timed_part("loss", lambda a=logits, b=batch: cross_entropy_sum(a, b.targets) / b.targets.numel())
        timed_part("backward", loss.backward)
        gradients = layout.gradients()
        norms = timed_part("gradient norms", lambda own=gradients: layout.gradient_norms(own))
        before = layout.flat_parameters()
        timed_part("optimiser", trainer.optimizer.step)
        change = timed_part("telemetry: copies", lambda old=before: layout.flat_parameters().sub_(old))
        snapshot = Snapshot(layout, norms, gradients, before, change, trainer._second_moments(), trainer.optim.eps)
        for metric in trainer.metrics:
            side.buffer.add(
                {"step": side.local.last_step + 1},
                [timed_part(f"telemetry: {metric.__name__}", partial(metric, snapshot))],
            )
        rows = timed_part("transfer", side.buffer.flush)
        row = {path: value for own in rows for path, value in own.items()}
        timed_part("metrics.jsonl", lambda row=row: side.local.write([row]))
        trainer.optimizer.zero_grad(set_to_none=True)
    return {name: statistics.median(own) for name, own in times.items()}


def ratio(ours: Side, theirs: Side, steps: int) -> dict[str, float]:
    """Blocks in turn, A B B A …; the first pair warms up."""
    pairs = []
    for index in range(1 + steps // BLOCK):
        first, second = (ours, theirs) if index % 2 else (theirs, ours)
        times = {id(first): first.block(), id(second): second.block()}
        pairs.append((times[id(ours)], times[id(theirs)]))
    for side in (ours, theirs):
        side.mirror.finish({"status": "finished"})
    return summary(pairs[1:])


def summary(pairs: list[tuple[float, float]]) -> dict[str, float]:
    ratios = sorted(a / b for a, b in pairs)
    quarter = len(ratios) // 4
    return {
        "ratio": statistics.median(ratios),
        "low": ratios[quarter],
        "high": ratios[-1 - quarter],
        "milliseconds_a_step": 1e3 * statistics.median(a for a, _ in pairs) / BLOCK,
    }


QUIET = "tracker.mode=disabled"
COMPARISONS: dict[str, tuple[list[str], list[str]]] = {
    "telemetry at every step / off": (["telemetry=dense", QUIET], ["telemetry=off", QUIET]),
    "default telemetry / off": ([QUIET], ["telemetry=off", QUIET]),
    "default telemetry and wandb offline / off": (["tracker.mode=offline"], ["telemetry=off", QUIET]),
    "wandb offline / disabled": (["tracker.mode=offline"], [QUIET]),
    "default telemetry / minimal loop": ([QUIET], [QUIET]),
    "rms / ln": (["norm=rms", QUIET], ["norm=ln", QUIET]),
    "bn / ln": (["norm=bn", QUIET], ["norm=ln", QUIET]),
    "rms / ln, compiled": (["norm=rms", "train.compile=true", QUIET], ["norm=ln", "train.compile=true", QUIET]),
}

IMPORTS = "import torch, wandb, sys; wandb.init(mode='offline', dir=sys.argv[1], settings=wandb.Settings(silent=True))"


def start_ratio(repeats: int) -> dict[str, float]:
    """From the command to the first step's row on the disk, over importing torch and `wandb.init`."""
    pairs = []
    for _ in range(repeats):
        folder = Path(tempfile.mkdtemp())
        limits = ["train.steps=1", "train.eval_batches=1", "tracker.mode=offline", f"results={folder}"]
        command = [sys.executable, "-m", "normexp.train", "norm=rms", *limits]
        ours = timed(command, lambda folder=folder: any(f.stat().st_size for f in folder.glob("runs/*/metrics.jsonl")))
        pairs.append((ours, timed([sys.executable, "-c", IMPORTS, tempfile.mkdtemp()], None)))
    return summary(pairs) | {"milliseconds_a_step": 1e3 * statistics.median(a for a, _ in pairs)}


def timed(command: list[str], reached: Callable[[], bool] | None) -> float:
    """Seconds until `reached()`, or until the command ends."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seconds = None
    while process.poll() is None:
        if seconds is None and reached is not None and reached():
            seconds = time.perf_counter() - start
        time.sleep(0.005)
    return time.perf_counter() - start if seconds is None else seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    measured = {}
    for name, (ours, theirs) in COMPARISONS.items():
        other = Minimal if "minimal" in name else Side
        measured[name] = ratio(Side(*ours), other(*theirs), arguments.steps)
    measured["start to first step / (import torch + wandb.init)"] = start_ratio(5)
    for name, numbers in measured.items():
        print(f"{name:<52} {numbers['ratio']:.3f}   [{numbers['low']:.3f}, {numbers['high']:.3f}]")
    milliseconds = parts(Side(QUIET), max(arguments.steps // 4, 5))
    print("\nmilliseconds of a step, by part (telemetry: of a step at which it reads)")
    for name, number in milliseconds.items():
        print(f"{name:<52} {number:7.3f}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    facts = {"machine": runs.machine(), "versions": runs.versions(), "git_commit": runs.git_commit()}
    (arguments.out / "train.json").write_text(
        json.dumps({"measured": measured, "parts": milliseconds, **facts}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
