"""The groups and fields of a config, before they are checked and after."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from normexp.data import Source
from normexp.fields import NonNegativeInt
from normexp.model import ModelConfig
from normexp.optim import OptimConfig
from normexp.placements import Block, NormFactory
from normexp.telemetry import TelemetryConfig
from normexp.trackers import TrackerConfig
from normexp.trainer import TrainConfig

CELL = ("norm", "placement", "model", "data", "optim")  # the groups whose choices name a cell
BY_BLOCK = (  # from the model
    "norm", "attention", "mlp", "width", "hidden", "heads", "kv_heads", "head_width", "layer", "depth",
)  # fmt: skip


@dataclass(frozen=True)
class Tree:
    """The composed config, as yaml files and command line give it."""

    model: ModelConfig
    norm: Mapping[str, Any]
    placement: Mapping[str, Any]
    data: Mapping[str, Any]
    optim: OptimConfig
    train: TrainConfig
    telemetry: TelemetryConfig
    tracker: TrackerConfig
    seed: NonNegativeInt
    device: Literal["auto", "cpu", "cuda", "mps"]
    results: Path


@dataclass(frozen=True)
class Config:
    model: ModelConfig
    norm: NormFactory
    placement: Callable[..., Block]
    data: Callable[..., Source]  # called with cache=<folder>
    optim: OptimConfig
    train: TrainConfig
    telemetry: TelemetryConfig
    tracker: TrackerConfig
    seed: int
    device: torch.device  # the one that `auto` stands for
    results: Path  # absolute
    cell: dict[str, str]  # group -> name of its choice; a recipe where one was chosen
    resolved: dict[str, Any]  # all of it as plain values, for config.yaml and the hash
