"""The arguments of every kernel launch, in one place: the launcher runs them, the tests compile and count them."""

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from normexp.kernels import launch, triton_backward, triton_forward


@dataclass(frozen=True)
class Call:
    kernel: Any
    programs: int
    arguments: tuple[Any, ...]  # tensors, numbers and None, in the order of the kernel's parameters
    constants: dict[str, Any]
    options: dict[str, int]

    def run(self) -> None:
        self.kernel[(self.programs,)](*self.arguments, **self.constants, **self.options)


def options(plan: launch.Launch) -> dict[str, int]:
    """Of Triton's compiler; that for ROCm knows no limit of registers."""
    limit = {} if plan.registers is None or torch.version.hip else {"maxnreg": plan.registers}
    return {"num_warps": plan.warps} | limit


def wide(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype == torch.float64 else tl.float32


def row_stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


Maybe = Tensor | None


def aligned(*tensors: Maybe) -> bool:
    """Whether addresses, row strides and the width are multiples of 16, which is what Triton compiles for."""
    return not any(
        tensor.data_ptr() % 16 or tensor.shape[-1] % 16 or (tensor.ndim > 1 and tensor.stride(0) % 16)
        for tensor in tensors
        if tensor is not None
    )


def forward(
    inputs: tuple[Tensor, Maybe, Maybe, Maybe],
    outputs: tuple[Tensor, Maybe, Maybe, Tensor],
    numbers: tuple[float, float],
    centre: bool,
    round_first: bool,
    plan: launch.Launch,
) -> Call:
    """inputs are x, residual (M, N), weight, bias; outputs y, total, mean, rstd; numbers eps and the gain's offset."""
    x, residual, _, _ = inputs
    m, n = x.shape
    return Call(
        triton_forward.forward_looped if plan.looped else triton_forward.forward,
        plan.programs,
        (*inputs, *outputs, m, n, row_stride(x), row_stride(residual), *numbers),
        {"CENTRE": centre, "ROUND_FIRST": round_first, "ROWS": plan.rows, "BLOCK": plan.block, "WIDE": wide(x.dtype)},
        options(plan),
    )


def backward(
    plan: launch.Launch,
    gradients: tuple[Tensor, Maybe],
    saved: tuple[Tensor, Maybe, Maybe, Tensor],
    outputs: tuple[Maybe, Maybe, Maybe, Maybe],
    offset: float,
) -> Call:
    """gradients are dy, dtotal; saved are x, weight, mean, rstd; outputs are dx, dresidual and the two partial sums."""
    dy, dtotal = gradients
    x, _, mean, _ = saved
    constants = {"ROWS": plan.rows, "BLOCK": plan.block, "CENTRE": mean is not None, "WIDE": wide(x.dtype)}
    if not plan.looped:
        constants |= {"STAGES": plan.stages, "REREAD": plan.reread}
    return Call(
        triton_backward.backward_looped if plan.looped else triton_backward.backward,
        plan.programs,
        (dy, dtotal, *saved, *outputs, *x.shape, row_stride(dy), row_stride(dtotal), row_stride(x), offset),
        constants,
        options(plan),
    )


def reduction(partials: tuple[Maybe, Maybe], gradients: tuple[Maybe, Maybe], lanes: int) -> Call:
    """partials are (programs, N) sums of dweight and dbias, gradients the (N,) results."""
    some = next(partial for partial in partials if partial is not None)
    programs, n = some.shape
    plan = launch.reduction(programs, n, lanes)
    return Call(
        triton_backward.reduce_partials,
        plan.programs,
        (*partials, *gradients, programs, n),
        {"ROWS": plan.rows, "BLOCK": plan.block, "WIDE": wide(some.dtype)},
        options(plan),
    )
