"""Optimisers, parameter groups by module type, and the learning rate as a pure function of the step."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from normexp.fields import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, UnitInterval
from normexp.model import in_norm


@dataclass(frozen=True)
class OptimConfig:
    name: Literal["adamw", "sgd"]
    lr: PositiveFloat  # the peak, reached at the end of the warmup
    warmup_steps: NonNegativeInt
    decay: Literal["constant", "cosine"]
    final_lr_fraction: Fraction  # of the peak, where a decay ends
    weight_decay: NonNegativeFloat  # decoupled under adamw, an L2 term under sgd
    betas: tuple[UnitInterval, UnitInterval]  # adamw
    eps: PositiveFloat  # adamw
    momentum: UnitInterval  # sgd


def learning_rate(step: int, config: OptimConfig, steps: int) -> float:
    """The rate of step 1, 2, … `steps`: lr · min(1, step / warmup_steps), so step 1 is never 0; then the decay.

    Cosine: from lr at the end of the warmup to final_lr_fraction · lr at the last step, along half a cosine.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.decay == "constant":
        return config.lr
    progress = (step - config.warmup_steps) / (steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * cosine)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups: the matrices of linear and embedding layers decay, all else (biases, and whatever a norm has) never.

    The rule goes by module type, so every norm is treated alike; each trainable parameter is in exactly one group.
    """
    decayed = {
        id(module.weight)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding) and not in_norm(name)
    }
    matrices = [p for p in model.parameters() if p.requires_grad and id(p) in decayed]
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in decayed]
    groups = ({"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Fused where torch has a fused form for the device: on a CPU it saves most of the optimiser's time."""
    groups = parameter_groups(model, config.weight_decay)
    fused = next(model.parameters()).device.type in ("cpu", "cuda", "mps")
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
