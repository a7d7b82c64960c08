"""The Triton kernels as `torch.library` operations with autograd. Importing this module imports triton.

Any leading shape is viewed as (M, N) with one row stride. Where that can't be a view (a last dimension that is not
contiguous, a fully expanded gradient, transposed leading dimensions), the tensor is copied, once in each direction.

Compiled programs see the operations `normexp::norm` and `normexp::norm_backward`. Eager ones go through `Norm`, which
runs the same two functions without the dispatcher: at small sizes a step waits for the host, not for the kernel.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from normexp.kernels import calls, formula, launch
from normexp.kernels.formula import Cast

INTERPRETED_MULTIPROCESSORS = 2  # a small persistent grid, so that one interpreted program works on several rows

Gradients = tuple[Tensor | None, ...]


@cache
def multiprocessors_and_lanes(index: int | None) -> tuple[int, int]:
    if index is None:
        return INTERPRETED_MULTIPROCESSORS, 32
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, getattr(properties, "warp_size", 32)


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of x."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def as_rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def maybe_rows(x: Tensor | None) -> Tensor | None:
    return None if x is None else as_rows(x)


def packed(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def given(x: Tensor) -> Tensor | None:
    return x if x.numel() else None


def allocate_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    eps: float, gain_offset: float, centre: bool, round_first: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The outputs y, total, mean and rstd of `norm`, unwritten; those that do not apply are empty."""
    device, rows, statistics = x.device, x.shape[:-1], formula.statistics_dtype(x.dtype)
    y = torch.empty(x.shape, dtype=x.dtype, device=device)
    if residual is None:
        total = torch.empty(0, dtype=x.dtype, device=device)
    else:
        total = torch.empty(x.shape, dtype=residual.dtype, device=device)
    mean = torch.empty(rows if centre else 0, dtype=statistics, device=device)
    return y, total, mean, torch.empty(rows, dtype=statistics, device=device)


def norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    eps: float, gain_offset: float, centre: bool, round_first: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    results = allocate_forward(x, residual, weight, bias, eps, gain_offset, centre, round_first)
    if x.numel():
        y, total, mean, rstd = results
        inputs = as_rows(x), maybe_rows(residual), packed(weight), packed(bias)
        _, lanes = multiprocessors_and_lanes(x.device.index)
        m, n = inputs[0].shape
        plan = launch.forward(m, n, calls.aligned(*inputs), lanes)
        outputs = y, given(total), given(mean), rstd
        call = calls.forward(inputs, outputs, (eps, gain_offset), centre, round_first, plan)
        with on_device(x):
            call.run()
    return results


def allocate_backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor,
    gain_offset: float, input_type: torch.dtype, want_dx: bool, want_dweight: bool, bias_type: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The outputs of `norm_backward`, unwritten; dresidual is apart from dx only where the residual's type differs."""
    device, width = x.device, x.shape[-1]
    dx = torch.empty(x.shape if want_dx else 0, dtype=input_type, device=device)
    apart = want_dx and x.dtype != input_type
    dresidual = torch.empty(x.shape if apart else 0, dtype=x.dtype, device=device)
    weight_type = x.dtype if weight is None else weight.dtype
    dweight = torch.empty(width if want_dweight else 0, dtype=weight_type, device=device)
    return dx, dresidual, dweight, torch.empty(width if bias_type else 0, dtype=bias_type or x.dtype, device=device)


def norm_backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor | None, rstd: Tensor,
    gain_offset: float, input_type: torch.dtype, want_dx: bool, want_dweight: bool, bias_type: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x is what was normalised (the sum, with a residual), input_type the type of x before the sum."""
    results = allocate_backward(
        dy, dtotal, x, weight, mean, rstd, gain_offset, input_type, want_dx, want_dweight, bias_type
    )
    dx, dresidual, dweight, dbias = results
    if not x.numel():
        dweight.zero_()
        dbias.zero_()
        return results
    rows = as_rows(x)
    multiprocessors, lanes = multiprocessors_and_lanes(x.device.index)
    m, n = rows.shape
    types = {x.dtype, input_type} if dtotal is None or weight is None else {x.dtype, input_type, weight.dtype}
    gradients = as_rows(dy), maybe_rows(dtotal)
    saved = rows, packed(weight), mean, rstd
    aligned = calls.aligned(*gradients, *saved[:2])
    plan = launch.backward(m, n, mean is not None, len(types) > 1, aligned, multiprocessors, lanes)
    wanted = want_dweight, bias_type is not None
    partials = torch.empty((sum(wanted), plan.programs, n), dtype=rstd.dtype, device=x.device)
    sums = partials[0] if want_dweight else None, partials[-1] if bias_type else None
    with on_device(x):
        calls.backward(plan, gradients, saved, (given(dx), given(dresidual), *sums), gain_offset).run()
        if any(wanted):
            calls.reduction(sums, (given(dweight), given(dbias)), lanes).run()
    return results


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, *ctx.numbers = inputs
    _, total, mean, rstd = output
    ctx.input_type = x.dtype
    ctx.has_residual = residual is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(total if ctx.has_residual else x, weight, bias, mean, rstd)


def save_operation(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, total, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd, *(() if inputs[1] is not None else (total,)))
    save(ctx, inputs, output)


def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None = None, *_: None) -> Gradients:
    if dy is None:
        return None if dtotal is None else dtotal.to(ctx.input_type), dtotal, *[None] * 6
    gradients = differentiable_gradients if torch.is_grad_enabled() else fused_gradients
    return *gradients(ctx, dy, dtotal), *[None] * 4


def fused_gradients(ctx: Any, dy: Tensor, dtotal: Tensor | None) -> Gradients:
    x, weight, bias, mean, rstd = ctx.saved_tensors
    _, offset, centre, _ = ctx.numbers
    want_x, want_residual, want_weight, want_bias, *_ = ctx.needs_input_grad
    compute = torch.ops.normexp.norm_backward if formula.traced(dy, dtotal, x, weight) else norm_backward
    dx, dresidual, dweight, dbias = compute(
        dy, dtotal, x, weight, mean if centre else None, rstd, offset, ctx.input_type,
        want_x or want_residual, want_weight, bias.dtype if want_bias else None,
    )  # fmt: skip
    if x.dtype == ctx.input_type:
        dresidual = dx
    wanted = zip((want_x, want_residual, want_weight, want_bias), (dx, dresidual, dweight, dbias), strict=True)
    return tuple(gradient if want else None for want, gradient in wanted)


def differentiable_gradients(ctx: Any, dy: Tensor, dtotal: Tensor | None) -> Gradients:
    """For `create_graph=True`: the gradient of the formula, which autograd can follow a second time."""
    x, weight, bias, _, _ = ctx.saved_tensors
    eps, offset, centre, round_first = ctx.numbers
    compute = formula.layer_norm if centre else formula.rms_norm
    y = compute(x, weight, bias, eps, offset, "input" if round_first else "float32", ctx.input_type)
    dx, dweight, dbias = formula.gradients(y, (x, weight, bias), dy)
    if dtotal is not None and dx is not None:
        dx = dx + dtotal
    return None if dx is None else dx.to(ctx.input_type), dx if ctx.has_residual else None, dweight, dbias


class Norm(torch.autograd.Function):
    """(x, residual, weight, bias, eps, gain_offset, centre, round_first) -> y, or (y, total) with a residual."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        results = norm_forward(*inputs)
        save(ctx, inputs, results)
        return results[:2] if ctx.has_residual else results[0]

    backward = staticmethod(backward)


library = torch.library.Library("normexp", "DEF")  # type: ignore[no-untyped-call]
library.define(  # type: ignore[no-untyped-call]
    "norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, float gain_offset, bool centre, "
    "bool round_first) -> (Tensor y, Tensor total, Tensor mean, Tensor rstd)"
)
library.define(  # type: ignore[no-untyped-call]
    "norm_backward(Tensor dy, Tensor? dtotal, Tensor x, Tensor? weight, Tensor? mean, Tensor rstd, float gain_offset, "
    "ScalarType input_type, bool want_dx, bool want_dweight, ScalarType? bias_type) "
    "-> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)"
)
library.impl("norm", norm_forward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
library.impl("norm_backward", norm_backward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("normexp::norm", allocate_forward, lib=library)
torch.library.register_fake("normexp::norm_backward", allocate_backward, lib=library)
torch.library.register_autograd("normexp::norm", backward, setup_context=save_operation, lib=library)


def run(arguments: tuple[Any, ...]) -> Any:
    """Of `Norm` or, where something looks on, of the operation: y first, then total."""
    if torch._C._are_functorch_transforms_active():  # torch.func.jvp of an operation is silently 0
        raise RuntimeError(
            "torch.func does not see through the fused norms; use norm.kernel=torch under its transforms"
        )
    if formula.traced(*arguments[:4]):
        return torch.ops.normexp.norm(*arguments)
    return Norm.apply(*arguments)  # type: ignore[no-untyped-call]


def norm(
    op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, cast: Cast
) -> Tensor:
    found = run((x, None, weight, bias, eps, offset, op == "layer_norm", cast == "input"))
    y: Tensor = found[0] if isinstance(found, tuple) else found
    return y


def add_norm(
    op: str,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    cast: Cast,
) -> tuple[Tensor, Tensor]:
    y, total, *_ = run((x, residual, weight, bias, eps, offset, op == "layer_norm", cast == "input"))
    return y, total
