"""Fields of attention and MLP that published models differ in, each in a second form: loops over heads and tokens."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from normexp import arithmetic, runs
from normexp.attention import attend, visible
from normexp.fields import UserError
from normexp.model import ModelConfig
from tests import tiny, zoo
from tests.tiny import load

TOKENS = torch.randint(0, tiny.VOCABULARY, (3, tiny.CONTEXT), generator=torch.Generator().manual_seed(0))
PLAIN = {"scale": None, "window": 0, "softcap": 0.0, "dropout": 0.0}
GEMMA = {
    "heads": 4, "kv_heads": 2, "head_width": 6, "attn_softcap": 3.0, "window": 5, "local_layers": "even",
    "query_scale": 0.3, "mlp": "geglu", "position": "rotary", "rotary_base": 500.0,
}  # fmt: skip
FIELDS = [
    {"heads": 4, "kv_heads": 2}, {"heads": 4, "kv_heads": 1, "position": "rotary"}, {"head_width": 12},
    {"attn_softcap": 0.5}, {"window": 3}, {"window": 5, "local_layers": "even"}, {"query_scale": 1.0},
    {"mlp": "gelu_tanh"}, {"mlp": "geglu"}, GEMMA,
]  # fmt: skip


def parts(heads: int = 4, shared: int = 2, length: int = 9, size: int = 6, dtype=torch.float64):
    source = torch.Generator().manual_seed(1)
    counts = (heads, heads // shared, heads // shared)
    return [torch.randn(2, count, length, size, generator=source).to(dtype) for count in counts]


def by_hand(q, k, v, scale, window, softcap):
    """Token by token and head by head, of the tokens that are seen alone."""
    y = torch.empty_like(q)
    for h in range(q.shape[1]):
        g = h * k.shape[1] // q.shape[1]
        for t in range(q.shape[2]):
            seen = slice(max(0, t + 1 - window) if window else 0, t + 1)
            z = torch.einsum("bk,bsk->bs", q[:, h, t], k[:, g, seen]) * (scale or 1 / math.sqrt(q.shape[-1]))
            if softcap:
                z = softcap * (torch.exp(2 * z / softcap) - 1) / (torch.exp(2 * z / softcap) + 1)
            weights = z.exp() / z.exp().sum(-1, keepdim=True)
            y[:, h, t] = torch.einsum("bs,bsk->bk", weights, v[:, g, seen])
    return y


@pytest.mark.parametrize("shared", [1, 2, 4])
@pytest.mark.parametrize("window", [0, 1, 4, 9, 50])
@pytest.mark.parametrize("softcap", [0.0, 0.7, 50.0])
@pytest.mark.parametrize("scale", [None, 0.9])
def test_attention_token_by_token(shared, window, softcap, scale):
    q, k, v = (part.requires_grad_() for part in parts(shared=shared))
    expected = by_hand(q, k, v, scale, window, softcap)
    got = attend(q, k, v, scale=scale, window=window, softcap=softcap, dropout=0.0)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(2), dtype=got.dtype)
    for ours, theirs in zip(
        *(torch.autograd.grad((weight * y).sum(), (q, k, v)) for y in (got, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)


def test_the_neutral_fields_are_plain_attention_to_the_bit():
    q, k, v = parts(shared=1, dtype=torch.float32)
    assert torch.equal(attend(q, k, v, **PLAIN), F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert torch.equal(attend(q, k, v, **PLAIN | {"window": 9}), attend(q, k, v, **PLAIN))  # all that there is


def test_a_window_counts_the_token_itself():
    assert visible(4, 2, torch.device("cpu")).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


def test_dropout_under_a_soft_cap_is_of_the_weights():
    """With the identity for v, y is the weights: some are 0, the others 1 / (1 − share) times what they were."""
    q, k = (torch.randn(4, 2, 16, 16) for _ in range(2))
    v = torch.eye(16).expand(4, 2, 16, 16)
    whole, dropped = (attend(q, k, v, scale=None, window=0, softcap=5.0, dropout=share) for share in (0.0, 0.25))
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.75)
    below = torch.ones(16, 16, dtype=torch.bool).tril().expand_as(kept)
    assert 0.68 < kept[below].float().mean() < 0.82  # of 1,088 weights: five standard errors
    assert not kept[~below].any()


def test_scores_under_a_soft_cap_are_float32():
    """Scores of 40 and 39.75, of which bfloat16 still knows the difference; under a cap of 100 it would not."""
    q = torch.ones(1, 1, 2, 2, dtype=torch.bfloat16)
    k = torch.tensor([[[[40.0, 0.0], [39.75, 0.0]]]], dtype=torch.bfloat16)
    v = torch.eye(2, dtype=torch.bfloat16).view(1, 1, 2, 2)
    y = attend(q, k, v, scale=1.0, window=0, softcap=100.0, dropout=0.0)
    difference = 100 * (math.tanh(0.4) - math.tanh(0.3975))
    assert y.dtype == torch.bfloat16
    assert y[0, 0, 1, 0].item() == pytest.approx(1 / (1 + math.exp(-difference)), abs=2e-3)  # half a step of bfloat16


@pytest.mark.parametrize(("local", "windows"), [("all", [3, 3, 3]), ("even", [3, 0, 3])])
def test_which_layers_are_local(local, windows):
    built = tiny.model(depth=3, window=3, local_layers=local)
    assert [block.attn.scores["window"] for block in built.blocks] == windows
    x = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(0))
    moved = x.clone()
    moved[:, 0] += 1
    for block, window in zip(built.blocks, windows, strict=True):
        changed = (block.attn(moved) != block.attn(x)).any(-1)[0]
        assert changed.tolist() == [not window or t < window for t in range(8)]


def test_shared_heads_are_heads_repeated():
    """A model whose k and v are repeated by hand, of the same weights, in every placement that takes them."""
    for name, placement in zoo.PLACEMENTS.items():
        if placement.func.plain_heads:
            continue
        shared, full = (
            zoo.model(name, heads=4, kv_heads=kv, depth=1, position="rotary", bias=False).double() for kv in (2, 0)
        )
        state = shared.state_dict()
        for part in ("k", "v"):
            weight = state[f"blocks.0.attn.{part}.weight"]
            assert weight.shape == (8, 16)
            state[f"blocks.0.attn.{part}.weight"] = torch.cat([weight[:4], weight[:4], weight[4:], weight[4:]])
        full.load_state_dict(state)
        torch.testing.assert_close(shared(TOKENS), full(TOKENS), atol=1e-12, rtol=1e-12, msg=name)


@pytest.mark.parametrize("kind", ["head", "full"])
def test_norms_of_shared_and_wider_heads(kind):
    built = tiny.model(heads=4, kv_heads=2, head_width=6, qk_norm=kind, position="rotary")
    widths = {site: len(norm.weight) for site, norm in built.blocks[0].attn.norm.items()}
    assert widths == ({"q_head": 6, "k_head": 6} if kind == "head" else {"q": 24, "k": 12})
    wide = zoo.model("subln", heads=4, head_width=6)
    assert len(wide.blocks[0].norm["attn_out"].weight) == 24
    assert wide.blocks[0].attn.o.weight.shape == (16, 24)
    assert torch.isfinite(wide(TOKENS)).all()


@pytest.mark.parametrize("name", ["hybrid", "normformer", "subln", "reordered"])
def test_placements_that_normalise_inside_attention_take_shared_heads(name):
    trainer = tiny.trainer(
        *zoo.cell(name), source=tiny.Source(padded=True), heads=4, kv_heads=2, head_width=6, position="rotary"
    )
    trainer.take_step()
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())


def test_gelu_by_tanh_and_its_gated_form():
    x = torch.linspace(-4, 4, 33, dtype=torch.float64)
    gelu = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert (gelu - F.gelu(x)).abs().max() > 1e-4
    h = torch.randn(2, 3, 16, dtype=torch.float64)
    for kind in ("gelu_tanh", "geglu"):
        mlp = tiny.model(mlp=kind, bias=False).double().blocks[0].mlp
        up = h @ getattr(mlp, "in").weight.T
        z = up if kind == "gelu_tanh" else h @ mlp.gate.weight.T
        act = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        expected = (act if kind == "gelu_tanh" else act * up) @ mlp.out.weight.T
        torch.testing.assert_close(mlp(h), expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(F.gelu(x, approximate="tanh"), gelu, atol=1e-15, rtol=1e-12)


@pytest.mark.parametrize("changes", FIELDS, ids=str)
def test_no_token_sees_a_later_one_or_a_pad(changes):
    built = tiny.model("rms", **changes).eval()
    logits, later = built(TOKENS), TOKENS.clone()
    later[:, 9] = (later[:, 9] + 1) % tiny.VOCABULARY
    assert torch.equal(built(later)[:, :9], logits[:, :9])
    assert not torch.equal(built(later)[:, 9], logits[:, 9])
    mask = torch.arange(tiny.CONTEXT) < torch.tensor([[16], [9], [4]])
    padded = built(torch.where(mask, TOKENS, 3), mask)
    assert torch.equal(padded[mask], logits[mask])


@pytest.mark.parametrize("changes", FIELDS, ids=str)
def test_it_trains_in_bfloat16_with_dropout_and_resumes_to_the_bit(changes, tmp_path):
    settings = {"source": tiny.Source(padded=True), "dropout": 0.1, "optim": replace(tiny.OPTIM, weight_decay=0.1)}
    train = replace(tiny.TRAIN, dtype="bfloat16", grad_accum=2)
    straight, fresh = (tiny.trainer("rms", train=train, **settings, **changes) for _ in range(2))
    tiny.goes_on(straight, fresh, tmp_path)
    assert all(torch.isfinite(parameter).all() for parameter in fresh.model.parameters())


def test_all_of_it_is_one_graph():
    built = tiny.model("rms", zoo.PLACEMENTS["peri"], **GEMMA)
    graph = torch.compile(built, backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(TOKENS), built(TOKENS), atol=1e-5, rtol=1e-5)  # reordered sums


def test_xavier_is_of_each_matrix_own_shape():
    built = tiny.model(width=128, heads=4, kv_heads=1, head_width=64)
    for name, rows, columns in (("q", 256, 128), ("k", 64, 128), ("v", 64, 128), ("o", 128, 256)):
        weight = getattr(built.blocks[0].attn, name).weight
        assert weight.shape == (rows, columns)
        # of 8,192 draws or more a standard deviation is within 1/√(2 · 8192), 0.8 %: five of these
        assert weight.std().item() == pytest.approx(math.sqrt(2 / (rows + columns)), rel=0.04)


def test_plain_initial_weights_have_one_size():
    built = tiny.model(width=64, init="plain", depth=8)
    for name in ("embed.token", "blocks.7.attn.o", "blocks.7.mlp.out", "blocks.0.attn.q"):
        assert built.get_submodule(name).weight.std().item() == pytest.approx(0.02, rel=0.15)  # 704 draws: 2.7 %


def test_flops_by_hand():
    """Per block and token: q and o of 16 · 24, k and v of 16 · 12, three matrices of 16 · 64; a head of 16 · 11; and
    the scores of 24 channels with 5 tokens in block 0 and 16 in block 1."""
    config = ModelConfig(**{**tiny.CONFIG, **GEMMA})
    weights = 2 * (2 * 16 * 24 + 2 * 16 * 12 + 3 * 16 * 64) + 16 * 11
    assert arithmetic.flops_per_token(config, 11) == 6 * weights + 12 * 24 * (5 + 16)
    assert arithmetic.flops_per_token(replace(config, window=99), 11) == 6 * weights + 12 * 24 * (16 + 16)


@pytest.mark.parametrize("override", [
    "model.kv_heads=2", "model.head_width=8", "model.attn_softcap=50", "model.query_scale=0.1", "model.window=8",
])  # fmt: skip
def test_another_value_is_another_run(override):
    assert runs.digest(load(override).resolved, "") != runs.digest(load().resolved, "")


def test_fields_that_another_puts_out_of_use_leave_the_run_the_same():
    def digest(*overrides):
        return runs.digest(load(*overrides).resolved, "")

    assert digest("model.local_layers=even", "model.rotary_base=5e5") == digest()
    assert digest("model.window=8", "model.local_layers=even") != digest("model.window=8")
    rotary = "model.position=rotary"
    assert digest(rotary, "model.rotary_base=5e5") != digest(rotary)
    assert digest(rotary, "model.rotary_base=10000") == digest(rotary)


REFUSED = [
    (["model.kv_heads=3"], "model.kv_heads=3: does not divide model.heads=4; give 0 for as many, or one of 1, 2, 4"),
    (["model.kv_heads=8"], "model.kv_heads=8: does not divide model.heads=4"),
    (["model.kv_heads=-1"], "model.kv_heads=-1: must be an integer >= 0"),
    (["model.head_width=7", "model.position=rotary"], "model.head_width=7: model.position=rotary rotates pairs"),
    (["model.head_width=100000000000"], "model.width=64 model.depth=6 model.mlp_ratio=4.0 model.head_width=100000000"),
    (["model.context=1000000", "model.attn_softcap=50"], "model.context=1000000 model.attn_softcap=50.0 model.heads=4"),
    (["model.context=1000000", "model.window=8"], "model.context=1000000 model.window=8: needs"),
    (["model.local_layers=odd"], "model.local_layers=odd: must be one of all, even"),
    (["placement=ngpt", "norm=none", "model.kv_heads=2"], "model.kv_heads=2: placement=ngpt scales whole heads of q"),
    (["placement=ngpt", "norm=none", "model.head_width=8"], "model.head_width=8: placement=ngpt scales whole heads"),
    (["placement=ngpt", "norm=none", "model.query_scale=0.1"], "model.query_scale=0.1: placement=ngpt scales whole"),
]


@pytest.mark.parametrize(("overrides", "line"), REFUSED)
def test_what_has_no_meaning_is_refused_in_one_line(overrides, line):
    with pytest.raises(UserError) as refused:
        load(*overrides)
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


def test_a_width_of_its_own_frees_the_heads_from_the_models():
    assert load("model.width=50", "model.head_width=8", "model.position=rotary").model.sizes()["head_width"] == 8
