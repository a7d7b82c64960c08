"""Rounded statistics against norms written by hand, and what training with fake quantisation keeps of a run."""

import math
from dataclasses import replace

import pytest
import torch

from normexp import config, runs
from normexp.fields import UserError
from normexp.quantise import fake_quantise, quantised
from normexp.telemetry import locate
from tests import tiny
from tests.norm_cases import ALL, DIM, inputs, perturbed, right_mask
from tests.test_quantise import MAGNITUDES
from tests.tiny import load, rows_of, same_weights

GRIDS = {"int8": [float(n) for n in range(128)], "e4m3": [0.0, *MAGNITUDES]}
ROUNDED = ("ln", "rms", "rms-offset", "prms", "scale", "seednorm", "rbn", "switch", *(n for n in ALL if "bn-" in n))
SITES = {f"layer_{i:02d}/norm.{site}" for i in range(2) for site in ("attn_in", "mlp_in")} | {"final_norm"}


def in_few_bits(statistic, real, quant, errors):
    """The nearest of a list of all numbers of the format, as a constant added to the statistic."""
    grid = torch.tensor(GRIDS[quant], dtype=torch.float64)
    kept = statistic if real is None else statistic[real]
    scale = kept.abs().max().detach() / grid[-1]
    nearest = grid[(statistic.detach().abs().unsqueeze(-1) / scale - grid).abs().argmin(-1)]
    constant = (statistic.detach().sign() * nearest * scale) - statistic.detach()
    errors.append(((constant if real is None else constant[real]).norm() / kept.norm()).item())
    return statistic + constant


def over(x, mask, dims, weights=None):
    real = torch.ones_like(x[..., :1]) if mask is None else mask.unsqueeze(-1).to(x.dtype)
    count = real.sum(dims).clamp(min=1)
    mean = (x * real).sum(dims) / count
    return mean, ((x - mean).square() * real).sum(dims) / count


def statistics(name, norm, x, mask):
    """(mean or 0, inverse, the mask of both) before any rounding, from the definitions."""
    if name.startswith("ln"):
        mean = x.mean(-1, keepdim=True)
        return mean, 1 / ((x - mean).square().mean(-1, keepdim=True) + norm.eps).sqrt(), mask
    if name == "scale":
        return 0, 1 / x.square().sum(-1, keepdim=True).sqrt(), mask
    if name.startswith(("rms", "prms", "seednorm")):
        part = x[..., : int(0.25 * DIM)] if name == "prms" else x
        return 0, 1 / (part.square().mean(-1, keepdim=True) + norm.eps).sqrt(), mask
    if name == "bn-cumulative":
        upto = [over(x[:, : t + 1], None if mask is None else mask[:, : t + 1], (0, 1)) for t in range(x.shape[1])]
        mean, var = (torch.stack(parts) for parts in zip(*upto, strict=True))
        return mean, 1 / (var + norm.eps).sqrt(), None if mask is None else mask.any(0)
    if name == "bn-position":
        mean, var = over(x, mask, 0)
        return mean, 1 / (var + norm.eps).sqrt(), None if mask is None else mask.any(0)
    mean, var = over(x, mask, (0, 1))
    if name == "switch":
        own, of_mean, of_var = x.mean(-1, keepdim=True), norm.mean_logits.softmax(0), norm.var_logits.softmax(0)
        var = of_var[0] * (x - own).square().mean(-1, keepdim=True) + of_var[1] * var
        return of_mean[0] * own + of_mean[1] * mean, 1 / (var + norm.eps).sqrt(), mask
    return mean, 1 / (var + norm.eps).sqrt(), None


def by_hand(name, norm, x, mask, quant):
    mean, inverse, real = statistics(name, norm, x, mask)
    errors: list[float] = []
    mean = in_few_bits(mean, real, quant, errors) if torch.is_tensor(mean) else 0
    y = (x - mean) * in_few_bits(inverse, real, quant, errors)
    gain = norm.weight + getattr(norm, "gain_offset", 0)
    if name == "seednorm":
        gain = gain + torch.tanh((x * norm.beta).sum(-1, keepdim=True)) * norm.alpha
    return y * gain + (0 if getattr(norm, "bias", None) is None else norm.bias), max(errors)


@pytest.mark.parametrize("quant", ["int8", "e4m3"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_statistics_by_hand(name, padded, quant):
    """Output, gradient and error, in float64, whose statistics lie on the same side of every boundary as by hand."""
    x, mask = inputs().double(), right_mask([9, 7, 3, 5]) if padded else None
    norm = perturbed(quantised(ALL[name], quant, "tensor", "norm_statistics")(DIM)).double()
    first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
    real = torch.ones_like(x[..., 0], dtype=torch.bool) if mask is None else mask
    y, (expected, error) = norm(first, mask), by_hand(name, norm, second, mask, quant)
    torch.testing.assert_close(y[real], expected[real], atol=1e-9, rtol=1e-9)
    assert norm.observed()["quant_error"].item() == pytest.approx(error, rel=1e-9)
    assert not torch.allclose(y[real], perturbed(ALL[name](DIM)).double()(x, mask)[real], atol=1e-6)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * real.unsqueeze(-1)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(first.grad, second.grad, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("stats", ["batch_time", "position", "cumulative"])
def test_running_statistics_are_rounded_when_they_are_applied(stats):
    norm = quantised(ALL[f"bn-{stats}"], "int8", "tensor", "norm_statistics")(DIM)
    norm(inputs())
    moved = norm.running_mean.clone(), norm.running_var.clone()
    plain = ALL[f"bn-{stats}"](DIM)
    plain(inputs())
    torch.testing.assert_close(moved, (plain.running_mean, plain.running_var), atol=1e-6, rtol=1e-5)
    norm.eval()
    x = inputs(seed=3)[:, :8]
    mean, inverse = moved[0], torch.rsqrt(moved[1] + norm.eps)
    if stats == "position":
        mean, inverse = mean[:8], inverse[:8]
    mean, inverse = (fake_quantise(part, None, "int8", "tensor") for part in (mean, inverse))
    torch.testing.assert_close(norm(x), (x - mean) * inverse, atol=1e-6, rtol=1e-6)
    assert torch.equal(norm.running_mean, moved[0])


PLACES = {
    "norm_input": {"quant": "e4m3", "quant_at": "norm_input", "quant_granularity": "token"},
    "norm_output": {"quant": "int8", "quant_at": "norm_output", "quant_granularity": "tensor"},
    "norm_statistics": {"quant": "int8", "quant_at": "norm_statistics", "quant_granularity": "tensor"},
}


@pytest.mark.parametrize("changes", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("norm", ["ln", "rms", "bn"])
def test_nothing_but_the_rounding_varies(norm, changes):
    """Initial weights, their type, the batch, what decays; and a step that does differ."""
    plain, rounding = (tiny.trainer(norm, dropout=0.2, qk_norm="head", **c) for c in ({}, changes))
    assert plain.model.state_dict().keys() == rounding.model.state_dict().keys()
    assert same_weights(plain.model, rounding.model)
    decays = [
        [
            {n for n, p in t.model.named_parameters() if any(p is q for q in g["params"])}
            for g in t.optimizer.param_groups
        ]
        for t in (plain, rounding)
    ]
    assert decays[0] == decays[1]
    (_, (first, *_)), (_, (second, *_)) = plain.take_step(), rounding.take_step()
    loss, rounded_loss = first.values[0], second.values[0]
    assert 0 < (loss - rounded_loss).abs() < 0.1
    assert all(p.dtype is torch.float32 for p in rounding.model.parameters())
    assert all(v.dtype is torch.float32 for s in rounding.optimizer.state.values() for v in s.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("padded", [False, True])
def test_the_error_of_every_site_is_logged_as_it_is_by_hand(padded, dtype):
    """What the norms gave in the last forward pass of a step, rounded here once more."""
    changes = {"quant": "int8", "quant_granularity": "tensor", "qk_norm": "head", "embed_norm": True}
    trainer = tiny.trainer("rms", source=tiny.Source(padded), train=replace(tiny.TRAIN, dtype=dtype), **changes)
    seen = {}
    for name, module in trainer.model.named_modules():
        if hasattr(module, "observed"):
            place = "/".join(filter(None, locate(name)))
            keep = lambda norm, args, y, place=place: seen.update({place: (y.detach(), args[1])})  # noqa: E731
            module.register_forward_hook(keep, prepend=True)  # in front of the rounding
    (row,) = rows_of(trainer, 1)
    logged = {path.partition("/")[2]: value for path, value in row.items() if path.startswith("quant_error")}
    heads = {f"layer_{i:02d}/attn.norm.{site}" for i in range(2) for site in ("q_head", "k_head")}
    assert logged.keys() == seen.keys() == SITES | heads | {"embed/norm"}
    for place, (y, mask) in seen.items():
        kept = y.float() if mask is None else y.float()[mask]
        scale = kept.abs().max() / 127
        rounded = (scale * (kept / scale).round()).to(y.dtype).float()
        assert logged[place] == pytest.approx(((rounded - kept).norm() / kept.norm()).item(), rel=1e-5), place
        assert 1e-3 < logged[place] < 0.1


@pytest.mark.parametrize("norm", ["rms", "bn"])
@pytest.mark.parametrize("changes", PLACES.values(), ids=PLACES)
def test_resume_is_bit_for_bit(norm, changes, tmp_path):
    settings = {"source": tiny.Source(padded=True), "train": replace(tiny.TRAIN, grad_accum=2), **changes}
    *_, row = tiny.goes_on(*(tiny.trainer(norm, **settings) for _ in range(2)), tmp_path, before=3)
    assert any(path.startswith("quant_error/layer_01/") for path in row)


@pytest.mark.parametrize("changes", PLACES.values(), ids=PLACES)
def test_compiled_errors_are_the_eager_ones(changes):
    """To 1e-5, by the compiler itself: a norm's last bits may move a value over a boundary, one of a thousand."""
    rows = {}
    for wanted in (False, True):
        trainer = tiny.trainer("rms", train=replace(tiny.TRAIN, compile=wanted), depth=1, **changes)
        rows[wanted] = rows_of(trainer, 3)
    assert trainer.compiled.facts()["graph_breaks"] == 0
    for eager, compiled in zip(rows[False], rows[True], strict=True):
        paths = [path for path in eager if path.startswith("quant_error")]
        assert len(paths) == 3
        for path in paths:
            assert compiled[path] == pytest.approx(eager[path], abs=1e-5)
            assert eager[path] > 1e-3
    assert math.isfinite(rows[True][-1]["train/loss"])


STATISTICS = ("model.quant=int8", "model.quant_at=norm_statistics", "model.quant_granularity=tensor")


@pytest.mark.parametrize(("overrides", "line"), [
    (["model.quant=int4"], "model.quant=int4: must be one of none, e4m3, int8"),
    (["norm=none", "model.quant=int8"], "model.quant=int8: rounds at the norms, and norm=none is none; give model.qu"),
    (["norm=none", "placement=ngpt", "model.quant=e4m3"], "model.quant=e4m3: rounds at the norms, and norm=none is n"),
    (["norm=dyt", *STATISTICS], "model.quant_at=norm_statistics: DynamicTanh hands over no statistics to be rounded;"),
    (["norm=power", *STATISTICS], "model.quant_at=norm_statistics: PowerNorm hands over no statistics to be rounded;"),
    ([*STATISTICS[:2]], "model.quant_granularity=token: a token has one number of a statistic, which would be its ow"),
    (["norm.kernel=compile", *STATISTICS], "norm.kernel=compile: cannot round statistics (model.quant_at); give auto"),
])  # fmt: skip
def test_what_has_no_meaning_is_refused_in_one_line(overrides, line):
    with pytest.raises(UserError) as refused:
        load(*overrides)
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


def test_the_norm_path_says_that_statistics_are_rounded_by_the_formula():
    assert config.norm_path(load("device=cpu", "model.quant=int8")) == "native"
    assert config.norm_path(load("device=cpu", *STATISTICS)) == "torch"
    assert config.norm_path(load("device=cpu", "train.compile=true", *STATISTICS)) == "compile"
    assert config.norm_path(load("device=cpu", "model.quant_at=norm_statistics")) == "native"  # of nothing


def test_runs_without_rounding_are_what_they_were_and_others_have_names_of_their_own():
    plain, *unused = (load(*o) for o in ([], ["model.quant_granularity=tensor"], ["model.quant_at=norm_input"]))
    assert {runs.digest(c.resolved, "") for c in (plain, *unused)} == {runs.digest(plain.resolved, "")}
    others = [["model.quant=int8"], ["model.quant=e4m3"], ["model.quant=int8", "model.quant_granularity=tensor"]]
    others += [["model.quant=int8", "model.quant_at=norm_input"], list(STATISTICS)]
    assert len({runs.digest(load(*o).resolved, "") for o in ([], *others)}) == 6


@pytest.mark.parametrize("granularity", ["token", "tensor"])
def test_a_scale_of_its_own_keeps_later_tokens_out(granularity):
    """Bit for bit; a shared scale lets them in."""
    built = tiny.model("rms", quant="int8", quant_granularity=granularity, quant_at="norm_input")
    built.embed.token.weight.data[10] *= 100
    tokens = torch.arange(2 * tiny.CONTEXT).view(2, -1) % 10
    changed = tokens.clone()
    changed[:, 9:] = 10
    same = torch.equal(built(tokens)[:, :9], built(changed)[:, :9])
    assert same == (granularity == "token")
