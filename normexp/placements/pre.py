"""Placements that keep an unnormalised stream x + …, with a final norm over it."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from normexp.placements.base import Block, Init

READ_BY = {"attn_in": ("attn.q", "attn.k", "attn.v"), "mlp_in": ("mlp.in", "mlp.gate")}
INSIDE_READ_BY = {"attn_out": ("attn.o",), "mlp_hidden": ("mlp.out",)}


class PreNorm(Block):
    """x + F(n(x)), then a final norm over the stream (1809.10853; 2002.04745). Checked: paper."""

    sites = ("attn_in", "mlp_in")
    final_norm = True
    feeds: ClassVar = READ_BY

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attn(self.norm["attn_in"](x, mask), mask)
        return x + self.mlp(self.norm["mlp_in"](x, mask), mask)


class LNScaling(PreNorm):
    """x + F(n(x) / √l) in block l = 1 … N, the norm's output scaled after its gain; the final norm is not (2502.05795).

    Init: every matrix N(0, 0.02), no 1/√(2N). Checked: authors' code, which is followed.
    """

    feeds: ClassVar = {}  # a folded bias would be scaled, too

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        scale = 1 / math.sqrt(self.layer + 1)
        x = x + self.attn(scale * self.norm["attn_in"](x, mask), mask)
        return x + self.mlp(scale * self.norm["mlp_in"](x, mask), mask)

    def initial(self) -> Init:
        return Init("plain")


class PeriNorm(Block):
    """x + n_out(F(n_in(x))), then a final norm (2502.02732). The paper's embedding norm is `model.embed_norm`.

    No init of its own; learned gains start at 1. Checked: abstract of the paper, the rest in a secondary source.
    """

    sites = ("attn_in", "attn_branch", "mlp_in", "mlp_branch")
    final_norm = True
    feeds: ClassVar = READ_BY

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.norm["attn_branch"](self.attn(self.norm["attn_in"](x, mask), mask), mask)
        return x + self.norm["mlp_branch"](self.mlp(self.norm["mlp_in"](x, mask), mask), mask)


class Sandwich(PeriNorm):
    """x + n(F(n(x))), then a final norm: CogView's Sandwich-LN (2105.13290), the block of PeriNorm.

    The authors also divide a norm's input by max|x| / 8, a guard for float16: not reproduced. Checked: authors' code.
    """


class Reordered(Block):
    """x + n(F(x)), then a final norm: OLMo 2 (2501.00656), which also has `model.qk_norm=full` and ε = 1e-6.

    Init: every matrix N(0, 0.02) truncated at ± 3σ. Checked: authors' code, which is followed.
    """

    sites = ("attn_branch", "mlp_branch")
    final_norm = True

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.norm["attn_branch"](self.attn(x, mask), mask)
        return x + self.norm["mlp_branch"](self.mlp(x, mask), mask)

    def initial(self) -> Init:
        return Init("plain", truncated=3.0)


class SubLN(Block):
    """x + W_o n(attn(n(x))); x + W₂ n(act(W₁ n(x))), the last n as wide as the MLP; final norm: Magneto (2210.06423).

    Init: Xavier, with v, o and the MLP's two matrices × √(ln 2N), the decoder-only rule; a gate is left at its base.
    Checked: authors' code (torchscale), but for the base, where that code differs from the paper's Xavier: the paper's.
    """

    sites = ("attn_in", "attn_out", "mlp_in", "mlp_hidden")
    final_norm = True
    feeds: ClassVar = READ_BY | INSIDE_READ_BY

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attn(self.norm["attn_in"](x, mask), mask, self.norm)
        return x + self.mlp(self.norm["mlp_in"](x, mask), mask, self.norm)

    def initial(self) -> Init:
        gain = math.sqrt(math.log(2 * self.depth))
        return Init("xavier", dict.fromkeys(("attn.v", "attn.o", "mlp.in", "mlp.out"), gain))


class NormFormer(Block):
    """x + n(W_o concat_h(c_h · head_h(n(x)))); λ ⊙ x + W₂ n(act(W₁ n(x))), the last n as wide as the MLP; final norm
    (2110.09456).

    c: one gain per head, 1 at the start, before W_o as in the paper (fairseq's code scales after W_o). λ: a d-vector,
    1 at the start, on the MLP's residual alone; the paper has it in its small models (`residual_gain`).
    No init of its own. Checked: authors' code and a secondary source.
    """

    sites = ("attn_in", "attn_branch", "mlp_in", "mlp_hidden")
    final_norm = True
    feeds: ClassVar = READ_BY | {"mlp_hidden": ("mlp.out",)}

    def __init__(self, *, residual_gain: bool, width: int, heads: int, **others: Any) -> None:
        super().__init__(width=width, heads=heads, **others)
        self.head_gain = HeadGain(heads)
        self.residual_gain = nn.Parameter(torch.ones(width)) if residual_gain else None

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        attended = self.attn(self.norm["attn_in"](x, mask), mask, {"attn_out": self.head_gain})
        x = x + self.norm["attn_branch"](attended, mask)
        residual = x if self.residual_gain is None else self.residual_gain * x
        return residual + self.mlp(self.norm["mlp_in"](x, mask), mask, self.norm)


class HeadGain(nn.Module):
    """c_h · x_h for each head h."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x_BTHK = x.view(*x.shape[:2], len(self.weight), -1)
        return (self.weight.unsqueeze(-1) * x_BTHK).flatten(-2)
