"""What the kernel tests share: inputs, a float64 oracle, one call with all its gradients, and the tolerance rule."""

import os
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from normexp import kernels

OPS = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"  # where the tests of the fused kernels run


@dataclass(frozen=True)
class Case:
    op: str
    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    dy: Tensor
    dtotal: Tensor | None
    eps: float = 1e-6
    gain_offset: float = 0.0
    cast: str = "float32"

    def tensors(self) -> dict[str, Tensor]:
        named = {"x": self.x, "residual": self.residual, "weight": self.weight, "bias": self.bias}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def case(op: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **changes) -> Case:
    """Random inputs; parameters and residual have the type of x unless `weight_dtype` or `residual_dtype` says else."""
    weight_dtype = changes.pop("weight_dtype", dtype)
    residual_dtype = changes.pop("residual_dtype", dtype)
    draw = torch.Generator().manual_seed(sum(shape) + len(op))
    add, layer = op.startswith("add"), op.endswith("layer_norm")

    def normal(size: tuple[int, ...], kind: torch.dtype) -> Tensor:
        return torch.randn(size, generator=draw).to(kind)

    made = Case(
        op,
        normal(shape, dtype),
        normal(shape, residual_dtype) if add else None,
        (normal(shape[-1:], torch.float32) * 0.5 + 1).to(weight_dtype),
        normal(shape[-1:], weight_dtype) if layer else None,
        normal(shape, dtype),
        normal(shape, residual_dtype) if add else None,
    )
    return replace(made, **changes)


def on(made: Case, device: str) -> Case:
    values = {field.name: getattr(made, field.name) for field in fields(made)}
    return replace(made, **{name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)})


def call(case: Case, kernel: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None):
    """(y,) or (y, total)."""
    positional = [x, *([residual] if case.op.startswith("add") else []), weight]
    positional += [bias] if case.op.endswith("layer_norm") else []
    function = getattr(kernels, case.op)
    result = function(*positional, case.eps, gain_offset=case.gain_offset, cast=case.cast, kernel=kernel)
    return result if isinstance(result, tuple) else (result,)


def evaluate(case: Case, kernel: str) -> dict[str, Tensor]:
    """Every output and every gradient by name: y, total, dx, dresidual, dweight, dbias."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in case.tensors().items()}
    outputs = call(case, kernel, *(leaves.get(name) for name in ("x", "residual", "weight", "bias")))
    gradients = torch.autograd.grad(outputs, list(leaves.values()), [case.dy, case.dtotal][: len(outputs)])
    found = dict(zip(("y", "total"), outputs, strict=False))
    return found | {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def oracle(case: Case, stored: Tensor | None = None) -> dict[str, Tensor]:
    """The same in float64; `stored` is the sum as the kernel under test rounded it, for that is what is normalised."""
    wide = {name: tensor.double().requires_grad_() for name, tensor in case.tensors().items()}
    total = wide["x"] if case.residual is None else wide["x"] + wide["residual"]
    exact_total = total.detach()
    if stored is not None:
        total = total + (stored.double() - total).detach()
    centred = total - total.mean(-1, keepdim=True) if case.op.endswith("layer_norm") else total
    y = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + case.eps)
    if "weight" in wide:
        y = y * (wide["weight"] + case.gain_offset)
    if "bias" in wide:
        y = y + wide["bias"]
    outputs = (y, total) if case.residual is not None else (y,)
    upstream = [case.dy.double(), None if case.dtotal is None else case.dtotal.double()]
    gradients = torch.autograd.grad(outputs, list(wide.values()), upstream[: len(outputs)])
    found = dict(zip(("y", "total"), (y, exact_total)[: len(outputs)], strict=False))
    return found | {f"d{name}": gradient for name, gradient in zip(wide, gradients, strict=True)}


def error(found: Tensor, truth: Tensor) -> float:
    return (found.double() - truth).abs().max().item() if truth.numel() else 0.0


def cancelled(case: Case) -> float:
    """The terms that cancel in dx, gain * dy / rms, where nothing else is left: N = 1 (2 if centred), constant rows."""
    total = case.x.double() if case.residual is None else case.x.double() + case.residual.double()
    centred = total - total.mean(-1, keepdim=True) if case.op.endswith("layer_norm") else total
    gain = 1.0 if case.weight is None else case.weight.double() + case.gain_offset
    terms = case.dy.double() * gain / torch.sqrt(centred.square().mean(-1, keepdim=True) + case.eps)
    constant = (total == total[..., :1]).all(-1, keepdim=True)
    alone = constant | (total.shape[-1] <= 1 + case.op.endswith("layer_norm"))
    return (terms * alone).abs().max().item()


def reordered(case: Case, order: Tensor) -> Case:
    """The same problem with its columns in another order."""
    tensors = case.tensors() | {"dy": case.dy} | ({} if case.dtotal is None else {"dtotal": case.dtotal})
    return replace(case, **{name: tensor[..., order] for name, tensor in tensors.items()})


def errors_of_the_formula(case: Case) -> dict[str, float]:
    """The largest over eight orders of the columns: that of one sum can be zero by luck."""
    largest: dict[str, float] = {}
    width, draw = case.x.shape[-1], torch.Generator().manual_seed(0)
    for number in range(8):
        order = torch.randperm(width, generator=draw, device="cpu") if number else torch.arange(width, device="cpu")
        shuffled = reordered(case, order)
        found = evaluate(shuffled, "torch")
        for name, exact in oracle(shuffled, found.get("total")).items():
            largest[name] = max(largest.get(name, 0.0), error(found[name], exact))
    return largest


def allowance(case: Case, name: str, found: Tensor, exact: Tensor, truncated: bool) -> float:
    """What is allowed beside twice the formula's error: see KERNELS.md, section 3.

    One unit in the last place of a bfloat16 that Triton's interpreter truncates where a GPU rounds, one of float32 of
    what cancels in dx, and for a sum over rows one for each root of their number.
    """
    single, largest = torch.finfo(torch.float32).eps, exact.abs().max().item()
    allowed = torch.finfo(torch.bfloat16).eps * largest if truncated and found.dtype == torch.bfloat16 else 0.0
    if name in ("dx", "dresidual"):
        allowed += single * cancelled(case)
    if name in ("dweight", "dbias"):
        allowed += single * largest * (case.x.numel() / case.x.shape[-1]) ** 0.5
    return allowed


def assert_as_exact_as_eager(case: Case, kernel: str, truncated: bool = False) -> None:
    """The error against float64 is at most twice that of the formula in the same types, and the allowance above."""
    eager, found, of_eager = evaluate(case, "torch"), evaluate(case, kernel), errors_of_the_formula(case)
    for name, exact in oracle(case, found.get("total")).items():
        assert found[name].dtype == eager[name].dtype, name
        assert found[name].shape == exact.shape, name
        if exact.numel():
            bound = 2 * of_eager[name] + allowance(case, name, found[name], exact, truncated)
            off = error(found[name], exact)
            assert off <= bound, f"{name} of {case.op} {tuple(case.x.shape)} {case.x.dtype}: {off:.3g} > {bound:.3g}"


def check_refusals(made: Case, kernel: str) -> None:
    """A kernel reads past the end of what the formula would broadcast, so no path takes it."""
    width = made.x.shape[-1]

    def refused(error: type[Exception], match: str, **changes) -> None:
        wrong = replace(made, **changes)
        with pytest.raises(error, match=match), torch.no_grad():
            call(wrong, kernel, wrong.x, wrong.residual, wrong.weight, wrong.bias)

    refused(ValueError, "cast='inputs'", cast="inputs")
    for dtype in torch.int64, torch.complex64, torch.bool:
        refused(TypeError, "a norm takes", x=made.x.to(dtype))
    refused(TypeError, "a norm takes", x=made.x[0, 0])
    for name in ("weight", "bias", "residual"):
        operand = getattr(made, name)
        if operand is not None:
            for shape in (1,), (width - 1,), (1, width), (width, 1):
                refused(ValueError, f"{name} has shape", **{name: torch.ones(shape, device=made.x.device)})
            for dtype in torch.int64, torch.float64, torch.complex64:
                refused(TypeError, f"{name} has type", **{name: operand.to(dtype)})
            refused(ValueError, f"{name} is on meta", **{name: operand.to("meta")})
