"""What a norm, a placement and a model leave without a meaning together."""

from operator import attrgetter
from typing import Any

import torch

from normexp import kernels
from normexp.choices import is_ours
from normexp.config import probes
from normexp.config.tree import Config
from normexp.fields import UserError, show
from normexp.fold import forward_is_newer_than
from normexp.layers import INSIDE
from normexp.norms import Identity
from normexp.placements import Block
from normexp.quantise import quantised
from normexp.runs import out_of_use


def check(config: Config) -> None:
    _check_norm(config)
    _check_placement(config)
    _check_quant(config)
    _check_experts(config)
    if not is_ours(getattr(config.placement, "func", config.placement)):
        probes.placement(config)


def _check_norm(config: Config) -> None:
    name, width = config.cell["norm"], config.model.width
    try:
        norm = config.norm(width)
    except Exception as error:  # a norm may be the user's own code
        raise UserError(f"norm={name}: cannot be built for width {width} ({type(error).__name__}: {error})") from error
    norm_path(config)
    if not is_ours(config.norm.func):  # type: ignore[attr-defined]
        causal = getattr(norm, "causal", True)
        probes.norm(config.norm, name, width, config.model.context, config.device, causal=causal)
    idle = out_of_use(config.resolved)
    for path, (allowed, why) in getattr(norm, "restrictions", {}).items():
        if path not in idle and (value := attrgetter(path)(config)) not in allowed:
            raise UserError(f"{path}={show(value)}: norm={name} takes {' or '.join(map(show, allowed))} only: {why}")
    problem = getattr(norm, "problem", None)
    reason = problem(config.train.batch_size, config.model.context) if problem else None
    if reason:
        rows = f"train.batch_size={config.train.batch_size} model.context={config.model.context}"
        raise UserError(f"norm={name}: {reason} ({rows})")


def _check_placement(config: Config) -> None:
    """What the chosen placement and norm leave without a meaning."""
    norm, placement, model = config.cell["norm"], config.cell["placement"], config.model
    target = getattr(config.placement, "func", None)
    normless = isinstance(config.norm(model.width), Identity)
    if getattr(target, "norm_free", False) and not normless:
        raise UserError(f"norm={norm}: placement={placement} has no place for a norm; give norm=none")
    if getattr(target, "needs_norm", False) and normless:
        raise UserError(f"norm={norm}: placement={placement} rests on the norm after each sublayer; give another norm")
    if normless and (model.qk_norm != "none" or model.embed_norm):
        given = f"model.qk_norm={model.qk_norm}" if model.qk_norm != "none" else "model.embed_norm=true"
        raise UserError(f"{given}: is of the cell's own norm, and norm={norm} is none; give none and false")
    if model.qk_norm != "none" and getattr(target, "normalises_qk", False):
        raise UserError(
            f"model.qk_norm={model.qk_norm}: placement={placement} normalises q and k itself; give model.qk_norm=none"
        )
    if getattr(target, "plain_heads", False):
        for name in ("kv_heads", "head_width", "query_scale"):
            if given := getattr(model, name):
                raise UserError(
                    f"model.{name}={given:g}: placement={placement} scales whole heads of q and k alike; give 0"
                )
    if model.init == "placement" and getattr(target, "initial", None) is Block.initial:
        raise UserError(
            f"model.init=placement: placement={placement} asks for no initial weights of its own; give another "
            "model.init, such as xavier"
        )


def _check_quant(config: Config) -> None:
    model = config.model
    quantised(config.norm, model.quant, model.quant_granularity, model.quant_at)(model.width)


def _check_experts(config: Config) -> None:
    """What norm and placement leave without a meaning where the MLP is a mixture of experts."""
    model, name, placement = config.model, config.cell["norm"], config.cell["placement"]
    if model.mlp != "moe":
        return
    if model.experts_per_token > model.experts:
        raise UserError(
            f"model.experts_per_token={model.experts_per_token}: is more than model.experts={model.experts}; "
            f"give {model.experts} or less"
        )
    norm: Any = config.norm(model.width)
    target: Any = getattr(config.placement, "func", None)
    inside = [site for site in getattr(target, "sites", ()) if site in INSIDE and site.startswith("mlp_")]
    if inside and hasattr(norm, "frozen"):
        raise UserError(
            f"norm={name}: placement={placement} has it at {inside[0]}, where every expert would move the same "
            "statistics; give another norm, or model.mlp=relu"
        )
    if inside and model.quant != "none":
        raise UserError(
            f"model.quant={model.quant}: placement={placement} has a norm at {inside[0]}, which every expert calls "
            "with its own tokens, or with none; give model.quant=none, or model.mlp=relu"
        )
    if model.moe_norm == "shared":
        return
    if isinstance(norm, Identity):
        raise UserError(f"model.moe_norm=per_expert: norm={name} leaves none to own; give shared")
    readers = getattr(target, "feeds", {}).get("mlp_in")
    if not readers or not set(readers) <= {"mlp.in", "mlp.gate"} or forward_is_newer_than(target, "feeds"):
        raise UserError(
            f"model.moe_norm=per_expert: placement={placement} has no norm that the MLP alone reads; give shared"
        )
    if not getattr(norm, "mask_padding", True):
        raise UserError(
            "norm.mask_padding=false: an expert's norm knows its own tokens by their mask "
            "(model.moe_norm=per_expert); give true"
        )


def norm_path(config: Config) -> str:
    """The arithmetic that the norm runs by: one of `kernels.path`, or `torch` where the norm leaves no choice, or
    where its statistics are rounded."""
    kernel = config.resolved["norm"].get("kernel", "torch")
    if config.model.quant != "none" and config.model.quant_at == "norm_statistics":
        if kernel not in ("auto", "torch"):
            raise UserError(f"norm.kernel={kernel}: cannot round statistics (model.quant_at); give auto or torch")
        kernel = "torch"
    dtype = getattr(torch, config.train.dtype)
    try:
        op = f"norm={config.cell['norm']}"
        return kernels.path(kernel, config.device, dtype, config.model.width, op, config.train.compile)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"norm.kernel={kernel}: {error}") from error
