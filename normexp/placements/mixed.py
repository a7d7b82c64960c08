"""Placements that are one thing here and another there: by depth, by sublayer, by stream."""

import math
from typing import Any, ClassVar

from torch import Tensor, nn

from normexp.fields import Fraction
from normexp.placements.base import Block, Init
from normexp.placements.post import PostNorm
from normexp.placements.pre import READ_BY, PreNorm


class MixLN(Block):
    """n(x + F(x)) in the first ⌊aN⌋ blocks, x + F(n(x)) in the others; final norm (2412.13795). The paper's a is 0.25.

    No init of its own. Checked: authors' code, which is followed.
    """

    final_norm = True
    feeds: ClassVar = READ_BY  # those of the pre-norm blocks

    def __init__(self, *, post_fraction: Fraction, layer: int, depth: int, **others: Any) -> None:
        self.post = layer < math.floor(round(post_fraction * depth, 9))  # 0.29 · 100 is 28.999999999999996
        self.sites = PostNorm.sites if self.post else PreNorm.sites
        super().__init__(layer=layer, depth=depth, **others)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        block: Any = PostNorm if self.post else PreNorm
        return block.forward(self, x, mask)


class HybridNorm(Block):
    """x + W_o attn(n(q), n(k), n(v)), the norms per head, before the rotary embedding, with no norm in front; then
    n(h) + FFN(n(h)) with one n; final norm (2503.04598).

    `star`: the first block is pre-norm in both sublayers, x + F(n(x)), and keeps its norms of q, k and v.
    Init: N(0, σ²) with σ = 1/√(2.5 d), residual projections ÷ √(2N), truncated at ± 3σ. Checked: paper; the init
    also in the authors' config.
    """

    final_norm = True
    normalises_qk = True

    def __init__(self, *, star: bool, layer: int, **others: Any) -> None:
        self.pre = star and layer == 0
        self.sites = (*(("attn_in",) if self.pre else ()), "q_head", "k_head", "v_head", "mlp_in")
        super().__init__(layer=layer, **others)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        read = self.norm["attn_in"](x, mask) if self.pre else x
        h = x + self.attn(read, mask, self.norm)
        normed = self.norm["mlp_in"](h, mask)
        return (h if self.pre else normed) + self.mlp(normed, mask)

    def initial(self) -> Init:
        return Init("small", truncated=3.0)


class ResiDual(Block):
    """x' = n(x + F(x)) and d' = d + F(x), from x₀ = d₀ = the embeddings; the head reads x_N + n_d(d_N) (2304.14802).

    The stream is the pair (x, d). n_d is the final norm, with its own gain and the ε of the cell's norm (the authors'
    is 1e-7). No init of its own. Checked: authors' code, without its option to scale F(x) in d.
    """

    sites = ("attn_residual", "mlp_residual")
    final_norm = True

    def forward(self, stream: tuple[Tensor, Tensor], mask: Tensor | None) -> tuple[Tensor, Tensor]:
        x, d = stream
        for sublayer, site in ((self.attn, "attn_residual"), (self.mlp, "mlp_residual")):
            branch = sublayer(x, mask)
            x, d = self.norm[site](x + branch, mask), d + branch
        return x, d

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    def leave(self, stream: tuple[Tensor, Tensor], norm: nn.Module | None, mask: Tensor | None) -> Tensor:
        x, d = stream
        return x + super().leave(d, norm, mask)
