"""Every placement: its equation in a second form, its sites, its constants, what it does at the start, and training."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from normexp import cell, commandline, config
from normexp.fold import fold_norms
from normexp.norms import Identity
from normexp.optim import parameter_groups
from normexp.placements import UnitMatrices, unit
from normexp.telemetry import Buffer
from tests import tiny, zoo

TOKENS = torch.randint(0, tiny.VOCABULARY, (3, tiny.CONTEXT), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(tiny.CONTEXT) < torch.tensor([[16], [9], [4]])


def test_every_placement_has_a_second_form():
    assert set(zoo.EQUATIONS) == set(zoo.PLACEMENTS)
    assert zoo.NORM_FREE == ("ngpt", "rezero", "tfixup")


@pytest.mark.parametrize("name", zoo.PLACEMENTS)
@pytest.mark.parametrize("layer", [0, 2, 7])
def test_block_is_its_equation(name, layer):
    """From the raw weights in float64, with every gain and bias disturbed. mixln at N = 8: two blocks are post.

    The tolerance is that of the block's table of angles, which is float32 and holds angles up to 5.
    """
    block = zoo.disturbed(zoo.model(name, depth=8, position="rotary").double().blocks[layer])
    x = block.enter(torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    if name == "residual_dual":
        x = (x[0], x[1] + 1)  # two streams that differ
    expected, got = zoo.EQUATIONS[name](zoo.Raw(block, heads=2), x), block(x, None)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-6)


def test_the_trunk_of_residual_dual_and_of_ngpt():
    """x_N + n_d(d_N) in front of the head; N(embedding) in front of the blocks and s_z times the logits after them."""
    built = zoo.disturbed(zoo.model("residual_dual").double())
    x = d = built.embed(TOKENS)
    for block in built.blocks:
        x, d = block((x, d), None)
    normed = nn.functional.layer_norm(d, (16,), built.final_norm.weight, built.final_norm.bias)
    torch.testing.assert_close(built(TOKENS), built.head(x + normed), atol=1e-10, rtol=1e-10)
    built = zoo.disturbed(zoo.model("ngpt").double())
    h = nn.functional.normalize(built.embed(TOKENS), dim=-1)
    for block in built.blocks:
        h = block(h, None)
    expected = built.head(h) * built.logit_scale.weight * 4.0  # √16
    torch.testing.assert_close(built(TOKENS), expected, atol=1e-10, rtol=1e-10)


SITES = {  # of a block in the middle, and of the first one where it differs
    "pre": "attn_in mlp_in", "lnscaling": "attn_in mlp_in", "post": "attn_residual mlp_residual",
    "deepnorm": "attn_residual mlp_residual", "b2t": "attn_residual mlp_residual",
    "admin": "attn_residual mlp_residual", "admin_fixed": "attn_residual mlp_residual",
    "residual_dual": "attn_residual mlp_residual", "peri": "attn_in attn_branch mlp_in mlp_branch",
    "sandwich": "attn_in attn_branch mlp_in mlp_branch", "reordered": "attn_branch mlp_branch",
    "subln": "attn_in attn_out mlp_in mlp_hidden", "normformer": "attn_in attn_branch mlp_in mlp_hidden",
    "mixln": "attn_in mlp_in", "hybrid": "q_head k_head v_head mlp_in", "hybrid_star": "q_head k_head v_head mlp_in",
    "keel": "attn_in attn_residual mlp_in mlp_residual", "rezero": "", "tfixup": "", "ngpt": "",
}  # fmt: skip
FIRST = {
    "mixln": "attn_residual mlp_residual", "keel": "attn_in mlp_in mlp_residual",
    "hybrid_star": "attn_in q_head k_head v_head mlp_in",
}  # fmt: skip
NO_FINAL = {"post", "deepnorm", "b2t", "keel", "admin", "admin_fixed", "rezero", "tfixup", "ngpt"}


@pytest.mark.parametrize("name", zoo.PLACEMENTS)
def test_names_and_widths_of_the_norms(name):
    built = zoo.model(name, depth=4)
    widths = {"mlp_hidden": 64, "q_head": 8, "k_head": 8, "v_head": 8}
    for layer, block in enumerate(built.blocks):
        sites = (FIRST.get(name, SITES[name]) if layer == 0 else SITES[name]).split()
        assert list(block.norm) == sites
        assert {site: norm.weight.numel() for site, norm in block.norm.items()} == {s: widths.get(s, 16) for s in sites}
    assert (built.final_norm is None) == (name in NO_FINAL)
    expected = 3 * len(SITES[name].split()) + len(FIRST.get(name, SITES[name]).split()) + (name not in NO_FINAL)
    assert sum(type(module).__name__ == "LayerNorm" for module in built.modules()) == expected


class Same(nn.Module):
    def forward(self, x, mask=None, sites=None):
        return x


def growth(name: str, depth: int, layer: int, sublayer: float) -> float:
    """Of x through a block without norms, whose sublayers multiply by `sublayer`."""
    block = tiny.model(Identity, zoo.PLACEMENTS[name], depth=depth).blocks[layer]
    branch = type("Branch", (Same,), {"forward": lambda self, x, mask=None, sites=None: sublayer * x})
    block.attn, block.mlp = branch(), branch()
    return block(torch.ones(1, 1, 16), None).mean().item()


@pytest.mark.parametrize("depth", [1, 6, 24])
def test_constants_by_depth(depth):
    last = depth - 1
    assert growth("deepnorm", depth, last, 0.0) == pytest.approx({1: 2**0.5, 6: 12**0.5, 24: 48**0.5}[depth])
    assert growth("keel", depth, last, 0.0) == pytest.approx({1: 1, 6: 144, 24: 2304}[depth])  # α = 1 in the first
    omega = {1: 3 / math.log(3) - 1, 6: 13 / math.log(13) - 1, 24: 49 / math.log(49) - 1}[depth]
    assert growth("admin_fixed", depth, last, 0.0) == pytest.approx(omega)
    assert growth("admin", depth, last, 0.0) == pytest.approx(1)
    assert growth("lnscaling", depth, last, 1.0) == pytest.approx(
        {1: 4, 6: (1 + 6**-0.5) ** 2, 24: 1.4499}[depth], rel=1e-4
    )
    assert growth("lnscaling", depth, 0, 1.0) == pytest.approx(4)
    posts = ["attn_residual" in block.norm for block in zoo.model("mixln", depth=depth).blocks]
    assert posts == [True] * {1: 0, 6: 1, 24: 6}[depth] + [False] * {1: 1, 6: 5, 24: 18}[depth]


def test_mixln_counts_blocks_exactly():
    placement = zoo.PLACEMENTS["mixln"].func
    for share, depth, count in ((0.29, 100, 29), (0.3, 10, 3), (1.0, 3, 3), (0.0, 3, 0), (0.25, 7, 1)):
        fields = {"post_fraction": share, "depth": depth, "norm": Identity, "attention": Same, "mlp": Same}
        blocks = [
            placement(layer=i, width=8, hidden=8, heads=1, kv_heads=1, head_width=8, **fields) for i in range(depth)
        ]
        assert sum(block.post for block in blocks) == count


def test_rezero_is_the_identity_at_the_start():
    built = zoo.model("rezero", depth=6)
    x = torch.randn(2, 5, 16)
    for block in built.blocks:
        assert torch.equal(block(x, None), x)
    assert torch.equal(built(TOKENS), built.head(built.embed(TOKENS)))
    built(TOKENS).square().sum().backward()
    assert all(block.residual_weight.grad.abs() > 0 for block in built.blocks)
    assert not any(block.mlp.out.weight.grad.any() for block in built.blocks)  # they wait for the scalar


@pytest.mark.parametrize("name", zoo.PLACEMENTS)
def test_gradients_of_24_blocks_are_finite(name):
    built = zoo.model(name, depth=24, init="placement" if name in zoo.WITH_INIT else "xavier")
    nn.functional.cross_entropy(built(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
    for parameter, value in built.named_parameters():
        assert value.grad is not None, parameter
        assert torch.isfinite(value.grad).all(), parameter


@pytest.mark.parametrize("name", zoo.PLACEMENTS)
def test_no_token_sees_a_later_one_or_a_pad(name):
    built = zoo.disturbed(zoo.model(name)).eval()
    changed = TOKENS.clone()
    changed[:, 9] = (changed[:, 9] + 1) % tiny.VOCABULARY
    assert torch.equal(built(TOKENS)[:, :9], built(changed)[:, :9])
    assert not torch.allclose(built(TOKENS)[:, 9:], built(changed)[:, 9:], atol=1e-4)
    short = built(TOKENS[:, :9], MASK[:, :9])
    torch.testing.assert_close(built(TOKENS, MASK)[:, :9][MASK[:, :9]], short[MASK[:, :9]], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["subln", "hybrid", "normformer"])
@pytest.mark.parametrize("stats", ["batch_time", "position", "cumulative"])
def test_batch_norm_at_the_sites_inside_sublayers(name, stats):
    """Of a head it sees each head as a sequence; with causal statistics it stays causal in training."""
    built = zoo.model(name, partial(tiny.NORMS["bn"], stats=stats))
    changed = TOKENS.clone()
    changed[:, 9] = (changed[:, 9] + 1) % tiny.VOCABULARY
    kept = torch.equal(built(TOKENS)[:, :9], built(changed)[:, :9])
    assert kept == (stats != "batch_time")
    mask = torch.arange(tiny.CONTEXT) < torch.tensor([[16], [16], [9]])
    assert torch.isfinite(built(TOKENS, mask)[mask]).all()


@pytest.mark.parametrize("name", ["subln", "hybrid"])
def test_pads_stay_out_of_statistics_inside_sublayers(name):
    """Of heads, too: BatchNorm in training gives real tokens the same logits whatever the pads hold."""
    built = zoo.model(name, "bn")
    other = (TOKENS + 3) % tiny.VOCABULARY
    first, second = built(TOKENS, MASK), built(torch.where(MASK, TOKENS, other), MASK)
    torch.testing.assert_close(first[MASK], second[MASK], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", zoo.PLACEMENTS)
def test_shared_parameters_and_weight_decay_are_those_of_every_cell(name):
    """All matrices have the names of a pre-norm cell; they alone decay, and but for nGPT they start as its do."""
    built, plain = zoo.model(name), dict(tiny.model().named_parameters())
    decayed = {id(p) for p in parameter_groups(built, 0.1)[0]["params"]}
    names = {parameter for parameter, value in built.named_parameters() if id(value) in decayed}
    assert names == {parameter for parameter, value in plain.items() if value.ndim > 1}
    matrices = {parameter: value for parameter, value in built.named_parameters() if parameter in names}
    if name == "ngpt":
        assert not any(torch.equal(value, plain[parameter]) for parameter, value in matrices.items())
    else:
        assert all(torch.equal(value, plain[parameter]) for parameter, value in matrices.items())


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_of_ngpt_have_unit_length_along_the_stream(tied):
    trainer = tiny.trainer(*zoo.cell("ngpt"), tied=tied, mlp="swiglu")
    for steps in (0, 3):
        for _ in range(steps):
            trainer.take_step()
        seen = 0
        for name, parameter in trainer.model.named_parameters():
            if parameter.ndim > 1:
                lengths = parameter.norm(dim=0 if name.endswith(("attn.o.weight", "mlp.out.weight")) else 1)
                torch.testing.assert_close(lengths, torch.ones_like(lengths), msg=name)
                seen += 1
        assert seen == 2 * 7 + (2 if tied else 3)
    assert sum(isinstance(module, UnitMatrices) for module in trainer.model.modules()) == 1
    assert {"preactivation.mlp_up.weight", "preactivation.mlp_gate.weight"} <= set(
        dict(trainer.model.blocks[0].named_parameters())
    )


def test_a_zero_vector_on_the_sphere_stays_zero_with_a_finite_gradient():
    x = torch.zeros(2, 3, requires_grad=True)
    unit(x).sum().backward()
    assert not unit(x).any()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("name", ["admin", "ngpt", "residual_dual"])
def test_resume_keeps_constants(name, tmp_path):
    """Into a model that was never calibrated, as if nothing had happened."""

    straight, fresh = (tiny.trainer(*zoo.cell(name), source=tiny.Source(padded=True)) for _ in range(2))
    if name == "admin":
        batch = straight.source.batch(0, 1, 4)
        straight.model.calibrate(batch.tokens, batch.mask)
    tiny.goes_on(straight, fresh, tmp_path)
    if name == "admin":
        assert (fresh.model.state_dict()["blocks.1.omega.mlp"] > 1.3).all()


@pytest.mark.parametrize("name", ["ngpt", "hybrid", "residual_dual", "normformer"])
def test_autocast_and_one_graph(name):
    trainer = tiny.trainer(*zoo.cell(name), train=replace(tiny.TRAIN, dtype="bfloat16"))
    buffer = Buffer()
    buffer.add(*trainer.take_step())
    assert math.isfinite(buffer.flush()[0]["train/loss"])
    built = zoo.model(name, depth=1).eval()
    graph = torch.compile(built, backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(TOKENS), built(TOKENS), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("norm", ["ln", "rms", "bn"])
@pytest.mark.parametrize("changes", [{}, {"mlp": "swiglu", "bias": False}])
def test_sub_ln_folds_whole(norm, changes):
    """Its norms inside the sublayers feed one matrix each."""
    built = zoo.disturbed(zoo.model("subln", norm, **changes)).double()
    built(TOKENS)  # moves running statistics
    folded = fold_norms(built.eval())
    torch.testing.assert_close(folded(TOKENS), built(TOKENS), atol=1e-10, rtol=1e-10)
    assert not [parameter for parameter, _ in folded.named_parameters() if "norm" in parameter]


FOLDED = {"pre", "subln", "rezero", "tfixup", "ngpt"}


@pytest.mark.parametrize("name", zoo.PLACEMENTS)
def test_folding_is_exact_or_refused_by_name(name):
    built = zoo.disturbed(zoo.model(name, depth=4)).double().eval()
    if name in FOLDED:
        torch.testing.assert_close(fold_norms(built)(TOKENS), built(TOKENS), atol=1e-10, rtol=1e-10)
    else:
        with pytest.raises(ValueError, match=r"blocks\.0\.norm\.\w+: its output in \w+ does not go to linear layers"):
            fold_norms(built)


TOY = """
from normexp.placements import Block

class Toy(Block):
    sites = ("attn_out", "q_head", "branch")
    final_norm = True

    def __init__(self, *, share: float, **others) -> None:
        super().__init__(**others)
        self.share = share

    def forward(self, x, mask):
        x = x + self.share * self.attn(x, mask, self.norm)
        return x + self.norm["branch"](self.mlp(x, mask), mask)
"""


def test_a_placement_of_the_users_own_is_one_class_and_one_yaml(tmp_path, monkeypatch):
    (tmp_path / "my_blocks.py").write_text(TOY)
    (tmp_path / "my_conf" / "placement").mkdir(parents=True)
    yaml = "_target_: my_blocks.Toy\n_partial_: true\nshare: 1\n"
    (tmp_path / "my_conf" / "placement" / "toy.yaml").write_text(yaml)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    small = ["placement=toy", "norm=rms", "model.depth=2", "model.width=16", "model.context=16", "device=cpu"]
    composed = commandline.compose(small, "my_conf")
    loaded = config.load(composed.values, composed.choices, composed.folder)
    source = cell.open_source(loaded)
    trainer = cell.build_trainer(loaded, source, cell.build(loaded, source))
    trainer.take_step()
    assert trainer.model.blocks[1].norm["q_head"].weight.shape == (4,)
    assert "blocks.1.norm.branch.weight" in dict(trainer.model.named_parameters())
