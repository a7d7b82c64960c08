"""Synthetic run folders in the run folder's format, for the tests of the reading side (no training, no torch).

The shapes follow the pilot's values: a trained cell falls from ln 65 to about 2.2 nats, a collapsed one stands at the
unigram entropy with vanishing gradients in the early layers, a diverged one ends in non-finite numbers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

UNIGRAM_ENTROPY = 3.024  # nats
VOCABULARY = 65
MATRICES = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.in", "mlp.out")
TARGETS = {"ln": "LayerNorm", "rms": "RMSNorm", "bn": "BatchNorm", "pre": "PreNorm", "post": "PostNorm"}
NORM_FIELDS: dict[str, dict[str, Any]] = {
    "bn": {"eps": 1e-5, "affine": True, "momentum": 0.1, "stats": "batch_time"},
    "rms": {"eps": 1e-6, "affine": True, "cast": "input"},
}


def config(norm: str, placement: str, depth: int, warmup: int, seed: int, **changes: Any) -> dict[str, Any]:
    """A resolved config; `changes` are dotted paths with `__` for the dot (`optim__lr=1e-2`)."""
    node: dict[str, Any] = {
        "seed": seed,
        "device": "cpu",
        "results": "results",
        "norm": {"_target_": f"normexp.norms.{TARGETS.get(norm, norm)}", "_partial_": True}
        | NORM_FIELDS.get(norm, {"eps": 1e-5, "affine": True, "cast": "input"}),
        "placement": {"_target_": f"normexp.placements.{TARGETS.get(placement, placement)}", "_partial_": True},
        "model": {"depth": depth, "width": 64, "heads": 4, "context": 64, "mlp": "relu", "init": "xavier"},
        "data": {"_target_": "normexp.data.kjv", "_partial_": True, "tokenizer": "characters", "shape": "packed"},
        "optim": {"name": "adamw", "lr": 0.003, "warmup_steps": warmup, "decay": "constant", "betas": [0.9, 0.98]},
        "train": {"steps": 400, "batch_size": 8, "grad_accum": 1, "clip": 0.0, "dtype": "float32"},
        "telemetry": {"every": 10, "dense_steps": 20},
        "tracker": {"mode": "disabled", "group": None},
        "cell": {"norm": norm, "placement": placement, "model": "tiny", "data": "kjv", "optim": "adamw"},
    }
    for path, value in changes.items():
        group, _, name = path.rpartition("__")
        (node[group] if group else node)[name] = value
    return node


def run_id(node: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(node, sort_keys=True).encode()).hexdigest()[:10]
    cell = f"{node['cell']['norm']}-{node['cell']['placement']}"
    return f"{cell}-L{node['model']['depth']}-w{node['optim']['warmup_steps']}-s{node['seed']}-{digest}"


def write_run(
    root: Path,
    node: dict[str, Any],
    verdict: str = "trained",
    final: float = 2.2,
    status: str = "finished",
    **known: Any,
) -> Path:
    """One run folder; a run that is not finished has the first half of its rows and a torn last line. `known` goes
    into the summary."""
    folder = root / run_id(node)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(node, sort_keys=False))
    rows = list(_rows(node, verdict, final, np.random.default_rng(node["seed"] + 1)))
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    if status != "finished":
        text = text[: len(text) // 2]
    (folder / "metrics.jsonl").write_text(text)
    summary = _summary(node, folder.name, verdict if status == "finished" else None, final, status)
    (folder / "summary.json").write_text(json.dumps(summary | known, allow_nan=False))
    return folder


def _summary(node: dict[str, Any], name: str, verdict: str | None, final: float, status: str) -> dict[str, Any]:
    loss = None if verdict == "diverged" else final
    return {
        "run_id": name,
        "status": status,
        "verdict": verdict,
        "first_bad_step": 5 if verdict in ("collapsed", "diverged") else None,
        "first_bad_layer": "layer_00" if verdict in ("collapsed", "diverged") else None,
        "reason": f"validation loss {final:.3f}",
        "val_loss": loss,
        "val_step": node["train"]["steps"],
        "best_val_loss": loss,
        "bits_per_byte": loss and loss / float(np.log(2)),
        "initial_loss": 4.6,
        "unigram_entropy": UNIGRAM_ENTROPY,
        "vocab_size": VOCABULARY,
        "loss_spike_score": 0.0,
        "grad_spike_score": 0.002,
        "skipped_steps": 0,
        "steps": node["train"]["steps"],
        "tokens": node["train"]["steps"] * 512,
        "tokens_per_second": 21000.0,
        "parameters": 50000 * node["model"]["depth"],
        "seconds": 3.0 * node["model"]["depth"],
        "cell": node["cell"],
        "depth": node["model"]["depth"],
        "warmup_steps": node["optim"]["warmup_steps"],
        "lr": node["optim"]["lr"],
        "seed": node["seed"],
        "init": node["model"]["init"],
        "norm_path": "torch",
        "versions": {"torch": "2.13.0", "normexp": "0.1.0"},
        "git_commit": "0123456789abcdef",
        "machine": "2 cores",
        "nonfinite": ["val_loss", "best_val_loss", "bits_per_byte"] if verdict == "diverged" else [],
    }


def _rows(node: dict[str, Any], verdict: str, final: float, random: np.random.Generator) -> Iterator[dict[str, Any]]:
    steps, every = node["train"]["steps"], node["telemetry"]["every"]
    yield {"step": 0, "tokens": 0, "time": 0.0, "val/loss": 4.6, "nonfinite": []}
    for step in range(1, steps + 1):
        loss = (
            final
            + (4.6 - final) * float(np.exp(-step / (steps / 14 + node["optim"]["warmup_steps"] / 8)))
            + 0.03 * float(random.normal())
        )
        bad = verdict == "diverged" and step > steps // 4
        numbers = {"train/loss": loss, "train/lr": node["optim"]["lr"], "grad_norm/total": 1 + random.random()}
        if step % every == 0 or step <= node["telemetry"]["dense_steps"]:
            numbers |= _layers(node["model"]["depth"], step, verdict, random)
        if step % 50 == 0:
            numbers["val/loss"] = loss
        row: dict[str, Any] = {"step": step, "tokens": 512 * step, "time": 0.01 * step}
        row |= {path: None if bad else round(float(value), 6) for path, value in numbers.items()}
        yield row | {"nonfinite": sorted(numbers) if bad else []}


def _layers(depth: int, step: int, verdict: str, random: np.random.Generator) -> dict[str, float]:
    """Per-layer numbers: even over the layers where a run trains, vanishing from the first one where it collapses."""
    fall = 0.9 * min(1.0, step / 6) if verdict == "collapsed" else 0.3 * float(random.normal()) / depth
    numbers = {"grad_norm/embed": 0.1, "grad_norm/head": 1.0, "grad_norm/final_norm": 0.2}
    for layer in range(depth):
        size = 0.5 * float(np.exp(-fall * (depth - 1 - layer))) * (1 + 0.2 * random.random())
        for group in ("grad_norm", "weight_norm", "update_ratio", "rms_t"):
            numbers[f"{group}/layer_{layer:02d}"] = size
            numbers |= {f"{group}/layer_{layer:02d}/{matrix}": size / 2 for matrix in MATRICES}
    return numbers | {"layer_ratio": numbers["grad_norm/layer_00"] / numbers[f"grad_norm/layer_{depth - 1:02d}"]}


def outcome(node: dict[str, Any]) -> tuple[str, float]:
    """The pilot's story: Post-LN needs warmup, more of it when deeper, and at depth 12 no warmup is enough."""
    norm = node["cell"]["norm"]
    noise = float(np.random.default_rng([node["seed"], node["model"]["depth"], *norm.encode()]).normal(0, 0.015))
    placement, depth, warmup = node["cell"]["placement"], node["model"]["depth"], node["optim"]["warmup_steps"]
    if placement != "post" or warmup >= 25 * (depth - 2) ** 1.5 or (depth == 6 and warmup == 50 and node["seed"] == 1):
        return "trained", 2.32 + noise - 0.01 * depth + {"bn": 0.04, "rms": 0.02}.get(norm, 0.0)
    if norm == "bn" and depth == 12:
        return "diverged", 5.0
    return "collapsed", UNIGRAM_ENTROPY + noise / 5


def write_sweep(results: Path, name: str, nodes: Iterable[dict[str, Any]], missing: int = 0) -> Path:
    """Runs under `results/runs` and the sweep folder that lists them; the last `missing` cells have no folder."""
    nodes = list(nodes)
    for node in nodes[: len(nodes) - missing]:
        write_run(results / "runs", node, *outcome(node))
    folder = results / "sweeps" / name
    folder.mkdir(parents=True)
    cells = [{"overrides": [f"norm={n['cell']['norm']}", f"seed={n['seed']}"], "run_id": run_id(n)} for n in nodes]
    sweep = {"name": name, "command": f"python -m normexp.train -m +sweep={name}", "overrides": [], "cells": cells}
    (folder / "sweep.json").write_text(json.dumps(sweep | {"status": "finished"}))
    return folder


def grid(
    norms: str = "bn ln rms", placements: str = "pre post", depths: tuple[int, ...] = (2, 6, 12),
    warmups: tuple[int, ...] = (0, 50, 200), seeds: int = 3, **changes: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    cells = itertools.product(norms.split(), placements.split(), depths, warmups, range(seeds))
    return [config(*cell, **changes) for cell in cells]
