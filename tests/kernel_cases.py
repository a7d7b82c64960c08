"""What the kernel tests share: inputs, a float64 oracle, one call with all its gradients, and the tolerance rule."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normexp import kernels

OPS = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    """The largest term that cancels in dx, gain * dy / rms: dx itself may be much smaller (N = 1, a constant row)."""
    total = case.x.double() if case.residual is None else case.x.double() + case.residual.double()
    centred = total - total.mean(-1, keepdim=True) if case.op.endswith("layer_norm") else total
    gain = 1.0 if case.weight is None else case.weight.double() + case.gain_offset
    term = case.dy.double() * gain / torch.sqrt(centred.square().mean(-1, keepdim=True) + case.eps)
    return term.abs().max().item()


def allowance(case: Case, name: str, found: Tensor, exact: Tensor, truncated: bool) -> float:
    """What is allowed beside the formula's error, which can be zero by luck.

    One unit in the last place of the largest value (two of a bfloat16 that Triton's interpreter truncates where a GPU
    rounds); for dx also one of float32 of the terms that cancel in it, and one for each root of the rows in a sum.
    """
    single, largest = torch.finfo(torch.float32).eps, exact.abs().max().item()
    allowed = torch.finfo(found.dtype).eps * largest * (2 if truncated and found.dtype == torch.bfloat16 else 1)
    if name in ("dx", "dresidual"):
        allowed += single * cancelled(case)
    if name in ("dweight", "dbias"):
        allowed += single * largest * (case.x.numel() / case.x.shape[-1]) ** 0.5
    return allowed


def assert_as_exact_as_eager(case: Case, kernel: str, truncated: bool = False) -> None:
    """The error against float64 is at most twice that of the formula in the same types, and the allowance above."""
    eager, found = evaluate(case, "torch"), evaluate(case, kernel)
    of_eager = oracle(case, eager.get("total"))
    for name, exact in oracle(case, found.get("total")).items():
        assert found[name].dtype == eager[name].dtype, name
        assert found[name].shape == exact.shape, name
        if exact.numel():
            bound = 2 * error(eager[name], of_eager[name]) + allowance(case, name, found[name], exact, truncated)
            assert error(found[name], exact) <= bound, f"{name} of {case.op} {tuple(case.x.shape)} {case.x.dtype}"
