"""Models whose MLP is a mixture of experts: every placement and norm, initial weights, telemetry, training, resume."""

import math
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch
from torch.nn import functional as F

from normexp import arithmetic, commandline, config, runs
from normexp.fields import UserError
from normexp.fold import fold_norms
from normexp.layers import Activation
from normexp.norms import Identity
from normexp.optim import parameter_groups
from tests import tiny, zoo
from tests.tiny import load, rows_of

TOKENS = torch.randint(0, tiny.VOCABULARY, (3, tiny.CONTEXT), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(tiny.CONTEXT) < torch.tensor([[16], [9], [4]])
OWN = ("pre", "peri", "sandwich", "subln", "normformer", "keel", "mixln")  # where experts may own the norm
PER_TOKEN = [name for name in tiny.NORMS | tiny.ZOO if name not in ("bn", "rbn", "switch", "power", "none")]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("name", "own"), [(n, "shared") for n in zoo.PLACEMENTS] + [(n, "per_expert") for n in OWN])
def test_every_placement_takes_three_steps(name, own, padded):
    trainer = tiny.trainer(*zoo.cell(name), source=tiny.Source(padded), mlp="moe", moe_norm=own)
    if name == "admin":
        batch = trainer.source.batch(0, 1, 4)
        trainer.model.calibrate(batch.tokens, batch.mask)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    taken = rows_of(trainer, 3)
    assert all(math.isfinite(row["train/loss"] + row["grad_norm/total"]) for row in taken)
    for layer in ("00", "01"):
        load = [taken[-1][f"expert_load/layer_{layer}/mlp.{expert}"] for expert in range(8)]
        assert sum(load) == pytest.approx(1)
        assert 0 < taken[-1][f"router_entropy/layer_{layer}/mlp"] < math.log(8)
    moved = [not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True)]
    names = [parameter for parameter, _ in trainer.model.named_parameters()]
    assert [n for n, m in zip(names, moved, strict=True) if not m and "experts" not in n and ".mlp.norm" not in n] == []


@pytest.mark.parametrize("name", zoo.PLACEMENTS)
@pytest.mark.parametrize("own", ["shared", "per_expert"])
def test_every_placement_loads_or_is_refused_in_one_line(name, own):
    norm = "none" if name in zoo.NORM_FREE else "rms"
    overrides = [f"placement={name}", f"norm={norm}", "model.mlp=moe", f"model.moe_norm={own}"]
    if own == "shared" or name in OWN:
        load(*overrides)
        return
    with pytest.raises(UserError) as refused:
        load(*overrides)
    assert str(refused.value) == (
        "model.moe_norm=per_expert: norm=none leaves none to own; give shared"
        if norm == "none"
        else f"model.moe_norm=per_expert: placement={name} has no norm that the MLP alone reads; give shared"
    )


REFUSED = [
    (
        ["model.experts=3", "model.experts_per_token=4"],
        "model.experts_per_token=4: is more than model.experts=3; give 3",
    ),
    (["model.experts=0"], "model.experts=0: must be an integer >= 1"),
    (["model.load_balance=-1"], "model.load_balance=-1: must be a finite number >= 0"),
    (["model.expert_mlp=moe"], "model.expert_mlp=moe: must be one of relu, gelu, gelu_tanh, swiglu, geglu"),
    (["model.moe_norm=own"], "model.moe_norm=own: must be one of shared, per_expert"),
    (
        ["norm=bn", "placement=subln"],
        "norm=bn: placement=subln has it at mlp_hidden, where every expert would move the",
    ),
    (["norm=switch", "placement=normformer", "model.moe_norm=per_expert"], "norm=switch: placement=normformer has it"),
    (
        ["norm=power", "model.moe_norm=per_expert"],
        "model.moe_norm=per_expert: norm=power takes shared only: its warm-up",
    ),
    (
        ["placement=subln", "model.quant=int8"],
        "model.quant=int8: placement=subln has a norm at mlp_hidden, which every expert calls",
    ),
    (
        ["model.experts=1000000000"],
        "model.width=64 model.depth=6 model.mlp_ratio=4.0 model.experts=1000000000: needs",
    ),
    (
        ["norm=bn", "norm.mask_padding=false", "model.moe_norm=per_expert"],
        "norm.mask_padding=false: an expert's norm knows its own tokens by their mask (model.moe_norm=per_expert); g",
    ),
]


def test_a_field_out_of_use_is_not_held_against_a_norm():
    assert load("norm=power", "model.moe_norm=per_expert").model.mlp == "relu"


@pytest.mark.parametrize(("overrides", "line"), REFUSED)
def test_what_has_no_meaning_is_refused_in_one_line(overrides, line):
    with pytest.raises(UserError) as refused:
        load("model.mlp=moe", *overrides)
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


def test_a_placement_whose_forward_is_newer_than_its_feeds_is_refused(tmp_path, monkeypatch):
    (tmp_path / "my_pre.py").write_text(
        "from normexp.placements import PreNorm\n\nclass Both(PreNorm):\n    def forward(self, x, mask):\n"
        "        n = self.norm['mlp_in'](x, mask)\n        return n + self.mlp(n, mask)\n"
    )
    (tmp_path / "conf" / "placement").mkdir(parents=True)
    (tmp_path / "conf" / "placement" / "both.yaml").write_text("_target_: my_pre.Both\n_partial_: true\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    composed = commandline.compose(
        ["placement=both", "model.mlp=moe", "model.moe_norm=per_expert"], str(tmp_path / "conf")
    )
    with pytest.raises(UserError, match="placement=both has no norm that the MLP alone reads"):
        config.load(composed.values, composed.choices, composed.folder)


def test_without_experts_their_fields_are_no_part_of_a_run():
    """Whatever the plain MLP is; with experts, each is."""
    changes = [
        "model.experts=4", "model.experts_per_token=1", "model.expert_mlp=swiglu", "model.load_balance=0.1",
        "model.router_z_loss=0.1", "model.moe_norm=per_expert",
    ]  # fmt: skip
    for plain in get_args(Activation):
        digests = {
            runs.digest(load(f"model.mlp={plain}", *given).resolved, "") for given in ([], *([c] for c in changes))
        }
        assert len(digests) == 1
    digests = {runs.digest(load("model.mlp=moe", *given).resolved, "") for given in ([], *([c] for c in changes))}
    assert len(digests) == 1 + len(changes)


@pytest.mark.parametrize("own", ["shared", "per_expert"])
def test_the_block_is_still_its_equation(own):
    """x + F(n(x)): with norms of their own, the site is empty and each owner reads n_e(x)."""
    built = zoo.disturbed(tiny.model(mlp="moe", moe_norm=own)).double()
    block, x = built.blocks[1], torch.randn(2, 5, 16, dtype=torch.float64)
    if own == "shared":
        h = x + block.attn(block.norm["attn_in"](x))
        torch.testing.assert_close(block(x, None), h + block.mlp(block.norm["mlp_in"](h)))
        assert not block.mlp.norm
        return
    assert isinstance(block.norm["mlp_in"], Identity)
    assert list(block.mlp.norm) == ["router", *"01234567"]
    names = dict(built.named_parameters())
    assert {"blocks.1.mlp.norm.router.weight", "blocks.1.mlp.norm.7.bias"} <= set(names)
    assert "blocks.1.norm.mlp_in.weight" not in names
    h = x + block.attn(block.norm["attn_in"](x))
    gates = torch.softmax(block.mlp.router(block.mlp.norm["router"](h)), -1)
    top = gates.topk(2)
    expected = h.clone()
    for b, t in ((b, t) for b in range(2) for t in range(5)):
        for share, e in zip(top.values[b, t], top.indices[b, t].tolist(), strict=True):
            expected[b, t] += share * block.mlp.experts[e](block.mlp.norm[str(e)](h))[b, t]
    torch.testing.assert_close(block(x, None), expected)


def test_post_blocks_of_mixln_have_no_norm_to_give():
    first, second = zoo.model("mixln", depth=4, mlp="moe", moe_norm="per_expert").blocks[:2]
    assert (len(first.mlp.norm), len(second.mlp.norm)) == (0, 9)


@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_norm_at_the_hidden_channels_is_shared_by_the_experts(name):
    """One gain, whose gradient comes from all of them; per token, so the grouping does not matter."""
    norm = (tiny.NORMS | tiny.ZOO)[name]
    first, second = (tiny.model(norm, zoo.PLACEMENTS["subln"], mlp="moe") for _ in range(2))
    graph = torch.compile(second, backend="eager", fullgraph=True)
    torch.testing.assert_close(first(TOKENS, MASK)[MASK], graph(TOKENS, MASK)[MASK], atol=1e-4, rtol=1e-4)
    assert torch.isfinite(
        torch.autograd.grad(first(TOKENS, MASK)[MASK].square().sum(), first.blocks[0].mlp.router.weight)[0]
    ).all()


@pytest.mark.parametrize("own", ["shared", "per_expert"])
def test_no_token_sees_a_later_one_or_a_pad(own):
    """In float64 and to a rounding: a product of other rows beside it may be summed in another order."""
    built = zoo.disturbed(tiny.model(mlp="moe", moe_norm=own)).double().eval()
    changed = TOKENS.clone()
    changed[:, 9] = (changed[:, 9] + 1) % tiny.VOCABULARY
    torch.testing.assert_close(built(TOKENS)[:, :9], built(changed)[:, :9], atol=1e-12, rtol=1e-12)
    assert not torch.allclose(built(TOKENS)[:, 9:], built(changed)[:, 9:], atol=1e-4)
    short = built(TOKENS[:, :9], MASK[:, :9])
    torch.testing.assert_close(built(TOKENS, MASK)[:, :9][MASK[:, :9]], short[MASK[:, :9]], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("stats", ["batch_time", "position", "cumulative"])
def test_experts_with_batch_norms_of_their_own_are_as_causal_as_its_statistics(stats):
    built = tiny.model(partial(tiny.NORMS["bn"], stats=stats), mlp="moe", moe_norm="per_expert").double()
    changed = TOKENS.clone()
    changed[:, 9] = (changed[:, 9] + 1) % tiny.VOCABULARY
    apart = (built(TOKENS)[:, :9] - built(changed)[:, :9]).abs().max().item()
    assert (apart < 1e-12) == (stats != "batch_time")


@pytest.mark.parametrize("scheme", ["xavier", "gpt2", "small", "torch"])
def test_experts_are_drawn_as_a_plain_mlp_is(scheme):
    """Each by its own name, at the scale of `mlp.in`, `mlp.gate` and `mlp.out`; nothing else of the model is moved."""
    changes = {"init": scheme, "width": 64, "heads": 4}
    built = dict(tiny.model(mlp="moe", expert_mlp="swiglu", **changes).named_parameters())
    plain = dict(tiny.model(mlp="swiglu", **changes).named_parameters())
    assert all(torch.equal(built[name], value) for name, value in plain.items() if ".mlp." not in name)
    for matrix in ("in", "gate", "out"):
        drawn = [built[f"blocks.1.mlp.experts.{e}.{matrix}.weight"] for e in range(8)]
        assert len({value.sum().item() for value in drawn}) == 8
        error = 4 / math.sqrt(2 * 16384)
        for value in drawn:
            assert value.std().item() == pytest.approx(
                plain[f"blocks.1.mlp.{matrix}.weight"].std().item(), rel=2 * error
            )
    router = {"xavier": (2 / 72) ** 0.5, "gpt2": 0.02, "small": (2 / 320) ** 0.5, "torch": 1 / (8 * 3**0.5)}[scheme]
    assert built["blocks.1.mlp.router.weight"].std().item() == pytest.approx(router, rel=4 / math.sqrt(2 * 512))
    assert "blocks.1.mlp.router.bias" not in built


@pytest.mark.parametrize("name", ["deepnorm", "subln", "b2t", "tfixup"])
def test_gains_of_placements_reach_every_expert(name):
    both = [
        dict(zoo.model(name, init=init, mlp="moe", expert_mlp="swiglu").named_parameters())
        for init in ("placement", "xavier")
    ]
    plain = [dict(zoo.model(name, init=init, mlp="swiglu").named_parameters()) for init in ("placement", "xavier")]
    for matrix in ("in", "gate", "out"):
        gain = plain[0][f"blocks.1.mlp.{matrix}.weight"].std() / plain[1][f"blocks.1.mlp.{matrix}.weight"].std()
        for expert in range(8):
            own, base = (part[f"blocks.1.mlp.experts.{expert}.{matrix}.weight"] for part in both)
            torch.testing.assert_close(own, gain * base)
    assert torch.equal(*(part["blocks.1.mlp.router.weight"] for part in both))


def test_matrices_of_ngpt_have_unit_length_along_the_stream():
    trainer = tiny.trainer(*zoo.cell("ngpt"), mlp="moe", expert_mlp="swiglu")
    trainer.take_step()
    for name, parameter in trainer.model.named_parameters():
        if parameter.ndim > 1:
            lengths = parameter.norm(dim=0 if name.endswith(("attn.o.weight", ".out.weight")) else 1)
            torch.testing.assert_close(lengths, torch.ones_like(lengths), msg=name)
    block = trainer.model.blocks[0]
    assert list(block.preactivation) == ["mlp_up", "mlp_gate"]
    x, scale = torch.randn(1, 1, 16), {n: 4.0 * s.weight for n, s in block.preactivation.items()}
    x = F.normalize(x, dim=-1)
    expected = 0
    top = block.mlp.router(x).softmax(-1).topk(2)
    for share, e in zip(top.values.flatten(), top.indices.flatten().tolist(), strict=True):
        expert = block.mlp.experts[e]
        up = expert.get_submodule("in")(x) * scale["mlp_up"]
        expected = expected + share * expert.out(F.silu(expert.gate(x) * scale["mlp_gate"]) * up)
    torch.testing.assert_close(block.mlp(x, None, block.preactivation), expected)


def test_matrices_decay_and_norms_do_not():
    built = tiny.model(mlp="moe", moe_norm="per_expert")
    decayed = {id(p) for p in parameter_groups(built, 0.1)[0]["params"]}
    for name, parameter in built.named_parameters():
        assert (id(parameter) in decayed) == (parameter.ndim > 1), name


def test_the_layer_ratio_is_that_of_all_experts_together():
    row = rows_of(tiny.trainer(mlp="moe"), 1)[0]
    first, last = (
        math.sqrt(sum(row[f"grad_norm/layer_{layer}/mlp.experts.{e}.out"] ** 2 for e in range(8)))
        for layer in ("00", "01")
    )
    assert row["layer_ratio"] == pytest.approx(first / last, rel=1e-5)
    assert "rms_t/layer_01/mlp.router" in row


def test_flops_count_the_experts_that_a_token_takes():
    """Two experts of three matrices of 16·64, a router of 16·8, four of 16·16 for the attention, and the head."""
    sizes = tiny.model(mlp="moe", expert_mlp="swiglu").config
    expected = 6 * (2 * (4 * 16 * 16 + 2 * 3 * 16 * 64 + 16 * 8) + 16 * 11) + 12 * 2 * 16 * 16
    assert arithmetic.flops_per_token(sizes, 11) == expected
    assert arithmetic.flops_per_token(replace(sizes, experts=16), 11) - expected == 6 * 2 * 16 * 8


@pytest.mark.parametrize("own", ["shared", "per_expert"])
@pytest.mark.parametrize(("placement", "norm"), [("pre", "ln"), ("pre", "rms"), ("pre", "bn"), ("subln", "ln")])
@pytest.mark.parametrize("changes", [{}, {"expert_mlp": "swiglu", "bias": False}])
def test_folded_logits_are_the_same(placement, norm, own, changes):
    """The router reads the norm, too. Running statistics are those of training."""
    built = zoo.disturbed(zoo.model(placement, norm, mlp="moe", moe_norm=own, **changes)).double()
    with torch.no_grad():
        built(TOKENS, MASK)
    folded = fold_norms(built.eval())
    torch.testing.assert_close(folded(TOKENS), built(TOKENS), atol=1e-10, rtol=1e-10)
    assert not [name for name, _ in folded.named_parameters() if "norm" in name]


@pytest.mark.parametrize(("norm", "own"), [("ln", "shared"), ("bn", "per_expert")])
def test_resume_is_bit_for_bit(norm, own, tmp_path):
    settings = {"source": tiny.Source(padded=True), "mlp": "moe", "moe_norm": own, "dropout": 0.1}
    tiny.goes_on(*(tiny.trainer(norm, **settings) for _ in range(2)), tmp_path, before=3, after=3)


@pytest.mark.parametrize("padded", [False, True])
def test_the_losses_of_a_step_are_the_mean_over_its_micro_batches(padded):
    """And over the blocks: weights a / N and b / N on the sum of both blocks', by hand; no loss that is reported has
    them."""
    source, fields = tiny.Source(padded), {"mlp": "moe", "load_balance": 0.3, "router_z_loss": 0.2}
    trainer = tiny.trainer(source=source, train=replace(tiny.TRAIN, grad_accum=2, batch_size=2), **fields)
    loss = trainer._backward()
    model, batch = tiny.model(**fields), source.batch(0, 0, 4)
    real, total, seen = (batch.targets != -100).sum(), 0.0, []
    for block in model.blocks:
        block.mlp.router.register_forward_hook(lambda module, inputs, logits: seen.append(logits))
    for part in (slice(0, 2), slice(2, 4)):
        mask = None if batch.mask is None else batch.mask[part]
        logits = model(batch.tokens[part], mask)
        total = total + F.cross_entropy(logits.flatten(0, 1), batch.targets[part].flatten(), reduction="sum") / real
    plain = total.item()
    for index, z in enumerate(seen):
        kept = z.flatten(0, 1) if batch.mask is None else z[batch.mask[2 * (index // 2) : 2 * (index // 2) + 2]]
        p = kept.softmax(-1)
        f = torch.bincount(p.topk(2).indices.flatten(), minlength=8) / (2 * len(p))
        total = total + (0.3 * 8 * (f * p.mean(0)).sum() + 0.2 * kept.exp().sum(-1).log().square().mean()) / 4
    total.backward()
    assert loss.item() == pytest.approx(plain, rel=1e-5)
    for name, parameter in trainer.model.named_parameters():
        expected = dict(model.named_parameters())[name].grad
        torch.testing.assert_close(parameter.grad, expected, atol=2e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize(("norm", "own"), [("ln", "shared"), ("rms", "per_expert"), ("bn", "per_expert")])
def test_training_learns_and_spreads_the_load(norm, own):
    """Towards the ln 2 = 0.69 of the source, from ln 11 = 2.4 and above."""
    trainer = tiny.trainer(
        norm, mlp="moe", moe_norm=own, optim=replace(tiny.OPTIM, lr=1e-2), train=replace(tiny.TRAIN, steps=80)
    )
    taken = rows_of(trainer, 80)
    assert taken[0]["train/loss"] > 2.3
    assert sum(row["train/loss"] for row in taken[-5:]) / 5 < 1.1
    last = taken[-1]
    assert max(last[f"expert_load/layer_01/mlp.{expert}"] for expert in range(8)) < 0.35


def test_the_load_balance_loss_is_what_spreads_it():
    """The same cell with and without: the loss E Σ f P of the last step is nearer to 1 with it."""
    apart = []
    for weight in (0.0, 1.0):
        trainer = tiny.trainer(mlp="moe", load_balance=weight, router_z_loss=0.0)
        rows_of(trainer, 40)
        trainer.model.blocks[0].mlp.load_balance, trainer.model.blocks[1].mlp.load_balance = 1.0, 1.0
        trainer.model(TOKENS)
        apart.append(sum(block.mlp.aux_loss().item() for block in trainer.model.blocks) / 2)
    assert 1 <= apart[1] < apart[0] - 0.05


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("own", ["shared", "per_expert"])
def test_low_precision_and_one_graph(dtype, own):
    trainer = tiny.trainer(mlp="moe", moe_norm=own, train=replace(tiny.TRAIN, dtype=dtype))
    assert math.isfinite(rows_of(trainer, 1)[0]["train/loss"])
    built = tiny.model(mlp="moe", moe_norm=own, depth=1)
    graph = torch.compile(built, backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(TOKENS, MASK)[MASK], built(TOKENS, MASK)[MASK], atol=1e-5, rtol=1e-5)


def test_dropout_draws_are_those_of_a_plain_cell():
    """Whatever the routing: behind the forward pass, the generator stands where it stands with a plain MLP."""
    states = []
    for mlp in ("relu", "moe"):
        built = tiny.model(mlp=mlp, dropout=0.1)
        torch.manual_seed(0)
        built(TOKENS, MASK)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
