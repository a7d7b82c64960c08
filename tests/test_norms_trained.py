"""Every norm in the trainer: it trains, it resumes bit for bit, and a skipped step leaves its state alone."""

from dataclasses import replace

import pytest
import torch

from normexp.norms import batch_norms
from tests import tiny

CELLS = [(norm, placement) for norm in tiny.ZOO for placement in tiny.PLACEMENTS]
STATEFUL = ["rbn", "switch", "power"]
PADDED = tiny.Source(padded=True)


def stepped(trainer, steps):
    return tiny.numbers(tiny.rows_of(trainer, steps))


def state(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("norm", "placement"), CELLS)
def test_every_cell_takes_three_steps(norm, placement):
    """Its gain moves, and it has two validation losses where it has two kinds of statistics."""
    trainer = tiny.trainer(norm, placement, source=PADDED)
    before = state(trainer)
    rows = stepped(trainer, 3)
    assert all(torch.isfinite(torch.tensor([row["train/loss"], row["grad_norm/total"]])).all() for row in rows)
    after = state(trainer)
    gains = [name for name in before if "norm" in name and name.endswith("weight")]
    assert len(gains) == (0 if norm == "none" else 5 if placement == "pre" else 4)
    assert not any(torch.equal(before[name], after[name]) for name in gains)
    paths = [path for reading in trainer.evaluate() for path in reading.paths]
    assert paths == ["val/loss", "val/loss_batch_stats"][: 2 if norm in STATEFUL else 1]
    assert bool(batch_norms(trainer.model)) == (norm in STATEFUL)
    assert equal(after, state(trainer))


@pytest.mark.parametrize(("norm", "placement"), CELLS)
def test_resume_is_bit_for_bit(norm, placement, tmp_path):
    """Cut in the second of four steps; what a norm remembers is in the checkpoint."""
    tiny.goes_on(*(tiny.trainer(norm, placement, source=PADDED, dropout=0.3) for _ in range(2)), tmp_path)


@pytest.mark.parametrize("norm", STATEFUL)
def test_a_step_that_is_not_finite_leaves_the_state_alone(norm):
    """φ, ν and the count of PowerNorm, the running statistics of the others; the next step is as if it had not been."""
    trainer, other = (tiny.trainer(norm, source=PADDED) for _ in range(2))
    for each in (trainer, other):
        stepped(each, 2)
    before = state(trainer)
    backward = trainer._backward

    def poisoned():
        loss = backward()
        assert not equal(before, state(trainer))  # it had moved
        trainer.model.head.weight.grad[0, 0] = float("nan")
        return loss

    trainer._backward = poisoned
    stepped(trainer, 1)
    assert equal(before, state(trainer))
    trainer._backward, other.step = backward, 3
    assert stepped(trainer, 1)[0]["train/loss"] == stepped(other, 1)[0]["train/loss"]
    assert equal(state(trainer), state(other))


@pytest.mark.parametrize("norm", STATEFUL)
def test_an_infinite_input_does_not_reach_the_state(norm):
    trainer = tiny.trainer(norm)
    stepped(trainer, 1)
    before = {name: buffer.clone() for name, buffer in trainer.model.named_buffers()}
    weight = trainer.model.embed.token.weight
    kept = weight.detach().clone()
    weight.data[:] = float("inf")
    stepped(trainer, 1)
    weight.data.copy_(kept)
    assert equal(before, dict(trainer.model.named_buffers()))


@pytest.mark.parametrize("norm", STATEFUL)
def test_an_evaluation_between_two_steps_and_within_one_changes_nothing(norm):
    trainers = [tiny.trainer(norm, source=PADDED) for _ in range(2)]
    loss_sum = trainers[1]._loss_sum

    def evaluated(batch):
        loss = loss_sum(batch)
        if torch.is_grad_enabled():
            trainers[1]._loss_sum = loss_sum
            trainers[1].evaluate()
            trainers[1]._loss_sum = evaluated
        return loss

    trainers[1]._loss_sum = evaluated
    assert stepped(trainers[0], 3) == stepped(trainers[1], 3)
    assert equal(state(trainers[0]), state(trainers[1]))


def test_the_penalty_of_rbn_reaches_the_gradient_once_for_each_micro_batch(monkeypatch):
    """And not the loss that is reported."""
    settings = {"source": PADDED, "train": replace(tiny.TRAIN, grad_accum=2, batch_size=2)}
    gradients, losses, asked = [], [], []
    for penalty in (0.0, 5.0):
        trainer = tiny.trainer("rbn", **settings)
        for norm in batch_norms(trainer.model):
            norm.mean_penalty = norm.spread_penalty = penalty
        hooks = trainer.aux_losses
        trainer.aux_losses = [lambda hook=hook: (asked.append(hook()), asked[-1])[1] for hook in hooks]
        trainer.step += 1
        losses.append(trainer._backward())
        gradients.append(trainer.model.embed.token.weight.grad)
    assert torch.equal(*losses)
    assert (gradients[1] - gradients[0]).norm() > 0.1 * gradients[0].norm()
    assert len(asked) == 2 * 2 * 5  # of each of five norms
    assert all(value > 0 for value in asked[10:])


@pytest.mark.parametrize("norm", [norm for norm in tiny.ZOO if norm != "power"])
def test_gradient_norms_under_float16_are_those_of_float32(norm):
    (exact,) = stepped(tiny.trainer(norm), 1)
    (low,) = stepped(tiny.trainer(norm, train=replace(tiny.TRAIN, dtype="float16")), 1)
    for path in exact:
        if path.startswith(("grad_norm/layer", "train/loss")) and exact[path] > 1e-5:
            assert low[path] == pytest.approx(exact[path], rel=0.03), path
