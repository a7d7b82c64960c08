"""What every norm is held to: its definition, invariances, gradients, precision, padding and causality."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from normexp import cell, commandline, config
from normexp.fields import UserError
from normexp.norms import batch_norms
from tests import tiny
from tests.norm_cases import ACROSS, ALL, CONTEXT, DIM, LEAKS, definition, inputs, maker, perturbed, right_mask

layer, rms = maker("ln"), maker("rms")
TOY = """
from torch import nn

class Toy(nn.Module):
    causal = False
    restrictions = {"train.clip": ((0.0,), "it is a toy")}

    def __init__(self, dim: int, *, power: float) -> None:
        super().__init__()
        self.power = power

    def forward(self, x, mask=None):
        return x * (1 + x.square().mean(-1, keepdim=True)) ** -self.power

    def problem(self, rows, context):
        return "no such batch for a toy" if rows == 3 else None
"""


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("padded", [False, True])
def test_a_norm_is_its_definition(name, padded):
    """Wherever its parameters stand, in training, pads included."""
    x, mask = inputs(), right_mask([12, 7, 9, 12]) if padded else None
    norm = perturbed(ALL[name](DIM))
    torch.testing.assert_close(norm(x, mask).double(), definition(name, norm, x.double(), mask), atol=2e-5, rtol=1e-5)


TOKEN, BATCH, SHIFT, CHANNEL = "scale of a token", "scale of a batch", "shift of all", "shift of a channel"
CHANGES = {
    TOKEN: lambda x: x * torch.tensor([0.5, 1.0, 4.0, 2.0, 1.0]).repeat(50)[: len(x) * CONTEXT].view(-1, CONTEXT, 1),
    BATCH: lambda x: 8 * x,
    SHIFT: lambda x: x + 5,
    CHANNEL: lambda x: x + torch.linspace(-4, 4, DIM),
}
INVARIANT = {
    "ln": {TOKEN, BATCH, SHIFT},
    "rms": {TOKEN, BATCH},
    "prms": {TOKEN, BATCH},
    "scale": {TOKEN, BATCH},
    "power": {TOKEN, BATCH},
    "bn": {BATCH, SHIFT, CHANNEL},
    "rbn": {BATCH, SHIFT, CHANNEL},
    "switch": {BATCH, SHIFT},
    "seednorm": set(),
    "dyt": set(),
    "derf": set(),
    "none": set(),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("change", CHANGES)
def test_invariances(name, change):
    """What a norm ignores, and nothing else, in training."""
    x, norm = inputs(rows=8), perturbed(ALL[name](DIM))
    before, after = norm(x), perturbed(ALL[name](DIM))(CHANGES[change](x))
    same = change in INVARIANT[name.partition("-")[0]]
    assert ((before - after).abs().max() < 2e-4) == same
    assert same or (before - after).abs().max() > 0.05


def test_seednorm_ignores_the_scale_of_a_token_only_at_its_start():
    x = inputs()
    torch.testing.assert_close(ALL["seednorm"](DIM)(8 * x), ALL["seednorm"](DIM)(x))


@pytest.mark.parametrize("name", ALL)
def test_gradients_in_float64(name):
    """Of the input and of every parameter. PowerNorm's own backward pass is an approximation: here it is frozen."""
    norm = perturbed(ALL[name](4)).double()
    if name.startswith("power"):
        norm.frozen = True
    parameters = {key: value.detach().requires_grad_() for key, value in norm.named_parameters()}
    x = inputs()[:2, :3, :4].double().requires_grad_()
    mask = torch.tensor([[True, True, True], [True, True, False]]) if name != "bn-position" else None

    def function(x, *values):
        return functional_call(norm, dict(zip(parameters, values, strict=True)), (x, mask))

    assert torch.autograd.gradcheck(function, (x, *parameters.values()))


@pytest.mark.parametrize("name", ACROSS)
def test_evaluation_gradients_in_float64(name):
    norm = perturbed(ALL[name](4)).double()
    norm(inputs()[:2, :3, :4].double())
    x = inputs(seed=1)[:2, :3, :4].double().requires_grad_()
    assert torch.autograd.gradcheck(norm.eval(), (x,))


@pytest.mark.parametrize(("make", "biased"), [
    *[(ALL[name], True) for name in ("ln", "bn-batch_time", "rbn", "switch", "power", "derf")],
    *[(ALL[name], False) for name in ("rms", "prms", "scale", "seednorm", "dyt")],
])  # fmt: skip
def test_affine_false_has_no_gain_and_no_bias(make, biased):
    names = {name for name, _ in make(DIM).named_parameters()}
    bare = {name for name, _ in make(DIM, affine=False).named_parameters()}
    assert names - bare == ({"weight", "bias"} if biased else {"weight"})
    assert bare <= {"alpha", "beta", "shift", "mean_logits", "var_logits"}  # what the norm is made of
    torch.testing.assert_close(make(DIM, affine=False)(inputs()), make(DIM)(inputs()))


@pytest.mark.parametrize(("name", "other"), [
    ("seednorm", "rms"), ("rbn", "bn-batch_time"), ("ln-offset", "ln"), ("rms-offset", "rms"),
])  # fmt: skip
def test_equality_at_the_declared_start(name, other):
    x = inputs()
    torch.testing.assert_close(ALL[name](DIM)(x), ALL[other](DIM)(x), atol=2e-6, rtol=1e-5)


def test_other_declared_starts():
    x, plain = inputs(), rms(DIM)(inputs())
    torch.testing.assert_close(maker("prms", share=1.0)(DIM)(x), plain)
    torch.testing.assert_close(ALL["scale"](DIM)(x), plain)
    torch.testing.assert_close(ALL["power"](DIM)(x), plain, atol=3e-5, rtol=1e-5)  # φ = 1, but for ε
    torch.testing.assert_close(ALL["dyt"](DIM)(1e-3 * x), 1e-3 * x, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(ALL["derf"](DIM)(x), torch.erf(x))
    assert ALL["none"](DIM)(x) is x


def test_the_first_channels_of_prms_are_rounded_down_but_at_least_one():
    x = inputs()[..., :10]
    for share, count in ((0.29, 2), (0.0625, 1), (1.0, 10)):
        expected = x / x[..., :count].square().mean(-1, keepdim=True).sqrt()
        torch.testing.assert_close(maker("prms", share=share)(10)(x), expected, rtol=1e-3, atol=1e-3)


def test_the_least_norm_of_scale_norm_is_a_floor():
    """Below it the norm is linear in x; above it there is no ε."""
    x = torch.zeros(3, DIM)
    x[1, 0], x[2, 0] = 4e-6, 4e-5
    y = ALL["scale"](DIM)(x)[:, 0]
    torch.testing.assert_close(y, torch.tensor([0.0, 4 * 0.4, 4.0]))


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


@pytest.mark.parametrize("shift", [300, 1.5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ALL)
def test_statistics_are_float32_under_low_precision(name, dtype, shift):
    """Rows of 300 overflow fp16 when squared. The output is that of float32, to a rounding; the state is its own."""
    x = inputs(shift=shift).to(dtype)
    norm, exact = ALL[name](DIM), ALL[name](DIM)
    if name not in ("ln", "rms"):  # their cast=input rounds before the gain as well
        norm, exact = perturbed(norm), perturbed(exact)
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(norm(x).float(), exact(x.float()), rtol=rounding, atol=rounding / 16)
    for ours, theirs in zip(norm.buffers(), exact.buffers(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ALL)
def test_a_zero_row_gives_finite_gradients(name):
    x = inputs()
    x[1, 3:5] = 0
    x[2] = 0
    x.requires_grad_()
    norm = ALL[name](DIM)
    y = norm(x)
    assert name in ACROSS or not y[2].any()
    y.square().sum().backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in (x, *norm.parameters()))


@pytest.mark.parametrize("name", ALL)
def test_a_mask_without_pads_changes_nothing(name):
    x, full = inputs(), torch.ones(4, CONTEXT, dtype=torch.bool)
    masked, plain = ALL[name](DIM), ALL[name](DIM)
    torch.testing.assert_close(masked(x, full), plain(x), atol=2e-6, rtol=1e-5)
    for ours, theirs in zip(masked.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ALL)
def test_pads_do_not_reach_real_tokens(name):
    """The same tokens padded to 6 and to 12 positions, with other values in the pads: the same real outputs and running
    statistics, and no gradient from a real output to a pad."""
    x, mask = inputs(), right_mask([6, 4, 5, 3])
    longer = torch.where(mask.unsqueeze(-1), x, 1e4 * torch.ones_like(x)).requires_grad_()
    norms = [ALL[name](DIM) for _ in range(2)]
    short, long = norms[0](x[:, :6], mask[:, :6]), norms[1](longer, mask)
    torch.testing.assert_close(long[:, :6][mask[:, :6]], short[mask[:, :6]], atol=1e-5, rtol=1e-5)
    for one, other in zip(norms[0].buffers(), norms[1].buffers(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    long[mask].square().sum().backward()
    assert not longer.grad[~mask].any()


@pytest.mark.parametrize("name", ALL)
def test_causality_to_the_bit(name):
    """Tokens after t change: outputs up to t stay bit-identical, except where a norm declares that it sees them."""
    x = inputs()
    changed = x.clone()
    changed[:, 7:] += 5
    norm = ALL[name](DIM)
    same = torch.equal(ALL[name](DIM)(x)[:, :7], norm(changed)[:, :7])
    assert same == getattr(norm, "causal", True)
    assert same == (name not in LEAKS)
    evaluated = ALL[name](DIM).eval()
    assert torch.equal(evaluated(x)[:, :7], evaluated(changed)[:, :7])


@pytest.mark.parametrize("name", ACROSS)
def test_batch_statistics_of_a_frozen_norm(name):
    """They normalise as in training, and leave what a checkpoint holds alone."""
    norm, x = ALL[name](DIM), inputs()
    assert batch_norms(nn.Sequential(norm)) == [norm]
    trained = ALL["power-warmup" if name == "power" else name](DIM)(x)
    before = [buffer.clone() for buffer in norm.buffers()]
    norm.eval()
    norm.frozen = True
    torch.testing.assert_close(norm(x), trained)
    norm.frozen = False
    assert not torch.allclose(norm(x), trained, atol=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(before, norm.buffers(), strict=True))


@pytest.mark.parametrize("name", [name for name in ALL if name not in ACROSS])
def test_a_norm_of_single_tokens_knows_no_batch(name):
    """No state, and a token's output does not depend on its neighbours or on the mode."""
    norm, x = perturbed(ALL[name](DIM)), inputs()
    assert not list(norm.buffers())
    assert not batch_norms(nn.Sequential(norm))
    torch.testing.assert_close(norm(x)[1:2, 3:4], norm(x[1:2, 3:4]))
    assert torch.equal(norm(x), norm.eval()(x))


def test_a_toy_norm_is_a_class_and_a_yaml(tmp_path, monkeypatch):
    """Nothing else is touched, and it has all that the package's own have."""
    (tmp_path / "toy_norms.py").write_text(TOY)
    (tmp_path / "conf" / "norm").mkdir(parents=True)
    (tmp_path / "conf" / "norm" / "toy.yaml").write_text("_target_: toy_norms.Toy\n_partial_: true\npower: 0.5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(*overrides):
        composed = commandline.compose(["norm=toy", *tiny.SHORT, *overrides], "conf")
        return config.load(composed.values, composed.choices, composed.folder)

    loaded = load()
    source = tiny.Source()
    trainer = cell.build_trainer(loaded, source, cell.build(loaded, source))
    for _ in range(3):
        _, readings = trainer.take_step()
    assert torch.isfinite(readings[0].values).all()
    with pytest.raises(UserError, match=r"^train.clip=1.0: norm=toy takes 0.0 only: it is a toy$"):
        load("train.clip=1")
    with pytest.raises(UserError, match=r"^norm=toy: no such batch for a toy"):
        load("train.batch_size=3")
