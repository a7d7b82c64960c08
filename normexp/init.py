"""Weight initialisation: an axis of its own, which can decide whether a placement trains.

Every parameter is drawn from a generator of its own, seeded by (seed, name): two models that share a name share the
numbers, whatever else they hold. Gains and biases of norms keep the values that their classes gave them.
"""

import hashlib
import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from normexp.experts import plain_name
from normexp.fields import UserError
from normexp.model import Transformer, in_norm, start_scale
from normexp.placements import Init

RESIDUAL = ("attn.o", "mlp.out")  # the last matrix of each sublayer, which writes into the stream


def generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def initialise(model: Transformer, seed: int) -> None:
    """Draws every weight of `model` by the scheme `model.config.init`:

    `xavier`: normal, std √(2 / (fan_in + fan_out)) per logical matrix, embeddings N(0, 1), head N(0, 1/d) (2002.04745);
    `gpt2`: N(0, 0.02), residual projections ÷ √(2N); `plain`: N(0, 0.02), these too;
    `small`: N(0, √(2 / (5d))), residual projections ÷ √(2N) (1910.05895);
    `torch`: torch's defaults, U(±1/√fan_in) for matrices and biases, embeddings N(0, 1);
    `placement`: one of these with the gains that the placement's paper asks for (`Block.initial`), or UserError.
    Biases start at 0, but for `torch`. With a tied head, embeddings are drawn at N(0, 1/d) under `xavier` and `torch`:
    at N(0, 1) they would give logits of size √d.
    """
    rule = scheme(model)
    for name, module in model.named_modules():
        if in_norm(name):
            continue
        if isinstance(module, nn.Embedding):
            _draw(module.weight, _embedding_std(model, rule, name), seed, f"{name}.weight", truncated=rule.truncated)
        elif isinstance(module, nn.Linear) and not (name == "head" and model.config.tied):
            _initialise_linear(model, rule, name, module, seed)
    if model.unit_matrices is not None:
        model.unit_matrices.after_step()


def scheme(model: Transformer) -> Init:
    """The rule by which `model` is drawn. Its text names the base scheme and the gains."""
    if model.config.init != "placement":
        return Init(model.config.init)
    first: Any = model.blocks[0]
    rule = cast(Init | None, first.initial())
    if rule is None:
        raise UserError(f"model.init=placement: {type(first).__name__} declares no initial weights; give another")
    return rule


def _initialise_linear(model: Transformer, rule: Init, name: str, linear: nn.Linear, seed: int) -> None:
    if rule.base == "torch":
        bound = 1 / math.sqrt(linear.in_features)
        for kind, parameter in linear.named_parameters():
            _draw(parameter, bound, seed, f"{name}.{kind}", uniform=True)
        return
    std = _matrix_std(model, rule, name, linear)
    _draw(linear.weight, std, seed, f"{name}.weight", truncated=rule.truncated)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def _embedding_std(model: Transformer, rule: Init, name: str) -> float:
    if rule.embed is not None:
        return rule.embed / start_scale(model.config) if name == "embed.token" else rule.embed
    if rule.base in ("xavier", "torch"):
        return 1 / math.sqrt(model.config.width) if model.config.tied else 1.0
    return _base_std(model, rule)


def _matrix_std(model: Transformer, rule: Init, name: str, linear: nn.Linear) -> float:
    name = plain_name(name)
    gain = math.prod(gain for matrix, gain in rule.gains.items() if name.endswith(f".{matrix}"))
    if rule.base == "xavier":
        if name == "head":
            return 1 / math.sqrt(model.config.width)
        return gain * math.sqrt(2 / (linear.in_features + linear.out_features))
    residual = math.sqrt(2 * model.config.depth) if name.endswith(RESIDUAL) and rule.base != "plain" else 1.0
    return gain * _base_std(model, rule) / residual


def _base_std(model: Transformer, rule: Init) -> float:
    return math.sqrt(2 / (5 * model.config.width)) if rule.base == "small" else 0.02


@torch.no_grad()
def _draw(
    parameter: Tensor, scale: float, seed: int, name: str, uniform: bool = False, truncated: float | None = None
) -> None:
    """N(0, scale²), perhaps truncated at ± truncated · scale, or U(−scale, scale), in float32 on the CPU: the same
    numbers on every device."""
    values = torch.empty(parameter.shape)
    source = generator(seed, name)
    if uniform:
        values.uniform_(-scale, scale, generator=source)
    elif truncated is not None:
        nn.init.trunc_normal_(values, 0.0, scale, -truncated * scale, truncated * scale, generator=source)
    else:
        values.normal_(0.0, scale, generator=source)
    parameter.copy_(values)
