"""Normalisation layers: one class per norm, called as `norm(x_BTC, mask_BT)` and returning the shape and dtype of x.

B: sequences, T: positions, C: channels. `mask` is True at real tokens, None when every token is real. Statistics are
float32 whatever the dtype of x; ε stands inside the square root; gain 1 and bias 0 at the start.
A norm whose statistics cross samples says in `problem` which micro-batches it cannot take, and while its attribute
`frozen` is true it normalises by the batch in hand and leaves its running statistics alone.
A norm that is, in evaluation, something without parameters times a scale plus a shift says so in `unfold`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normexp import kernels
from normexp.fields import PositiveFloat, PositiveInt, UnitInterval
from normexp.kernels import Cast, Kernel
from normexp.kernels.formula import statistics_dtype

Statistics = Literal["batch_time", "position", "cumulative"]
Unfolded = tuple[nn.Module, Tensor | None, Tensor | None]  # norm(x) = module(x) · scale + shift, in evaluation


class Identity(nn.Module):
    """x."""

    def __init__(self, dim: int) -> None:
        super().__init__()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x


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


class BatchNorm(nn.Module):
    """(x − μ) / √(σ² + ε) · γ + β per channel, with μ and σ² over samples (1502.03167).

    `stats` names what a statistic is taken over, in training:
    `batch_time`: all B·T tokens of the micro-batch. Output at t then depends on tokens after t: not causal.
    `position`: the B tokens at each position; running statistics (T, C). Causal.
    `cumulative`: the tokens of all samples at positions ≤ t; running statistics (C), of the last position. Causal.

    Only real tokens count when `mask_padding`; pads are still normalised, by the statistics of the real ones. The
    biased variance normalises, r ← (1 − m) r + m s with the unbiased variance updates the running statistics, and
    evaluation uses those (torch's rule). Statistics that no token or a single one supports leave them as they were.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        dim: int,
        *,
        eps: PositiveFloat,
        momentum: UnitInterval,
        affine: bool,
        stats: Statistics,
        mask_padding: bool,
        context: PositiveInt,
    ) -> None:
        super().__init__()
        self.eps, self.momentum, self.stats, self.mask_padding = eps, momentum, stats, mask_padding
        self.frozen = False  # normalise by the batch in hand and leave the running statistics alone
        self.weight = nn.Parameter(torch.ones(dim)) if affine else None
        self.bias = nn.Parameter(torch.zeros(dim)) if affine else None
        shape = (context, dim) if stats == "position" else (dim,)
        self.register_buffer("running_mean", torch.zeros(shape))
        self.register_buffer("running_var", torch.ones(shape))

    @property
    def causal(self) -> bool:
        """Whether the training output at t depends on tokens up to t only."""
        return self.stats != "batch_time"

    def problem(self, rows: int, context: int) -> str | None:
        """Why statistics over `rows` sequences of `context` tokens cannot be taken, or None."""
        values = rows * context if self.stats == "batch_time" else rows
        if values > 1:
            return None
        return f"BatchNorm with norm.stats={self.stats} would take its variance from one value; use a larger batch"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = mask if self.mask_padding else None
        own = self.training or self.frozen
        if (self.stats == "batch_time" and mask is None) or (self.stats != "position" and not own):
            return self._dense(x, own)
        wide = x.to(statistics_dtype(x.dtype))
        if own:
            mean, var = self._statistics(wide, mask)
        else:
            mean, var = self.running_mean[: x.shape[1]], self.running_var[: x.shape[1]]
        y = (wide - mean) * torch.rsqrt(var + self.eps)
        if self.weight is not None and self.bias is not None:
            y = y * self.weight + self.bias
        return y.to(x.dtype)

    def unfold(self, dim: int) -> Unfolded:
        """The whole norm: with running statistics it is linear in x."""
        if self.stats == "position":
            raise ValueError("its running statistics differ by position (norm.stats=position)")
        scale = torch.rsqrt(self.running_var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -self.running_mean * scale
        return Identity(dim), scale, shift if self.bias is None else shift + self.bias

    def _dense(self, x: Tensor, own: bool) -> Tensor:
        """One statistic per channel for all tokens: torch's own operator, over (B·T, C)."""
        flat = x.to(statistics_dtype(x.dtype)).reshape(-1, x.shape[-1])
        mean, var = (None, None) if self.frozen else (self.running_mean, self.running_var)
        y = F.batch_norm(flat, mean, var, self.weight, self.bias, own, self.momentum, self.eps)
        return y.view(x.shape).to(x.dtype)

    def _statistics(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and biased variance that broadcast over x (B, T, C); moves the running ones in training."""
        count_T1, mean_TC, square_TC = moments_per_position(x, mask)  # sums of squared deviations, not variances
        if self.stats != "position":
            count_T1, mean_TC, square_TC = accumulate(count_T1, mean_TC, square_TC)
        if self.stats == "batch_time":
            count_T1, mean_TC, square_TC = count_T1[-1], mean_TC[-1], square_TC[-1]
        if not self.frozen:
            self._update(count_T1, mean_TC, square_TC)
        return mean_TC, square_TC / count_T1.clamp(min=1)

    @torch.no_grad()
    def _update(self, count: Tensor, mean: Tensor, square: Tensor) -> None:
        if self.stats == "cumulative":
            count, mean, square = count[-1], mean[-1], square[-1]
        length = slice(0, mean.shape[0]) if self.stats == "position" else slice(None)
        rate = self.momentum * (count > 1)
        self.running_mean[length] += rate * (mean - self.running_mean[length])
        self.running_var[length] += rate * (square / (count - 1).clamp(min=1) - self.running_var[length])


def moments_per_position(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Number of real tokens (T, 1), mean (T, C) and sum of squared deviations (T, C) over B, in two passes."""
    real = torch.ones_like(x[..., :1]) if mask is None else mask.unsqueeze(-1).to(x.dtype)
    count = real.sum(0)
    mean = (x * real).sum(0) / count.clamp(min=1)
    square = ((x - mean).square() * real).sum(0)
    return count, mean, square


def accumulate(count: Tensor, mean: Tensor, square: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per-position moments -> those of all positions ≤ t (Chan's parallel form of Welford: nothing cancels)."""
    total = count.cumsum(0)
    mean_up_to = (count * mean).cumsum(0) / total.clamp(min=1)
    before = torch.cat([torch.zeros_like(mean[:1]), mean_up_to[:-1]])
    between = (mean - before).square() * count * (total - count) / total.clamp(min=1)
    return total, mean_up_to, (square + between).cumsum(0)


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """The norms in the model that take statistics across samples."""
    return [module for module in model.modules() if hasattr(module, "frozen")]


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Inside, every batch norm normalises by the statistics of the batch in hand and moves no running ones."""
    norms = batch_norms(model)
    for norm in norms:
        setattr(norm, "frozen", True)  # noqa: B010  the type checker knows no attributes of a module
    try:
        yield
    finally:
        for norm in norms:
            setattr(norm, "frozen", False)  # noqa: B010
