"""Norms against float64 formulas, and the properties that set them apart."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from normexp.norms import BatchNorm, LayerNorm, RMSNorm, batch_statistics

CONTEXT, DIM = 12, 16
layer = partial(LayerNorm, eps=1e-5, affine=True, cast="input", kernel="auto", gain_offset=0.0)
rms = partial(RMSNorm, eps=1e-6, affine=True, cast="input", kernel="auto", gain_offset=0.0)
batch = partial(BatchNorm, eps=1e-5, momentum=0.1, affine=True, stats="batch_time", mask_padding=True, context=CONTEXT)
STATISTICS = ("batch_time", "position", "cumulative")
ALL = {"ln": layer, "rms": rms, **{f"bn-{stats}": partial(batch, stats=stats) for stats in STATISTICS}}


def inputs(rows: int = 4, seed: int = 0, scale: float = 3.0, shift: float = 1.5) -> Tensor:
    return shift + scale * torch.randn(rows, CONTEXT, DIM, generator=torch.Generator().manual_seed(seed))


def right_mask(lengths: list[int]) -> Tensor:
    return torch.arange(CONTEXT) < torch.tensor(lengths).unsqueeze(1)


def test_layer_norm_is_its_formula():
    x, norm = inputs(), layer(DIM)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x64 = x.double()
    centred = x64 - x64.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias
    torch.testing.assert_close(norm(x).double(), expected, atol=2e-6, rtol=1e-5)


def test_rms_norm_is_its_formula():
    x, norm = inputs(), rms(DIM)
    nn.init.normal_(norm.weight)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
    torch.testing.assert_close(norm(x).double(), expected, atol=2e-6, rtol=1e-5)


def test_invariance_of_layer_and_rms_norm():
    """Both ignore the scale of a token; only LayerNorm ignores its shift."""
    x = inputs(scale=3.0)
    for norm in (layer(DIM), rms(DIM)):
        torch.testing.assert_close(norm(8 * x), norm(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer(DIM)(x + 5), layer(DIM)(x), atol=1e-5, rtol=1e-5)
    assert (rms(DIM)(x + 5) - rms(DIM)(x)).abs().max() > 0.1


@pytest.mark.parametrize(("make", "biased"), [(layer, True), (rms, False), (batch, True)])
def test_affine_false_has_no_parameters(make, biased):
    names = {name for name, _ in make(DIM).named_parameters()}
    assert names == ({"weight", "bias"} if biased else {"weight"})
    assert not list(make(DIM, affine=False).parameters())
    torch.testing.assert_close(make(DIM, affine=False)(inputs()), make(DIM)(inputs()))


@pytest.mark.parametrize("make", [layer, rms])
@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_gain_offset_is_a_part_of_the_gain_that_is_not_stored(make, kernel):
    """Gemma's 1 + w: w starts at 0 and the norm where it always starts; then γ = offset + w, gradients included."""
    x, plain, offset = inputs(), make(DIM, kernel=kernel), make(DIM, kernel=kernel, gain_offset=1.0)
    assert torch.equal(offset.weight, torch.zeros(DIM))
    assert torch.equal(offset(x), plain(x))
    nn.init.normal_(offset.weight)
    with torch.no_grad():
        plain.weight.copy_(1 + offset.weight)
    torch.testing.assert_close(offset(x), plain(x), atol=0, rtol=1e-6)
    gradients = [torch.autograd.grad(norm(x).square().sum(), norm.weight) for norm in (plain, offset)]
    torch.testing.assert_close(*gradients)
    assert torch.equal(make(DIM, affine=False, gain_offset=1.0)(x), make(DIM, affine=False)(x))


@pytest.mark.parametrize("make", [layer, rms])
def test_cast_says_where_bfloat16_begins(make):
    """`input`: x̂ is rounded before the gain; `float32`: once, at the end. Both return the dtype of x."""
    x = inputs().bfloat16()
    normed = {cast: make(DIM, cast=cast) for cast in ("input", "float32")}
    with torch.no_grad():
        for norm in normed.values():
            norm.weight.copy_(torch.linspace(0.5, 1.7, DIM))
    plain = make(DIM, affine=False, cast="float32")(x.float())
    weight = normed["input"].weight
    twice = (plain.bfloat16() * weight.bfloat16()).float()
    once = (plain * weight).bfloat16().float()
    assert normed["input"](x).dtype == normed["float32"](x).dtype == torch.bfloat16
    torch.testing.assert_close(normed["input"](x).float(), twice, atol=0, rtol=2**-7)
    torch.testing.assert_close(normed["float32"](x).float(), once, atol=0, rtol=2**-8)
    assert not torch.equal(normed["input"](x), normed["float32"](x))


@pytest.mark.parametrize("name", ALL)
def test_statistics_are_float32_under_low_precision(name):
    """Rows of 300 overflow fp16 when squared; the output must be that of float32, rounded."""
    x = (inputs() + 300).half()
    norm = ALL[name](DIM)
    reference = ALL[name](DIM)(x.float())
    torch.testing.assert_close(norm(x).float(), reference, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", ALL)
def test_gradients_against_float64_differences(name):
    """A directional derivative of each, in float32, against the central difference of the float64 formula."""
    norm, x = ALL[name](DIM), inputs().requires_grad_()
    direction, probe = inputs(seed=1, shift=0.0, scale=1.0), inputs(seed=2, shift=0.0, scale=1.0)
    mask = None if name in ("ln", "rms") else right_mask([12, 7, 9, 5])
    (gradient,) = torch.autograd.grad((norm(x, mask) * probe).sum(), x)
    step = 1e-4
    ends = [reference(name, x.detach().double() + sign * step * direction.double(), mask) for sign in (1, -1)]
    expected = ((ends[0] - ends[1]) * probe.double()).sum() / (2 * step)
    torch.testing.assert_close((gradient * direction).sum().double(), expected, rtol=1e-3, atol=1e-3)


def reference(name: str, x: Tensor, mask: Tensor | None) -> Tensor:
    """The definitions, written a second time, with plain loops."""
    if name == "ln":
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    if name == "rms":
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    y = torch.empty_like(x)
    for t in range(x.shape[1]):
        part = {"bn-batch_time": slice(None), "bn-position": slice(t, t + 1), "bn-cumulative": slice(0, t + 1)}[name]
        values = x[:, part][real[:, part]]
        y[:, t] = (x[:, t] - values.mean(0)) / (values.var(0, correction=0) + 1e-5).sqrt()
    return y


@pytest.mark.parametrize("stats", STATISTICS)
@pytest.mark.parametrize("padded", [False, True])
def test_batch_norm_is_its_definition(stats, padded):
    mask = right_mask([12, 7, 9, 12]) if padded else None
    x, norm = inputs(), batch(DIM, stats=stats)
    expected = reference(f"bn-{stats}", x.double(), mask)
    torch.testing.assert_close(norm(x, mask).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("stats", STATISTICS)
def test_running_statistics_follow_torchs_rule(stats):
    """r ← 0.9 r + 0.1 s from (0, 1), unbiased variance, over two batches; evaluation uses them."""
    norm, mean, var = batch(DIM, stats=stats), 0.0, 1.0
    for seed in (0, 1):
        x = inputs(seed=seed)
        norm(x)
        tokens, axes = (x, (0,)) if stats == "position" else (x.reshape(-1, DIM), (0,))
        mean = 0.9 * mean + 0.1 * tokens.mean(axes)
        var = 0.9 * var + 0.1 * tokens.var(axes, correction=1)
    torch.testing.assert_close(norm.running_mean, mean, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(norm.running_var, var, atol=1e-5, rtol=1e-5)
    x = inputs(seed=3)[:, :5]
    mean, var = (mean[:5], var[:5]) if stats == "position" else (mean, var)
    torch.testing.assert_close(norm.eval()(x), (x - mean) / (var + 1e-5).sqrt(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_a_mask_without_pads_changes_nothing(name):
    x, full = inputs(), torch.ones(4, CONTEXT, dtype=torch.bool)
    masked, plain = ALL[name](DIM), ALL[name](DIM)
    torch.testing.assert_close(masked(x, full), plain(x), atol=2e-6, rtol=1e-5)
    for ours, theirs in zip(masked.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ALL)
def test_pads_do_not_reach_real_tokens(name):
    """The same tokens padded to 6 and to 12 positions, with other values in the pads, give the same real outputs."""
    x, mask = inputs(), right_mask([6, 4, 5, 3])
    longer = torch.where(mask.unsqueeze(-1), x, 1e4 * torch.ones_like(x))
    short = ALL[name](DIM)(x[:, :6], mask[:, :6])
    torch.testing.assert_close(
        ALL[name](DIM)(longer, mask)[:, :6][mask[:, :6]], short[mask[:, :6]], atol=1e-5, rtol=1e-5
    )


def test_unmasked_batch_norm_is_polluted_by_pads():
    x, mask = inputs(), right_mask([6, 4, 5, 3])
    zeroed = x * mask.unsqueeze(-1)
    honest, polluted = batch(DIM)(zeroed, mask), batch(DIM, mask_padding=False)(zeroed, mask)
    assert (honest - polluted)[mask].abs().max() > 0.3


@pytest.mark.parametrize("name", ALL)
def test_causality_to_the_bit(name):
    """Token t + 1 changes: outputs up to t stay bit-identical, except in BatchNorm over batch and time."""
    x = inputs()
    changed = x.clone()
    changed[:, 7:] += 5
    norm = ALL[name](DIM)
    same = torch.equal(ALL[name](DIM)(x)[:, :7], norm(changed)[:, :7])
    assert same == getattr(norm, "causal", True)
    assert same == (name != "bn-batch_time")
    evaluated = ALL[name](DIM).eval()
    assert torch.equal(evaluated(x)[:, :7], evaluated(changed)[:, :7])


@pytest.mark.parametrize("stats", STATISTICS)
def test_batch_statistics_leave_the_running_ones_alone(stats):
    norm, x = batch(DIM, stats=stats), inputs()
    trained = batch(DIM, stats=stats)(x)
    before = [buffer.clone() for buffer in norm.buffers()]
    norm.eval()
    with batch_statistics(nn.Sequential(norm)):
        torch.testing.assert_close(norm(x), trained)
    assert all(torch.equal(a, b) for a, b in zip(before, norm.buffers(), strict=True))
    assert not torch.allclose(norm(x), trained)


@pytest.mark.parametrize(("stats", "rows", "context", "fine"), [
    ("batch_time", 1, 1, False), ("batch_time", 1, 2, True), ("batch_time", 2, 1, True),
    ("position", 1, 64, False), ("position", 2, 64, True), ("cumulative", 1, 64, False), ("cumulative", 2, 1, True),
])  # fmt: skip
def test_batch_norm_names_the_batches_it_cannot_take(stats, rows, context, fine):
    problem = batch(DIM, stats=stats).problem(rows, context)
    assert (problem is None) == fine
    assert fine or f"norm.stats={stats}" in problem


@pytest.mark.parametrize("stats", STATISTICS)
def test_variance_survives_a_large_mean(stats):
    """Mean 1e4, spread 1e-1: E[x²] − E[x]² would have no digit left in float32."""
    x = 1e4 + 0.125 * torch.randn(8, CONTEXT, DIM, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    mask = torch.ones(8, CONTEXT, dtype=torch.bool)
    expected = reference(f"bn-{stats}", x.double(), None)
    # one ulp of 1e4 in float32 is 1e-3, and x − μ is divided by σ = 0.125
    torch.testing.assert_close(batch(DIM, stats=stats)(x, mask).double(), expected, atol=0.03, rtol=0)


def test_an_all_pad_position_keeps_its_running_statistics():
    norm, x = batch(DIM, stats="position"), inputs()
    norm(x, right_mask([6, 4, 5, 3]))
    assert torch.equal(norm.running_mean[6:], torch.zeros(CONTEXT - 6, DIM))
    assert torch.equal(norm.running_var[5:], torch.ones(CONTEXT - 5, DIM))  # one token gives no variance
    assert norm.running_mean[0].abs().min() > 0
    assert torch.isfinite(norm(x, right_mask([6, 4, 5, 3]))).all()
