"""What only a device can show: the compiled kernels' numbers, their repeatability, and rows beyond 2^31 values.

Layouts, unused outputs, misaligned pointers and canaries are in `test_kernels_memory.py`, autocast, scaling and
sharding in `test_kernels_operations.py`, hard rows in `test_kernels_interpreted.py`: these run on a device as well.
"""

from dataclasses import replace

import pytest
import torch

from normexp import kernels
from tests.kernel_cases import DTYPES, OPS, assert_as_exact_as_eager, call, case, evaluate, on

pytestmark = pytest.mark.gpu
bfloat16, float32 = torch.bfloat16, torch.float32
ROWS = [1, 2, 15, 16, 17, 131, 132, 133, 32_767, 32_768, 32_769, 65_536, 70_000]
WIDTHS = [1, 2, 3, 41, 127, 128, 129, 255, 256, 257, 1023, 1024, 2048, 4096, 5120, 8192, 12_288, 16_384, 16_385]
WIDEST = [32_768, 65_536, 65_537, 131_072]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
class TestAgainstFloat64:
    @pytest.mark.parametrize("width", WIDTHS + WIDEST)
    def test_widths(self, op, dtype, width):
        for rows in (1, 300) if width < 32_768 else (3, 140):
            for cast in "input", "float32":
                assert_as_exact_as_eager(on(case(op, (rows, width), dtype, cast=cast), "cuda"), "triton")

    @pytest.mark.parametrize("rows", ROWS)
    def test_rows(self, op, dtype, rows):
        assert_as_exact_as_eager(on(case(op, (rows, 96), dtype, weight_dtype=float32), "cuda"), "triton")


@pytest.mark.parametrize("width", [41, 1024, 8192, 16_384])
@pytest.mark.parametrize("op", ["add_rms_norm", "add_layer_norm"])
def test_a_wider_residual_stream(op, width):
    made = case(op, (300, width), bfloat16, weight_dtype=float32, residual_dtype=float32)
    assert_as_exact_as_eager(on(made, "cuda"), "triton")


@pytest.mark.parametrize("shape", [(32_768, 256), (4096, 4096), (512, 32_768)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_a_hundred_backward_passes_are_bitwise_equal(op, shape):
    made = on(case(op, shape, bfloat16), "cuda")
    first = evaluate(made, "triton")
    for _ in range(99):
        again = evaluate(made, "triton")
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_rows_beyond_two_to_the_31_values():
    """The last rows of 4 GiB of bfloat16, forward and backward, against a tensor of those rows alone."""
    rows, width = (1 << 17) + 3, 16_384
    x = torch.randn(rows, width, device="cuda", dtype=bfloat16, requires_grad=True)
    weight = torch.ones(width, device="cuda", dtype=bfloat16)
    y = kernels.rms_norm(x, weight, 1e-6, cast="input", kernel="triton")
    y.backward(x.detach())
    tail = x[-3:].detach().clone().requires_grad_()
    expected = kernels.rms_norm(tail, weight, 1e-6, cast="input", kernel="triton")
    expected.backward(tail.detach())
    assert torch.equal(y[-3:], expected)
    assert torch.equal(x.grad[-3:], tail.grad)


def test_dweight_of_many_rows_in_bfloat16():
    made = on(
        replace(case("layer_norm", (131_072, 128), bfloat16), weight=torch.ones(128), bias=torch.zeros(128)), "cuda"
    )
    assert_as_exact_as_eager(made, "triton")


def test_few_variants_are_compiled_for_many_row_counts():
    from normexp.kernels import triton_backward, triton_forward

    def variants() -> int:
        kernels_here = triton_forward.forward, triton_backward.backward, triton_backward.reduce_partials
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels_here)

    evaluate(on(case("layer_norm", (7, 1040), bfloat16), "cuda"), "triton")
    before = variants()
    for rows in range(8, 58):
        evaluate(on(case("layer_norm", (rows, 1040), bfloat16), "cuda"), "triton")
    assert variants() - before <= 9  # the reduction's tiles, one for each power of two


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_tensors_need_not_be_on_the_current_device():
    assert_as_exact_as_eager(on(case("add_layer_norm", (300, 1024), bfloat16), "cuda:1"), "triton")


def test_a_compiled_block_keeps_one_graph():
    made = on(case("add_rms_norm", (64, 256), bfloat16), "cuda")

    def block(x, residual):
        y, total = call(made, "triton", x, residual, made.weight, None)
        return torch.relu(y) + total

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(made.x, made.residual), block(made.x, made.residual))
    torch.testing.assert_close(compiled(made.x[:9], made.residual[:9]), block(made.x[:9], made.residual[:9]))


def test_a_captured_graph_replays_the_same_numbers():
    made = on(case("layer_norm", (300, 1024), bfloat16), "cuda")
    expected = evaluate(made, "triton")["y"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (y,) = call(made, "triton", made.x, None, made.weight, made.bias)
    graph.replay()
    assert torch.equal(y, expected)
