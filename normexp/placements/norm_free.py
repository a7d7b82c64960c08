"""Placements without any norm: they take norm=none."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from normexp.placements.base import Block, Init


class ReZero(Block):
    """x + a F(x), one scalar a per block, shared by its two sublayers, 0 at the start: the identity (2003.04887).

    No init of its own for the matrices. Checked: authors' code, which is followed.
    """

    sites = ()
    final_norm = False
    norm_free = True

    def __init__(self, **others: Any) -> None:
        super().__init__(**others)
        self.residual_weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.residual_weight * self.attn(x, mask)
        return x + self.residual_weight * self.mlp(x, mask)


class TFixup(Block):
    """x + F(x), no norm anywhere and no warmup: T-Fixup (Huang et al., ICML 2020), all of which lies in its init.

    Init: Xavier, q and k × 1/√2; v, o and the MLP's two matrices × 0.67 N^−¼ (`rule=encoder`, blocks of two sublayers)
    or × (9N)^−¼ (`rule=decoder`, derived for three, with cross-attention); none for decoder-only models is published.
    Embeddings N(0, 1/d) × (9N)^−¼, and × √d in the forward pass: with `model.embed_scale=sqrt` they are stored so, and
    with another scale the stream begins at the same size; learned positions, which the paper has not, begin at that
    size, too. A gate is left at its base. Checked: authors' code, which is followed.
    """

    sites = ()
    final_norm = False
    norm_free = True

    def __init__(self, *, rule: Literal["encoder", "decoder"], **others: Any) -> None:
        super().__init__(**others)
        self.rule = rule

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attn(x, mask)
        return x + self.mlp(x, mask)

    def initial(self) -> Init:
        decoder = (9 * self.depth) ** -0.25
        gain = 0.67 * self.depth**-0.25 if self.rule == "encoder" else decoder
        scores = dict.fromkeys(("attn.q", "attn.k"), 0.5**0.5)
        return Init("xavier", scores | dict.fromkeys(("attn.v", "attn.o", "mlp.in", "mlp.out"), gain), embed=decoder)
