"""nGPT: every vector on the unit sphere. It takes norm=none."""

from typing import Any

import torch
from torch import Tensor, nn

from normexp.experts import plain_name
from normexp.kernels.formula import statistics_dtype
from normexp.placements.base import Block, Init


class NGPT(Block):
    """h ← N(h + |a| ⊙ (N(F(h)) − N(h))), N(x) = x / ‖x‖₂ along d (2410.01131).

    a: a d-vector for each sublayer, 0.05 at the start, stored at 1/√d. q and k: N per head after the rotary embedding,
    times s_qk (d, shared by both; 1, stored at 1/√d); softmax scale √K instead of 1/√K. Pre-activations of the MLP
    times s · √d (one s per hidden channel and matrix; 1). Logits times s_z (V; 1, stored at 1/√d). Every matrix is
    kept at unit length along d: at the start, and after each step of the optimiser. No final norm.

    The authors have no biases, no position table (`model.position=rotary`), an untied head, a gated MLP, no weight
    decay and no warmup, all of which are fields here; the embeddings, summed with a table where there is one, are
    normalised before the first block. With `model.mlp=moe`, which the paper has not, the experts share one s. Init: any
    Gaussian, since the matrices are then normalised; N(0, 0.02) here.
    Checked: authors' code, which is followed, but for a zero vector, which stays zero here and is NaN there.
    """

    sites = ()
    final_norm = False
    norm_free = True
    normalises_qk = True
    unit_matrices = True
    scaled_logits = True
    plain_heads = True

    def __init__(self, *, width: int, hidden: int, heads: int, **others: Any) -> None:
        super().__init__(width=width, hidden=hidden, heads=heads, **others)
        stored = width**-0.5
        self.rate = nn.ModuleDict({sublayer: Scale(width, 0.05, stored) for sublayer in ("attn", "mlp")})
        self.qk = Scale(width, 1.0, stored)
        gated = any(name.split(".")[-1] == "gate" for name, _ in self.mlp.named_modules())
        places = ("mlp_up", "mlp_gate") if gated else ("mlp_up",)
        self.preactivation = nn.ModuleDict({place: Scale(hidden, width**0.5, 1.0) for place in places})
        self.heads = heads

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        h = self.move(h, self.attn(h, mask, {"q_rotated": self.query, "k_rotated": self.key}), self.rate["attn"])
        return self.move(h, self.mlp(h, mask, self.preactivation), self.rate["mlp"])

    def move(self, h: Tensor, branch: Tensor, rate: Any) -> Tensor:
        h = unit(h)
        return unit(h + rate.value().abs() * (unit(branch) - h))

    def key(self, k: Tensor, mask: Tensor | None) -> Tensor:
        return self.qk(unit(k.view(*k.shape[:2], self.heads, -1)).flatten(-2))

    def query(self, q: Tensor, mask: Tensor | None) -> Tensor:
        """Times K besides: the attention divides by √K, and √K is to be its scale."""
        return (self.width // self.heads) * self.key(q, mask)

    def enter(self, x: Tensor) -> Tensor:
        return unit(x)

    def initial(self) -> Init:
        return Init("plain")


class Scale(nn.Module):
    """s ⊙ x for a learned s of `size` numbers that begins at `start`. What the optimiser moves is a multiple of s that
    begins at `stored`, which sets how fast Adam moves s."""

    def __init__(self, size: int, start: float, stored: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), stored))
        self.factor = start / stored

    def value(self) -> Tensor:
        return self.weight * self.factor

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.value() * x


def unit(x: Tensor, dim: int = -1) -> Tensor:
    """x / ‖x‖₂; a zero vector stays zero, and so does its gradient."""
    wide = x.to(statistics_dtype(x.dtype))
    length = torch.linalg.vector_norm(wide, dim=dim, keepdim=True)
    return (wide / torch.where(length > 0, length, torch.inf)).to(x.dtype)


class UnitMatrices(nn.Module):
    """Keeps every matrix of a model at length 1 along the stream's channels. It owns none of them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.matrices = [  # and the dimension that is the stream's
            (module.weight, 0 if plain_name(name).endswith(("attn.o", "mlp.out")) else 1)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | nn.Embedding)
        ]

    @torch.no_grad()
    def after_step(self) -> None:
        for weight, dim in self.matrices:
            weight.copy_(unit(weight, dim))
