"""Fused normalisation: RMSNorm and LayerNorm, with and without the residual add, forward and backward.

x and residual are (..., N), weight and bias (N,) or None; each is float32, bfloat16 or float16, or all are float64, and
anything else is refused by name. Statistics are float32 whatever the type of x; the result has the type of x.
gain_offset is added to the weight in float32 (Gemma's 1 + w). cast says when low-precision values are rounded: "input"
before the gain (LLaMA), "float32" once at the end (Gemma).

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
DTYPES = (*FUSED_DTYPES, torch.float64)


def path(
    kernel: str, device: torch.device | str, dtype: torch.dtype, width: int, op: str, model_compiled: bool = False
) -> str:
    """Name of the arithmetic that `kernel` means here; it depends on nothing but the arguments and TRITON_INTERPRET.

    triton: the fused kernels; torch: the formula; compile: the compiled formula; native: ATen's LayerNorm kernels.
    `model_compiled`: the norm lies in a compiled model, and whatever is not one operation is compiled with it.
    Raises RuntimeError when Triton was asked for and can't run on `device`.
    """
    where = _path_by_itself(kernel, torch.device(device).type, dtype, width, op)
    return "compile" if model_compiled and where != "triton" else where


def _path_by_itself(kernel: str, kind: str, dtype: torch.dtype, width: int, op: str) -> str:
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


def check(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, cast: str) -> None:
    """Every path takes the same operands: a kernel reads past the end of one that the formula would broadcast."""
    if cast not in ("input", "float32"):
        raise ValueError(f"cast={cast!r}; known are input and float32")
    if x.ndim == 0 or x.dtype not in DTYPES:
        raise TypeError(f"x has shape {tuple(x.shape)} and type {x.dtype}; a norm takes (..., N) of a floating type")
    if residual is not None:
        _check_operand("residual", residual, x, x.shape)
    if weight is not None:
        _check_operand("weight", weight, x, x.shape[-1:])
    if bias is not None:
        _check_operand("bias", bias, x, x.shape[-1:])


def _check_operand(name: str, operand: Tensor, x: Tensor, shape: torch.Size) -> None:
    if operand.shape != shape:
        raise ValueError(
            f"{name} has shape {tuple(operand.shape)}; beside x {tuple(x.shape)} it must be {tuple(shape)}"
        )
    if operand.dtype is not x.dtype and (operand.dtype not in FUSED_DTYPES or x.dtype is torch.float64):
        raise TypeError(f"{name} has type {operand.dtype}, x {x.dtype}; float64 goes with float64 alone")
    if operand.device != x.device:
        raise ValueError(f"{name} is on {operand.device}, x on {x.device}")
    if _distributed(operand) != _distributed(x):
        raise TypeError(f"{name} is a {type(operand).__name__}, x a {type(x).__name__}: distribute both, or neither")


def _distributed(tensor: Tensor) -> bool:
    """Whether it is a DTensor; torch.distributed is not imported for the question."""
    return type(tensor) not in formula.PLAIN and hasattr(tensor, "device_mesh")


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
    check(x, None, weight, bias, cast)
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
    check(x, residual, weight, bias, cast)
    where = path(kernel, x.device, x.dtype, x.shape[-1], f"add_{op}")
    if where == "triton":
        from normexp.kernels import fused

        return fused.add_norm(op, x, residual, weight, bias, eps, offset, cast)
    total = (x + residual).to(residual.dtype)
    return _unfused(op, where)(total, weight, bias, eps, offset, cast, x.dtype), total
