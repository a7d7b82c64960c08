"""What the norms share."""

from torch import Tensor, nn

from normexp.kernels.formula import statistics_dtype

Unfolded = tuple[nn.Module, Tensor | None, Tensor | None]  # norm(x) = module(x) · scale + shift, in evaluation


def wide(x: Tensor) -> Tensor:
    """x in the type of its statistics: float32, or float64 where x is."""
    return x.to(statistics_dtype(x.dtype))
