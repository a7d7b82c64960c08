"""Fake quantisation: the formats, their scales, the gradient, and the norms around which it stands."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch

from normexp.fields import UserError
from normexp.fold import fold_norms
from normexp.norms import DynamicTanh
from normexp.quantise import LARGEST, fake_quantise, quantised, relative_error, to_format
from tests import tiny
from tests.norm_cases import ALL, DIM, inputs, maker, perturbed, right_mask

FORMATS, GRANULARITIES = tuple(LARGEST), ("tensor", "token")
MAGNITUDES = sorted(  # of E4M3, as its definition has them: 7 below 2^-6, 8 for each power of two, 448 the last
    [m / 8 * 2.0**-6 for m in range(1, 8)]
    + [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)]
)


def nearest(x: float, grid: list[float]) -> float:
    """By looking at every number of the grid; of two as near, the one of even mantissa, which has an even index."""
    best = min(abs(x - number) for number in grid)
    found = [i for i, number in enumerate(grid) if abs(x - number) == best]
    return grid[next(i for i in found if len(found) == 1 or i % 2 == 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_e4m3_is_its_126_magnitudes(dtype):
    assert (len(MAGNITUDES), MAGNITUDES[0], MAGNITUDES[-1]) == (126, 2.0**-9, 448.0)
    grid = torch.tensor([0.0, *MAGNITUDES], dtype=dtype)
    assert torch.equal(to_format(grid, "e4m3"), grid)
    assert torch.equal(to_format(-grid, "e4m3"), -grid)


@pytest.mark.parametrize("sign", [1, -1])
def test_e4m3_rounds_to_nearest_even(sign):
    """At each number, at each midpoint, and a float32 step on either side of both; subnormals included."""
    grid = [0.0, *MAGNITUDES]
    points = torch.tensor(grid + [(a + b) / 2 for a, b in pairwise(grid)])
    infinity = torch.tensor(torch.inf)
    points = torch.cat([points, torch.nextafter(points, infinity), torch.nextafter(points, -infinity)])
    points = torch.cat([points, torch.rand(2000, generator=torch.Generator().manual_seed(0)) * 0.1])
    expected = [sign * nearest(abs(x), grid) * (1 if x >= 0 else -1) for x in points.tolist()]
    assert to_format(sign * points, "e4m3").tolist() == expected


@pytest.mark.parametrize("quant", FORMATS)
def test_beyond_the_largest_is_the_largest_and_nan_stays(quant):
    largest = LARGEST[quant]
    x = torch.tensor([largest * 1.001, largest * 1.04, 1e9, torch.inf])
    assert to_format(x, quant).tolist() == [largest] * 4
    assert to_format(-x, quant).tolist() == [-largest] * 4
    assert to_format(torch.tensor([torch.nan]), quant).isnan().all()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_int8_is_numpys(granularity):
    x = inputs()
    numbers = x.numpy()
    largest = np.abs(numbers).max(axis=-1 if granularity == "token" else None, keepdims=True)
    scale = (largest / np.float32(127)).astype(np.float32)
    expected = scale * np.clip(np.rint(numbers / scale), -127, 127)
    assert np.array_equal(fake_quantise(x, None, "int8", granularity).numpy(), expected)
    halves = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 127.0]])  # a scale of 1
    assert fake_quantise(halves, None, "int8", granularity).tolist() == [[0, 2, 2, 0, -2, 127]]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("quant", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gradient_passes_as_if_nothing_were_rounded(dtype, quant, granularity):
    x = inputs().to(dtype).requires_grad_()
    y = fake_quantise(x, None, quant, granularity)
    assert y.dtype == dtype
    assert not torch.equal(y, x)
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    y.backward(upstream)
    assert torch.equal(x.grad, upstream)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("quant", FORMATS)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-30, 1e17])
def test_a_row_of_zeros_and_extreme_rows(size, quant, granularity):
    x = inputs()
    x[1, 3] = 0
    x = (x * size).requires_grad_()
    y = fake_quantise(x, None, quant, granularity)
    assert torch.isfinite(y).all()
    assert (y[1, 3] == 0).all()
    y.sum().backward()
    assert (x.grad == 1).all()
    assert 0 <= relative_error(y, x, None) <= 1
    assert relative_error(y * 0, x * 0, None) == 0


@pytest.mark.parametrize("quant", FORMATS)
def test_what_is_not_finite_is_not_hidden(quant):
    x = inputs()
    x[0, 0, 0], x[1, 2, 3] = torch.nan, torch.inf
    by_token = fake_quantise(x, None, quant, "token")
    assert by_token[0, 0, 0].isnan()
    assert not by_token[1, 2].isfinite().any()
    assert by_token[2:].isfinite().all()
    assert not fake_quantise(x, None, quant, "tensor").isfinite().any()


@pytest.mark.parametrize("quant", FORMATS)
def test_pads_set_no_scale_and_count_in_no_error(quant):
    x, mask = inputs(), right_mask([12, 7, 9, 12])
    wild = torch.where(mask.unsqueeze(-1), x, 1e6 * x)
    for granularity in GRANULARITIES:
        first, second = (fake_quantise(values, mask, quant, granularity) for values in (x, wild))
        assert torch.equal(first[mask], second[mask])
        assert torch.isfinite(second).all()
        assert relative_error(first, x, mask) == relative_error(second, wild, mask)
    assert not torch.equal(fake_quantise(x, mask, quant, "tensor"), fake_quantise(wild, None, quant, "tensor"))
    assert fake_quantise(x, torch.zeros_like(mask), quant, "tensor").isfinite().all()


def test_the_error_by_hand():
    x, rounded = torch.tensor([[[3.0, 4.0], [8.0, 6.0]]]), torch.tensor([[[3.0, 4.5], [8.5, 6.0]]])
    assert relative_error(rounded, x, None).item() == pytest.approx((0.5 / 125) ** 0.5)
    assert relative_error(rounded, x, torch.tensor([[True, False]])).item() == pytest.approx(0.1)


def error(x, quant, granularity):
    return relative_error(fake_quantise(x, None, quant, granularity), x, None).item()


@pytest.mark.parametrize("quant", FORMATS)
def test_outliers_cost_a_shared_scale_more(quant):
    """A large token costs the others their bits where they share its scale, and only there; E4M3, whose numbers go down
    to 2^-18 of the largest, bears a larger one. A large channel costs every token, and more where the largest of all
    tokens sets the scale."""
    x = torch.randn(8, 64, 64, generator=torch.Generator().manual_seed(0))

    def of_others(granularity, factor):
        token = x.clone()
        token[0, 0] *= factor
        return relative_error(fake_quantise(token, None, quant, granularity)[1:], token[1:], None).item()

    large = {"int8": 1e3, "e4m3": 1e6}[quant]
    assert of_others("token", large) == pytest.approx(error(x, quant, "token"), rel=0.01)
    assert of_others("tensor", large) > 0.9
    assert quant == "int8" or of_others("tensor", 1e3) == pytest.approx(error(x, quant, "tensor"), rel=0.02)
    channel = x.clone()
    channel[..., 5] *= 50
    assert error(channel, quant, "tensor") > 1.05 * error(channel, quant, "token")
    assert quant == "e4m3" or error(channel, quant, "token") > 2 * error(x, quant, "token")


def test_a_bounded_norm_loses_less_to_int8_and_not_to_e4m3():
    """Student's t with 2 degrees of freedom through DyT and RMSNorm. A floating format spends its bits by size: the
    outlier that sets the scale is exact there and is most of RMSNorm's length, so that DyT's error is the larger."""
    x = torch.distributions.StudentT(2.0)
    torch.manual_seed(0)
    x = x.sample((32, 64, 64))
    lost = {
        (n, q, g): error(maker(n)(64)(x).detach(), q, g) for n in ("dyt", "rms") for q in FORMATS for g in GRANULARITIES
    }
    assert lost["dyt", "int8", "token"] < 0.4 * lost["rms", "int8", "token"]
    assert lost["dyt", "int8", "tensor"] < 0.3 * lost["rms", "int8", "tensor"]
    assert lost["dyt", "e4m3", "token"] > lost["rms", "e4m3", "token"]


def with_rounding(name, quant="int8", granularity="tensor", place="norm_output"):
    return perturbed(quantised(ALL[name], quant, granularity, place)(DIM))


@pytest.mark.parametrize("name", [name for name in ALL if name != "none"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("place", ["norm_input", "norm_output"])
def test_a_norm_between_two_roundings(name, padded, place):
    """n(x̂), or n(x) rounded: the norm itself does not know."""
    x, mask = inputs(), right_mask([12, 7, 9, 12]) if padded else None
    for quant, granularity in (("int8", "tensor"), ("e4m3", "token")):
        norm, plain = with_rounding(name, quant, granularity, place), perturbed(ALL[name](DIM))
        if place == "norm_input":
            before, after = x, fake_quantise(x, mask, quant, granularity)
            expected = plain(after, mask)
        else:
            before = plain(x, mask)
            after = expected = fake_quantise(before, mask, quant, granularity)
        assert torch.equal(norm(x, mask=mask), expected)
        assert "quant_error" in norm.observed()
        assert norm.observed()["quant_error"] == relative_error(after, before, mask) > 0


def test_names_attributes_and_copies_are_the_norms_own():
    for name in ("bn-batch_time", "rbn", "dyt"):
        norm, plain = with_rounding(name), ALL[name](DIM)
        assert type(norm) is type(plain)
        assert norm.state_dict().keys() == plain.state_dict().keys()
        assert norm.observed() == {}
        other = copy.deepcopy(norm)
        norm(inputs())
        assert other.observed() == {}
        other(3 * inputs(seed=1))
        assert other.observed() != norm.observed()


def test_what_a_norm_observes_itself_is_kept():
    class Watching(DynamicTanh):
        def observed(self):
            return {"mean": torch.ones(())}

    norm = quantised(lambda dim: Watching(dim, alpha=1.0, affine=True, bias=False), "int8", "token", "norm_output")(DIM)
    norm(inputs())
    assert norm.observed().keys() == {"mean", "quant_error"}


def test_the_next_layer_reads_few_values():
    """The integers from −127 to 127 times a scale: of the whole tensor, or of each token."""
    for granularity in GRANULARITIES:
        built, read = tiny.model("rms", quant="int8", quant_granularity=granularity, width=64), []
        built.blocks[1].attn.q.register_forward_pre_hook(lambda _, args, read=read: read.append(args[0]))
        built(torch.arange(3 * tiny.CONTEXT).view(3, -1) % tiny.VOCABULARY)
        (x,) = read
        largest = x.abs().amax(-1, keepdim=True) if granularity == "token" else x.abs().amax()
        steps = 127 * x / largest
        torch.testing.assert_close(steps, steps.round(), atol=1e-4, rtol=0)  # 127 float32 roundings of 6e-8, and s's
        assert steps.round().unique().numel() <= 255 < x.numel()
        assert granularity == "token" or x.unique().numel() <= 255


def test_a_norm_with_rounding_is_not_folded():
    for changes, why in (
        ({"quant_at": "norm_output"}, "has forward hooks"),
        ({"quant_at": "norm_input"}, "has forward hooks"),
        ({"quant_at": "norm_statistics", "quant_granularity": "tensor"}, "its statistics are rounded"),
    ):
        with pytest.raises(ValueError, match=rf"^blocks\.0\.norm\.attn_in: {why}"):
            fold_norms(tiny.model("bn", quant="int8", **changes))


@pytest.mark.parametrize("name", ["dyt", "derf", "power", "none"])
def test_a_norm_without_statistics_to_round_is_refused(name):
    with pytest.raises(UserError, match=r"^model\.quant"):
        quantised(ALL[name], "int8", "tensor", "norm_statistics")(DIM)
