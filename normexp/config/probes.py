"""A user's own norm or placement, called on a few tokens: what would fail in the middle of a run, or mislead."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normexp.config.tree import Config
from normexp.fields import UserError, show
from normexp.layers import INSIDE
from normexp.model import Transformer

LENGTH = 16  # tokens among which a later one is looked for
ROUNDING = 1e-4  # of the largest output: beyond any reordering of float32 sums over so few tokens


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Inside, operations need not be deterministic, as an earlier cell in this process may have asked; afterwards the
    random numbers of torch are as they were."""
    strict = torch.are_deterministic_algorithms_enabled()
    if strict:
        torch.use_deterministic_algorithms(False)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        if strict:
            torch.use_deterministic_algorithms(True)


def norm(
    make: Callable[[int], Any], name: str, width: int, context: int, device: torch.device, *, causal: bool
) -> None:
    """Refuses what is no norm, and one whose training output sees later tokens though it is said to be `causal`."""
    _call(make, name, torch.ones(2, 2, width), device)
    if causal and sees_later_tokens(make, name, width, min(context, LENGTH), device):
        raise UserError(
            f"norm={name}: its training output changes with later tokens, so that the loss sees what it predicts; take "
            "its statistics over other dimensions, or write `causal = False` in its class if this is to be studied"
        )


def _call(make: Callable[[int], Any], name: str, x: Tensor, device: torch.device) -> Tensor:
    """The training output of a new norm for x (B, T, C). Every call draws the same random numbers."""
    try:
        with undisturbed(device):
            made = make(x.shape[-1]).to(device)
            awaken(made)
            y = made(x.to(device, copy=True), torch.ones(x.shape[:2], dtype=torch.bool, device=device))
        fault = "" if isinstance(made, nn.Module) and y.shape == x.shape else f"returns {show(getattr(y, 'shape', y))}"
    except Exception as error:
        fault = f"fails ({type(error).__name__}: {error})"
    if fault:
        raise UserError(
            f"norm={name}: must be a torch.nn.Module called as norm(x, mask) that returns the shape of x; with x of "
            f"shape {tuple(x.shape)} it {fault}"
        )
    return y.detach()


def sees_later_tokens(make: Callable[[int], Any], name: str, width: int, length: int, device: torch.device) -> bool:
    """Whether another last token changes outputs before it. Not told of a norm whose output differs by the call."""
    generator = torch.Generator().manual_seed(0)
    x, other = torch.randn(2, 2, length, width, generator=generator)
    moved = torch.cat([x[:, :-1], 10 * other[:, -1:] + 1], dim=1)
    y, again, changed = (_call(make, name, values, device)[:, :-1].float() for values in (x, x, moved))
    return apart(y, changed) and not apart(y, again)


def placement(config: Config) -> None:
    """Refuses a placement that cannot be built and called, leaves a norm of its blocks out, or sees later tokens."""
    key = json.dumps([config.resolved[group] for group in ("norm", "placement", "model")], sort_keys=True, default=str)
    if key not in _sound:
        _try(config, config.cell["placement"])
        _sound.add(key)


_sound: set[str] = set()  # that have been tried: a sweep composes each of them many times


def _try(config: Config, name: str) -> None:
    model = replace(config.model, context=min(config.model.context, LENGTH), dropout=0.0, quant="none")
    called: set[str] = set()
    stage = "built"
    try:
        with undisturbed(config.device), torch.no_grad():
            built = Transformer(model, 2, norm=config.norm, placement=config.placement).to(config.device)
            blocks: Any = built.blocks
            sites = [(site, made) for block in blocks for site, made in block.norm.items()]
            for site, made in sites:
                made.register_forward_hook(lambda *_, site=site: called.add(site))
            stage = "called"
            ahead = _looks_ahead(built, model.context, config.device)
    except Exception as error:
        raise UserError(
            f"placement={name}: cannot be {stage} ({type(error).__name__}: {error}); it must be a Block with `sites` "
            "for its norms, `final_norm`, and a `forward` that takes and gives the stream (B, T, C)"
        ) from error
    for site in sorted({site for site, _ in sites} - called):
        raise UserError(
            f"placement={name}: no block calls its norm at {site}; call it, or give one of the names inside "
            f"a sublayer ({', '.join(INSIDE)}) and hand `self.norm` on to that sublayer"
        )
    if ahead:
        raise UserError(
            f"placement={name}: a token's logits change with later tokens, so that the loss sees what it predicts; let "
            "`forward` mix no positions but by the attention, or write `causal = False` in its class"
        )


def _looks_ahead(model: nn.Module, length: int, device: torch.device) -> bool:
    """Whether another last token changes logits before it, though no module says so."""
    tokens = torch.zeros(2, length, dtype=torch.long, device=device)
    moved = tokens.clone()
    moved[:, -1] = 1
    mask = torch.ones_like(tokens, dtype=torch.bool)
    awaken(model)
    y, again, changed = (model(given, mask)[:, :-1].float() for given in (tokens, tokens, moved))
    causal = all(getattr(module, "causal", True) for module in model.modules())
    return causal and apart(y, changed) and not apart(y, again)


@torch.no_grad()
def awaken(module: nn.Module) -> None:
    """A parameter that begins at 0 hides what it scales: it becomes 1."""
    for parameter in module.parameters():
        if not parameter.any():
            parameter.fill_(1)


def apart(y: Tensor, other: Tensor) -> bool:
    return bool(((other - y).abs() > ROUNDING * y.abs().max()).any()) if y.numel() else False
