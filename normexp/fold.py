"""FlashNorm's fold for inference: gain and bias of a norm move into the linear layers that read it (2407.09577)."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from normexp.model import Transformer
from normexp.norms import Identity


def fold_norms(model: Transformer) -> Transformer:
    """A copy of `model` in evaluation mode whose norms have no parameters, and which computes the same logits.

    With n(x) = u(x) · γ + β, W n(x) + b = (W γ) u(x) + (b + W β): exact but for rounding. BatchNorm, linear in
    evaluation, goes whole. ValueError names the norm whose output does not go to linear layers alone (in Post-Norm it
    is the stream) or that cannot be written so. Not for training: the optimiser would see other parameters.
    """
    folded = copy.deepcopy(model).eval()
    _refuse(folded.embed.norm, "embed.norm", "the embeddings")
    block: Any
    for layer, block in enumerate(folded.blocks):
        for site, norm in block.attn.norm.items():
            _refuse(norm, f"blocks.{layer}.attn.norm.{site}", "the attention")
        for site, norm in block.norm.items():
            name = f"blocks.{layer}.norm.{site}"
            if site not in block.feeds:
                _refuse(norm, name, type(block).__name__)
                continue
            readers = [reader for path in block.feeds[site] if (reader := _submodule(block, path)) is not None]
            block.norm[site] = _fold(name, norm, readers)
    if folded.final_norm is not None:
        if folded.config.tied:
            folded.head.weight = nn.Parameter(folded.head.weight.detach().clone())  # the embedding keeps its own
        folded.final_norm = _fold("final_norm", folded.final_norm, [folded.head])
    return folded


def _submodule(block: nn.Module, path: str) -> nn.Linear | None:
    """None where a block has no such layer, as `mlp.gate` without a gated MLP."""
    found = dict(block.named_modules()).get(path)
    return found if isinstance(found, nn.Linear) else None


def _refuse(norm: nn.Module | None, name: str, where: str) -> None:
    if norm is not None and not isinstance(norm, Identity):
        raise ValueError(f"{name}: its output in {where} does not go to linear layers alone, so it cannot be folded")


def _fold(name: str, norm: Any, readers: list[nn.Linear]) -> nn.Module:
    if isinstance(norm, Identity):
        return norm
    if not hasattr(norm, "unfold"):
        raise ValueError(f"{name}: {type(norm).__name__} does not say how to `unfold`, so it cannot be folded")
    try:
        plain, scale, shift = norm.unfold(readers[0].in_features)
    except ValueError as error:
        raise ValueError(f"{name}: cannot be folded: {error}") from None
    for linear in readers:
        _absorb(linear, scale, shift)
    return plain.eval()


@torch.no_grad()
def _absorb(linear: nn.Linear, scale: Tensor | None, shift: Tensor | None) -> None:
    if shift is not None:
        moved = linear.weight @ shift
        linear.bias = nn.Parameter(moved if linear.bias is None else linear.bias + moved)
    if scale is not None:
        linear.weight = nn.Parameter(linear.weight * scale)
