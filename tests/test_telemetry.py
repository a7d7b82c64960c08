"""Metrics against plain loops, the schedule, and the promises about gradient norms."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from normexp.data import Batch
from normexp.model import cross_entropy_sum
from normexp.telemetry import Buffer, Layout, Reading, TelemetryConfig, locate
from tests import tiny
from tests.tiny import rows_of


def gradients(model, batch, parts=1):
    """name -> gradient of the mean loss, by hand."""
    loss = cross_entropy_sum(model(batch.tokens, batch.mask), batch.targets) / (batch.targets != -100).sum()
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


@pytest.mark.parametrize(("name", "expected"), [
    ("blocks.3.mlp.out.weight", ("layer_03", "mlp.out")),
    ("blocks.11.norm.attn_in.bias", ("layer_11", "norm.attn_in.bias")),
    ("blocks.2.alpha", ("layer_02", "alpha")),
    ("embed.token.weight", ("embed", "token")), ("head.weight", ("head", "weight")),
    ("final_norm.bias", ("final_norm", "bias")),
])  # fmt: skip
def test_paths(name, expected):
    assert locate(name) == expected


@pytest.mark.parametrize(("norm", "placement"), tiny.CELLS)
def test_logged_keys_are_the_layers(norm, placement):
    (row,) = rows_of(tiny.trainer(norm, placement))
    groups = {"embed", "layer_00", "layer_01", "head"} | ({"final_norm"} if placement == "pre" else set())
    inside = ["attn.q", "attn.k", "attn.v", "attn.o", "mlp.in", "mlp.out"]
    matrices = {f"layer_{layer:02d}/{name}" for layer in range(2) for name in inside} | {
        "embed/token",
        "embed/position",
        "head/weight",
    }
    for metric in ("grad_norm", "weight_norm", "update_ratio"):
        logged = {path.removeprefix(f"{metric}/") for path in row if path.startswith(f"{metric}/")} - {"total"}
        assert logged == groups | matrices
    assert {path.removeprefix("rms_t/") for path in row if path.startswith("rms_t/")} == matrices


def test_gradient_norms_against_a_loop():
    trainer, model, source = tiny.trainer(), tiny.model(), tiny.Source()
    by_name = gradients(model, source.batch(0, 1, 4))
    (row,) = rows_of(trainer)
    for layer in range(2):
        inside = [g for name, g in by_name.items() if name.startswith(f"blocks.{layer}.")]
        assert row[f"grad_norm/layer_{layer:02d}"] == pytest.approx(
            sum(g.square().sum() for g in inside).sqrt().item(), rel=1e-5
        )
        expected = by_name[f"blocks.{layer}.mlp.out.weight"].norm().item()
        assert row[f"grad_norm/layer_{layer:02d}/mlp.out"] == pytest.approx(expected, rel=1e-5)
    total = sum(g.square().sum() for g in by_name.values()).sqrt().item()
    assert row["grad_norm/total"] == pytest.approx(total, rel=1e-5)
    assert row["layer_ratio"] == pytest.approx(
        row["grad_norm/layer_00/mlp.out"] / row["grad_norm/layer_01/mlp.out"], rel=1e-5
    )


def test_the_layer_ratio_is_first_over_last():
    (row,) = rows_of(tiny.trainer(depth=4))
    expected = row["grad_norm/layer_00/mlp.out"] / row["grad_norm/layer_03/mlp.out"]
    assert row["layer_ratio"] == pytest.approx(expected, rel=1e-6)


class Idle(nn.LayerNorm):
    """A norm with a matrix that takes no part."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.idle = nn.Parameter(torch.ones(2, 3))

    def forward(self, x, mask=None):
        return super().forward(x)


def test_what_takes_no_part_has_no_gradient_and_does_not_move():
    row = rows_of(tiny.trainer(Idle, "pre"), 2)[-1]
    read = {metric: row[f"{metric}/layer_01/norm.attn_in.idle"] for metric in ("grad_norm", "update_ratio", "rms_t")}
    assert read == {"grad_norm": 0, "update_ratio": 0, "rms_t": 0}
    assert row["weight_norm/layer_01/norm.attn_in.idle"] == pytest.approx(6**0.5)


def test_gradient_norms_are_taken_before_clipping():
    (free,), (clipped,) = (rows_of(tiny.trainer(train=replace(tiny.TRAIN, clip=clip))) for clip in (0.0, 0.01))
    assert clipped["grad_norm/total"] == free["grad_norm/total"] > 0.1
    assert clipped["rms_t/layer_00/mlp.out"] == pytest.approx(free["rms_t/layer_00/mlp.out"], rel=1e-3)


def test_clipping_scales_the_update():
    changes = [replace(tiny.OPTIM, name="sgd", lr=1.0, warmup_steps=0)]
    totals = []
    for clip in (0.0, 0.01):
        trainer = tiny.trainer(optim=changes[0], train=replace(tiny.TRAIN, clip=clip))
        before = [p.detach().clone() for p in trainer.layout.parameters]
        trainer.take_step()
        moved = torch.cat([(p - b).flatten() for p, b in zip(trainer.layout.parameters, before, strict=True)])
        totals.append(moved.norm().item())
    assert totals[1] == pytest.approx(0.01, rel=1e-3)
    assert totals[0] > 0.1


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("norm", ["ln", "rms"])
def test_accumulated_micro_batches_equal_one_batch(norm, padded):
    """4 × 2 against 1 × 8 sequences; padded losses divide by the real tokens of all micro-batches."""
    source = tiny.Source(padded)
    settings = ({"batch_size": 2, "grad_accum": 4}, {"batch_size": 8, "grad_accum": 1})
    many, one = (rows_of(tiny.trainer(norm, source=source, train=replace(tiny.TRAIN, **s)), 3) for s in settings)
    for first, second in zip(many, one, strict=True):
        for path in [p for p in first if p == "train/loss" or p.startswith("grad_norm")]:
            # rounding differs by the order of sums, and Adam's first steps follow the gradient's sign
            assert first[path] == pytest.approx(second[path], rel=1e-5 if first["step"] == 1 else 2e-3), path


def test_batch_norm_sees_each_micro_batch_alone():
    settings = ({"batch_size": 2, "grad_accum": 4}, {"batch_size": 8, "grad_accum": 1})
    many, one = (rows_of(tiny.trainer("bn", train=replace(tiny.TRAIN, **s)))[0] for s in settings)
    assert abs(many["train/loss"] - one["train/loss"]) > 1e-3


def test_weight_norm_and_update_ratio():
    trainer = tiny.trainer(optim=replace(tiny.OPTIM, name="sgd", lr=0.5, warmup_steps=0))
    weight = trainer.model.blocks[1].attn.v.weight
    before = weight.detach().clone()
    (row,) = rows_of(trainer)
    assert row["weight_norm/layer_01/attn.v"] == pytest.approx(before.norm().item(), rel=1e-5)
    ratio = (weight - before).norm() / before.norm()
    assert row["update_ratio/layer_01/attn.v"] == pytest.approx(ratio.item(), rel=1e-4)
    assert row["grad_norm/layer_01/attn.v"] * 0.5 == pytest.approx((weight - before).norm().item(), rel=1e-4)
    assert not any(path.startswith("rms_t") for path in row)  # SGD has no second moment


def test_rms_t_starts_at_its_ceiling_and_matches_a_loop():
    """v = (1 − β₂) g² after one step, so RMS_t = 1/√(1 − 0.98) = 7.07 wherever the gradient is not below ε."""
    trainer = tiny.trainer()
    first, second = rows_of(trainer, 2)
    assert first["rms_t/layer_01/mlp.out"] == pytest.approx(0.02**-0.5, rel=1e-2)
    assert second["rms_t/layer_01/mlp.out"] < first["rms_t/layer_01/mlp.out"]
    fresh = tiny.trainer()
    fresh.take_step()
    gradient = gradients(fresh.model, tiny.Source().batch(0, 2, 4))["blocks.1.mlp.out.weight"]
    fresh.take_step()
    v = fresh.optimizer.state[fresh.model.blocks[1].mlp.out.weight]["exp_avg_sq"]
    expected = (gradient.square() / v.clamp(min=1e-16)).mean().sqrt()
    assert second["rms_t/layer_01/mlp.out"] == pytest.approx(expected.item(), rel=1e-4)


def test_rms_t_is_by_epsilon_where_the_second_moment_is_below_it():
    (row,) = rows_of(tiny.trainer(optim=replace(tiny.OPTIM, eps=1.0)))
    elements = tiny.model().blocks[1].mlp.out.weight.numel()
    expected = row["grad_norm/layer_01/mlp.out"] / elements**0.5
    assert row["rms_t/layer_01/mlp.out"] == pytest.approx(expected, rel=1e-5)


def test_group_norms_over_the_range_of_float32():
    layout = Layout(tiny.model())
    for size in (1e15, 1e-15):
        values = layout.norms(torch.full((sum(layout.segments),), size))
        inside = sum(p.numel() for name, p in tiny.model().named_parameters() if name.startswith("blocks.0."))
        assert values[layout.groups.index("layer_00")].item() == pytest.approx(size * inside**0.5, rel=1e-5)


def test_schedule_is_dense_first():
    config = TelemetryConfig(every=10, dense_steps=3, flush_every=20, metrics=("grad_norm",))
    assert [step for step in range(1, 31) if config.reads(step)] == [1, 2, 3, 10, 20, 30]
    assert not any(replace(config, metrics=()).reads(step) for step in range(1, 31))


def test_every_step_has_loss_rate_and_total_norm():
    rows = rows_of(tiny.trainer(), 8)
    assert all({"train/loss", "train/lr", "grad_norm/total", "tokens", "time"} <= set(row) for row in rows)
    assert [row["step"] for row in rows if "layer_ratio" in row] == [1, 2, 3, 5]
    assert [row["tokens"] for row in rows] == [64 * step for step in range(1, 9)]


def test_the_buffer_makes_one_transfer(monkeypatch):
    buffer, calls = Buffer(), []
    for step in range(5):
        buffer.add({"step": step}, [Reading([f"m/{i}" for i in range(step)], step + torch.arange(step) / 8)])
    to_list = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: calls.append(len(tensor)) or to_list(tensor))
    rows = buffer.flush()
    assert calls == [10]
    assert rows[3] == {"step": 3, "m/0": 3.0, "m/1": 3.125, "m/2": 3.25}
    assert buffer.flush() == []


def test_targets_all_ignored_count_nothing():
    class Empty(tiny.Source):
        def batch(self, seed, step, rows):
            tokens = super().batch(seed, step, rows).tokens
            return Batch(tokens, torch.full_like(tokens, -100), torch.zeros_like(tokens, dtype=torch.bool))

    (row,) = rows_of(tiny.trainer(source=Empty()))
    assert row["train/loss"] == 0
    assert row["grad_norm/total"] == 0
    assert row["tokens"] == 0


def test_the_model_does_not_know_that_it_is_watched():
    model: nn.Module = tiny.trainer().model
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())


class Watching(nn.Module):
    """A LayerNorm that tells the mean of what it saw, and a vector."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.seen = nn.LayerNorm(dim), {}

    def forward(self, x, mask=None):
        self.seen = {"mean": x.mean(), "ends": x.flatten()[[0, -1]], "grid": x[0, :2, :3]}
        return self.norm(x)

    def observed(self):
        return self.seen


def test_what_a_module_observed_is_logged_where_the_metrics_are_read():
    trainer = tiny.trainer(Watching, "pre", telemetry=TelemetryConfig(2, 1, 10, ("layer_ratio",)))
    rows = rows_of(trainer, steps=3)
    assert [{name for name in row if "mean" in name} for row in rows] == [
        places := {f"mean/layer_{i:02d}/norm.{site}" for i in range(2) for site in ("attn_in", "mlp_in")}
        | {"mean/final_norm"},
        places,
        set(),
    ]
    assert {"ends/final_norm.0", "ends/final_norm.1"} <= set(rows[0])
    (row,) = rows_of(trainer)  # the fourth
    seen = trainer.model.final_norm.seen
    assert row["mean/final_norm"] == float(seen["mean"].detach())
    assert [row["ends/final_norm.0"], row["ends/final_norm.1"]] == seen["ends"].tolist()
    assert [row[f"grid/final_norm.{i}"] for i in range(6)] == seen["grid"].flatten().tolist()
    buffer = Buffer()
    buffer.add({"step": 0}, [Reading(["one"], torch.ones(2))])
    with pytest.raises(ValueError, match="zip"):  # or each later value would stand under another's name
        buffer.flush()


def test_norms_of_gradients_are_to_the_bit_those_of_each():
    layout = Layout(tiny.model("dyt", "pre", width=24))  # gains of 24, biases of 24 and 96, scalars
    source = torch.Generator().manual_seed(0)
    gradients = [torch.randn(p.shape, generator=source) * 10.0 ** (i % 7 - 3) for i, p in enumerate(layout.parameters)]
    assert {gradient.ndim for gradient in gradients} == {0, 1, 2}
    each = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
    torch.testing.assert_close(layout.gradient_norms(gradients), each, rtol=0, atol=0)
