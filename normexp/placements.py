"""Placements: where the norms sit. One class each; `forward` is the block's equation.

A placement names its norm `sites`, says whether the trunk needs a `final_norm`, and may define the optional hooks

- `aux_loss() -> Tensor`: added to the loss of the micro-batch just seen;
- `after_step() -> None`: called after every optimiser step;
- `calibrate(x, mask) -> Tensor`: a forward pass of the block that sets its constants, once, before the first step.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import Tensor, nn

NormFactory = Callable[[int], nn.Module]


class Block(nn.Module):
    """One Transformer block of `depth` blocks; `layer` counts from 0. x and the result are (B, T, C)."""

    sites: ClassVar[tuple[str, ...]]
    final_norm: ClassVar[bool]
    feeds: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # site -> the linear layers that alone read its norm's output

    def __init__(
        self,
        *,
        norm: NormFactory,
        attention: Callable[[], nn.Module],
        mlp: Callable[[], nn.Module],
        width: int,
        layer: int,
        depth: int,
    ) -> None:
        super().__init__()
        self.layer, self.depth = layer, depth
        self.norm = nn.ModuleDict({site: norm(width) for site in self.sites})
        self.attn, self.mlp = attention(), mlp()

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        raise NotImplementedError


class PreNorm(Block):
    """x + F(n(x)), then a final norm over the stream (1809.10853; 2002.04745)."""

    sites = ("attn_in", "mlp_in")
    final_norm = True
    feeds: ClassVar = {"attn_in": ("attn.q", "attn.k", "attn.v"), "mlp_in": ("mlp.in", "mlp.gate")}

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attn(self.norm["attn_in"](x, mask), mask)
        return x + self.mlp(self.norm["mlp_in"](x, mask), mask)


class PostNorm(Block):
    """n(x + F(x)), no final norm (1706.03762)."""

    sites = ("attn_residual", "mlp_residual")
    final_norm = False

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.norm["attn_residual"](x + self.attn(x, mask), mask)
        return self.norm["mlp_residual"](x + self.mlp(x, mask), mask)
