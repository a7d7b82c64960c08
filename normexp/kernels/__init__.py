"""Fused normalisation: RMSNorm and LayerNorm, with and without the residual add, forward and backward.

x is (..., N); weight and bias are (N,) or None. Statistics are float32 whatever the type of x; the result has the type
of x. gain_offset is added to the weight in float32 (Gemma's 1 + w). cast says when low-precision values are rounded:
"input" before the gain (LLaMA), "float32" once at the end (Gemma).

kernel chooses the arithmetic:
    auto     Triton on a CUDA or ROCm device, ATen's kernels on a CPU, the formula elsewhere; never timed, never random
    triton   the fused kernels; an error without a GPU, unless TRITON_INTERPRET=1
    torch    the formula in plain operations
    compile  torch.compile of that formula
"""

import os
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from normexp.kernels import formula, native
from normexp.kernels.formula import Cast

Kernel = Literal["auto", "triton", "torch", "compile"]
Operation = Literal["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"]

__all__ = ["Cast", "Kernel", "Operation", "add_layer_norm", "add_rms_norm", "layer_norm", "path", "rms_norm"]

FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def path(kernel: str, device: torch.device | str, dtype: torch.dtype, width: int, op: str) -> str:
    """Name of the arithmetic that `kernel` means here; it depends on nothing but the arguments and TRITON_INTERPRET.

    triton: the fused kernels; torch: the formula; compile: the compiled formula; native: ATen's LayerNorm kernels.
    Raises RuntimeError when Triton was asked for and can't run on `device`.
    """
    kind = torch.device(device).type
    if kernel == "auto":
        if kind == "cuda" and dtype in FUSED_DTYPES:
            return "triton"
        return "native" if kind == "cpu" else "torch"
    if kernel == "triton" and kind != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            f"kernel=triton needs a CUDA or ROCm device, and {op} of width {width} was given a tensor on {kind!r}; "
            "use kernel=auto or kernel=torch there"
        )
    if kernel not in ("triton", "torch", "compile"):
        raise ValueError(f"kernel={kernel!r}; known are auto, triton, torch and compile")
    return kernel


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, gain_offset: float = 0.0, cast: Cast, kernel: Kernel
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + gain_offset) (1910.07467)."""
    return _norm("rms_norm", x, weight, None, eps, gain_offset, cast, kernel)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    gain_offset: float = 0.0,
    cast: Cast,
    kernel: Kernel,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * (weight + gain_offset) + bias, biased variance (1607.06450)."""
    return _norm("layer_norm", x, weight, bias, eps, gain_offset, cast, kernel)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    gain_offset: float = 0.0,
    cast: Cast,
    kernel: Kernel,
) -> tuple[Tensor, Tensor]:
    """s = x + residual in the residual's type, and rms_norm(s) in the type of x: returns (y, s)."""
    return _add_norm("rms_norm", x, residual, weight, None, eps, gain_offset, cast, kernel)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    gain_offset: float = 0.0,
    cast: Cast,
    kernel: Kernel,
) -> tuple[Tensor, Tensor]:
    """s = x + residual in the residual's type, and layer_norm(s) in the type of x: returns (y, s)."""
    return _add_norm("layer_norm", x, residual, weight, bias, eps, gain_offset, cast, kernel)


def _unfused(op: str, where: str) -> Callable[..., Any]:
    if where == "native":
        return getattr(native, op)
    plain = getattr(formula, op)
    return formula.compiled(plain) if where == "compile" else plain


def _norm(
    op: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    cast: Cast,
    kernel: Kernel,
) -> Tensor:
    where = path(kernel, x.device, x.dtype, x.shape[-1], op)
    if where == "triton":
        from normexp.kernels import fused  # the only import of triton, taken when its path is

        return fused.norm(op, x, weight, bias, eps, offset, cast)
    return _unfused(op, where)(x, weight, bias, eps, offset, cast, x.dtype)


def _add_norm(
    op: str,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    cast: Cast,
    kernel: Kernel,
) -> tuple[Tensor, Tensor]:
    where = path(kernel, x.device, x.dtype, x.shape[-1], f"add_{op}")
    if where == "triton":
        from normexp.kernels import fused

        return fused.add_norm(op, x, residual, weight, bias, eps, offset, cast)
    total = (x + residual).to(residual.dtype)
    return _unfused(op, where)(total, weight, bias, eps, offset, cast, x.dtype), total
