"""A user's own norm or placement, called on a few tokens: what would fail in the middle of a run, or mislead."""

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
    random numbers are as they were."""
    strict = torch.are_deterministic_algorithms_enabled()
    if strict:
        torch.use_deterministic_algorithms(False)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        if strict:
            torch.use_deterministic_algorithms(True)


def norm(make: Callable[[int], Any], name: str, width: int, context: int, device: torch.device) -> None:
    """Refuses what is no norm, and one whose training output sees later tokens though its class does not say so."""
    _call(make, name, torch.ones(2, 2, width), device)
    with undisturbed(device):
        causal = getattr(make(width), "causal", True)
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
            y = made(x.to(device), torch.ones(x.shape[:2], dtype=torch.bool, device=device))
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

    def apart(one: Tensor) -> bool:
        return bool(((one - y).abs() > ROUNDING * y.abs().max()).any()) if y.numel() else False

    return apart(changed) and not apart(again)


def placement(config: Config) -> None:
    """Refuses a placement whose first and last block cannot be built and called, or leave a norm of theirs out."""
    device, name, called = config.device, config.cell["placement"], set()
    model = replace(config.model, depth=min(config.model.depth, 2), context=min(config.model.context, LENGTH))
    stage = "built"
    try:
        with undisturbed(device), torch.no_grad():
            built = Transformer(model, 2, norm=config.norm, placement=config.placement).to(device)
            blocks: Any = built.blocks
            sites = {site for block in blocks for site in block.norm}
            for site, made in ((site, made) for block in blocks for site, made in block.norm.items()):
                made.register_forward_hook(lambda *_, site=site: called.add(site))
            stage = "called"
            shape = 2, model.context
            tokens = torch.zeros(shape, dtype=torch.long, device=device)
            built(tokens, torch.ones(shape, dtype=torch.bool, device=device))
    except Exception as error:
        raise UserError(
            f"placement={name}: cannot be {stage} ({type(error).__name__}: {error}); it must be a Block with `sites` "
            "for its norms, `final_norm`, and a `forward` that takes and gives the stream (B, T, C)"
        ) from error
    for site in sorted(sites - called):
        raise UserError(
            f"placement={name}: no block calls its norm at {site}; call it, or give one of the names inside "
            f"a sublayer ({', '.join(INSIDE)}) and hand `self.norm` on to that sublayer"
        )
