"""Weight initialisation: an axis of its own, which can decide whether a placement trains.

Every parameter is drawn from a generator of its own, seeded by (seed, name): two models that share a name share the
numbers, whatever else they hold. Gains and biases of norms keep the values that their classes gave them.
"""

import hashlib
import math

import torch
from torch import Tensor, nn

from normexp.model import Transformer, in_norm

RESIDUAL = ("attn.o", "mlp.out")  # the last matrix of each sublayer, which writes into the stream


def generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def initialise(model: Transformer, seed: int) -> None:
    """Draws every weight of `model` by the scheme `model.config.init`:

    `xavier`: normal, std √(2 / (fan_in + fan_out)) per logical matrix, embeddings N(0, 1), head N(0, 1/d) (2002.04745);
    `gpt2`: N(0, 0.02), residual projections ÷ √(2N);
    `small`: N(0, √(2 / (5d))), residual projections ÷ √(2N) (1910.05895);
    `torch`: torch's defaults, U(±1/√fan_in) for matrices and biases, embeddings N(0, 1).
    Biases start at 0, but for `torch`. With a tied head, embeddings are drawn at N(0, 1/d) under `xavier` and `torch`:
    at N(0, 1) they would give logits of size √d.
    """
    for name, module in model.named_modules():
        if in_norm(name):
            continue
        if isinstance(module, nn.Embedding):
            _draw(module.weight, _embedding_std(model), seed, f"{name}.weight")
        elif isinstance(module, nn.Linear) and not (name == "head" and model.config.tied):
            _initialise_linear(model, name, module, seed)


def _initialise_linear(model: Transformer, name: str, linear: nn.Linear, seed: int) -> None:
    if model.config.init == "torch":
        bound = 1 / math.sqrt(linear.in_features)
        for kind, parameter in linear.named_parameters():
            _draw(parameter, bound, seed, f"{name}.{kind}", uniform=True)
        return
    _draw(linear.weight, _matrix_std(model, name, linear), seed, f"{name}.weight")
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def _embedding_std(model: Transformer) -> float:
    if model.config.init in ("gpt2", "small"):
        return _base_std(model)
    return 1 / math.sqrt(model.config.width) if model.config.tied else 1.0


def _matrix_std(model: Transformer, name: str, linear: nn.Linear) -> float:
    if model.config.init == "xavier":
        if name == "head":
            return 1 / math.sqrt(model.config.width)
        return math.sqrt(2 / (linear.in_features + linear.out_features))
    residual = math.sqrt(2 * model.config.depth) if name.endswith(RESIDUAL) else 1.0
    return _base_std(model) / residual


def _base_std(model: Transformer) -> float:
    return 0.02 if model.config.init == "gpt2" else math.sqrt(2 / (5 * model.config.width))


@torch.no_grad()
def _draw(parameter: Tensor, scale: float, seed: int, name: str, uniform: bool = False) -> None:
    """N(0, scale²), or U(−scale, scale), in float32 on the CPU: the same numbers on every device."""
    values = torch.empty(parameter.shape)
    source = generator(seed, name)
    if uniform:
        values.uniform_(-scale, scale, generator=source)
    else:
        values.normal_(0.0, scale, generator=source)
    parameter.copy_(values)
