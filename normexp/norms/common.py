"""What the norms share."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from normexp.kernels.formula import statistics_dtype

Unfolded = tuple[nn.Module, Tensor | None, Tensor | None]  # norm(x) = module(x) · scale + shift, in evaluation


Rounded = Callable[..., tuple[Tensor, ...]]  # (mask, *statistics) -> the statistics that are applied


def exact(mask: Tensor | None, *statistics: Tensor) -> tuple[Tensor, ...]:
    """What a norm hands its statistics to before it applies them: as they are. A study of low precision puts another
    function in its place; `mask` (…) is True at the real tokens of statistics (…, C or 1), None where all are."""
    return statistics


def wide(x: Tensor) -> Tensor:
    """x in the type of its statistics: float32, or float64 where x is."""
    return x.to(statistics_dtype(x.dtype))


def ones(dim: int, wanted: bool) -> nn.Parameter | None:
    """A gain (C), if it is to be learned."""
    return nn.Parameter(torch.ones(dim)) if wanted else None


def zeros(dim: int, wanted: bool) -> nn.Parameter | None:
    """A bias (C), if it is to be learned."""
    return nn.Parameter(torch.zeros(dim)) if wanted else None


def scaled(normalised: Tensor, gain: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """normalised · γ + β, rounded once, to `dtype`."""
    y = normalised if gain is None else normalised * gain
    return (y if bias is None else y + bias).to(dtype)
