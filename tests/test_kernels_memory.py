"""Where the fused kernels read and write: layouts, alignment, canaries, what is unused, frozen or used twice.

Run in the interpreter, or on a device, as `test_kernels_interpreted.py` is.
"""

from dataclasses import replace

import pytest
import torch

from tests.kernel_cases import DEVICE, INTERPRETED, OPS, call, evaluate
from tests.kernel_device import assert_exact, case

pytest.importorskip("triton")
if not INTERPRETED:
    pytestmark = pytest.mark.gpu

from normexp.kernels import calls, fused

bfloat16, float32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def here():
    """Tensors are made on the device, so that a layout need not survive a copy."""
    with torch.device(DEVICE):
        yield


def test_nothing_is_written_outside_the_outputs(monkeypatch):
    """Every buffer that the operations allocate lies between canaries; N is odd and no tile is full."""
    empty, guarded = torch.empty, []

    def empty_between_canaries(size, dtype, device):
        shape = empty(size, device="meta").shape
        buffer = torch.full((shape.numel() + 256,), 77.0, dtype=dtype, device=device)
        guarded.append(buffer)
        return buffer[128:-128].view(shape)

    monkeypatch.setattr(fused.torch, "empty", empty_between_canaries)
    for op in OPS:
        for shape in (5, 41), (3, 16_385):
            evaluate(case(op, shape, bfloat16, residual_dtype=float32), "triton")
    assert len(guarded) > 40
    assert all((buffer[:128] == 77).all() and (buffer[-128:] == 77).all() for buffer in guarded)


def misaligned(tensor):
    buffer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return buffer[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("dtype", [float32, bfloat16])
@pytest.mark.parametrize("shape", [(5, 41), (5, 64), (3, 4097)], ids=str)
def test_misaligned_base_pointers(dtype, shape):
    made = case("add_layer_norm", shape, dtype)
    names = ("x", "residual", "weight", "bias", "dy", "dtotal")
    moved = {name: misaligned(getattr(made, name)) for name in names}
    assert all(tensor.data_ptr() % 16 for tensor in moved.values())
    for name in names:
        assert_exact(replace(made, **{name: moved[name]}))
    assert_exact(replace(made, **moved))


LAYOUTS = {
    "strided columns": lambda: torch.randn(6, 5, 82)[..., ::2],
    "odd row stride": lambda: torch.randn(6, 5, 43)[..., :41],
    "part of a fused qkv": lambda: torch.randn(6, 5, 123)[..., 41:82],
    "transposed rows": lambda: torch.randn(5, 6, 41).transpose(0, 1),
    "transposed matrix": lambda: torch.randn(41, 5, 6).permute(2, 1, 0),
    "expanded row": lambda: torch.randn(41).expand(6, 5, 41),
    "expanded number": lambda: torch.ones(()).expand(6, 5, 41),
}


@pytest.mark.parametrize("where", ["x", "residual", "dy", "dtotal"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(where, layout):
    assert_exact(replace(case("add_layer_norm", (6, 5, 41)), **{where: LAYOUTS[layout]()}))


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_left_as_they_are_and_repeat_bitwise(op):
    made = case(op, (40, 129), bfloat16)
    before = made.dy.clone(), None if made.dtotal is None else made.dtotal.clone()
    first, second = evaluate(made, "triton"), evaluate(made, "triton")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(made.dy, before[0])
    assert before[1] is None or torch.equal(made.dtotal, before[1])


def test_one_graph_takes_two_backward_passes_and_two_consumers():
    made = case("rms_norm", (9, 41))
    x = made.x.clone().requires_grad_()
    (y,) = call(made, "triton", x, None, made.weight, None)
    once = torch.autograd.grad(y, x, made.dy, retain_graph=True)[0]
    again = torch.autograd.grad(y, x, made.dy, retain_graph=True)[0]
    assert torch.equal(once, again)
    (y * made.dy + y * made.dy).sum().backward()
    torch.testing.assert_close(x.grad, 2 * once)


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("op", ["add_rms_norm", "add_layer_norm"])
def test_any_of_the_two_outputs_may_be_unused(op, used, monkeypatch):
    made = case(op, (9, 41))
    found, expected = [], []
    for kernel, results in ("torch", expected), ("triton", found):
        if kernel == "triton" and not used[0]:
            monkeypatch.setattr(fused, "norm_backward", None)  # the sum alone needs no kernel
        leaves = [made.x.clone(), made.residual.clone(), made.weight.clone()]
        x, residual, weight = (leaf.requires_grad_() for leaf in leaves)
        outputs = call(made, kernel, x, residual, weight, made.bias)
        chosen = [(o, g) for o, g, use in zip(outputs, (made.dy, made.dtotal), used, strict=True) if use]
        if chosen:
            torch.autograd.backward(*zip(*chosen, strict=True))
        results += [leaf.grad for leaf in (x, residual, weight)]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.allclose(ours, theirs, atol=1e-5)


def test_an_unused_gradient_is_not_materialised(monkeypatch):
    seen = []
    backward = fused.norm_backward
    monkeypatch.setattr(fused, "norm_backward", lambda *a: seen.append(a[1]) or backward(*a))
    made = case("add_rms_norm", (3, 41))
    y, _ = call(made, "triton", made.x.requires_grad_(), made.residual, made.weight, None)
    y.sum().backward()
    assert seen == [None]


def test_what_is_frozen_is_not_computed(monkeypatch):
    outputs, reductions = [], []
    backward, reduction = calls.backward, calls.reduction
    monkeypatch.setattr(calls, "backward", lambda *a: outputs.append(a[3]) or backward(*a))
    monkeypatch.setattr(calls, "reduction", lambda *a: reductions.append(a) or reduction(*a))
    made = case("rms_norm", (3, 41))
    call(made, "triton", made.x.clone().requires_grad_(), None, made.weight, None)[0].sum().backward()
    assert outputs[0][2:] == (None, None)
    assert not reductions
    call(made, "triton", made.x, None, made.weight.clone().requires_grad_(), None)[0].sum().backward()
    assert outputs[1][0] is None
    assert len(reductions) == 1
