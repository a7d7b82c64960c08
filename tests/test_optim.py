"""Learning rates as golden lists, and parameter groups by module type."""

from dataclasses import replace

import pytest
import torch

from normexp.optim import build_optimizer, learning_rate, parameter_groups
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


def test_a_tied_matrix_is_in_one_group_once():
    groups = parameter_groups(tiny.model(tied=True), 0.1)
    assert len({id(p) for group in groups for p in group["params"]}) == sum(len(group["params"]) for group in groups)


@pytest.mark.parametrize(("name", "cls"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_optimiser_by_name_is_fused(name, cls):
    config = replace(tiny.OPTIM, name=name, momentum=0.5)
    built = build_optimizer(tiny.model(), config)
    assert type(built) is cls
    assert built.defaults["fused"]
    assert built.defaults.get("momentum", 0.5) == 0.5
    assert built.defaults.get("betas", (0.9, 0.98)) == (0.9, 0.98)
