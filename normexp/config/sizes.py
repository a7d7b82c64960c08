"""Numbers of a config that do not go together, or into this machine."""

import os
from operator import attrgetter

import torch

from normexp.config.tree import Config
from normexp.fields import UserError, show, suggest
from normexp.model import ModelConfig
from normexp.telemetry import METRICS

LARGEST_SEED = 2**63 - 1  # of torch's and numpy's generators


def check(config: Config) -> None:
    _check_schedule(config)
    _check_model(config)
    _check_memory(config)
    _check_context(config)


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
    if width % heads and not config.model.head_width:
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
    _check_heads(config.model)


def _check_heads(model: ModelConfig) -> None:
    width, heads = model.width, model.heads
    if model.kv_heads and heads % model.kv_heads:
        divisors = [number for number in range(1, heads + 1) if heads % number == 0]
        raise UserError(
            f"model.kv_heads={model.kv_heads}: does not divide model.heads={heads}; give 0 for as many, or one of "
            f"{', '.join(map(str, divisors))}"
        )
    if model.position == "rotary" and model.head_width % 2:
        raise UserError(
            f"model.head_width={model.head_width}: model.position=rotary rotates pairs of channels; give an even number"
        )
    if model.position == "rotary" and not model.head_width and width // heads % 2:
        raise UserError(
            f"model.position=rotary: rotates pairs, and model.width={width} over model.heads={heads} leaves "
            f"{width // heads} channels a head, an odd number; give a width of {2 * heads} times a number"
        )


def _check_memory(config: Config) -> None:
    """Refuses what cannot be held by any reckoning: it would fail late, with a traceback."""
    model, train = config.model, config.train
    row = 4 * train.batch_size * model.context  # bytes of a float for each token of a micro-batch
    sizes = model.sizes()
    projected = 2 * (sizes["heads"] + sizes["kv_heads"]) * sizes["head_width"]  # q and o, k and v
    experts = model.experts if model.mlp == "moe" else 1
    weights = model.depth * model.width * (projected + 2 * sizes["hidden"] * experts)
    own = [*(["model.head_width"] if model.head_width else []), *(["model.experts"] if experts > 1 else [])]
    scores = row * model.heads * model.context  # which a soft cap needs whole
    least = {
        ("model.width", "model.depth", "model.mlp_ratio", *own): 16 * weights,  # with gradients and two moments
        ("train.batch_size", "model.context", "model.width", "model.depth"): 2 * row * model.width * model.depth,
        ("model.context", "model.attn_softcap", "model.heads", "train.batch_size"): scores if model.attn_softcap else 0,
        ("model.context", "model.window"): model.context**2 if 0 < model.window < model.context else 0,  # the mask
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
