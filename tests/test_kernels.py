"""Which arithmetic runs where, the CPU paths and the formula; and a process for the tests of Triton's interpreter."""

import ctypes
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from normexp import kernels
from tests.kernel_cases import DTYPES, OPS, assert_as_exact_as_eager, call, case, check_refusals, evaluate

ROOT = Path(__file__).parent.parent
float32, float64, bfloat16 = torch.float32, torch.float64, torch.bfloat16


def run_in_the_interpreter(file: str, *options: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{file}.py", *options]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.parametrize("file", ["test_kernels_interpreted", "test_kernels_memory", "test_kernels_operations"])
def test_the_fused_kernels_in_the_interpreter(file):
    pytest.importorskip("triton")
    run_in_the_interpreter(file)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["test_kernels_interpreted", "test_kernels_operations"])
def test_the_fused_kernels_in_the_interpreter_at_length(file):
    pytest.importorskip("triton")
    run_in_the_interpreter(file, "-m", "slow")


@pytest.mark.parametrize(
    ("kernel", "device", "dtype", "expected"),
    [
        ("auto", "cuda", bfloat16, "triton"),
        ("auto", "cuda:1", float32, "triton"),
        ("auto", "cuda", float64, "torch"),
        ("auto", "cpu", bfloat16, "native"),
        ("auto", "mps", float32, "torch"),
        ("triton", "cuda", float32, "triton"),
        ("torch", "cpu", float32, "torch"),
        ("compile", "cuda", float32, "compile"),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_the_path_is_a_function_of_its_arguments(kernel, device, dtype, expected, op):
    assert kernels.path(kernel, device, dtype, 64, op) == expected
    in_a_compiled_model = "triton" if expected == "triton" else "compile"
    assert kernels.path(kernel, device, dtype, 64, op, model_compiled=True) == in_a_compiled_model


@pytest.mark.parametrize("kernel", ["auto", "torch", "compile"])
@pytest.mark.parametrize("op", OPS)
def test_wrong_operands_are_refused_on_every_path(op, kernel):
    check_refusals(case(op, (3, 24), bfloat16), kernel)


def test_triton_without_a_gpu_is_an_error_that_says_so(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="kernel=triton needs a CUDA or ROCm device"):
        kernels.rms_norm(torch.ones(2, 3), None, 1e-6, cast="input", kernel="triton")
    with pytest.raises(ValueError, match="'cuda'; known are auto, triton, torch and compile"):
        kernels.path("cuda", "cpu", float32, 64, "rms_norm")


def test_triton_is_imported_only_when_it_runs():
    code = """
import sys, torch
from normexp import kernels
for kernel in "auto", "torch":
    kernels.add_rms_norm(torch.ones(2, 3), torch.ones(2, 3), None, 1e-6, cast="input", kernel=kernel)
assert "normexp.kernels.fused" not in sys.modules
print("triton" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("shape", [(41,), (0, 7), (3, 0, 25), (2, 3, 64), (17, 257), (2, 4096)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_the_cpu_path_is_as_exact_as_the_formula(op, dtype, shape):
    for cast in "input", "float32":
        assert_as_exact_as_eager(case(op, shape, dtype, cast=cast, gain_offset=1.0), "auto")
        for weight_dtype in {dtype, float32}:
            assert_as_exact_as_eager(case(op, shape, dtype, cast=cast, weight_dtype=weight_dtype), "auto")
    assert_as_exact_as_eager(case(op, shape, dtype, weight=None, bias=None), "auto")


def test_one_column():
    """LayerNorm is left out: ATen forms x * rstd - mean * rstd, which leaves a rounding error where x is the mean."""
    for shape in (1, 1), (5, 1):
        assert_as_exact_as_eager(case("rms_norm", shape), "auto")
        assert_as_exact_as_eager(case("add_rms_norm", shape), "auto")


@pytest.mark.parametrize("op", OPS)
def test_the_compiled_formula_is_as_exact(op):
    for shape in (3, 41), (5, 41):
        assert_as_exact_as_eager(case(op, shape, bfloat16, weight_dtype=float32), "compile", truncated=True)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_first_and_second_derivatives(op, kernel):
    made = case(op, (3, 5), float64, eps=1e-3, gain_offset=0.5)
    leaves = [tensor.requires_grad_() for tensor in made.tensors().values()]

    def function(*tensors):
        named = dict(zip(made.tensors(), tensors, strict=True))
        return call(made, kernel, named["x"], named.get("residual"), named["weight"], named.get("bias"))

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("cast", ["input", "float32"])
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_a_gradient_penalty_in_bfloat16_is_the_formulas(op, cast):
    made, found = case(op, (4, 24), bfloat16, cast=cast), {}
    for kernel in "auto", "torch":
        x = made.x.clone().requires_grad_()
        (y,) = call(made, kernel, x, None, made.weight, made.bias)
        (dx,) = torch.autograd.grad(y.float().pow(3).sum(), x, create_graph=True)
        dx.float().square().sum().backward()
        found[kernel] = x.grad
    torch.testing.assert_close(found["auto"], found["torch"], rtol=0.05, atol=0.05 * found["torch"].abs().max().item())


def test_the_gradients_of_many_rows_in_bfloat16_are_summed_in_float32():
    """ATen's own backward kernel rounds each partial sum to bfloat16: an error thousands of times as large."""
    for op in "rms_norm", "layer_norm":
        assert_as_exact_as_eager(case(op, (4096, 64), bfloat16, weight_dtype=float32), "auto")


@pytest.mark.parametrize("layout", ["strided", "transposed", "expanded"])
def test_layouts_of_x_and_of_its_gradient(layout):
    tensor = {
        "strided": torch.randn(6, 5, 82)[..., ::2],
        "transposed": torch.randn(41, 5, 6).permute(2, 1, 0),
        "expanded": torch.randn(41).expand(6, 5, 41),
    }[layout]
    made = case("rms_norm", (6, 5, 41))
    assert_as_exact_as_eager(replace(made, x=tensor), "auto")
    for upstream in tensor, torch.ones(()).expand(6, 5, 41):
        assert_as_exact_as_eager(replace(made, dy=upstream), "auto")


def test_what_is_frozen_has_no_gradient():
    made = case("rms_norm", (3, 41))
    expected = evaluate(made, "auto")
    for frozen in "x", "weight":
        x, weight = (t.clone().requires_grad_(name != frozen) for name, t in (("x", made.x), ("weight", made.weight)))
        call(made, "auto", x, None, weight, None)[0].backward(made.dy)
        for name, leaf in ("x", x), ("weight", weight):
            assert (leaf.grad is None) == (name == frozen)
            assert name == frozen or torch.equal(leaf.grad, expected[f"d{name}"])


def test_zero_rows_and_zero_inputs():
    for x in torch.zeros(4, 64), torch.full((4, 64), 1e-25):
        made = replace(case("rms_norm", (4, 64)), x=x)
        assert all(value.isfinite().all() for value in evaluate(made, "auto").values())
    assert not evaluate(replace(made, x=torch.zeros(4, 64)), "auto")["y"].any()


def test_autocast_around_the_backward_pass_rounds_nothing():
    made = case("rms_norm", (64, 256))
    expected = evaluate(made, "auto")
    with torch.autocast("cpu", dtype=bfloat16):
        found = evaluate(made, "auto")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_compiled_model_sees_the_formula_in_one_graph():
    made = case("rms_norm", (6, 24))

    def block(x):
        return torch.relu(call(made, "auto", x, None, made.weight, None)[0]) + x

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(made.x), block(made.x))
    gradient = torch.func.grad(lambda x: block(x).sum())(made.x)
    leaf = made.x.clone().requires_grad_()
    torch.testing.assert_close(gradient, torch.autograd.grad(block(leaf).sum(), leaf)[0])


def test_the_compiled_formula_is_once_differentiable_and_says_so():
    """torch's own limits: its compiled backward gives its buffers away, and has no derivative."""
    made = case("rms_norm", (3, 41))
    for how in "retain_graph", "create_graph":
        x = made.x.clone().requires_grad_()
        (y,) = call(made, "compile", x, None, made.weight, None)
        with pytest.raises(RuntimeError, match="create_graph=False"):
            torch.autograd.grad(y.square().sum(), x, **{how: True})


def seconds(function, repeats: int) -> float:
    """Of this thread, so that others' work on the machine counts for less."""
    function()  # the first call after another provider pays for memory that the allocator gave back
    start = time.thread_time()
    for _ in range(repeats):
        function()
    return (time.thread_time() - start) / repeats


def best_seconds(providers, repeats: int) -> dict:
    """The allocator keeps its memory meanwhile: else glibc gives 4 MB back after one provider's step and not after
    another's, and the page faults weigh more than the arithmetic."""
    for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        ctypes.CDLL(None).mallopt(option, 1 << 30)
    torch.set_num_threads(1)
    rounds = [{name: seconds(provider, repeats) for name, provider in providers.items()} for _ in range(7)]
    return {name: min(times[name] for times in rounds) for name in providers}


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 128, 512, 1024])
def test_the_cpu_path_is_fast(width):
    """Forward + backward of 2,048 rows on one thread: at most twice LayerNorm's time, never above F.rms_norm's."""
    x, weight, bias = torch.randn(2048, width), torch.ones(width), torch.zeros(width)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    dy = torch.randn(2048, width)

    def backward(y):
        torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not bias], dy)

    providers = {
        "ours": lambda: backward(kernels.rms_norm(x, weight, 1e-6, cast="input", kernel="auto")),
        "layer_norm": lambda: backward(F.layer_norm(x, (width,), weight, bias)),
        "F.rms_norm": lambda: backward(F.rms_norm(x, (width,), weight)),
    }
    best = best_seconds(providers, 20)
    assert best["ours"] <= 2 * best["layer_norm"]
    assert best["F.rms_norm"] >= (3 if width == 512 else 1) * best["ours"]


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 128, 512, 1024])
def test_the_cpu_path_is_fast_in_bfloat16(width):
    """At inference, for what the README says; the margins above it are those of a machine with other work."""
    x, weight, bias = (torch.randn(size).to(bfloat16) for size in ((2048, width), (width,), (width,)))
    providers = {"F.layer_norm": lambda: F.layer_norm(x, (width,), weight, bias)}
    providers["F.rms_norm"] = lambda: F.rms_norm(x, (width,), weight)
    for cast in "input", "float32":
        providers[f"layer_norm {cast}"] = partial(kernels.layer_norm, x, weight, bias, 1e-6, cast=cast, kernel="auto")
        providers[f"rms_norm {cast}"] = partial(kernels.rms_norm, x, weight, 1e-6, cast=cast, kernel="auto")
    with torch.no_grad():
        best = best_seconds(providers, 20)
    assert best["layer_norm float32"] <= 1.3 * best["F.layer_norm"]
    assert best["layer_norm input"] <= 2.5 * best["F.layer_norm"]
    for cast in "input", "float32":
        assert best[f"rms_norm {cast}"] <= (1.4 if width <= 128 else 1.1) * best["F.rms_norm"]
