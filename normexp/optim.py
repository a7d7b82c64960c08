"""Optimisers, parameter groups by module type, and the learning rate as a pure function of the step."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normexp.fields import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, UnitInterval
from normexp.model import in_norm


@dataclass(frozen=True)
class OptimConfig:
    name: Literal["adamw", "stableadamw", "sgd"]
    lr: PositiveFloat  # the peak, reached at the end of the warmup
    warmup_steps: NonNegativeInt
    decay: Literal["constant", "cosine", "linear", "inverse_sqrt", "wsd"]
    final_lr_fraction: Fraction  # of the peak, where cosine, linear and wsd end
    decay_fraction: Fraction  # of all steps, the last ones, in which wsd decays
    weight_decay: NonNegativeFloat  # decoupled under adamw and stableadamw, an L2 term under sgd
    betas: tuple[UnitInterval, UnitInterval]  # adamw, stableadamw
    eps: PositiveFloat  # likewise
    momentum: UnitInterval  # sgd


def learning_rate(step: int, config: OptimConfig, steps: int) -> float:
    """The rate of step 1, 2, … `steps`: lr · min(1, step / warmup_steps), so step 1 is never 0; then, with progress p
    from 0 at the end of the warmup to 1 at the last step and f = final_lr_fraction,

    constant: lr; linear: lr · (1 − (1 − f) p); cosine: lr · (f + (1 − f)(1 + cos πp) / 2);
    inverse_sqrt: lr · √(warmup_steps / step), a warmup of 0 counting as 1 (1706.03762);
    wsd: lr, and linear over the last decay_fraction of all steps (2404.06395), as far as the warmup leaves them.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.decay == "constant":
        return config.lr
    if config.decay == "inverse_sqrt":
        return config.lr * math.sqrt(max(config.warmup_steps, 1) / step)
    start = config.warmup_steps
    if config.decay == "wsd":
        start = max(start, round((1 - config.decay_fraction) * steps))
    progress = max(step - start, 0) / max(steps - start, 1)
    left = 0.5 * (1 + math.cos(math.pi * progress)) if config.decay == "cosine" else 1 - progress
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * left)


TINY = torch.finfo(torch.float32).tiny  # 0 / 0 is no share of a gradient


class StableAdamW(torch.optim.Optimizer):
    """AdamW that moves each tensor by lr / max(1, RMS_t), RMS_t = √mean(g² / max(v, ε²)) with g in v (2304.13013,
    algorithm 2): when gradients outrun their second moment, the step is not larger than Adam's usual one.

    The moments are kept unbiased by β̂ = β (1 − β^(t−1)) / (1 − β^t), so the first v is g².
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_age: dict[int, list[Tensor]] = {}  # steps taken: some may have had no gradient at times
            for p in group["params"]:
                if p.grad is not None:
                    by_age.setdefault(int(self._state(p)["step"]), []).append(p)
            for parameters in by_age.values():
                self._step(group, parameters, [p.grad for p in parameters if p.grad is not None])

    def _step(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        states = [self._state(p) for p in parameters]
        first, second = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        for state in states:
            state["step"] += 1
        steps = int(states[0]["step"])
        beta1, beta2 = (beta * (1 - beta ** (steps - 1)) / (1 - beta**steps) for beta in group["betas"])
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        shares = torch._foreach_div(gradients, torch._foreach_clamp_min(second, max(group["eps"] ** 2, TINY)))
        torch._foreach_mul_(shares, gradients)
        rms = torch.stack([share.mean() for share in shares]).sqrt()
        rates = (group["lr"] / rms.clamp(min=1)).unbind()
        roots = torch._foreach_sqrt(second)
        torch._foreach_add_(roots, group["eps"])
        moves = torch._foreach_div(first, roots)
        torch._foreach_add_(moves, torch._foreach_mul(parameters, group["weight_decay"]))
        torch._foreach_mul_(moves, rates)
        torch._foreach_sub_(parameters, moves)

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state


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
    if config.name == "stableadamw":
        return StableAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
