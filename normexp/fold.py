"""FlashNorm's fold for inference: gain and bias of a norm move into the linear layers that read it (2407.09577)."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from normexp.experts import MoE, plain_name
from normexp.model import Transformer, hooks
from normexp.norms import Identity


def fold_norms(model: Transformer) -> Transformer:
    """A copy of `model` in evaluation mode whose norms have no parameters, and which computes the same logits.

    With n(x) = u(x) · γ + β, W n(x) + b = (W γ) u(x) + (b + W β): exact but for rounding. BatchNorm, linear in
    evaluation, goes whole. ValueError names the norm whose output does not go to linear layers alone (in Post-Norm it
    is the stream) or that cannot be written so, and the layer that is wrapped, hooked or not a plain nn.Linear. Not
    for training: the optimiser would see other parameters.
    """
    for hook in hooks(model, "aux_loss"):
        hook()  # a loss that was never handed over is part of a graph, which cannot be copied
    folded = copy.deepcopy(model).eval()
    _refuse(folded.embed.norm, "embed.norm", "the embeddings")
    block: Any
    for layer, block in enumerate(folded.blocks):
        for site, norm in block.attn.norm.items():
            _refuse(norm, f"blocks.{layer}.attn.norm.{site}", "the attention")
        if isinstance(block.mlp, MoE):
            _fold_experts(block.mlp, f"blocks.{layer}.mlp")
        for site, norm in block.norm.items():
            name = f"blocks.{layer}.norm.{site}"
            if site not in block.feeds:
                _refuse(norm, name, type(block).__name__)
                continue
            block.norm[site] = _fold(name, norm, _readers(block, layer, site))
    if folded.final_norm is not None:
        head = _linear("head", folded.head)
        if folded.config.tied:
            head.weight = nn.Parameter(head.weight.detach().clone())  # the embedding keeps its own
        folded.final_norm = _fold("final_norm", folded.final_norm, [head])
    return folded


def _readers(block: Any, layer: int, site: str) -> list[nn.Linear]:
    """The linear layers that read the norm at `site`; a block may lack some, as `mlp.gate` without a gated MLP, or have
    one for each expert, and a router beside them."""
    name, kind = f"blocks.{layer}.norm.{site}", type(block).__name__
    if forward_is_newer_than(block, "feeds"):
        raise ValueError(
            f"{name}: {kind} has a `forward` of its own and the `feeds` of its base class; "
            f"give {kind} its own `feeds` if they hold for it"
        )
    paths = (*block.feeds[site], *(("mlp.router",) if "mlp.in" in block.feeds[site] else ()))
    found = {path: module for path, module in block.named_modules() if plain_name(path) in paths}
    return [_linear(f"blocks.{layer}.{path}", module) for path, module in found.items()]


def _fold_experts(mlp: MoE, name: str) -> None:
    """The norms that router and experts own, each into its owner's first matrices."""
    for owner, norm in mlp.norm.items():
        paths = ("router",) if owner == "router" else (f"experts.{owner}.in", f"experts.{owner}.gate")
        readers = [_linear(f"{name}.{path}", module) for path, module in mlp.named_modules() if path in paths]
        mlp.norm[owner] = _fold(f"{name}.norm.{owner}", norm, readers)


def _linear(name: str, module: nn.Module) -> nn.Linear:
    if type(module) is not nn.Linear:  # a subclass need not be x W + b of the weight that is found in it
        raise ValueError(
            f"{name}: is a {type(module).__name__}, not a plain nn.Linear, so no norm can be folded into it"
        )
    _refuse_hooks(name, module)
    return module


def _refuse_hooks(name: str, module: nn.Module) -> None:
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        raise ValueError(f"{name}: has forward hooks, which folding would not keep; remove them first")


def forward_is_newer_than(module: nn.Module | type, attribute: str) -> bool:
    """Whether a class below the one that states `attribute` changed what the statement is about."""
    kinds = module.__mro__ if isinstance(module, type) else (module, *type(module).__mro__)
    lineage = [vars(kind) for kind in kinds]
    forward, stated = (next(i for i, own in enumerate(lineage) if key in own) for key in ("forward", attribute))
    return forward < stated


def _refuse(norm: nn.Module | None, name: str, where: str) -> None:
    if norm is not None and not isinstance(norm, Identity):
        raise ValueError(f"{name}: its output in {where} does not go to linear layers alone, so it cannot be folded")


def _fold(name: str, norm: Any, readers: list[nn.Linear]) -> nn.Module:
    if type(norm) is Identity:
        return norm
    kind = type(norm).__name__
    if not hasattr(norm, "unfold"):
        raise ValueError(f"{name}: {kind} does not say how to `unfold`, so it cannot be folded")
    if forward_is_newer_than(norm, "unfold"):
        raise ValueError(f"{name}: {kind} has a `forward` of its own and the `unfold` of its base class; give it both")
    _refuse_hooks(name, norm)
    if "rounded" in vars(norm):
        raise ValueError(f"{name}: its statistics are rounded (model.quant_at), which folding would not keep")
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
