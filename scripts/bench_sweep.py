"""What a sweep costs beside its training, and what a second process saves, measured on 16 cells.

    python scripts/bench_sweep.py [--steps 200] [--repeats 1] [--out results/bench]

Prints a table and writes `sweep.json`. Both sides run in turn, on the same cells; run it on an idle machine.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from normexp import runs

CELLS = ["norm=ln,rms", "placement=pre,post", "seed=0,1,2,3"]
SIDES = {"one process": [], "two processes": ["hydra/launcher=local", "hydra.launcher.n_jobs=2"]}


def sweep(results: Path, steps: int, launcher: list[str]) -> float:
    """Seconds from the command to its end."""
    limits = [f"train.steps={steps}", "train.eval_batches=1", f"results={results}"]  # an evaluation has no clock
    command = [sys.executable, "-m", "normexp.train", "-m", *CELLS, *limits, *launcher]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def beyond_training(results: Path) -> list[float]:
    """Seconds of each cell but the first of a process: from the end of the one before it to its own, less its steps."""
    ends: dict[str, list[tuple[float, float]]] = {}
    for run in (results / "runs").iterdir():
        process = (run / "lock").read_text().split()[1]
        summary = run / "summary.json"
        ends.setdefault(process, []).append((summary.stat().st_mtime, json.loads(summary.read_text())["seconds"]))
    pairs = [pair for own in ends.values() for pair in zip(sorted(own), sorted(own)[1:], strict=False)]
    return [end - before - seconds for (before, _), (end, seconds) in pairs]


def measure(steps: int, repeats: int) -> dict[str, dict[str, float]]:
    walls: dict[str, list[float]] = {side: [] for side in SIDES}
    again: dict[str, list[float]] = {side: [] for side in SIDES}
    beyond: dict[str, list[float]] = {side: [] for side in SIDES}
    for index in range(repeats):
        for side in list(SIDES)[:: 1 if index % 2 == 0 else -1]:  # A B, B A, …
            with tempfile.TemporaryDirectory() as results:
                walls[side].append(sweep(Path(results), steps, SIDES[side]))
                beyond[side] += beyond_training(Path(results))
                again[side].append(sweep(Path(results), steps, SIDES[side]))
    return {
        side: {
            "seconds": statistics.median(walls[side]),
            "seconds_once_finished": statistics.median(again[side]),
            "beyond_training_a_cell": statistics.median(beyond[side]),
            "beyond_training_at_most": max(beyond[side]),
        }
        for side in SIDES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    arguments = parser.parse_args()
    measured = measure(arguments.steps, arguments.repeats)
    speedup = measured["one process"]["seconds"] / measured["two processes"]["seconds"]
    print(f"{'':<16}" + "".join(f"{name:>26}" for name in measured["one process"]))
    for side, numbers in measured.items():
        print(f"{side:<16}" + "".join(f"{number:>26.2f}" for number in numbers.values()))
    print(f"two processes are {speedup:.2f} times as fast as one")
    arguments.out.mkdir(parents=True, exist_ok=True)
    facts = {"machine": runs.machine(), "versions": runs.versions(), "git_commit": runs.git_commit()}
    about = {"cells": 16, "steps": arguments.steps, "repeats": arguments.repeats, "speedup": speedup}
    (arguments.out / "sweep.json").write_text(json.dumps({"measured": measured, **about, **facts}, indent=2) + "\n")


if __name__ == "__main__":
    main()
