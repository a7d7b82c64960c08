"""BatchNorm, and what a trainer asks of every norm whose statistics cross samples."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normexp.fields import PositiveFloat, PositiveInt, UnitInterval
from normexp.norms.common import Rounded, Unfolded, exact, ones, scaled, wide, zeros
from normexp.norms.pointwise import Identity

Statistics = Literal["batch_time", "position", "cumulative"]


class RunningStatistics(nn.Module):
    """A norm with the mean and variance of samples, and running ones by torch's rule: r ← (1 − m) r + m s, s with the
    unbiased variance; evaluation uses them. Statistics that no token or a single one supports leave them as they were.
    """

    running_mean: Tensor
    running_var: Tensor
    rounded: Rounded = staticmethod(exact)

    def __init__(self, *shape: int, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.frozen = False  # normalise by the batch in hand and leave the running statistics alone
        self.register_buffer("running_mean", torch.zeros(shape))
        self.register_buffer("running_var", torch.ones(shape))

    @property
    def causal(self) -> bool:
        """Whether the training output at t depends on tokens up to t only."""
        return False

    def problem(self, rows: int, context: int) -> str | None:
        """Why statistics over `rows` sequences of `context` tokens cannot be taken, or None."""
        if rows * context > 1:
            return None
        return f"{type(self).__name__} would take its variance from one value; use a larger batch"

    @torch.no_grad()
    def _update(self, count: Tensor, mean: Tensor, square: Tensor) -> None:
        """`square`: the sum of squared deviations from the mean of `count` tokens. (C), or (T, C) for each position."""
        places = slice(0, len(mean)) if mean.ndim > 1 else slice(None)  # the first T positions
        rate = self.momentum * (count > 1)
        self.running_mean[places] += rate * (mean - self.running_mean[places])
        self.running_var[places] += rate * (square / (count - 1).clamp(min=1) - self.running_var[places])


class BatchNorm(RunningStatistics):
    """(x − μ) / √(σ² + ε) · γ + β per channel, with μ and σ² over samples (1502.03167).

    `stats` names what a statistic is taken over, in training:
    `batch_time`: all B·T tokens of the micro-batch. Output at t then depends on tokens after t: not causal.
    `position`: the B tokens at each position; running statistics (T, C). Causal.
    `cumulative`: the tokens of all samples at positions ≤ t; running statistics (C), of the last position. Causal.

    Only real tokens count when `mask_padding`; pads are taken as 0 and normalised like the real ones. The
    biased variance normalises.

    Checked: torch's `batch_norm`, running statistics included; the causal forms are ours.
    """

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
        super().__init__(*((context, dim) if stats == "position" else (dim,)), momentum=momentum)
        self.eps, self.stats, self.mask_padding = eps, stats, mask_padding
        self.weight, self.bias = ones(dim, affine), zeros(dim, affine)

    @property
    def causal(self) -> bool:
        return self.stats != "batch_time"

    def problem(self, rows: int, context: int) -> str | None:
        values = rows * context if self.stats == "batch_time" else rows
        if values > 1:
            return None
        return f"BatchNorm with norm.stats={self.stats} would take its variance from one value; use a larger batch"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        real = mask
        mask = mask if self.mask_padding else None
        own = self.training or self.frozen
        dense = (self.stats == "batch_time" and mask is None) or (self.stats != "position" and not own)
        if dense and self.rounded is exact:
            return self._dense(x, own)
        values = wide(x)
        if own:
            values = without_pads(values, mask)
            mean, var = self._statistics(values, mask)
        else:
            places = slice(x.shape[1] if self.stats == "position" else None)
            mean, var = self.running_mean[places], self.running_var[places]
        real = real.any(0) if real is not None and mean.ndim > 1 else None  # where a position has a real token
        mean, inverse = self.rounded(real, mean, torch.rsqrt(var + self.eps))
        return scaled((values - mean) * inverse, self.weight, self.bias, x.dtype)

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
        flat = wide(x).reshape(-1, x.shape[-1])
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
            last = -1 if self.stats == "cumulative" else slice(None)
            self._update(count_T1[last], mean_TC[last], square_TC[last])
        return mean_TC, square_TC / count_T1.clamp(min=1)


def moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Number of real tokens (1), their mean (C) and sum of squared deviations (C), in two passes."""
    real = _real(x, mask)
    count = real.sum((0, 1))
    mean = (x * real).sum((0, 1)) / count.clamp(min=1)
    return count, mean, ((x - mean).square() * real).sum((0, 1))


def moments_per_position(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Number of real tokens (T, 1), mean (T, C) and sum of squared deviations (T, C) over B, in two passes."""
    real = _real(x, mask)
    count = real.sum(0)
    mean = (x * real).sum(0) / count.clamp(min=1)
    return count, mean, ((x - mean).square() * real).sum(0)


def _real(x: Tensor, mask: Tensor | None) -> Tensor:
    return torch.ones_like(x[..., :1]) if mask is None else mask.unsqueeze(-1).to(x.dtype)


def without_pads(x: Tensor, mask: Tensor | None) -> Tensor:
    """0 at pads, which no loss sees: statistics of a single token would blow them up from norm to norm, and 0 · ∞ is
    no 0."""
    return x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0.0)


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
