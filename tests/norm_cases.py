"""Every norm as its yaml builds it, and its definition written a second time, in float64 and with plain loops."""

import importlib
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from torch import Tensor, nn

import normexp

CONTEXT, DIM = 12, 16
STATISTICS = ("batch_time", "position", "cumulative")


def maker(choice: str, **changes: Any) -> Callable[..., nn.Module]:
    """The factory of conf/norm/<choice>.yaml, with a context of 12."""
    settings = yaml.safe_load((normexp.CONF / "norm" / f"{choice}.yaml").read_text(encoding="utf-8"))
    module, _, name = settings.pop("_target_").rpartition(".")
    settings = {field: value for field, value in settings.items() if not field.startswith("_")}
    if "context" in settings:
        settings["context"] = CONTEXT
    return partial(getattr(importlib.import_module(module), name), **settings | changes)


ALL = {
    "ln": maker("ln"),
    "ln-offset": maker("ln", gain_offset=1.0, cast="float32"),
    "rms": maker("rms"),
    "rms-offset": maker("rms", gain_offset=1.0, cast="float32"),
    "prms": maker("prms", share=0.25),
    "scale": maker("scale"),
    "seednorm": maker("seednorm"),
    "dyt": maker("dyt"),
    "derf": maker("derf"),
    "none": maker("none"),
    **{f"bn-{stats}": maker("bn", stats=stats) for stats in STATISTICS},
    "rbn": maker("rbn"),
    "switch": maker("switch"),
    "power": maker("power", warmup_steps=0),
    "power-warmup": maker("power"),
}
ACROSS = [name for name in ALL if name.startswith(("bn", "rbn", "switch", "power"))]  # statistics cross samples
LEAKS = {"bn-batch_time", "rbn", "switch", "power-warmup"}  # the training output at t sees tokens after t


def inputs(rows: int = 4, seed: int = 0, scale: float = 3.0, shift: float = 1.5) -> Tensor:
    return shift + scale * torch.randn(rows, CONTEXT, DIM, generator=torch.Generator().manual_seed(seed))


def right_mask(lengths: list[int]) -> Tensor:
    return torch.arange(CONTEXT) < torch.tensor(lengths).unsqueeze(1)


def perturbed(norm: nn.Module, seed: int = 5) -> nn.Module:
    """Its parameters moved from where they start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return norm


def definition(name: str, norm: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    """What `norm`, in training and not yet used, makes of x (B, T, C), float64."""
    kind, _, variant = name.partition("-")
    learned = {key: value.detach().double() for key, value in norm.named_parameters()}
    p = SimpleNamespace(**{"weight": torch.ones(()).double(), "bias": torch.zeros(()).double()} | learned)
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    if name.startswith("bn-"):
        x = x * real[..., None]  # a pad counts as 0
    y = torch.empty_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            y[b, t] = DEFINITIONS[kind](x[b, t], p, x, real, (t, variant))
    return y


def _rms(x, eps):
    return x / math.sqrt(sum(value**2 for value in x) / len(x) + eps)


def _gain(p, where):
    return p.weight + 1 if where[1] == "offset" else p.weight


def _ln(x, p, whole, real, where):
    return _gain(p, where) * _rms(x - sum(x) / len(x), 1e-5) + p.bias


def _rms_norm(x, p, whole, real, where):
    return _gain(p, where) * _rms(x, 1e-6)


def _prms(x, p, *_):
    first = x[: len(x) // 4]
    return p.weight * x / math.sqrt(sum(value**2 for value in first) / len(first) + 1e-6)


def _scale(x, p, *_):
    return p.weight * x / max(math.sqrt(sum(value**2 for value in x)), 1e-5)


def _seednorm(x, p, *_):
    share = math.tanh(sum(a * b for a, b in zip(x, p.beta, strict=True)))
    return (p.weight + share * p.alpha) * _rms(x, 1e-6)


def _dyt(x, p, *_):
    return p.weight * x.new_tensor([1 - 2 / (math.exp(2 * p.alpha * value) + 1) for value in x]) + p.bias


def _derf(x, p, *_):
    return p.weight * x.new_tensor([math.erf(p.alpha * value + p.shift) for value in x]) + p.bias


def _samples(x, real, where):
    """The tokens that a statistic is over: a list of (C)."""
    t, variant = where
    part = {"position": [t], "cumulative": range(t + 1)}.get(variant, range(x.shape[1]))
    return torch.stack([x[b, s] for b in range(x.shape[0]) for s in part if real[b, s]])


def _bn(x, p, whole, real, where):
    samples = _samples(whole, real, where)
    return p.weight * (x - samples.mean(0)) / (samples.var(0, correction=0) + 1e-5).sqrt() + p.bias


def _switch(x, p, whole, real, where):
    samples = _samples(whole, real, where)
    of_mean, of_var = (logits.exp() / logits.exp().sum() for logits in (p.mean_logits, p.var_logits))
    mean = of_mean[0] * x.mean() + of_mean[1] * samples.mean(0)
    var = of_var[0] * x.var(correction=0) + of_var[1] * samples.var(0, correction=0)
    return p.weight * (x - mean) / (var + 1e-5).sqrt() + p.bias


def _power(x, p, whole, real, where):
    phi = torch.ones(len(x)).double()
    if where[1] == "warmup":
        squares = _samples(whole, real, where) ** 2
        phi = (squares / (squares.mean(1, keepdim=True) + 1e-5)).mean(0)
    return p.weight * _rms(x, 1e-5) / (phi + 1e-5).sqrt() + p.bias


DEFINITIONS: dict[str, Callable[..., Tensor]] = {
    "ln": _ln,
    "rms": _rms_norm,
    "prms": _prms,
    "scale": _scale,
    "seednorm": _seednorm,
    "dyt": _dyt,
    "derf": _derf,
    "none": lambda x, *_: x,
    "bn": _bn,
    "rbn": _bn,
    "switch": _switch,
    "power": _power,
}
