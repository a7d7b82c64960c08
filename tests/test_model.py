"""The trunk, its layers and its blocks: equations, causality, and independence from padding."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normexp.layers import MLP, Attention, Rotary
from normexp.model import cross_entropy_sum, hooks, sinusoids
from normexp.placements import PostNorm, PreNorm
from tests import tiny

TOKENS = torch.randint(0, tiny.VOCABULARY, (3, tiny.CONTEXT), generator=torch.Generator().manual_seed(0))


def attention(bias: bool) -> Attention:
    heads = {"kv_heads": 2, "head_width": 4, "rotary": None, "scale": None, "window": 0, "softcap": 0.0}
    return Attention(8, 2, bias=bias, dropout=0.0, **heads)


def test_attention_against_a_loop_over_queries():
    layer, x = attention(bias=True), torch.randn(2, 5, 8)
    q, k, v = (projection(x).view(2, 5, 2, 4) for projection in (layer.q, layer.k, layer.v))
    expected = torch.empty(2, 5, 2, 4)
    for t in range(5):
        scores = torch.einsum("bhk,bshk->bhs", q[:, t], k[:, : t + 1]) / math.sqrt(4)
        expected[:, t] = torch.einsum("bhs,bshk->bhk", scores.softmax(-1), v[:, : t + 1])
    torch.testing.assert_close(layer(x), layer.o(expected.flatten(2)), atol=1e-6, rtol=1e-5)


def test_mlp_is_its_formula():
    x = torch.randn(2, 3, 8)
    for activation, act in (("relu", F.relu), ("gelu", F.gelu)):
        mlp = MLP(8, 20, activation=activation, bias=True, dropout=0.0)
        torch.testing.assert_close(mlp(x), mlp.out(act(getattr(mlp, "in")(x))))
    mlp = MLP(8, 20, activation="swiglu", bias=False, dropout=0.0)
    torch.testing.assert_close(mlp(x), mlp.out(F.silu(mlp.gate(x)) * getattr(mlp, "in")(x)))
    assert {name for name, _ in mlp.named_parameters()} == {"gate.weight", "in.weight", "out.weight"}


def test_sites_inside_sublayers_take_a_norm():
    double = type("Double", (nn.Module,), {"forward": lambda self, x, mask: 2 * x})()
    layer, x = attention(bias=False), torch.randn(2, 5, 8)
    torch.testing.assert_close(layer(x, None, {"v": double}), 2 * layer(x))
    torch.testing.assert_close(layer(x, None, {"attn_out": double}), 2 * layer(x))
    assert not torch.allclose(layer(x, None, {"q": double}), layer(x))
    mlp = MLP(8, 20, activation="relu", bias=False, dropout=0.0)
    torch.testing.assert_close(mlp(x, None, {"mlp_hidden": double}), 2 * mlp(x))


def test_rotary_scores_depend_on_the_distance_only():
    rotary, q, k = Rotary(8, 16, 10_000.0), torch.randn(8), torch.randn(8)
    turned_q, turned_k = rotary(q.expand(1, 1, 16, 8)), rotary(k.expand(1, 1, 16, 8))
    scores = (turned_q @ turned_k.transpose(-1, -2))[0, 0]
    for distance in (0, 3, 7):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(1, 1, 16), atol=1e-5, rtol=1e-5)
    assert (scores.diagonal(-7)[0] - scores.diagonal()[0]).abs() > 1e-3


def test_sinusoids():
    table = sinusoids(6, 8)
    assert table[5, 2] == pytest.approx(math.sin(5 / 10_000 ** (2 / 8)), abs=1e-6)
    assert table[5, 3] == pytest.approx(math.cos(5 / 10_000 ** (2 / 8)), abs=1e-6)


def block(cls, norm="ln"):
    built = tiny.model(norm, {PreNorm: "pre", PostNorm: "post"}[cls])
    return built.blocks[0]


@pytest.mark.parametrize("norm", tiny.NORMS)
def test_pre_and_post_are_their_equations(norm):
    x = torch.randn(3, tiny.CONTEXT, 16)
    pre = block(PreNorm, norm)
    n1, n2 = pre.norm["attn_in"], pre.norm["mlp_in"]
    h = x + pre.attn(n1(x))
    torch.testing.assert_close(pre(x, None), h + pre.mlp(n2(h)))
    post = block(PostNorm, norm)
    n1, n2 = post.norm["attn_residual"], post.norm["mlp_residual"]
    h = n1(x + post.attn(x))
    torch.testing.assert_close(post(x, None), n2(h + post.mlp(h)))


@pytest.mark.parametrize("norm_first", [True, False])
def test_blocks_equal_torchs_encoder_layer(norm_first):
    ours = block(PreNorm if norm_first else PostNorm)
    theirs = nn.TransformerEncoderLayer(16, 2, 64, 0.0, "relu", batch_first=True, norm_first=norm_first)
    attention, mlp = ours.attn, ours.mlp
    with torch.no_grad():
        qkv = [getattr(attention, name) for name in "qkv"]
        theirs.self_attn.in_proj_weight.copy_(torch.cat([layer.weight for layer in qkv]))
        theirs.self_attn.in_proj_bias.copy_(torch.cat([layer.bias for layer in qkv]))
        theirs.self_attn.out_proj.load_state_dict(attention.o.state_dict())
        theirs.linear1.load_state_dict(getattr(mlp, "in").state_dict())
        theirs.linear2.load_state_dict(mlp.out.state_dict())
    x, causal = torch.randn(3, tiny.CONTEXT, 16), nn.Transformer.generate_square_subsequent_mask(tiny.CONTEXT)
    torch.testing.assert_close(ours(x, None), theirs(x, src_mask=causal, is_causal=True), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("norm", "placement"), tiny.CELLS)
@pytest.mark.parametrize("position", ["learned", "sinusoidal", "rotary"])
def test_causality_in_evaluation(norm, placement, position):
    built = tiny.model(norm, placement, position=position).eval()
    changed = TOKENS.clone()
    changed[:, 9] = (changed[:, 9] + 1) % tiny.VOCABULARY
    assert torch.equal(built(TOKENS)[:, :9], built(changed)[:, :9])
    assert not torch.allclose(built(TOKENS)[:, 9:], built(changed)[:, 9:], atol=1e-3)


def test_batch_norm_leaks_the_future_in_training():
    changed = TOKENS.clone()
    changed[:, 9] = (changed[:, 9] + 1) % tiny.VOCABULARY
    for norm, leaks in (("bn", True), ("ln", False), ("rms", False)):
        built = tiny.model(norm)
        assert torch.equal(built(TOKENS)[:, :9], built(changed)[:, :9]) != leaks


@pytest.mark.parametrize(("norm", "placement"), tiny.CELLS)
def test_padding_to_twice_the_length_changes_no_real_token(norm, placement):
    mask = torch.arange(tiny.CONTEXT) < torch.tensor([[8], [5], [3]])
    built = tiny.model(norm, placement)
    long, short = built(TOKENS * mask, mask)[:, :8], built((TOKENS * mask)[:, :8], mask[:, :8])
    torch.testing.assert_close(long[mask[:, :8]], short[mask[:, :8]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("placement", "count", "final"), [("pre", 5, True), ("post", 4, False)])
def test_number_of_norm_sites(placement, count, final):
    built = tiny.model("ln", placement)
    assert (
        sum(isinstance(module, nn.Module) and "LayerNorm" in type(module).__name__ for module in built.modules())
        == count
    )
    assert (built.final_norm is not None) == final


def test_parameter_names_are_the_contracts():
    names = {name for name, _ in tiny.model("ln", "pre").named_parameters()}
    expected = {"embed.token.weight", "embed.position.weight", "final_norm.weight", "final_norm.bias"}
    expected |= {"head.weight", "head.bias"}
    for layer in range(2):
        inside = ["attn.q", "attn.k", "attn.v", "attn.o", "mlp.in", "mlp.out", "norm.attn_in", "norm.mlp_in"]
        expected |= {f"blocks.{layer}.{name}.{kind}" for name in inside for kind in ("weight", "bias")}
    assert names == expected


def test_tied_head_shares_one_matrix_and_has_no_bias():
    built = tiny.model(tied=True)
    assert built.head.weight is built.embed.token.weight
    assert built.head.bias is None
    assert "head.weight" not in dict(built.named_parameters())


def test_dropout_drops_in_training_only():
    built = tiny.model(dropout=0.5)
    assert not torch.equal(built(TOKENS), built(TOKENS))
    built.eval()
    assert torch.equal(built(TOKENS), built(TOKENS))


def test_cross_entropy_sum_ignores_pads_and_survives_none():
    logits, targets = torch.randn(2, 3, 5), torch.tensor([[1, -100, 2], [-100, 0, -100]])
    picked = [logits[b, t].log_softmax(-1)[targets[b, t]] for b, t in ((0, 0), (0, 2), (1, 1))]
    torch.testing.assert_close(cross_entropy_sum(logits, targets), -sum(picked))
    assert cross_entropy_sum(logits, torch.full((2, 3), -100)) == 0


def test_hooks_are_found_and_calibrate_runs_in_forward_order():
    built, order = tiny.model(), []
    assert hooks(built, "after_step") == []
    for index, layer in enumerate(built.blocks):
        layer.calibrate = lambda x, mask, index=index, layer=layer: (order.append(index), layer(x, mask))[1]
    built.calibrate(TOKENS)
    assert order == [0, 1]
    assert len(hooks(built, "calibrate")) == 2
