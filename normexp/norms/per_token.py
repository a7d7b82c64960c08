"""Norms whose statistics are those of one token: the same in training and evaluation, whatever the batch holds."""

import torch
from torch import Tensor, nn

from normexp import kernels
from normexp.fields import PositiveFloat
from normexp.kernels import Cast, Kernel
from normexp.norms.common import Unfolded


def gain_parameter(dim: int, offset: float) -> nn.Parameter:
    """w (C), from 1 − offset on, so that the gain offset + w starts at 1. Gemma stores γ as 1 + w: near 0 a bfloat16
    has finer steps than near 1."""
    return nn.Parameter(torch.full((dim,), 1 - offset))


def gain(weight: Tensor | None, offset: float) -> Tensor | None:
    return None if weight is None else weight + offset


class LayerNorm(nn.Module):
    """(x − μ) / √(σ² + ε) · γ + β, with μ and the biased σ² over C, per token (1607.06450). γ = gain_offset + w."""

    def __init__(
        self, dim: int, *, eps: PositiveFloat, affine: bool, cast: Cast, kernel: Kernel, gain_offset: float
    ) -> None:
        super().__init__()
        self.eps, self.cast, self.kernel, self.gain_offset = eps, cast, kernel, gain_offset
        self.weight = gain_parameter(dim, gain_offset) if affine else None
        self.bias = nn.Parameter(torch.zeros(dim)) if affine else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return kernels.layer_norm(
            x, self.weight, self.bias, self.eps, gain_offset=self.gain_offset, cast=self.cast, kernel=self.kernel
        )

    def unfold(self, dim: int) -> Unfolded:
        plain = LayerNorm(dim, eps=self.eps, affine=False, cast=self.cast, kernel=self.kernel, gain_offset=0.0)
        return plain, gain(self.weight, self.gain_offset), self.bias


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · γ, the mean over C, per token; no centring, no bias (1910.07467). γ = gain_offset + w."""

    def __init__(
        self, dim: int, *, eps: PositiveFloat, affine: bool, cast: Cast, kernel: Kernel, gain_offset: float
    ) -> None:
        super().__init__()
        self.eps, self.cast, self.kernel, self.gain_offset = eps, cast, kernel, gain_offset
        self.weight = gain_parameter(dim, gain_offset) if affine else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return kernels.rms_norm(
            x, self.weight, self.eps, gain_offset=self.gain_offset, cast=self.cast, kernel=self.kernel
        )

    def unfold(self, dim: int) -> Unfolded:
        plain = RMSNorm(dim, eps=self.eps, affine=False, cast=self.cast, kernel=self.kernel, gain_offset=0.0)
        return plain, gain(self.weight, self.gain_offset), None
