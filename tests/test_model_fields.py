"""Fields of the model beside norm and placement: norms of q, k and the embeddings, scales, soft cap, z-loss."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from normexp import cell, runs
from normexp.fields import UserError
from normexp.fold import fold_norms
from normexp.model import squared_log_z_sum
from tests import tiny, zoo
from tests.tiny import load

TOKENS = torch.randint(0, tiny.VOCABULARY, (3, tiny.CONTEXT), generator=torch.Generator().manual_seed(0))


def test_runs_made_before_these_fields_keep_their_names(tmp_path, monkeypatch):
    """Golden: they name the folders of results/tables/runs.md."""
    monkeypatch.chdir(tmp_path)
    for overrides, golden in (
        (["norm=rms", "placement=pre"], "rms-pre-L6-w0-s0-0d10324103"),
        (["norm=ln", "placement=post"], "ln-post-L6-w0-s0-39e0053c8d"),
    ):
        loaded = load(*overrides)
        assert runs.run_id(loaded.resolved, cell.open_source(loaded).sha256) == golden


@pytest.mark.parametrize("override", [
    "model.qk_norm=head", "model.embed_norm=true", "model.embed_scale=sqrt", "model.embed_scale=2", "train.z_loss=1e-4",
    "model.logit_softcap=30",
])  # fmt: skip
def test_another_value_is_another_run(override):
    assert runs.digest(load(override).resolved, "") != runs.digest(load().resolved, "")


def hand_norm(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


@pytest.mark.parametrize("kind", ["head", "full"])
def test_norms_of_q_and_k_stand_before_the_rotary_embedding(kind):
    built = zoo.disturbed(tiny.model(qk_norm=kind, position="rotary")).double()
    attention, sites = built.blocks[1].attn, {"head": ("q_head", "k_head"), "full": ("q", "k")}[kind]
    assert set(attention.norm) == set(sites)
    assert all(norm.weight.shape == ((8,) if kind == "head" else (16,)) for norm in attention.norm.values())
    names = {f"blocks.1.attn.norm.{site}.weight" for site in sites}
    assert names <= {name for name, _ in built.named_parameters()}
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    raw = zoo.Raw(built.blocks[1], heads=2)

    def normed(name, heads):
        if name == "v":
            return heads
        norm = attention.norm[f"{name}_head" if kind == "head" else name]
        y = heads if kind == "head" else heads.flatten(2)
        return hand_norm(y, norm.weight, norm.bias).reshape(heads.shape)

    torch.testing.assert_close(attention(x), raw.attend(x, heads=normed), atol=2e-6, rtol=2e-6)  # float32 angles


@pytest.mark.parametrize("norm", tiny.NORMS)
def test_q_and_k_get_norms_of_the_cells_own_type(norm):
    built = tiny.model(norm, "post", qk_norm="head", embed_norm=True)
    kinds = {type(n) for block in built.blocks for n in (*block.attn.norm.values(), *block.norm.values())}
    assert kinds == {type(built.embed.norm)}
    assert len(list(built.blocks[0].attn.norm)) == 2
    trainer = tiny.trainer(norm, "post", qk_norm="full", embed_norm=True, source=tiny.Source(padded=True))
    trainer.take_step()
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
    decayed = {id(p) for p in trainer.optimizer.param_groups[0]["params"]}
    assert not any(id(p) in decayed for name, p in trainer.model.named_parameters() if "norm" in name)


def test_all_of_it_is_one_graph():
    fields = {"qk_norm": "head", "embed_norm": True, "embed_scale": "learned", "logit_softcap": 5.0}
    built = tiny.model("rms", zoo.PLACEMENTS["subln"], depth=1, position="rotary", **fields)
    graph = torch.compile(built, backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(TOKENS), built(TOKENS), atol=1e-5, rtol=1e-5)


def test_norms_of_q_k_and_the_embeddings_are_not_folded():
    for changes, name in (
        ({"qk_norm": "head"}, r"blocks\.0\.attn\.norm\.q_head"),
        ({"embed_norm": True}, r"embed\.norm"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: its output in the"):
            fold_norms(tiny.model(**changes))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("scale", [1.0, 3.0, "sqrt", "learned"])
def test_embeddings_by_hand(norm, scale):
    embed = zoo.disturbed(tiny.model(embed_scale=scale, embed_norm=norm)).embed
    factor = {"sqrt": 4.0}.get(scale, scale)
    if scale == "learned":
        assert tiny.model(embed_scale=scale).embed.scale.item() == 4.0
        factor = embed.scale
        assert factor.requires_grad
        assert factor.ndim == 0
    expected = factor * embed.token.weight[TOKENS] + embed.position.weight[: tiny.CONTEXT]
    if norm:
        expected = hand_norm(expected, embed.norm.weight, embed.norm.bias)
    torch.testing.assert_close(embed(TOKENS), expected, atol=1e-5, rtol=1e-5)


def test_a_learned_scale_is_trained_and_never_decays():
    trainer = tiny.trainer(embed_scale="learned", optim=replace(tiny.OPTIM, weight_decay=0.1))
    trainer.take_step()
    assert trainer.model.embed.scale.item() != 4.0
    assert not any(trainer.model.embed.scale is p for p in trainer.optimizer.param_groups[0]["params"])


def test_soft_cap_by_hand():
    plain, capped = tiny.model().double(), tiny.model(logit_softcap=0.5).double()
    z = plain(TOKENS)
    torch.testing.assert_close(capped(TOKENS), 0.5 * (torch.exp(4 * z) - 1) / (torch.exp(4 * z) + 1))
    assert z.abs().max() > 1
    assert capped(TOKENS).abs().max() < 0.5


def gradient(trainer):
    loss = trainer._backward()
    return loss, {name: p.grad for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("padded", [False, True])
def test_z_loss_by_hand(padded):
    """c · mean of log² Z over the real tokens of all micro-batches, in the gradient and in no loss that is reported."""
    source, settings = tiny.Source(padded), {"grad_accum": 2, "batch_size": 2}
    trainer = tiny.trainer(source=source, train=replace(tiny.TRAIN, z_loss=0.1, **settings))
    plain = tiny.trainer(source=source, train=replace(tiny.TRAIN, **settings))
    loss, got = gradient(trainer)
    trainer.step = 0
    batch, model = source.batch(0, 0, 4), tiny.model()
    logits = model(batch.tokens, batch.mask)
    real = batch.targets != -100
    log_z = logits.double().exp().sum(-1).log()[real]
    total = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()) + 0.1 * (log_z**2).sum() / real.sum()
    total.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)
    plain_loss, without = gradient(plain)
    assert loss == plain_loss
    assert (got["head.bias"] - without["head.bias"]).abs().max() > 1e-4
    evaluated = [t.evaluate()[0].values.item() for t in (trainer, plain)]
    assert evaluated[0] == evaluated[1]


def test_z_loss_counts_no_ignored_target():
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[1, -100, 2], [-100, 0, -100]])
    picked = [math.log(sum(math.exp(v) for v in logits[b, t].tolist())) ** 2 for b, t in ((0, 0), (0, 2), (1, 1))]
    assert squared_log_z_sum(logits, targets).item() == pytest.approx(sum(picked), rel=1e-5)


REFUSED = [
    (["placement=rezero"], "norm=ln: placement=rezero has no place for a norm; give norm=none"),
    (["placement=ngpt", "norm=bn"], "norm=bn: placement=ngpt has no place for a norm; give norm=none"),
    (["placement=pre", "model.init=placement"], "model.init=placement: placement=pre asks for no initial weights"),
    (["placement=hybrid", "model.qk_norm=full"], "model.qk_norm=full: placement=hybrid normalises q and k itself"),
    (
        ["placement=ngpt", "norm=none", "model.qk_norm=head"],
        "model.qk_norm=head: is of the cell's own norm, and norm=n",
    ),
    (["norm=none", "model.embed_norm=true"], "model.embed_norm=true: is of the cell's own norm, and norm=none is none"),
    (["model.qk_norm=heads"], "model.qk_norm=heads: must be one of none, head, full (did you mean head?)"),
    (["model.embed_scale=root"], "model.embed_scale=root: must be a finite number > 0 or one of sqrt, learned"),
    (["model.logit_softcap=-1"], "model.logit_softcap=-1: must be a finite number >= 0"),
    (["train.z_loss=-1"], "train.z_loss=-1: must be a finite number >= 0"),
    (
        ["placement=mixln", "placement.post_fraction=1.5"],
        "placement.post_fraction=1.5: must be a finite number in [0, 1",
    ),
    (["placement=admin", "placement.omega=profile"], "placement.omega=profile: must be one of profiled, fixed"),
]


@pytest.mark.parametrize(("overrides", "line"), REFUSED)
def test_what_has_no_meaning_is_refused_in_one_line(overrides, line):
    with pytest.raises(UserError) as refused:
        load(*overrides)
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", zoo.PLACEMENTS)
def test_every_placement_loads_with_its_own_init_where_it_has_one(name):
    norm = ["norm=none"] if name in zoo.NORM_FREE else []
    init = ["model.init=placement"] if name in zoo.WITH_INIT else []
    assert load(f"placement={name}", *norm, *init).placement.func is zoo.PLACEMENTS[name].func
