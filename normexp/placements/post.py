"""Placements that normalise the stream itself, n(… x + F(x)); no final norm."""

import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from normexp.kernels.formula import statistics_dtype
from normexp.placements.base import Block, Init
from normexp.placements.pre import READ_BY

BRANCH = ("attn.v", "attn.o", "mlp.in", "mlp.out")  # what DeepNorm scales: q, k and a gate are left at their base


class PostNorm(Block):
    """n(x + F(x)), no final norm (1706.03762). Checked: paper."""

    sites = ("attn_residual", "mlp_residual")
    final_norm = False

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.norm["attn_residual"](x + self.attn(x, mask), mask)
        return self.norm["mlp_residual"](x + self.mlp(x, mask), mask)


class DeepNorm(PostNorm):
    """n(αx + F(x)), α = (2N)^¼, the decoder-only rule; no final norm (2203.00555).

    Init: Xavier, with v, o and the MLP's two matrices × β = (8N)^−¼, not q and k.
    Checked: authors' code (torchscale), but for the base, where that code differs from the paper's Xavier: the paper's.
    """

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        alpha = (2 * self.depth) ** 0.25
        x = self.norm["attn_residual"](alpha * x + self.attn(x, mask), mask)
        return self.norm["mlp_residual"](alpha * x + self.mlp(x, mask), mask)

    def initial(self) -> Init:
        return Init("xavier", dict.fromkeys(BRANCH, (8 * self.depth) ** -0.25))


class BottomToTop(PostNorm):
    """h = n(x + Attn(x)); n(x + h + FFN(h)), no final norm: the B2T connection (2206.00330).

    Init: Xavier, all matrices of the blocks × N^−½, an option of the authors' code. Checked: authors' code.
    """

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        h = self.norm["attn_residual"](x + self.attn(x, mask), mask)
        return self.norm["mlp_residual"](x + h + self.mlp(h, mask), mask)

    def initial(self) -> Init:
        matrices = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.in", "mlp.gate", "mlp.out")
        return Init("xavier", dict.fromkeys(matrices, self.depth**-0.5))


class Keel(Block):
    """n₁(αx + F(n₂(x))) with α = 2N, the number of sublayers (2601.19895).

    The first block has α = 1 and no n₁ after its attention: h = x + Attn(n₂(x)); n₁(h + FFN(n₂(h))). No final norm, of
    which the paper says nothing. Its norms have no bias; here the cell's norm decides. No init of its own.
    Checked: paper.
    """

    final_norm = False
    feeds: ClassVar = READ_BY
    needs_norm = True  # α would be raised to the power of the sublayers

    def __init__(self, *, layer: int, **others: Any) -> None:
        self.sites = ("attn_in", *(("attn_residual",) if layer else ()), "mlp_in", "mlp_residual")
        super().__init__(layer=layer, **others)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        alpha = 2 * self.depth if self.layer else 1
        x = alpha * x + self.attn(self.norm["attn_in"](x, mask), mask)
        if self.layer:
            x = self.norm["attn_residual"](x, mask)
        return self.norm["mlp_residual"](alpha * x + self.mlp(self.norm["mlp_in"](x, mask), mask), mask)


class Admin(PostNorm):
    """n(ω_i ⊙ x + F(x)) in sublayer i = 1 … 2N, no final norm (2004.08249).

    `omega=profiled`, the paper: ω_1 = 1 and ω²_{i+1} = Var[ω_i x_i] + Var[F_i(x_i)], over the real tokens of the first
    training batch, in one forward pass before training; from there ω is trained, a d-vector.
    `omega=fixed`, the authors' later code (admin-torch): ω² = (2N + 1) / ln(2N + 1) − 1 everywhere, not trained.
    No init of its own for the matrices. Checked: authors' code of both, which is followed.
    """

    needs_norm = True  # the profiled ω² would be squared from sublayer to sublayer

    def __init__(self, *, omega: Literal["profiled", "fixed"], width: int, depth: int, **others: Any) -> None:
        super().__init__(width=width, depth=depth, **others)
        self.omega: nn.ParameterDict | dict[str, float]
        if omega == "profiled":
            self.omega = nn.ParameterDict({sublayer: torch.ones(width) for sublayer in ("attn", "mlp")})
        else:
            self.omega = dict.fromkeys(("attn", "mlp"), math.sqrt((2 * depth + 1) / math.log(2 * depth + 1) - 1))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.norm["attn_residual"](self.omega["attn"] * x + self.attn(x, mask), mask)
        return self.norm["mlp_residual"](self.omega["mlp"] * x + self.mlp(x, mask), mask)

    @torch.no_grad()
    def calibrate(self, stream: Tensor | tuple[Tensor, float], mask: Tensor | None) -> tuple[Tensor, float]:
        """Between the blocks, the stream carries the next ω beside x."""
        x, omega = stream if isinstance(stream, tuple) else (stream, 1.0)
        for sublayer in ("attn", "mlp"):
            if isinstance(self.omega, nn.ParameterDict):
                self.omega[sublayer].fill_(omega)
            kept, branch = self.omega[sublayer] * x, getattr(self, sublayer)(x, mask)
            omega = math.sqrt(variance(kept, mask) + variance(branch, mask))
            x = self.norm[f"{sublayer}_residual"](kept + branch, mask)
        return x, omega


def variance(x: Tensor, mask: Tensor | None) -> float:
    """Of all channels of all real tokens, biased."""
    real = x.to(statistics_dtype(x.dtype)) if mask is None else x.to(statistics_dtype(x.dtype))[mask]
    return float(real.var(correction=0))
