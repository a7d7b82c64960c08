"""The GPT-style Transformer: embed -> blocks -> final norm -> head. It receives factories and knows no norm by name."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normexp.experts import MoE
from normexp.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, UnitInterval
from normexp.kernels.formula import statistics_dtype
from normexp.layers import MLP, Activation, Attention, QKNorm, Rotary, qk_norms
from normexp.placements import Block, NormFactory, Scale, UnitMatrices
from normexp.quantise import Granularity, Place, Quant, quantised


@dataclass(frozen=True)
class ModelConfig:
    depth: PositiveInt  # blocks
    width: PositiveInt  # channels of the stream
    heads: PositiveInt
    kv_heads: NonNegativeInt  # heads of k and v, each shared by heads / kv_heads of q; 0: as many as heads
    head_width: NonNegativeInt  # channels of a head; 0: width / heads
    context: PositiveInt  # tokens
    mlp: Literal[Activation, "moe"]
    mlp_ratio: PositiveFloat  # hidden channels / width, of each expert
    position: Literal["learned", "sinusoidal", "rotary"]
    rotary_base: PositiveFloat
    bias: bool  # of the linear layers; the norms have their own
    tied: bool  # the head shares the token embedding's matrix, and has no bias
    dropout: UnitInterval
    init: Literal["xavier", "gpt2", "plain", "small", "torch", "placement"]
    qk_norm: QKNorm  # of the cell's own type, in front of the rotary embedding
    embed_norm: bool  # a norm of the cell's own type on the embeddings
    embed_scale: PositiveFloat | Literal["sqrt", "learned"]  # factor of the token embeddings; √width, or begun there
    logit_softcap: NonNegativeFloat  # the logits' bound; 0: none
    attn_softcap: NonNegativeFloat  # the attention scores' bound; 0: none
    query_scale: NonNegativeFloat  # factor of the attention scores; 0: 1/√ the channels of a head
    window: NonNegativeInt  # tokens that a token of a local layer sees, itself among them; 0: all so far
    local_layers: Literal["all", "even"]  # even: the first, the third, … (Gemma 2)
    experts: PositiveInt  # this and what follows: of mlp=moe
    experts_per_token: PositiveInt
    expert_mlp: Activation
    load_balance: NonNegativeFloat  # weight of E Σ f P, averaged over the blocks, in what is minimised
    router_z_loss: NonNegativeFloat  # likewise of the mean log² Z of the router
    moe_norm: Literal["shared", "per_expert"]  # experts and router read the block's norm, or own one each
    quant: Quant  # what stands at every norm is rounded to this format and back
    quant_granularity: Granularity  # what shares a scale
    quant_at: Place

    def sizes(self) -> dict[str, int]:
        """Of a block, with what 0 stands for."""
        head_width = self.head_width or self.width // self.heads
        hidden = round(self.mlp_ratio * self.width)
        heads = {"heads": self.heads, "kv_heads": self.kv_heads or self.heads, "head_width": head_width}
        return {"width": self.width, "hidden": hidden, **heads}

    def window_of(self, layer: int) -> int:
        """Tokens that a token of block `layer` = 0, 1, … sees; 0: all so far."""
        return self.window if self.local_layers == "all" or layer % 2 == 0 else 0


def sinusoids(context: int, width: int) -> Tensor:
    """(T, C): sin(t / 10000^(2i/C)) at even channels, cos at odd ones (1706.03762)."""
    angle = torch.outer(torch.arange(context).float(), 10_000.0 ** (-torch.arange(0, width, 2).float() / width))
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :width]


class Embed(nn.Module):
    """n(scale · token embedding + position table); the table is there unless rotary, the norm if `embed_norm`.

    `embed_scale=sqrt`: √width (1706.03762; with small weights 2312.16903); `learned`: one number, begun at √width.
    """

    table: Tensor

    def __init__(self, config: ModelConfig, vocab_size: int, norm: NormFactory) -> None:
        super().__init__()
        self.dropout, self.kind = config.dropout, config.position
        self.scale: float | nn.Parameter = start_scale(config)
        if config.embed_scale == "learned":
            self.scale = nn.Parameter(torch.tensor(self.scale))
        self.token = nn.Embedding(vocab_size, config.width)
        if config.position == "learned":
            self.position = nn.Embedding(config.context, config.width)
        if config.position == "sinusoidal":
            self.register_buffer("table", sinusoids(config.context, config.width), persistent=False)
        self.norm = norm(config.width) if config.embed_norm else None

    def forward(self, tokens_BT: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.token(tokens_BT)
        if isinstance(self.scale, Tensor) or self.scale != 1:
            x = self.scale * x
        if self.kind != "rotary":
            table = self.position.weight if self.kind == "learned" else self.table
            x = x + table[: tokens_BT.shape[1]]
        if self.norm is not None:
            x = self.norm(x, mask)
        return F.dropout(x, self.dropout, self.training)


def start_scale(config: ModelConfig) -> float:
    """The factor of the token embeddings, before training."""
    return math.sqrt(config.width) if isinstance(config.embed_scale, str) else config.embed_scale


def feed_forward(config: ModelConfig) -> Callable[[], nn.Module]:
    """Makes the MLP of a block."""
    plain = partial(MLP, config.width, config.sizes()["hidden"], bias=config.bias)
    if config.mlp != "moe":
        return partial(plain, activation=config.mlp, dropout=config.dropout)
    return partial(
        MoE,
        config.width,
        config.experts,
        config.experts_per_token,
        expert=partial(plain, activation=config.expert_mlp, dropout=0.0),
        dropout=config.dropout,
        own_norms=config.moe_norm == "per_expert",
        load_balance=config.load_balance / config.depth,
        z_loss=config.router_z_loss / config.depth,
    )


class Transformer(nn.Module):
    """Logits (B, T, V) of the next token; `mask` (B, T) is True at real tokens, None when all are.

    With a `logit_softcap` s, the logits z become s · tanh(z / s) (Gemma 2, 2408.00118).
    """

    def __init__(
        self, config: ModelConfig, vocab_size: int, *, norm: NormFactory, placement: Callable[..., Block]
    ) -> None:
        super().__init__()
        self.config = config
        norm = quantised(norm, config.quant, config.quant_granularity, config.quant_at)
        sizes, width = config.sizes(), config.width
        rotary = partial(Rotary, context=config.context, base=config.rotary_base)
        attention = partial(
            Attention,
            width,
            config.heads,
            kv_heads=sizes["kv_heads"],
            head_width=sizes["head_width"],
            bias=config.bias,
            dropout=config.dropout,
            rotary=rotary if config.position == "rotary" else None,
            scale=config.query_scale or None,
            softcap=config.attn_softcap,
            norms=partial(qk_norms, config.qk_norm, norm, **sizes),
        )
        block = partial(placement, norm=norm, mlp=feed_forward(config), depth=config.depth, **sizes)
        self.embed = Embed(config, vocab_size, norm)
        self.blocks = nn.ModuleList(
            block(layer=layer, attention=partial(attention, window=config.window_of(layer)))
            for layer in range(config.depth)
        )
        first: Any = self.blocks[0]
        self.final_norm = norm(width) if first.final_norm else None
        self.head = nn.Linear(width, vocab_size, bias=config.bias and not config.tied)
        if config.tied:
            self.head.weight = self.embed.token.weight
        self.logit_scale = Scale(vocab_size, 1.0, width**-0.5) if first.scaled_logits else None
        self.unit_matrices = UnitMatrices(self) if first.unit_matrices else None

    def forward(self, tokens_BT: Tensor, mask: Tensor | None = None) -> Tensor:
        blocks: Any = self.blocks
        stream = blocks[0].enter(self.embed(tokens_BT, mask))
        for block in blocks:
            stream = block(stream, mask)
        return self._logits(blocks[-1].leave(stream, self.final_norm, mask))

    @torch.no_grad()
    def calibrate(self, tokens_BT: Tensor, mask: Tensor | None = None) -> None:
        """One forward pass in which blocks with a `calibrate` hook set their constants, in forward order."""
        blocks: Any = self.blocks
        stream = blocks[0].enter(self.embed(tokens_BT, mask))
        for block in blocks:
            stream = getattr(block, "calibrate", block)(stream, mask)

    def _logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        if self.logit_scale is not None:
            logits = self.logit_scale(logits)
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits.to(statistics_dtype(logits.dtype)) / cap) if cap else logits


def in_norm(name: str) -> bool:
    """Whether a module or parameter of that name is a norm's or lies in one."""
    return bool({"norm", "final_norm"} & set(name.split(".")))


def hooks(model: nn.Module, name: str) -> list[Callable[[], Any]]:
    """The optional methods called `name` of the modules inside the model, in forward order."""
    return [getattr(module, name) for module in model.modules() if hasattr(module, name) and module is not model]


def draws(model: Transformer) -> bool:
    """Whether a forward pass may draw random numbers: with dropout, or in modules that are not this program's."""
    foreign = (type(module).__module__.partition(".")[0] not in ("normexp", "torch") for module in model.modules())
    return model.config.dropout > 0 or any(foreign)


def cross_entropy_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Σ −ln p(target) over the targets that are not −100, in nats and float32; 0 when there are none."""
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten(), reduction="sum", ignore_index=-100)


def squared_log_z_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Σ log² Z, Z = Σ_v exp(logit_v), over the tokens whose target is not −100, in float32 (z-loss, 2204.02311)."""
    log_z = logits_BTV.float().logsumexp(-1)
    return (log_z.square() * (targets_BT != -100)).sum()
