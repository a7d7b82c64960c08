"""Learning rates as golden lists, and parameter groups by module type."""

import math
from dataclasses import replace

import pytest
import torch

from normexp.optim import StableAdamW, build_optimizer, learning_rate, parameter_groups
from tests import tiny

PEAK = replace(tiny.OPTIM, lr=1.0)


@pytest.mark.parametrize(("changes", "steps", "expected"), [
    ({"warmup_steps": 0}, 4, [1, 1, 1, 1]),
    ({"warmup_steps": 4}, 6, [0.25, 0.5, 0.75, 1, 1, 1]),
    ({"warmup_steps": 4}, 4, [0.25, 0.5, 0.75, 1]),
    ({"warmup_steps": 0}, 1, [1]),
    ({"warmup_steps": 1}, 1, [1]),
    ({"warmup_steps": 0, "decay": "cosine"}, 4, [0.8535534, 0.5, 0.1464466, 0]),
    ({"warmup_steps": 2, "decay": "cosine", "final_lr_fraction": 0.1}, 6, [0.5, 1, 0.8681981, 0.55, 0.2318019, 0.1]),
    ({"warmup_steps": 2, "decay": "cosine"}, 2, [0.5, 1]),
    ({"warmup_steps": 2, "decay": "linear", "final_lr_fraction": 0.2}, 6, [0.5, 1, 0.8, 0.6, 0.4, 0.2]),
    ({"warmup_steps": 0, "decay": "linear"}, 1, [0]),
    ({"warmup_steps": 4, "decay": "inverse_sqrt"}, 16, [0.25, 0.5, 0.75, 1, *((4 / n) ** 0.5 for n in range(5, 17))]),
    ({"warmup_steps": 0, "decay": "inverse_sqrt"}, 4, [1, 2**-0.5, 3**-0.5, 0.5]),
    ({"warmup_steps": 1, "decay": "wsd", "decay_fraction": 0.4}, 5, [1, 1, 1, 0.5, 0]),
    ({"warmup_steps": 3, "decay": "wsd", "decay_fraction": 1.0}, 5, [1 / 3, 2 / 3, 1, 0.5, 0]),
    ({"warmup_steps": 0, "decay": "wsd", "decay_fraction": 0.0}, 3, [1, 1, 1]),
    ({"warmup_steps": 0, "decay": "wsd", "decay_fraction": 0.9}, 10, [n / 9 for n in range(9, -1, -1)]),  # 0.1 · 10 < 1
    ({"warmup_steps": 5, "decay": "wsd"}, 5, [0.2, 0.4, 0.6, 0.8, 1]),
])  # fmt: skip
def test_learning_rate_at_every_step(changes, steps, expected):
    config = replace(PEAK, **changes)
    assert [learning_rate(step, config, steps) for step in range(1, steps + 1)] == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("norm", "placement"), tiny.CELLS)
def test_weight_decay_touches_matrices_only_and_the_same_in_every_cell(norm, placement):
    model = tiny.model(norm, placement)
    groups = parameter_groups(model, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    grouped = [names[id(p)] for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(names.values())  # each exactly once
    decayed = {names[id(p)] for p in groups[0]["params"]}
    inside = ["attn.q", "attn.k", "attn.v", "attn.o", "mlp.in", "mlp.out"]
    matrices = {f"blocks.{layer}.{name}.weight" for layer in range(2) for name in inside}
    assert decayed == matrices | {"embed.token.weight", "embed.position.weight", "head.weight"}
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


class Learned(torch.nn.Module):
    """A user's norm that owns a linear layer."""

    def __init__(self, dim):
        super().__init__()
        self.mix = torch.nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        return self.mix(x)


def test_nothing_inside_a_norm_decays():
    model = tiny.model(Learned, "pre")
    decayed = {id(p) for p in parameter_groups(model, 0.1)[0]["params"]}
    inside = [p for name, p in model.named_parameters() if "norm" in name]
    assert len(inside) == 2 * 5
    assert not any(id(p) in decayed for p in inside)


def test_a_tied_matrix_is_in_one_group_once():
    groups = parameter_groups(tiny.model(tied=True), 0.1)
    assert len({id(p) for group in groups for p in group["params"]}) == sum(len(group["params"]) for group in groups)


def test_stable_adamw_against_its_equations():
    """Algorithm 2 of 2304.13013, one number at a time; the second gradient outruns v, so the rate is divided."""
    weight = torch.nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]]))
    optimizer = StableAdamW([weight], lr=0.1, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01)
    w, m, v = weight.detach().double().flatten().tolist(), [0.0] * 4, [0.0] * 4
    divided = []
    for step, gradient in enumerate(([0.1, -0.2, 0.3, 0.01], [5.0, 4.0, -3.0, 6.0], [0.1, 0.1, 0.0, 0.2]), start=1):
        weight.grad = torch.tensor(gradient).view(2, 2)
        optimizer.step()
        beta1, beta2 = (beta * (1 - beta ** (step - 1)) / (1 - beta**step) for beta in (0.9, 0.98))
        m = [beta1 * a + (1 - beta1) * g for a, g in zip(m, gradient, strict=True)]
        v = [beta2 * a + (1 - beta2) * g * g for a, g in zip(v, gradient, strict=True)]
        rms = math.sqrt(sum(g * g / max(a, 1e-16) for a, g in zip(v, gradient, strict=True)) / 4)
        rate = 0.1 / max(1.0, rms)
        divided.append(rms > 1)
        w = [x - rate * 0.01 * x - rate * a / (math.sqrt(b) + 1e-8) for x, a, b in zip(w, m, v, strict=True)]
        assert weight.detach().flatten().tolist() == pytest.approx(w, rel=1e-5)
    assert divided == [False, True, False]


def test_stable_adamw_leaves_alone_what_has_no_gradient():
    used, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = StableAdamW([used, unused], lr=0.1, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1)
    optimizer.step()
    used.grad = torch.ones(2)
    optimizer.step()
    assert used.tolist() == pytest.approx([1 - 0.1 * (0.1 + 1)] * 2)
    assert unused.tolist() == [1, 1]
    unused.grad = torch.ones(2)
    optimizer.step()
    assert unused.tolist() == pytest.approx([1 - 0.1 * (0.1 + 1)] * 2)  # its first step, whatever the others have had


@pytest.mark.parametrize(("name", "cls"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_optimiser_by_name_is_fused(name, cls):
    config = replace(tiny.OPTIM, name=name, momentum=0.5)
    built = build_optimizer(tiny.model(), config)
    assert type(built) is cls
    assert built.defaults["fused"]
    assert built.defaults.get("momentum", 0.5) == 0.5
    assert built.defaults.get("betas", (0.9, 0.98)) == (0.9, 0.98)


def test_a_vanishing_epsilon_leaves_weights_finite():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = StableAdamW([weight], lr=0.1, betas=(0.9, 0.98), eps=1e-30)
    weight.grad = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    optimizer.step()
    assert torch.isfinite(weight).all()


@pytest.mark.parametrize(("name", "kind"), [
    ("adamw", torch.optim.AdamW), ("stableadamw", StableAdamW), ("sgd", torch.optim.SGD),
])  # fmt: skip
def test_every_optimiser_by_its_name_steps_and_resumes_to_the_bit(name, kind, tmp_path):
    optim = replace(tiny.OPTIM, name=name, momentum=0.9 if name == "sgd" else 0.0, weight_decay=0.1)
    optim = replace(optim, lr=2e-3, betas=(0.8, 0.95), eps=1e-3)
    straight, fresh = (tiny.trainer(optim=optim) for _ in range(2))
    assert type(straight.optimizer) is kind
    fields = {field: getattr(optim, field) for field in ("lr", "betas", "eps", "momentum")}
    assert {field: straight.optimizer.defaults.get(field, value) for field, value in fields.items()} == fields
    tiny.goes_on(straight, fresh, tmp_path)
