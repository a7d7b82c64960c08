"""The CPU paths: ATen's own LayerNorm kernels, and an RMSNorm made of them.

PyTorch's `F.rms_norm` is several times slower than `F.layer_norm` on a CPU, so a comparison of the two layers there
would compare implementations. RMSNorm's backward differs from LayerNorm's, taken at mean 0 and RMSNorm's 1/rms, by one
constant per row:

    dx_rms = dx_layer_norm + rstd * mean(dy * gain)        dgain_rms = dgain_layer_norm
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normexp.kernels import formula
from normexp.kernels.formula import Cast

layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps), (..., 1)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    # eps - (-1/N) * norm^2 in one operation: each one with a Python number costs as much as a small row
    return torch.rsub(norm.mul_(norm), eps, alpha=-1 / max(x.shape[-1], 1)).rsqrt_()


class RmsNorm(torch.autograd.Function):
    """x / rms(x) * scale for float32 or float64 x and scale; right in its second derivative as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor | None, eps: float) -> Tensor:
        y = torch.empty_like(x)  # before rstd, which then keeps the allocator from giving y back after every step
        rstd = inverse_rms(x, eps)
        ctx.save_for_backward(x, scale, rstd)
        ctx.eps = eps
        torch.mul(x, rstd, out=y)
        return y if scale is None else y.mul_(scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (dy,) = gradients
        x, scale, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():
            y = formula.rms_norm(x, scale, None, ctx.eps, 0.0, "float32", x.dtype)
            dx, dscale = formula.gradients(y, (x, scale), dy)
            return dx, dscale, None
        want_dx, want_dscale, _ = ctx.needs_input_grad
        width = x.shape[-1]
        dx, dscale, _ = layer_norm_backward(
            dy, x, [width], torch.zeros_like(rstd), rstd, scale, None, [want_dx, want_dscale, False]
        )
        if want_dx and width:
            dx.add_(row_sum(dy, scale).mul_(rstd), alpha=1 / width)
        return dx if want_dx else None, dscale if want_dscale else None, None


def row_sum(dy: Tensor, scale: Tensor | None) -> Tensor:
    """sum(dy * scale) over the last dimension, (..., 1); the matrix-vector product does not store dy * scale."""
    if scale is None:
        return dy.sum(-1, keepdim=True)
    return torch.mv(dy.reshape(-1, dy.shape[-1]), scale).view(*dy.shape[:-1], 1)


def _rms_norm(x: Tensor, scale: Tensor | None, eps: float) -> Tensor:
    if torch.is_grad_enabled():
        y: Tensor = RmsNorm.apply(x, scale, eps)  # type: ignore[no-untyped-call]
        return y
    y = x * inverse_rms(x, eps)
    return y if scale is None else y.mul_(scale)


def rms_norm(
    x: Tensor, weight: Tensor | None, bias: None, eps: float, offset: float, cast: Cast, dtype: torch.dtype
) -> Tensor:
    if formula.traced(x):  # inductor fuses the formula with its neighbours, but can't see into a Function
        return formula.rms_norm(x, weight, bias, eps, offset, cast, dtype)
    wide = formula.statistics_dtype(x.dtype)
    if dtype == wide:
        return _rms_norm(x.to(wide), formula.gain(weight, offset, wide), eps)
    normalised = _rms_norm(x.to(wide), None, eps)
    return formula.scale_and_cast(normalised, weight, bias, offset, cast, dtype)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, cast: Cast, dtype: torch.dtype
) -> Tensor:
    wide = formula.statistics_dtype(x.dtype)
    width = (x.shape[-1],)
    if dtype == wide:
        shift = None if bias is None else bias.to(wide)
        return F.layer_norm(x.to(wide), width, formula.gain(weight, offset, wide), shift, eps)
    normalised = F.layer_norm(x.to(wide), width, None, None, eps)
    return formula.scale_and_cast(normalised, weight, bias, offset, cast, dtype)
