"""A norm that learns which statistics to take."""

import torch
from torch import Tensor, nn

from normexp.fields import PositiveFloat, UnitInterval
from normexp.norms.batch import RunningStatistics, moments
from normexp.norms.common import ones, scaled, wide, zeros


class SwitchableNorm(RunningStatistics):
    """(x − μ) / √(σ² + ε) · γ + β, μ = Σ ω_k μ_k and σ² = Σ ω'_k σ²_k over k in {LayerNorm, BatchNorm} (1806.10779).

    ω and ω' are softmaxes of two learned logits each, all 1 at the start; LayerNorm's shares are metrics. Variances are
    averaged as they are: the spread between the means is no part of σ². BatchNorm's statistics are over B·T, of real
    tokens only when `mask_padding`, and running in evaluation.

    Checked: authors' code, whose one-dimensional form has these two members (the image forms have InstanceNorm as
    well). Ours as in BatchNorm, not theirs: the biased variance normalises, and the running one starts at 1 and moves
    by m = 0.1, not 0.003.
    """

    def __init__(
        self, dim: int, *, eps: PositiveFloat, momentum: UnitInterval, affine: bool, mask_padding: bool
    ) -> None:
        super().__init__(dim, momentum=momentum)
        self.eps, self.mask_padding = eps, mask_padding
        self.mean_logits = nn.Parameter(torch.ones(2))
        self.var_logits = nn.Parameter(torch.ones(2))
        self.weight, self.bias = ones(dim, affine), zeros(dim, affine)

    def observed(self) -> dict[str, Tensor]:
        """ω and ω' of LayerNorm; BatchNorm has the rest."""
        return {"ln_share_of_mean": self.mean_logits.softmax(0)[0], "ln_share_of_var": self.var_logits.softmax(0)[0]}

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        values = wide(x)
        mean_ln = values.mean(-1, keepdim=True)
        var_ln = (values - mean_ln).square().mean(-1, keepdim=True)
        mean_bn, var_bn = self._batch_statistics(values, mask if self.mask_padding else None)
        of_mean, of_var = self.mean_logits.softmax(0), self.var_logits.softmax(0)
        mean = of_mean[0] * mean_ln + of_mean[1] * mean_bn
        var = of_var[0] * var_ln + of_var[1] * var_bn
        mean, inverse = self.rounded(mask, mean, torch.rsqrt(var + self.eps))
        return scaled((values - mean) * inverse, self.weight, self.bias, x.dtype)

    def _batch_statistics(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if not (self.training or self.frozen):
            return self.running_mean, self.running_var
        count, mean, square = moments(x, mask)
        if not self.frozen:
            self._update(count, mean, square)
        return mean, square / count.clamp(min=1)
