"""The mixture of experts as a layer: against a loop over tokens, against OLMoE's code, and at its limits."""

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from normexp.experts import MoE, plain_name
from normexp.layers import MLP
from normexp.norms import batch_statistics
from tests import tiny

WIDTH, HIDDEN, EXPERTS = 6, 10, 4
MASK = torch.arange(7) < torch.tensor([[7], [4], [1]])


def draw(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def moe(experts=EXPERTS, per_token=2, *, activation="relu", dropout=0.0, norm=None, bias=True, a=0.01, b=0.001):
    """In float64, every parameter drawn."""
    expert = partial(MLP, WIDTH, HIDDEN, activation=activation, bias=bias, dropout=0.0)
    settings = {"dropout": dropout, "own_norms": norm is not None, "load_balance": a, "z_loss": b}
    built = MoE(WIDTH, experts, per_token, expert=expert, **settings)
    if norm is not None:
        built.take_norm(partial(norm, WIDTH))
    built = built.double()
    for index, parameter in enumerate(built.parameters()):
        parameter.data = draw(*parameter.shape, seed=1000 + index)
    return built


def by_hand(layer, x, mask, read=lambda owner, b, t: None):
    """y, its loss, f and the router's entropy by a loop over tokens and experts. `read`: what an owner of a norm reads;
    None: x."""
    w, count, k = dict(layer.named_parameters()), len(layer.experts), layer.per_token
    y, f, mean, entropy, squares, real = torch.zeros_like(x), [0.0] * count, [0.0] * count, 0.0, 0.0, 0
    for b, t in ((b, t) for b in range(x.shape[0]) for t in range(x.shape[1]) if mask is None or mask[b, t]):
        real += 1

        def seen(owner, b=b, t=t):
            own = read(owner, b, t)
            return x[b, t] if own is None else own

        z = [(w["router.weight"][e] * seen("router")).sum() for e in range(count)]
        total = sum(value.exp() for value in z)
        p = [value.exp() / total for value in z]
        squares = squares + total.log() ** 2
        entropy -= sum(share.item() * math.log(share.item()) for share in p)
        mean = [m + share for m, share in zip(mean, p, strict=True)]
        for e in sorted(range(count), key=lambda e: -p[e].item())[:k]:
            f[e] += 1
            up = w[f"experts.{e}.in.weight"] @ seen(e) + w[f"experts.{e}.in.bias"]
            if hasattr(layer.experts[e], "gate"):
                gate = w[f"experts.{e}.gate.weight"] @ seen(e) + w[f"experts.{e}.gate.bias"]
                up = gate / (1 + (-gate).exp()) * up
            else:
                up = up.clamp(min=0)
            y[b, t] += p[e] * (w[f"experts.{e}.out.weight"] @ up + w[f"experts.{e}.out.bias"])
    balance = count * sum(share / (k * real) * m / real for share, m in zip(f, mean, strict=True))
    loss = layer.load_balance * balance + layer.z_loss * squares / real
    return y, loss, [share / (k * real) for share in f], entropy / real


@pytest.mark.parametrize("mask", [None, MASK], ids=["packed", "padded"])
@pytest.mark.parametrize(("experts", "per_token"), [(4, 2), (4, 1), (3, 3), (5, 3)])
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_it_is_a_loop_over_tokens(experts, per_token, activation, mask):
    layer = moe(experts, per_token, activation=activation)
    x = draw(3, 7, WIDTH).requires_grad_()
    y = layer(x, mask)
    expected, loss, load, entropy = by_hand(layer, x, mask)
    torch.testing.assert_close(y, expected)
    auxiliary = layer.aux_loss()
    torch.testing.assert_close(auxiliary, loss)
    torch.testing.assert_close(layer.observed()["expert_load"], torch.tensor(load).double())
    assert layer.observed()["router_entropy"].item() == pytest.approx(entropy)
    weights = [x, *layer.parameters()]
    cotangent = draw(*x.shape, seed=5)
    got = torch.autograd.grad((y * cotangent).sum() + 9 * auxiliary, weights)
    for ours, theirs in zip(got, torch.autograd.grad((expected * cotangent).sum() + 9 * loss, weights), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("compiling", [False, True])
def test_its_gradient_is_that_of_finite_differences(compiling, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    layer = moe(3, 2)
    names = [name for name, _ in layer.named_parameters()]

    def outputs(x, *weights):
        y = torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x, MASK[:2, :4]))
        return y, layer.aux_loss()

    assert torch.autograd.gradcheck(outputs, (draw(2, 4, WIDTH).requires_grad_(), *layer.parameters()))


@pytest.mark.parametrize("norm", [None, "ln", "bn"])
def test_compiled_code_computes_the_same_in_one_graph(norm):
    """Every expert on every token there, each on its own here: another order of sums, in float64."""
    first, second = (moe(norm=norm and tiny.NORMS[norm]) for _ in range(2))
    graph = torch.compile(first, backend="eager", fullgraph=True)
    x = draw(3, 7, WIDTH).requires_grad_()
    torch.testing.assert_close(graph(x, MASK), second(x, MASK))
    gradients = [torch.autograd.grad(layer(x, MASK).square().sum(), x)[0] for layer in (graph, second)]
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(first.aux_loss(), second.aux_loss())
    torch.testing.assert_close(first.observed(), second.observed())
    torch.testing.assert_close(dict(first.named_buffers()), dict(second.named_buffers()))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_one_expert_is_the_plain_mlp_to_the_bit(activation, dropout):
    layer = moe(1, 1, activation=activation, dropout=dropout).float()
    plain = MLP(WIDTH, HIDDEN, activation=activation, bias=True, dropout=dropout)
    plain.load_state_dict(layer.experts[0].state_dict())
    x = draw(3, 7, WIDTH).float()
    outputs = []
    for mlp in (layer, plain):
        torch.manual_seed(0)
        outputs.append(mlp(x))
    assert torch.equal(*outputs)
    assert layer.aux_loss().item() == pytest.approx(0.01 + 0.001 * (layer.router(x) ** 2).mean().item(), rel=1e-5)


@pytest.mark.parametrize("renormalised", [False, True])
def test_against_olmoe(renormalised):
    """Its gates are not renormalised: with `norm_topk_prob`, which is Mixtral's way, y is another one. Its router's
    softmax is float32, hence the tolerance. Its f sums to k."""
    olmoe = pytest.importorskip(
        "transformers.models.olmoe.modeling_olmoe", reason="the extra `dev` brings transformers"
    )
    layer = moe(activation="swiglu", bias=False, a=1.0, b=0.0)
    config = olmoe.OlmoeConfig(hidden_size=WIDTH, intermediate_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=2)
    config.norm_topk_prob, config._experts_implementation = renormalised, "eager"
    theirs = olmoe.OlmoeSparseMoeBlock(config).double()
    with torch.no_grad():
        theirs.gate.weight.copy_(layer.router.weight)
        for index, expert in enumerate(layer.experts):
            theirs.experts.gate_up_proj[index] = torch.cat([expert.gate.weight, getattr(expert, "in").weight])
            theirs.experts.down_proj[index] = expert.out.weight
    x = draw(3, 7, WIDTH)
    y = layer(x, MASK)
    apart = (y - theirs(x))[MASK].abs().max().item()
    assert (apart < 1e-5) != renormalised
    balance = olmoe.load_balancing_loss_func((layer.router(x).flatten(0, 1),), EXPERTS, 2, MASK)
    assert layer.aux_loss().item() == pytest.approx(balance.item() / 2, rel=1e-5)


def test_no_token_is_dropped_when_all_want_the_same():
    """Experts 2 and 0 have every token. The idle ones have a gradient, and it is 0."""
    layer = moe()
    x = draw(3, 7, WIDTH).abs()
    with torch.no_grad():
        layer.router.weight[:] = torch.tensor([[1.0], [0.0], [2.0], [-1.0]])
    y = layer(x, MASK)
    torch.testing.assert_close(y, by_hand(layer, x, MASK)[0])
    assert y[MASK].abs().amin(-1).min() > 0
    assert layer.observed()["expert_load"].tolist() == [0.5, 0.0, 0.5, 0.0]
    y.sum().backward()
    for index, expert in enumerate(layer.experts):
        assert all(parameter.grad.any() == (index in (0, 2)) for parameter in expert.parameters())


def test_pads_have_no_influence():
    """Other pads, or none: the same real outputs, losses and metrics, and no gradient from one to the other."""
    layer, x = moe(), draw(3, 7, WIDTH)
    other = torch.where(MASK.unsqueeze(-1), x, 1e3).requires_grad_()
    first, loss, seen = layer(x, MASK), layer.aux_loss(), layer.observed()
    second = layer(other, MASK)
    auxiliary = layer.aux_loss()
    assert torch.equal(first, second)
    assert torch.equal(loss, auxiliary)
    assert all(torch.equal(seen[name], value) for name, value in layer.observed().items())
    assert not first[~MASK].any()
    (second.square().sum() + auxiliary).backward()
    assert not other.grad[~MASK].any()
    torch.testing.assert_close(layer(x)[MASK], first[MASK])
    rows = torch.cat([row[own] for row, own in zip(x, MASK, strict=True)]).unsqueeze(0)  # the real tokens alone
    torch.testing.assert_close(layer(rows)[0], first[MASK])
    torch.testing.assert_close(layer.aux_loss(), loss)
    torch.testing.assert_close(layer.observed(), seen)


def test_a_batch_of_pads_is_nothing():
    layer = moe(norm=tiny.NORMS["bn"])
    y = layer(draw(3, 7, WIDTH), torch.zeros_like(MASK))
    assert not y.any()
    assert layer.aux_loss().item() == 0
    assert layer.observed()["expert_load"].tolist() == [0.0] * EXPERTS


@pytest.mark.parametrize("own", [None, "ln"])
def test_the_router_is_float32_under_autocast(own):
    """Its logits are those without autocast, to the bit."""
    layer, seen = moe(norm=own and tiny.NORMS[own]).float(), []
    layer.router.register_forward_hook(lambda module, inputs, logits: seen.append(logits))
    x = draw(3, 7, WIDTH).float()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    layer(x)
    assert y.dtype == torch.bfloat16
    assert seen[0].dtype == torch.float32
    assert torch.equal(*seen)
    assert layer.aux_loss().dtype == torch.float32


def test_a_difference_that_bfloat16_cannot_hold_decides_the_routing():
    layer = moe(per_token=1).float()
    torch.nn.init.ones_(layer.router.weight)
    layer.router.weight.data[3] += 2**-10
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.ones(1, 5, WIDTH))
    assert layer.observed()["expert_load"].tolist() == [0, 0, 0, 1]


def test_a_router_that_knows_nothing():
    """p uniform: the entropy is ln E, the loss a at any load, and log² Z is ln² E."""
    layer = moe(a=0.5, b=0.25)
    torch.nn.init.zeros_(layer.router.weight)
    layer(draw(3, 7, WIDTH))
    assert layer.observed()["router_entropy"].item() == pytest.approx(math.log(EXPERTS))
    assert layer.observed()["expert_load"].sum().item() == pytest.approx(1)
    assert layer.aux_loss().item() == pytest.approx(0.5 + 0.25 * math.log(EXPERTS) ** 2)


@pytest.mark.parametrize(("shared", "expected"), [(False, 1.0), (True, float(EXPERTS))])
def test_the_load_balance_loss_from_best_to_worst(shared, expected):
    """k = 1 and a router that is certain: 1 with every expert in turn, E with one for all."""
    layer = moe(per_token=1, a=1.0, b=0.0)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(EXPERTS, WIDTH) * 50)
    chosen = torch.zeros(8, dtype=torch.long) if shared else torch.arange(8) % EXPERTS
    layer(F.one_hot(chosen, WIDTH).double().unsqueeze(0))
    assert layer.aux_loss().item() == pytest.approx(expected)
    assert layer.observed()["router_entropy"].item() == pytest.approx(0, abs=1e-12)


def test_a_loss_is_handed_over_once_and_is_of_training_alone():
    layer, x = moe(), draw(3, 7, WIDTH)
    assert layer.aux_loss().item() == 0
    layer(x)
    assert layer.aux_loss().item() > 0
    assert layer.aux_loss().item() == 0
    layer.eval()(x)
    assert layer.aux_loss().item() == 0


def routed(layer, x, mask):
    """Expert -> the (b, t) of its real tokens, by the router's own norm."""
    chosen = layer.router(layer.norm["router"](x, mask)).topk(layer.per_token).indices
    places = [(b, t) for b in range(x.shape[0]) for t in range(x.shape[1]) if mask[b, t]]
    return {e: [(b, t) for b, t in places if e in chosen[b, t]] for e in range(len(layer.experts))}


@pytest.mark.parametrize("stats", ["batch_time", "position", "cumulative"])
def test_an_experts_batch_norm_has_the_statistics_of_its_tokens(stats):
    """By hand, from lists of tokens; the router's norm from all real ones."""
    norm = partial(tiny.NORMS["bn"], stats=stats)
    layer, twin = moe(norm=norm), moe(norm=norm)
    x = 2 + 3 * draw(6, 7, WIDTH)
    mask = torch.arange(7) < torch.tensor([[7], [4], [1], [7], [6], [7]])
    own = routed(twin, x, mask) | {"router": [(b, t) for b in range(6) for t in range(7) if mask[b, t]]}

    def read(owner, b, t):
        among = {"batch_time": lambda s: True, "position": lambda s: s == t, "cumulative": lambda s: s <= t}[stats]
        values = torch.stack([x[i, s] for i, s in own[owner] if among(s)])
        var, mean = torch.var_mean(values, 0, correction=0)
        gain, bias = (layer.norm[str(owner)].get_parameter(name) for name in ("weight", "bias"))
        return (x[b, t] - mean) / (var + 1e-5).sqrt() * gain + bias

    torch.testing.assert_close(layer(x, mask), by_hand(layer, x, mask, read)[0])
    for owner, places in own.items():
        if stats == "batch_time" and len(places) > 1:
            values = torch.stack([x[place] for place in places])
            running = layer.norm[str(owner)]
            torch.testing.assert_close(running.running_mean, 0.1 * values.mean(0))
            torch.testing.assert_close(running.running_var, 0.9 + 0.1 * values.var(0))


@pytest.mark.parametrize("stats", ["batch_time", "position", "cumulative"])
@pytest.mark.parametrize("name", ["bn", "rbn", "switch"])
def test_an_expert_without_a_token_learns_nothing_of_the_batch(name, stats):
    """Not even its running statistics move; with a single token, nothing is infinite."""
    if name != "bn" and stats != "batch_time":
        return
    norm = partial(tiny.NORMS["bn"], stats=stats) if name == "bn" else tiny.ZOO[name]
    layer = moe(per_token=1, norm=norm)
    torch.nn.init.zeros_(layer.router.weight)
    x = draw(3, 7, WIDTH)
    for mask in (MASK, torch.arange(7) < torch.tensor([[1], [0], [0]])):
        y = layer(x, mask)
        (y.sum() + layer.aux_loss() + sum(n.aux_loss() for n in layer.norm.values() if name == "rbn")).backward()
        assert torch.isfinite(y).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in layer.parameters())
    used = [index for index, load in enumerate(layer.observed()["expert_load"].tolist()) if load]
    assert len(used) == 1
    for index in range(EXPERTS):
        running = layer.norm[str(index)]
        moved = (running.running_mean != 0).any() or (running.running_var != 1).any()
        assert moved == (index in used)
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    with batch_statistics(layer):
        layer(x, MASK)
    assert all(torch.equal(before[key], value) for key, value in layer.state_dict().items())


@pytest.mark.parametrize("name", ["ln", "rms", "seednorm", "dyt"])
def test_experts_with_norms_per_token(name):
    norm = (tiny.NORMS | tiny.ZOO)[name]
    layer, x = moe(norm=norm), 2 + 3 * draw(3, 7, WIDTH)
    expected = by_hand(layer, x, MASK, lambda owner, b, t: layer.norm[str(owner)](x[b : b + 1, t : t + 1])[0, 0])[0]
    torch.testing.assert_close(layer(x, MASK), expected)


def test_plain_names():
    assert plain_name("blocks.11.mlp.experts.10.out.weight") == "blocks.11.mlp.out.weight"
    assert plain_name("mlp.experts.0.in") == "mlp.in"
    assert plain_name("blocks.1.mlp.router") == "blocks.1.mlp.router"
    assert plain_name("blocks.1.mlp.out") == "blocks.1.mlp.out"


@pytest.mark.parametrize("compiling", [False, True])
def test_what_is_infinite_where_it_does_not_count_reaches_nothing(compiling, monkeypatch):
    """0 · ∞ is no 0: an expert that overflows on another's tokens, and a pad that already has."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    layer, x = moe(2, 1).train(), draw(2, 3, WIDTH)
    x[..., 0] = torch.tensor([[1.0, -1.0, 1.0], [-1.0, 1.0, -1.0]])
    with torch.no_grad():
        layer.router.weight.zero_()[0, 0] = 100.0  # tokens with x_0 > 0 go to expert 0
        layer.experts[1].get_submodule("in").weight[:, 0] = 1e308
    x[..., 0] *= 10  # 1e309 is infinite in float64
    mask = torch.tensor([[True, False, True], [False, True, False]])  # the tokens of expert 0 are the real ones
    x[0, 1], x[1, 2] = torch.inf, torch.nan
    x.requires_grad_()
    y = layer(x, mask)
    loss = layer.aux_loss()
    (y.sum() + loss).backward()
    assert torch.isfinite(y).all()
    assert torch.isfinite(loss)
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(layer.router.weight.grad).all()
