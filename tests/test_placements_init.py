"""The initial weights that placements declare, against their papers; and Admin's calibration by hand."""

import json
import math
from pathlib import Path

import pytest
import torch

from normexp import cell, commandline, config, train
from normexp.fields import UserError
from normexp.init import scheme
from normexp.report.__main__ import main as report
from tests import tiny, zoo

WIDTH = 64
MATRICES = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.in", "mlp.gate", "mlp.out")
TRUNCATED = 0.986578  # standard deviation of a standard normal that is cut at ± 3


def built(name: str, depth: int, init: str = "placement", **changes):
    return zoo.model(name, width=WIDTH, depth=depth, heads=4, init=init, mlp="swiglu", **changes)


def ratios(name: str, depth: int, base: str) -> dict[str, float]:
    """Standard deviation of each matrix of each block over the base scheme's: one number per kind of matrix."""
    own, plain = (dict(built(name, depth, init).named_parameters()) for init in ("placement", base))
    found: dict[str, set[float]] = {matrix: set() for matrix in MATRICES}
    for layer in (0, depth - 1):
        for matrix in MATRICES:
            weight = f"blocks.{layer}.{matrix}.weight"
            found[matrix].add(round((own[weight].std() / plain[weight].std()).item(), 5))
    assert all(len(values) == 1 for values in found.values())
    return {matrix: values.pop() for matrix, values in found.items()}


def gains(depth: int) -> dict[str, dict[str, float]]:
    deep, sub, fixup = (8 * depth) ** -0.25, math.sqrt(math.log(2 * depth)), 0.67 * depth**-0.25
    scaled = ("attn.v", "attn.o", "mlp.in", "mlp.out")
    return {
        "deepnorm": dict.fromkeys(scaled, deep),
        "subln": dict.fromkeys(scaled, sub),
        "b2t": dict.fromkeys(MATRICES, depth**-0.5),
        "tfixup": dict.fromkeys(scaled, fixup) | dict.fromkeys(("attn.q", "attn.k"), 2**-0.5),
    }


@pytest.mark.parametrize("depth", [1, 6, 24])
@pytest.mark.parametrize("name", ["deepnorm", "subln", "b2t", "tfixup"])
def test_gains_on_xavier(name, depth):
    expected = dict.fromkeys(MATRICES, 1.0) | gains(depth)[name]
    assert ratios(name, depth, "xavier") == pytest.approx(expected, abs=2e-5)


def test_gains_in_numbers():
    """The constants of the papers once more, as numbers, at N = 6."""
    assert ratios("deepnorm", 6, "xavier")["attn.v"] == pytest.approx(0.37992, abs=1e-4)
    assert ratios("subln", 6, "xavier")["mlp.out"] == pytest.approx(1.57636, abs=1e-4)
    assert ratios("tfixup", 6, "xavier")["mlp.in"] == pytest.approx(0.42809, abs=1e-4)


@pytest.mark.parametrize("name", ["deepnorm", "subln", "b2t"])
def test_the_rest_is_the_bases(name):
    own, plain = (dict(built(name, 2, init).named_parameters()) for init in ("placement", "xavier"))
    for parameter in ("embed.token.weight", "embed.position.weight", "head.weight", "blocks.1.attn.q.weight"):
        assert torch.equal(own[parameter], plain[parameter]) == (name != "b2t" or "blocks" not in parameter)


def test_tfixup_by_the_decoders_rule():
    placement = zoo.PLACEMENTS["tfixup"].func
    models = [
        tiny.model(norm, lambda **fields: placement(rule="decoder", **fields), width=WIDTH, init=init)
        for norm, init in ((zoo.Identity, "placement"), (zoo.Identity, "xavier"))
    ]
    own, plain = (dict(m.named_parameters()) for m in models)
    for matrix in ("attn.v", "attn.o", "mlp.in", "mlp.out"):
        weight = f"blocks.1.{matrix}.weight"
        torch.testing.assert_close(own[weight], plain[weight] * 18**-0.25)


@pytest.mark.parametrize(("scale", "token"), [(1.0, 54**-0.25), ("sqrt", 54**-0.25 / 8), ("learned", 54**-0.25 / 8)])
def test_embeddings_of_tfixup(scale, token):
    """N(0, 1/d) × (9N)^−¼ and × √d in the forward pass: the stream begins at (9N)^−¼ whatever the scale."""
    model = built("tfixup", 6, embed_scale=scale, context=256)
    assert model.embed.token.weight.std().item() == pytest.approx(token, rel=0.1)
    assert model.embed.position.weight.std().item() == pytest.approx(54**-0.25, rel=0.03)


@pytest.mark.parametrize(("name", "std", "residual", "cut"), [
    ("reordered", 0.02, 0.02, True),
    ("lnscaling", 0.02, 0.02, False),
    ("hybrid", (2.5 * WIDTH) ** -0.5, (2.5 * WIDTH) ** -0.5 / 12**0.5, True),
    ("hybrid_star", (2.5 * WIDTH) ** -0.5, (2.5 * WIDTH) ** -0.5 / 12**0.5, True),
])  # fmt: skip
def test_bases_that_are_no_xavier(name, std, residual, cut):
    model = built(name, 6, context=256)
    for parameter, value in model.named_parameters():
        if value.ndim > 1:
            sigma = residual if parameter.endswith(("attn.o.weight", "mlp.out.weight")) else std
            error = 4 / math.sqrt(2 * value.numel())
            assert value.std().item() == pytest.approx(sigma * (TRUNCATED if cut else 1), rel=error), parameter
            assert (value.abs().max() <= 3.0001 * sigma) == cut or value.numel() < 2000, parameter


@pytest.mark.parametrize("name", sorted(set(zoo.PLACEMENTS) - set(zoo.WITH_INIT)))
def test_a_placement_without_initial_weights_of_its_own_refuses(name):
    with pytest.raises(UserError, match=r"^model\.init=placement: \w+ declares no initial weights; give another$"):
        zoo.model(name, init="placement")


def test_the_rule_in_words():
    assert str(scheme(built("deepnorm", 6))) == "xavier, attn.v attn.o mlp.in mlp.out × 0.3799"
    assert str(scheme(built("reordered", 6))) == "plain, truncated at 3σ"
    assert str(scheme(zoo.model("pre", init="gpt2"))) == "gpt2"
    text = "xavier, attn.v attn.o mlp.in mlp.out × 0.4281, attn.q attn.k × 0.7071, embeddings 0.3689"
    assert str(scheme(built("tfixup", 6))) == text


def test_the_summary_names_what_was_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.main(["placement=deepnorm", "model.init=placement", *tiny.SHORT]) == 0
    used = "xavier, attn.v attn.o mlp.in mlp.out × 0.5946"
    (summary,) = (tmp_path / "results" / "runs").glob("ln-deepnorm-*/summary.json")
    assert json.loads(summary.read_text())["initial_weights"] == used
    assert report(["results"]) == 0
    assert f"- **initial weights by placement**: deepnorm: {used}\n" in Path("results/REPORT.md").read_text()


@pytest.mark.parametrize("padded", [False, True])
def test_admin_calibrates_by_the_recursion_of_variances(padded):
    """ω_1 = 1, ω²_{i+1} = Var[ω_i x_i] + Var[F_i(x_i)], pads left out: by hand from the raw weights, to the
    precision of the block's float32 angles."""
    model = zoo.model("admin", depth=3, position="rotary").double()
    batch = tiny.Source(padded).batch(0, 1, 4)
    real = torch.ones(4, 16, dtype=torch.bool) if batch.mask is None else batch.mask

    def variance(x):
        values = x[real]
        return ((values - values.mean()) ** 2).mean().item()

    x, omega, expected = model.embed(batch.tokens).detach(), 1.0, []
    for block in model.blocks:
        raw = zoo.Raw(block, heads=2)
        for site, branch in (("attn_residual", raw.attend), ("mlp_residual", raw.feed)):
            expected.append(omega)
            added = branch(x).detach()
            total = omega * x + added
            omega = math.sqrt(variance(omega * x) + variance(added))
            x = raw.n(site, total).detach()
    model.calibrate(batch.tokens, batch.mask)
    got = [block.omega[sublayer] for block in model.blocks for sublayer in ("attn", "mlp")]
    for value, vector in zip(expected, got, strict=True):
        torch.testing.assert_close(vector.detach(), torch.full((16,), value, dtype=torch.float64), atol=2e-6, rtol=2e-6)
    assert expected[0] == 1
    assert expected[-1] > expected[1] != 1


def test_a_run_calibrates_before_its_first_step_and_leaves_running_statistics_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    composed = commandline.compose(["placement=admin", "norm=bn", *tiny.SHORT])
    loaded = config.load(composed.values, composed.choices, composed.folder)
    model = cell.build(loaded, cell.open_source(loaded))
    assert (model.blocks[0].omega["attn"] == 1).all()
    assert (model.blocks[0].omega["mlp"] > 1).all()
    assert not model.blocks[0].norm["attn_residual"].running_mean.any()
