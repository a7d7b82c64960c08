"""The CPU paths: ATen's own LayerNorm kernels, and an RMSNorm made of them.

PyTorch's `F.rms_norm` is several times slower than `F.layer_norm` on a CPU, so a comparison of the two layers there
would compare implementations. RMSNorm's backward differs from LayerNorm's, taken at mean 0 and RMSNorm's 1/rms, by one
constant per row:

    dx_rms = dx_layer_norm + rstd * mean(dy * gain)        dgain_rms = dgain_layer_norm

In bfloat16 and float16, ATen's LayerNorm kernels are exact in y and dx when they are given float32 parameters, but
round the partial sums of a parameter's gradient to the type of x: those are taken of float32 copies.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normexp.kernels import formula
from normexp.kernels.formula import Cast

LONG_ROW = 512  # columns from which the norm of a vector, added up one by one, is twice as wrong as the formula
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
        dx, dscale = rms_backward(dy, x, scale, rstd, want_dx, want_dscale)
        return dx, dscale, None


def rms_backward(
    dy: Tensor, x: Tensor, scale: Tensor | None, rstd: Tensor, want_dx: bool, want_dscale: bool
) -> tuple[Tensor | None, Tensor | None]:
    width = x.shape[-1]
    dx, dscale, _ = layer_norm_backward(
        dy, x, [width], torch.zeros_like(rstd), rstd, scale, None, [want_dx, want_dscale, False]
    )
    if want_dx and width:
        dx.add_(row_sum(dy, scale).mul_(rstd), alpha=1 / width)
    return dx if want_dx else None, dscale if want_dscale else None


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


class Narrow(torch.autograd.Function):
    """A norm of bfloat16 or float16 x with float32 inside; right in its second derivative as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, centre: bool, *numbers: Any) -> Tensor:
        y, mean, rstd = narrow_forward(x, weight, bias, centre, *numbers)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.centre, ctx.numbers = centre, numbers
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = gradients
        x, weight, bias, mean, rstd = ctx.saved_tensors
        eps, offset, cast = ctx.numbers
        if torch.is_grad_enabled():
            compute = formula.layer_norm if ctx.centre else formula.rms_norm
            y = compute(x, weight, bias, eps, offset, cast, x.dtype)
            found = formula.gradients(y, (x, weight, bias), dy)
        else:
            scale = formula.gain(weight, offset, torch.float32)
            found = narrow_backward(dy, x, scale, mean, rstd, ctx.needs_input_grad[:3])
        typed = (g if g is None else g.to(t.dtype) for g, t in zip(found, (x, weight, bias), strict=True))
        return *typed, *[None] * 4


def narrow_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, centre: bool, eps: float, offset: float, cast: Cast
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, and mean and 1/sigma in float32; an RMSNorm has no mean."""
    scale = formula.gain(weight, offset, torch.float32)
    if centre:
        once = cast == "float32"  # all in one kernel, which rounds at its end
        shift = bias.float() if once and bias is not None else None
        y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], or_ones(scale if once else None, x), shift, eps)
        return y if once else affine_(y, weight, bias, offset), mean, rstd
    wide = x.float()
    long = x.shape[-1] > LONG_ROW
    rstd = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_() if long else inverse_rms(wide, eps)
    wide.mul_(rstd)
    if cast == "float32":
        return (wide if scale is None else wide.mul_(scale)).to(x.dtype), None, rstd
    return affine_(wide.to(x.dtype), weight, bias, offset), None, rstd


def or_ones(scale: Tensor | None, x: Tensor) -> Tensor:
    """ATen takes float32 statistics, or gives them, only beside a float32 weight."""
    return torch.ones(x.shape[-1:], dtype=torch.float32, device=x.device) if scale is None else scale


def affine_(y: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float) -> Tensor:
    """y * gain + bias, rounded once, since a product of two bfloat16 or float16 is exact in ATen's float32."""
    if weight is None and bias is None:
        return y
    if weight is not None and weight.dtype == y.dtype and not offset:
        if bias is None:
            return y.mul_(weight)
        if bias.dtype == y.dtype:
            return torch.addcmul(bias, y, weight)
    wide, scale = y.float(), formula.gain(weight, offset, torch.float32)
    if scale is not None:
        wide.mul_(scale)
    return y.copy_(wide if bias is None else wide.add_(bias))


def narrow_backward(
    dy: Tensor, x: Tensor, scale: Tensor | None, mean: Tensor | None, rstd: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    want_dx, *want_parameters = wanted
    if mean is None:
        return *rms_backward(dy.float(), x.float(), scale, rstd, want_dx, want_parameters[0]), None
    dx, dscale, dbias = None, None, None
    given = mean, rstd, or_ones(scale, x)
    if want_dx:
        dx, _, _ = layer_norm_backward(dy, x, x.shape[-1:], *given, None, [True, False, False])
    if any(want_parameters):
        _, dscale, dbias = layer_norm_backward(
            dy.float(), x.float(), x.shape[-1:], *given, given[-1], [False, *want_parameters]
        )
    return dx, dscale if want_parameters[0] else None, dbias if want_parameters[1] else None


def _narrow(x: Tensor, weight: Tensor | None, bias: Tensor | None, centre: bool, *numbers: Any) -> Tensor:
    if torch.is_grad_enabled():
        y: Tensor = Narrow.apply(x, weight, bias, centre, *numbers)  # type: ignore[no-untyped-call]
        return y
    return narrow_forward(x, weight, bias, centre, *numbers)[0]


def rms_norm(
    x: Tensor, weight: Tensor | None, bias: None, eps: float, offset: float, cast: Cast, dtype: torch.dtype
) -> Tensor:
    if formula.traced(x, weight):  # inductor fuses the formula with its neighbours, but can't see into a Function
        return formula.rms_norm(x, weight, bias, eps, offset, cast, dtype)
    wide = formula.statistics_dtype(x.dtype)
    if x.dtype == dtype != wide:
        return _narrow(x, weight, None, False, eps, offset, cast)
    if dtype == wide or cast == "float32":
        return _rms_norm(x.to(wide), formula.gain(weight, offset, wide), eps).to(dtype)
    return formula.scale_and_cast(_rms_norm(x.to(wide), None, eps), weight, bias, offset, cast, dtype)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, cast: Cast, dtype: torch.dtype
) -> Tensor:
    wide = formula.statistics_dtype(x.dtype)
    if x.dtype == dtype != wide and not formula.traced(x, weight, bias):
        return _narrow(x, weight, bias, True, eps, offset, cast)
    width = (x.shape[-1],)
    if dtype == wide or cast == "float32":
        shift = None if bias is None else bias.to(wide)
        return F.layer_norm(x.to(wide), width, formula.gain(weight, offset, wide), shift, eps).to(dtype)
    normalised = F.layer_norm(x.to(wide), width, None, None, eps)
    return formula.scale_and_cast(normalised, weight, bias, offset, cast, dtype)
