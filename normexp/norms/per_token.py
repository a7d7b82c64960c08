"""Norms whose statistics are those of one token: the same in training and evaluation, whatever the batch holds."""

import torch
from torch import Tensor, nn

from normexp import kernels
from normexp.fields import PositiveFloat
from normexp.kernels import Cast, Kernel
from normexp.norms.common import Unfolded


class LayerNorm(nn.Module):
    """(x − μ) / √(σ² + ε) · γ + β, with μ and the biased σ² over C, per token (1607.06450)."""

    def __init__(self, dim: int, *, eps: PositiveFloat, affine: bool, cast: Cast, kernel: Kernel) -> None:
        super().__init__()
        self.eps, self.cast, self.kernel = eps, cast, kernel
        self.weight = nn.Parameter(torch.ones(dim)) if affine else None
        self.bias = nn.Parameter(torch.zeros(dim)) if affine else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return kernels.layer_norm(x, self.weight, self.bias, self.eps, cast=self.cast, kernel=self.kernel)

    def unfold(self, dim: int) -> Unfolded:
        plain = LayerNorm(dim, eps=self.eps, affine=False, cast=self.cast, kernel=self.kernel)
        return plain, self.weight, self.bias


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · γ, the mean over C, per token; no centring, no bias (1910.07467)."""

    def __init__(self, dim: int, *, eps: PositiveFloat, affine: bool, cast: Cast, kernel: Kernel) -> None:
        super().__init__()
        self.eps, self.cast, self.kernel = eps, cast, kernel
        self.weight = nn.Parameter(torch.ones(dim)) if affine else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps, cast=self.cast, kernel=self.kernel)

    def unfold(self, dim: int) -> Unfolded:
        return RMSNorm(dim, eps=self.eps, affine=False, cast=self.cast, kernel=self.kernel), self.weight, None
