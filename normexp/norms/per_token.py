"""Norms whose statistics are those of one token: the same in training and evaluation, whatever the batch holds."""

import math
from typing import Annotated

import torch
from torch import Tensor, nn

from normexp import kernels
from normexp.fields import PositiveFloat, Range
from normexp.kernels import Cast, Kernel, formula
from normexp.norms.common import Rounded, Unfolded, exact, ones, scaled, wide, zeros

Share = Annotated[float, Range(low=0.0, high=1.0, open_low=True)]


def gain_parameter(dim: int, offset: float) -> nn.Parameter:
    """w (C), from 1 − offset on, so that the gain offset + w starts at 1. Gemma stores γ as 1 + w: near 0 a bfloat16
    has finer steps than near 1."""
    return nn.Parameter(torch.full((dim,), 1 - offset))


def gain(weight: Tensor | None, offset: float) -> Tensor | None:
    return None if weight is None else weight + offset


class LayerNorm(nn.Module):
    """(x − μ) / √(σ² + ε) · γ + β, with μ and the biased σ² over C, per token (1607.06450).

    γ = gain_offset + w. Checked: torch's `layer_norm`.
    """

    rounded: Rounded = staticmethod(exact)

    def __init__(
        self, dim: int, *, eps: PositiveFloat, affine: bool, cast: Cast, kernel: Kernel, gain_offset: float
    ) -> None:
        super().__init__()
        self.eps, self.cast, self.kernel, self.gain_offset = eps, cast, kernel, gain_offset
        self.weight = gain_parameter(dim, gain_offset) if affine else None
        self.bias = zeros(dim, affine)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.rounded is not exact:
            return self._by_rounded_statistics(x, mask)
        return kernels.layer_norm(
            x, self.weight, self.bias, self.eps, gain_offset=self.gain_offset, cast=self.cast, kernel=self.kernel
        )

    def _by_rounded_statistics(self, x: Tensor, mask: Tensor | None) -> Tensor:
        values = wide(x)
        mean = values.mean(-1, keepdim=True)
        variance = (values - mean).square().mean(-1, keepdim=True)
        mean, inverse = self.rounded(mask, mean, torch.rsqrt(variance + self.eps))
        normalised = (values - mean) * inverse
        return formula.scale_and_cast(normalised, self.weight, self.bias, self.gain_offset, self.cast, x.dtype)

    def unfold(self, dim: int) -> Unfolded:
        plain = LayerNorm(dim, eps=self.eps, affine=False, cast=self.cast, kernel=self.kernel, gain_offset=0.0)
        return plain, gain(self.weight, self.gain_offset), self.bias


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · γ, the mean over C, per token; no centring, no bias (1910.07467).

    γ = gain_offset + w. Checked: authors' code, which adds ε to the root; we add it inside.
    """

    rounded: Rounded = staticmethod(exact)

    def __init__(
        self, dim: int, *, eps: PositiveFloat, affine: bool, cast: Cast, kernel: Kernel, gain_offset: float
    ) -> None:
        super().__init__()
        self.eps, self.cast, self.kernel, self.gain_offset = eps, cast, kernel, gain_offset
        self.weight = gain_parameter(dim, gain_offset) if affine else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.rounded is not exact:
            return self._by_rounded_statistics(x, mask)
        return kernels.rms_norm(
            x, self.weight, self.eps, gain_offset=self.gain_offset, cast=self.cast, kernel=self.kernel
        )

    def _by_rounded_statistics(self, x: Tensor, mask: Tensor | None) -> Tensor:
        values = wide(x)
        (inverse,) = self.rounded(mask, torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps))
        return formula.scale_and_cast(values * inverse, self.weight, None, self.gain_offset, self.cast, x.dtype)

    def unfold(self, dim: int) -> Unfolded:
        plain = RMSNorm(dim, eps=self.eps, affine=False, cast=self.cast, kernel=self.kernel, gain_offset=0.0)
        return plain, gain(self.weight, self.gain_offset), None


class PartialRMSNorm(nn.Module):
    """x / √(mean(x₁² … x_k²) + ε) · γ: the RMS of the first k = ⌊share · C⌋ channels, at least 1 (1910.07467).

    Checked: authors' code, whose ⌊·⌋ is followed; it adds ε to the root, we add it inside. That the paper
    has ⌈·⌉, and 6.25 % as the share, is from secondary sources. At C = 64 it is 4 channels.
    """

    rounded: Rounded = staticmethod(exact)

    def __init__(self, dim: int, *, share: Share, eps: PositiveFloat, affine: bool) -> None:
        super().__init__()
        self.share, self.eps = share, eps
        self.weight = ones(dim, affine)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        values = wide(x)
        mean_square = values[..., : max(1, int(self.share * x.shape[-1]))].square().mean(-1, keepdim=True)
        (inverse,) = self.rounded(mask, torch.rsqrt(mean_square + self.eps))
        return scaled(values * inverse, self.weight, None, x.dtype)

    def unfold(self, dim: int) -> Unfolded:
        return PartialRMSNorm(dim, share=self.share, eps=self.eps, affine=False), self.weight, None


class ScaleNorm(nn.Module):
    """g · x / max(‖x‖₂, eps), g a learned scalar, √C at the start (1910.05895).

    Checked: authors' code, which is followed: a floor under the norm, no ε in a root. Without `affine`, g
    stays √C.
    """

    rounded: Rounded = staticmethod(exact)

    def __init__(self, dim: int, *, eps: PositiveFloat, affine: bool) -> None:
        super().__init__()
        self.eps, self.root = eps, math.sqrt(dim)
        self.weight = nn.Parameter(torch.tensor(self.root)) if affine else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        values = wide(x)
        length = torch.linalg.vector_norm(values, dim=-1, keepdim=True).clamp(min=self.eps)
        unit = values / length if self.rounded is exact else values * self.rounded(mask, 1 / length)[0]
        return (unit * (self.root if self.weight is None else self.weight)).to(x.dtype)

    def unfold(self, dim: int) -> Unfolded:
        scale = None if self.weight is None else self.weight / self.root
        return ScaleNorm(dim, eps=self.eps, affine=False), scale, None


class SeeDNorm(nn.Module):
    """[γ + tanh(x·β) α] ⊙ x / √(mean(x²) + ε), x·β one number for each token: a gain that it moves itself (2510.22777).

    Not checked against the paper: the form is that of secondary sources, and the start from memory. There γ = 1, α = 1
    and β = 0, which make it RMSNorm. Secondary sources report weight decay on α and β;
    here nothing of a norm decays, and γ stays 1 without `affine`. Since x·β sees the scale of x, only β = 0 ignores it.
    """

    rounded: Rounded = staticmethod(exact)

    def __init__(self, dim: int, *, eps: PositiveFloat, affine: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = ones(dim, affine)
        self.alpha = nn.Parameter(torch.ones(dim))
        self.beta = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        values = wide(x)
        (inverse,) = self.rounded(mask, torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps))
        normalised = values * inverse
        moved = torch.tanh((values * self.beta).sum(-1, keepdim=True)) * self.alpha
        return (normalised * (moved + (1 if self.weight is None else self.weight))).to(x.dtype)
