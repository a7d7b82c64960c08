"""The fused kernels, forward and backward, in Triton's interpreter; and, marked `gpu`, the same tests on a device.

`test_kernels.py` runs this file in a process of its own: TRITON_INTERPRET must be set before the kernels are decorated,
and the other tests must not see it.
"""

from dataclasses import replace

import pytest
import torch

from tests.kernel_cases import DEVICE, DTYPES, INTERPRETED, OPS, error, evaluate, oracle
from tests.kernel_device import assert_exact, case

pytest.importorskip("triton")
if not INTERPRETED:
    pytestmark = pytest.mark.gpu

from normexp.kernels import fused

bfloat16, float16, float32, float64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES = [
    (1, 1),
    (5, 1),
    (41,),
    (0, 7),
    (3, 0, 2520),
    (2, 3, 41),
    (17, 128),
    (15, 129),
    (33, 255),
    (16, 257),
    (2, 1023),
    (4, 2),
    (7, 127),
    (9, 256),
]
WIDE_SHAPES = [(3, 5120), (3, 12_288), (3, 16_384), (5, 16_385)]  # two programs: some have more than one tile
WIDEST_SHAPES = [(1, 65_536), (1, 65_537), (1, 131_072)]
ROWS = [1, 2, 15, 16, 17, 70_000, *(pytest.param(m, marks=pytest.mark.slow) for m in (32_767, 32_768, 32_769, 65_536))]


@pytest.fixture(autouse=True)
def here():
    with torch.device(DEVICE):
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
class TestAgainstFloat64:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("cast", ["input", "float32"])
    def test_shapes(self, op, dtype, shape, cast):
        assert_exact(case(op, shape, dtype, cast=cast))

    @pytest.mark.parametrize("shape", WIDE_SHAPES, ids=str)
    def test_wide_rows(self, op, dtype, shape):
        assert_exact(case(op, shape, dtype))

    def test_float32_parameters_and_offset(self, op, dtype):
        made = case(op, (9, 41), dtype, weight_dtype=float32, gain_offset=1.0)
        assert_exact(made)
        found = evaluate(made, "triton")
        assert (found["y"].dtype, found["dweight"].dtype) == (dtype, float32)

    def test_without_parameters(self, op, dtype):
        assert_exact(case(op, (9, 41), dtype, weight=None, bias=None))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", WIDEST_SHAPES, ids=str)
def test_rows_wider_than_a_block(op, shape):
    assert_exact(case(op, shape, bfloat16))


@pytest.mark.parametrize("rows", ROWS)
def test_many_rows(rows):
    assert_exact(case("layer_norm", (rows, 3), float32))


@pytest.mark.parametrize("multiprocessors", [3, 4, 5])
def test_rows_around_the_number_of_programs(multiprocessors, monkeypatch):
    """32 programs of one row each against 24, 32 and 40 that the device could hold."""
    monkeypatch.setattr(fused, "multiprocessors_and_lanes", lambda _: (multiprocessors, 32))
    assert_exact(case("add_layer_norm", (32, 1024), bfloat16))


@pytest.mark.parametrize("op", ["add_rms_norm", "add_layer_norm"])
@pytest.mark.parametrize("shape", [(9, 41), (3, 1024), (3, 16_384)], ids=str)
def test_a_wider_residual_stream(op, shape):
    made = case(op, shape, bfloat16, residual_dtype=float32)
    assert_exact(made)
    found = evaluate(made, "triton")
    assert [found[name].dtype for name in ("y", "total", "dx", "dresidual")] == [bfloat16, float32, bfloat16, float32]


@pytest.mark.parametrize("op", ["add_rms_norm", "add_layer_norm"])
def test_what_is_normalised_is_the_sum_as_it_is_stored(op):
    for shape in (9, 41), (2, 40_000):
        assert_exact(case(op, shape, float32, residual_dtype=bfloat16))


@pytest.mark.parametrize("rows", [1024, 4096, pytest.param(131_072, marks=pytest.mark.slow)])
def test_the_error_of_dweight_grows_with_the_root_of_the_rows_only(rows, monkeypatch):
    monkeypatch.setattr(fused, "multiprocessors_and_lanes", lambda _: (16, 32))  # 128 partial sums
    made = replace(case("layer_norm", (rows, 128), bfloat16), weight=torch.ones(128), bias=torch.zeros(128))
    truth, found = oracle(made), evaluate(made, "triton")
    for name in ("dweight", "dbias"):
        assert error(found[name], truth[name]) < 2**-19 * rows**0.5, name  # 16 units of a float32 of about sqrt(rows)


HARD_ROWS = {
    "large mean": lambda: 100 + 0.1 * torch.randn(4, 128),
    "larger mean": lambda: 1e4 + 1e-3 * torch.randn(4, 128),
    "odd width": lambda: 1e3 + torch.randn(4, 17),
    "constant": lambda: torch.full((4, 128), 3.0),
    "zero": lambda: torch.zeros(4, 128),
    "tiny": lambda: 1e-25 * torch.randn(4, 128),
    "1e18": lambda: 1e18 * torch.randn(4, 8).sign(),
    "large mean, looped": lambda: 100 + 0.1 * torch.randn(1, 400_000),
}


@pytest.mark.parametrize("name", HARD_ROWS)
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_hard_rows(op, name):
    torch.manual_seed(0)
    x = HARD_ROWS[name]()
    made = replace(case(op, tuple(x.shape)), x=x)
    assert_exact(made)
    assert all(value.isfinite().all() for value in evaluate(made, "triton").values())


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_squares_beyond_float32_give_zeros_and_no_nan(op):
    """|x| > 1.8e19: the sum of squares is infinite, as in the formula; a row becomes 0, its gradient too."""
    made = replace(case(op, (4, 128)), x=1e19 * torch.randn(4, 128).sign() * torch.linspace(1, 3, 128), bias=None)
    found = evaluate(made, "triton")
    assert all(value.isfinite().all() for value in found.values())
    assert not found["y"].any()
    assert not found["dx"].any()


@pytest.mark.parametrize("scale", [300.0, 60_000.0])
def test_float16_rows_whose_squares_overflow(scale):
    made = case("rms_norm", (4, 64), float16)
    assert_exact(replace(made, x=(scale * torch.randn(4, 64).sign()).to(float16)))


@pytest.mark.parametrize("gain", [0.0, 1e-8])
def test_gradients_do_not_divide_by_the_gain(gain):
    assert_exact(replace(case("layer_norm", (4, 64)), weight=torch.full((64,), gain)))


@pytest.mark.parametrize("cast", ["input", "float32"])
def test_the_two_orders_of_casting_differ_and_are_the_formulas(cast):
    made = case("rms_norm", (64, 64), float16, cast=cast)  # float16: the interpreter rounds it as a GPU does
    torch.testing.assert_close(evaluate(made, "triton")["y"], evaluate(made, "torch")["y"], rtol=0, atol=0)
    other = replace(made, cast="float32" if cast == "input" else "input")
    assert not torch.equal(evaluate(other, "triton")["y"], evaluate(made, "triton")["y"])


def test_a_nan_stays_in_its_row_and_column():
    made = case("layer_norm", (9, 41))
    clean = evaluate(made, "triton")
    made.dy[4, 7] = torch.nan
    found = evaluate(made, "triton")
    for name in ("dweight", "dbias"):
        assert found[name].isnan().nonzero().tolist() == [[7]]
    others = [row for row in range(9) if row != 4]
    assert torch.equal(found["dx"][others], clean["dx"][others])
    made.x[4, 7] = torch.nan
    assert evaluate(made, "triton")["y"].isnan().any(-1).nonzero().tolist() == [[4]]
