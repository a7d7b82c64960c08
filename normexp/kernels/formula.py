"""The norms as plain torch operations: the reference of every other path, twice differentiable on every device.

Shapes: x is (..., N), weight and bias are (N,). Statistics are taken in float32 (float64 for float64 inputs).
`dtype` is the type of the result, which is that of x before a residual was added.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

Cast = Literal["input", "float32"]


PLAIN = (Tensor, torch.nn.Parameter, type(None))


def traced(*tensors: Tensor | None) -> bool:
    """Whether something looks through the program at its operations: a compiler, torch.func, a tensor subclass."""
    seen = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return seen or any(type(tensor) not in PLAIN for tensor in tensors)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def gain(weight: Tensor | None, offset: float, dtype: torch.dtype) -> Tensor | None:
    """offset + weight, added in `dtype`: Gemma stores 1 + w as w, since bfloat16 steps by 2^-7 near 1."""
    if weight is None:
        return None
    wide = weight.to(dtype)
    return wide + offset if offset else wide


def scale_and_cast(
    normalised: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float, cast: Cast, dtype: torch.dtype
) -> Tensor:
    """normalised * gain + bias in `dtype`.

    cast="input" rounds the normalised value to `dtype` before the gain (LLaMA); "float32" rounds once, at the end
    (Gemma).
    """
    wide = normalised.dtype
    if cast == "input":
        normalised = normalised.to(dtype).to(wide)
    scale = gain(weight, offset, wide)
    if scale is not None:
        normalised = normalised * scale
    if bias is not None:
        normalised = normalised + bias.to(wide)
    return normalised.to(dtype)


def rms_norm(
    x: Tensor, weight: Tensor | None, bias: None, eps: float, offset: float, cast: Cast, dtype: torch.dtype
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain (1910.07467)."""
    wide = x.to(statistics_dtype(x.dtype))
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return scale_and_cast(normalised, weight, bias, offset, cast, dtype)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, cast: Cast, dtype: torch.dtype
) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * gain + bias, biased variance in two passes (1607.06450)."""
    wide = x.to(statistics_dtype(x.dtype))
    centred = wide - wide.mean(-1, keepdim=True)
    normalised = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return scale_and_cast(normalised, weight, bias, offset, cast, dtype)


def gradients(y: Tensor, inputs: tuple[Tensor | None, ...], dy: Tensor) -> tuple[Tensor | None, ...]:
    """dy's pull-back to each input that wants one, itself differentiable with respect to dy and the inputs."""
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
    return tuple(next(found) if x is not None and x.requires_grad else None for x in inputs)


@cache
def compiled(formula: Callable[..., Tensor]) -> Callable[..., Any]:
    """One compiled form for all row counts: a compilation for each would take longer than a short run."""
    return torch.compile(formula, dynamic=True, fullgraph=True)
