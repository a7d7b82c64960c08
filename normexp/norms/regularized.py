"""BatchNorm held to its own running statistics."""

from typing import Literal

import torch
from torch import Tensor

from normexp.fields import NonNegativeFloat, PositiveFloat, UnitInterval
from normexp.norms.batch import BatchNorm, RunningStatistics, moments
from normexp.norms.common import Unfolded, scaled, wide


class RegularizedBatchNorm(BatchNorm):
    """BatchNorm over B·T, and in the loss [a Σ_c (μ_B − μ_run)² + b Σ_c d_c] / n over n tokens, with d = (σ_B − σ_run)²
    (`std`) or |σ²_B − σ²_run| (`variance`) (RBN, 2210.05153).

    A penalty on what training sees and evaluation will not, for each norm, over real tokens, by the running statistics
    that this batch has already moved; its gradient flows through μ_B and σ_B. `aux_loss` hands it over once for each
    training forward pass; there is none in evaluation or while `frozen`.

    Checked: authors' code, which is followed. Its loss is a sum over tokens, so beside our mean the penalty is divided
    by n. Its recipes, (a, b) = (0.1, 0.01) with Pre-Norm and (60, 0) with Post-Norm, go with `variance`, its default;
    `std` is its `diff2`. Ours as in BatchNorm, not theirs: an unbiased running variance, ε inside the root and not as a
    floor. The floor ε under σ² in the penalty keeps the root's gradient finite.
    """

    def __init__(
        self,
        dim: int,
        *,
        eps: PositiveFloat,
        momentum: UnitInterval,
        affine: bool,
        mask_padding: bool,
        mean_penalty: NonNegativeFloat,
        spread_penalty: NonNegativeFloat,
        spread: Literal["std", "variance"],
    ) -> None:
        super().__init__(
            dim, eps=eps, momentum=momentum, affine=affine, stats="batch_time", mask_padding=mask_padding, context=1
        )
        self.mean_penalty, self.spread_penalty, self.spread = mean_penalty, spread_penalty, spread
        self._penalty: Tensor | None = None  # of the last training forward pass, until it is handed over

    def problem(self, rows: int, context: int) -> str | None:
        return RunningStatistics.problem(self, rows, context)

    def unfold(self, dim: int) -> Unfolded:
        return super().unfold(dim)  # in evaluation it is a BatchNorm

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.frozen or not self.training:
            return super().forward(x, mask)
        values = wide(x)
        count, mean, square = moments(values, mask if self.mask_padding else None)
        self._update(count, mean, square)
        var = square / count.clamp(min=1)
        self._penalty = self._discrepancy(mean, var) / count.clamp(min=1).squeeze()
        mean, inverse = self.rounded(None, mean, torch.rsqrt(var + self.eps))
        return scaled((values - mean) * inverse, self.weight, self.bias, x.dtype)

    def _discrepancy(self, mean: Tensor, var: Tensor) -> Tensor:
        if self.spread == "std":
            apart = (var.clamp(min=self.eps).sqrt() - self.running_var.clamp(min=self.eps).sqrt()).square()
        else:
            apart = (var - self.running_var).abs()
        return self.mean_penalty * (mean - self.running_mean).square().sum() + self.spread_penalty * apart.sum()

    def aux_loss(self) -> Tensor:
        """The penalty of the training forward pass just made, a scalar; 0 where it was handed over already."""
        penalty, self._penalty = self._penalty, None
        return self.running_mean.new_zeros(()) if penalty is None else penalty
