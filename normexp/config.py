"""What a composed config means: its leaves cast and checked, its choices turned into factories.

Plain mappings in, a frozen `Config` out; every refusal is a UserError of one line, and nothing is created.
"""

import functools
import glob
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch

from normexp import kernels
from normexp.choices import factory, is_ours, own_code, refuse_no_norm
from normexp.data import Source
from normexp.fields import NonNegativeInt, UserError, cast_dataclass, show, suggest
from normexp.fold import forward_is_newer_than
from normexp.layers import INSIDE
from normexp.model import ModelConfig
from normexp.norms import Identity
from normexp.optim import OptimConfig
from normexp.placements import Block, NormFactory
from normexp.telemetry import METRICS, TelemetryConfig
from normexp.trackers import TrackerConfig
from normexp.trainer import TrainConfig

CELL = ("norm", "placement", "model", "data", "optim")  # the groups whose choices name a cell
BY_BLOCK = ("norm", "attention", "mlp", "width", "hidden", "heads", "layer", "depth")  # from the model
LARGEST_SEED = 2**63 - 1  # of torch's and numpy's generators


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
    cell: dict[str, str]  # group -> name of its choice
    resolved: dict[str, Any]  # all of it as plain values, for config.yaml and the hash


def load(node: Mapping[str, Any], choices: Mapping[str, Any], folder: Path) -> Config:
    """`node`: interpolations resolved. `choices`: names of the chosen files, by group. `folder`: the directory the
    command was given in, which relative paths start from."""
    tree = cast_dataclass(node, Tree, "")
    for group in CELL:
        if not isinstance(choices.get(group), str):  # a list such as norm=[ln,bn]
            raise UserError(f"{group}: is not one choice; give {group}=<name>")
    arguments = {
        "norm": factory(tree.norm, "norm", first_positional=True),
        "placement": factory(tree.placement, "placement", provided=BY_BLOCK),
        "data": factory(tree.data, "data", provided=("cache",)),
    }
    for name in ("path", "name"):
        given = arguments["data"].keywords.get(name)
        if given and (name == "path" or absolute(given, folder).exists() or glob.has_magic(given)):
            arguments["data"].keywords[name] = str(absolute(given, folder))
    config = Config(
        **{**vars(tree), **arguments, "device": _device(tree.device), "results": absolute(tree.results, folder)},
        cell={group: choices[group] for group in CELL},
        resolved={},
    )
    config.resolved.update(_resolved(tree, arguments, config))
    _check_schedule(config)
    _check_model(config)
    _check_memory(config)
    _check_context(config)
    _check_norm(config)
    _check_placement(config)
    _check_experts(config)
    return config


def absolute(path: str | Path, folder: Path) -> Path:
    """`path` as seen from `folder`; `~` is the home directory."""
    return Path(os.path.normpath(folder / Path(path).expanduser()))


def _resolved(tree: Tree, choices: Mapping[str, functools.partial[Any]], config: Config) -> dict[str, Any]:
    """Plain values only; paths absolute. `device` stays as given, since `auto` is no fact about the run."""
    plain: dict[str, Any] = asdict(tree) | {"results": config.results, "cell": config.cell}
    for group, chosen in choices.items():
        target = getattr(tree, group)["_target_"]
        plain[group] = {"_target_": target, "_partial_": True, **chosen.keywords, **own_code(chosen.func)}
    resolved: dict[str, Any] = _plain(plain)
    return resolved


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _device(name: str) -> torch.device:
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, present in available.items() if present))
    if not available[name]:
        there = " or ".join(f"device={kind}" for kind, present in available.items() if present)
        raise UserError(f"device={name}: torch finds none on this machine; give device=auto or {there}")
    return torch.device(name)


def _check_schedule(config: Config) -> None:
    warmup, steps = config.optim.warmup_steps, config.train.steps
    if warmup > steps:
        raise UserError(f"optim.warmup_steps={warmup}: is longer than train.steps={steps}; give {steps} or less")
    if config.seed > LARGEST_SEED:
        raise UserError(f"seed={config.seed}: is too large; give {LARGEST_SEED} or less")
    for name in config.telemetry.metrics:
        if name not in METRICS:
            raise UserError(f"telemetry.metrics={name}: there is no such metric{suggest(name, METRICS)}")


def _check_model(config: Config) -> None:
    width, heads = config.model.width, config.model.heads
    if width % heads:
        below = width - width % heads
        near = f"{below} or {below + heads}" if below else f"{heads}"
        raise UserError(
            f"model.heads={heads}: does not divide model.width={width}; give another number, or a width of {near}"
        )
    if round(config.model.mlp_ratio * width) < 1:
        raise UserError(
            f"model.mlp_ratio={config.model.mlp_ratio:g}: leaves an MLP of width {width} no hidden channel; "
            f"give {1 / width:g} or more"
        )
    if config.model.position == "rotary" and width // heads % 2:
        raise UserError(
            f"model.position=rotary: rotates pairs, and model.width={width} over model.heads={heads} leaves "
            f"{width // heads} channels a head, an odd number; give a width of {2 * heads} times a number"
        )


def _check_memory(config: Config) -> None:
    """Refuses what cannot be held by any reckoning: it would fail late, with a traceback."""
    model, train = config.model, config.train
    row = 4 * train.batch_size * model.context  # bytes of a float for each token of a micro-batch
    experts = model.experts if model.mlp == "moe" else 1
    weights = model.depth * model.width**2 * (4 + 2 * model.mlp_ratio * experts)
    sizes = ("model.width", "model.depth", "model.mlp_ratio", *(("model.experts",) if experts > 1 else ()))
    least = {
        sizes: 16 * weights,  # with gradients and two moments
        ("train.batch_size", "model.context", "model.width", "model.depth"): 2 * row * model.width * model.depth,
        ("train.batch_size", "model.context", "train.grad_accum"): 4 * row * train.grad_accum,  # ids and targets
        ("train.batch_size", "model.context", "train.eval_batches"): 4 * row * train.eval_batches,
    }
    there = _memory(config.device)
    for names, needed in least.items():
        if needed > there:
            given = " ".join(f"{name}={show(attrgetter(name)(config))}" for name in names)
            raise UserError(
                f"{given}: needs {needed / 1e9:,.0f} GB or more, and device={config.device.type} has "
                f"{there / 1e9:,.0f}; lower one of them"
            )


def _memory(device: torch.device) -> int:
    """Bytes of all memory there is."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check_context(config: Config) -> None:
    for group in ("norm", "data"):
        context = config.resolved[group].get("context", config.model.context)
        if context != config.model.context:
            raise UserError(
                f"{group}.context={context}: is not model.context={config.model.context}; give the latter only"
            )


def _check_norm(config: Config) -> None:
    name, width = config.cell["norm"], config.model.width
    try:
        norm = config.norm(width)
    except Exception as error:  # a norm may be the user's own code
        raise UserError(f"norm={name}: cannot be built for width {width} ({type(error).__name__}: {error})") from error
    norm_path(config)
    if not is_ours(config.norm.func):  # type: ignore[attr-defined]
        refuse_no_norm(norm, name, width, config.device)
    for path, (allowed, why) in getattr(norm, "restrictions", {}).items():
        if (value := attrgetter(path)(config)) not in allowed:
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
    if normless and (model.qk_norm != "none" or model.embed_norm):
        given = f"model.qk_norm={model.qk_norm}" if model.qk_norm != "none" else "model.embed_norm=true"
        raise UserError(f"{given}: is of the cell's own norm, and norm={norm} is none; give none and false")
    if model.qk_norm != "none" and getattr(target, "normalises_qk", False):
        raise UserError(
            f"model.qk_norm={model.qk_norm}: placement={placement} normalises q and k itself; give model.qk_norm=none"
        )
    if model.init == "placement" and getattr(target, "initial", None) is Block.initial:
        raise UserError(
            f"model.init=placement: placement={placement} asks for no initial weights of its own; give another "
            "model.init, such as xavier"
        )


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
    """The arithmetic that the norm runs by: one of `kernels.path`, or `torch` where the norm leaves no choice."""
    kernel = config.resolved["norm"].get("kernel", "torch")
    dtype = getattr(torch, config.train.dtype)
    try:
        op = f"norm={config.cell['norm']}"
        return kernels.path(kernel, config.device, dtype, config.model.width, op, config.train.compile)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"norm.kernel={kernel}: {error}") from error
