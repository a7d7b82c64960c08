"""Placements: where the norms sit. One class each; `forward` is the block's equation.

`pre`: an unnormalised stream; `post`: a normalised one; `mixed`: both; `norm_free`, `ngpt`: no norm at all.
A placement names its norm `sites`, says whether the trunk needs a `final_norm`, may declare the paper's own initial
weights in `initial` and what surrounds the blocks in `enter` and `leave`, and may define the optional hooks

- `aux_loss() -> Tensor`: added to the loss of the micro-batch just seen;
- `after_step() -> None`: called after every optimiser step;
- `calibrate(x, mask) -> Tensor`: a forward pass of the block that sets its constants, once, before the first step.

A docstring ends with what the equation was checked against: the paper, the authors' code, a secondary source.
N: blocks; F: a sublayer, attention or MLP; n: a norm, each with parameters of its own; d: channels; K: those of a head.
"""

from normexp.placements.base import Block, Init, NormFactory
from normexp.placements.mixed import HybridNorm, MixLN, ResiDual
from normexp.placements.ngpt import NGPT, Scale, UnitMatrices, unit
from normexp.placements.norm_free import ReZero, TFixup
from normexp.placements.post import Admin, BottomToTop, DeepNorm, Keel, PostNorm
from normexp.placements.pre import LNScaling, NormFormer, PeriNorm, PreNorm, Reordered, Sandwich, SubLN

__all__ = [
    "NGPT", "Admin", "Block", "BottomToTop", "DeepNorm", "HybridNorm", "Init", "Keel", "LNScaling", "MixLN",
    "NormFactory", "NormFormer", "PeriNorm", "PostNorm", "PreNorm", "ReZero", "Reordered", "ResiDual", "Sandwich",
    "Scale", "SubLN", "TFixup", "UnitMatrices", "unit",
]  # fmt: skip
