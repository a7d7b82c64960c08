"""The GPT-style Transformer: embed -> blocks -> final norm -> head. It receives factories and knows no norm by name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normexp.fields import PositiveFloat, PositiveInt, UnitInterval
from normexp.layers import MLP, Activation, Attention
from normexp.placements import Block, NormFactory


@dataclass(frozen=True)
class ModelConfig:
    depth: PositiveInt  # blocks
    width: PositiveInt  # channels of the stream
    heads: PositiveInt
    context: PositiveInt  # tokens
    mlp: Activation
    mlp_ratio: PositiveFloat  # hidden channels / width
    position: Literal["learned", "sinusoidal", "rotary"]
    bias: bool  # of the linear layers; the norms have their own
    tied: bool  # the head shares the token embedding's matrix, and has no bias
    dropout: UnitInterval
    init: Literal["xavier", "gpt2", "small", "torch"]


def sinusoids(context: int, width: int) -> Tensor:
    """(T, C): sin(t / 10000^(2i/C)) at even channels, cos at odd ones (1706.03762)."""
    angle = torch.outer(torch.arange(context).float(), 10_000.0 ** (-torch.arange(0, width, 2).float() / width))
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width]


class Embed(nn.Module):
    """Token embedding plus, unless rotary, a position table."""

    table: Tensor

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.dropout, self.kind = config.dropout, config.position
        self.token = nn.Embedding(vocab_size, config.width)
        if config.position == "learned":
            self.position = nn.Embedding(config.context, config.width)
        if config.position == "sinusoidal":
            self.register_buffer("table", sinusoids(config.context, config.width), persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.token(tokens_BT)
        if self.kind != "rotary":
            table = self.position.weight if self.kind == "learned" else self.table
            x = x + table[: tokens_BT.shape[1]]
        return F.dropout(x, self.dropout, self.training)


class Transformer(nn.Module):
    """Logits (B, T, V) of the next token; `mask` (B, T) is True at real tokens, None when all are."""

    def __init__(
        self, config: ModelConfig, vocab_size: int, *, norm: NormFactory, placement: Callable[..., Block]
    ) -> None:
        super().__init__()
        self.config = config
        attention = partial(
            Attention,
            config.width,
            config.heads,
            bias=config.bias,
            dropout=config.dropout,
            rotary_context=config.context if config.position == "rotary" else None,
        )
        hidden = round(config.mlp_ratio * config.width)
        mlp = partial(MLP, config.width, hidden, activation=config.mlp, bias=config.bias, dropout=config.dropout)
        block = partial(placement, norm=norm, attention=attention, mlp=mlp, width=config.width, depth=config.depth)
        self.embed = Embed(config, vocab_size)
        self.blocks = nn.ModuleList(block(layer=layer) for layer in range(config.depth))
        self.final_norm = norm(config.width) if self.blocks[0].final_norm else None
        self.head = nn.Linear(config.width, vocab_size, bias=config.bias and not config.tied)
        if config.tied:
            self.head.weight = self.embed.token.weight

    def forward(self, tokens_BT: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens_BT)
        for block in self.blocks:
            x = block(x, mask)
        return self._logits(x, mask)

    @torch.no_grad()
    def calibrate(self, tokens_BT: Tensor, mask: Tensor | None = None) -> None:
        """One forward pass in which blocks with a `calibrate` hook set their constants, in forward order."""
        x = self.embed(tokens_BT)
        for block in self.blocks:
            x = getattr(block, "calibrate", block)(x, mask)

    def _logits(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.final_norm is not None:
            x = self.final_norm(x, mask)
        logits: Tensor = self.head(x)
        return logits


def in_norm(name: str) -> bool:
    """Whether a module or parameter of that name is a norm's or lies in one."""
    return bool({"norm", "final_norm"} & set(name.split(".")))


def hooks(model: nn.Module, name: str) -> list[Callable[[], Any]]:
    """The optional methods called `name` of the modules inside the model, in forward order."""
    return [getattr(module, name) for module in model.modules() if hasattr(module, name) and module is not model]


def cross_entropy_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Σ −ln p(target) over the targets that are not −100, in nats and float32; 0 when there are none."""
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten(), reduction="sum", ignore_index=-100)
