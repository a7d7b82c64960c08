"""The trainer's promises: exact resume, steps that are skipped whole, cells that differ in one variable only."""

import copy
import functools
import itertools
import os
import signal
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normexp import checkpoint
from normexp.fields import UserError
from normexp.interruption import interruption
from normexp.model import cross_entropy_sum
from normexp.norms import batch_norms
from normexp.optim import learning_rate
from normexp.telemetry import Buffer
from normexp.trainer import Outcome, fit, micro_batches, stream
from tests import tiny
from tests.tiny import VOLATILE, numbers, same_weights


def train(trainer, path, rows, hopeless=lambda: False, log=None):
    with interruption() as received:
        save = functools.partial(checkpoint.save, path / "checkpoint.pt")
        return fit(trainer, log=log or rows.extend, save=save, hopeless=hopeless, received=received)


@pytest.mark.parametrize(("norm", "placement"), tiny.CELLS)
def test_every_cell_trains(norm, placement, tmp_path):
    trainer, rows = tiny.trainer(norm, placement, train=replace(tiny.TRAIN, steps=60)), []
    assert train(trainer, tmp_path, rows) == Outcome(60, None, False)
    assert [row["step"] for row in rows] == list(range(61))
    validated = {row["step"]: row["val/loss"] for row in rows if "val/loss" in row}
    assert list(validated) == [0, *range(4, 61, 4)]
    assert validated[60] < validated[0] - 0.5
    assert all(("val/loss_batch_stats" in row) == ("val/loss" in row and norm == "bn") for row in rows)


@pytest.mark.parametrize("stop", [1, 3, 6])
@pytest.mark.parametrize("norm", ["ln", "bn"])
def test_resume_is_bit_for_bit(norm, stop, tmp_path):
    """Dropout on, padded rows, accumulation: as if nothing had happened, wherever the run is cut."""
    settings = {"source": tiny.Source(padded=True), "dropout": 0.3, "train": replace(tiny.TRAIN, grad_accum=2)}
    straight, rows = tiny.trainer(norm, **settings), []
    train(straight, tmp_path, rows)
    first = tiny.trainer(norm, **settings)
    buffer = Buffer()
    for _ in range(stop):
        buffer.add(*first.take_step())
    checkpoint.save(tmp_path / "cut.pt", first.state())
    second, rest = tiny.trainer(norm, seed=0, **settings), []
    second.load(checkpoint.load(tmp_path / "cut.pt"))
    torch.manual_seed(12345)  # what happened meanwhile must not matter
    train(second, tmp_path, rest)
    assert numbers(rest) == numbers(rows[stop + 1 :])
    assert same_weights(straight.model, second.model)
    assert second.tokens == straight.tokens


class Noise(nn.Module):
    """A user's norm that draws random numbers, without a parameter or a dropout layer that could tell."""

    def __init__(self, dim: int) -> None:
        super().__init__()

    def forward(self, x, mask=None):
        return x + 0.1 * torch.randn_like(x)


@pytest.mark.parametrize(("norm", "changes"), [(Noise, {}), ("ln", {"dropout": 0.3})], ids=["norm", "dropout"])
def test_random_numbers_are_a_function_of_the_step(norm, changes):
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)  # what happened before must not matter
        trainer = tiny.trainer(norm, **changes)
        losses.append([trainer.take_step()[1][0].values[0].item() for _ in range(2)])
    assert losses[0] == losses[1]


def test_dropout_is_by_seed_step_and_micro_batch():
    """Of the embedding, in three steps of two micro-batches, for two seeds: as torch draws it from each stream."""
    seen, expected = [], []
    for seed in (1, 2):
        trainer = tiny.trainer(dropout=0.5, seed=seed, train=replace(tiny.TRAIN, grad_accum=2))
        trainer.model.embed.register_forward_hook(lambda _, __, out: seen.append(out != 0))
        tiny.rows_of(trainer, 3)
        for step, part in itertools.product((1, 2, 3), (0, 1)):
            torch.manual_seed(stream(seed, step, part))
            expected.append(F.dropout(torch.ones(4, 16, 16), 0.5) != 0)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(seen, expected, strict=True))
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(seen, 2))


@pytest.mark.parametrize(("number", "at"), [(signal.SIGTERM, 5), (signal.SIGINT, 2), (signal.SIGUSR2, 7)])
def test_a_signal_ends_the_step_saves_and_resumes(number, at, tmp_path):
    straight, whole = tiny.trainer(), []
    train(straight, tmp_path / "..", whole)
    trainer, rows, take_step = tiny.trainer(), [], tiny.Trainer.take_step

    def interrupted():
        if trainer.step + 1 == at:
            os.kill(os.getpid(), number)
        return take_step(trainer)

    trainer.take_step = interrupted
    before = signal.getsignal(number)
    assert train(trainer, tmp_path, rows) == Outcome(at, number, False)
    assert signal.getsignal(number) is before
    resumed = tiny.trainer()
    resumed.load(checkpoint.load(tmp_path / "checkpoint.pt"))
    assert train(resumed, tmp_path, rows).step == 8
    assert numbers(rows) == numbers(whole)
    assert same_weights(resumed.model, straight.model)


def test_a_signal_in_the_last_step_leaves_a_finished_run(tmp_path):
    trainer, take_step = tiny.trainer(), tiny.Trainer.take_step

    def interrupted():
        if trainer.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return take_step(trainer)

    trainer.take_step = interrupted
    assert train(trainer, tmp_path, []) == Outcome(8, None, False)
    assert checkpoint.load(tmp_path / "checkpoint.pt")["step"] == 8


def test_rows_reach_the_log_before_the_checkpoint_that_covers_them(tmp_path):
    trainer, logged, seen = tiny.trainer(), [], []

    def log(rows):
        logged.extend(rows)
        state = checkpoint.load(tmp_path / "checkpoint.pt")
        seen.append((logged[-1]["step"], 0 if state is None else state["step"]))

    train(trainer, tmp_path, [], log=log)
    assert all(step > saved for step, saved in seen)
    assert checkpoint.load(tmp_path / "checkpoint.pt")["step"] == 8


def poison(trainer, step, value=float("nan"), layer=None):
    """From now on, at `step` alone, the gradient of one matrix (or, without a layer, the loss) is not finite."""
    backward = trainer._backward

    def poisoned():
        loss = backward()
        if trainer.step == step:
            matrix = trainer.model.head if layer is None else trainer.model.blocks[layer].mlp.out
            matrix.weight.grad[0, 0] = value
        return loss

    trainer._backward = poisoned


@pytest.mark.parametrize(("step", "value"), [(3, float("nan")), (3, float("inf")), (4, float("nan"))])
def test_a_gradient_that_is_not_finite_changes_nothing(step, value, tmp_path):
    """Nor at the fourth step, where the metrics are not read."""
    trainer, buffer = tiny.trainer("bn"), Buffer()
    poison(trainer, step, value, layer=1)
    for _ in range(step - 1):
        buffer.add(*trainer.take_step())
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    moments = [state["exp_avg_sq"].clone() for state in trainer.optimizer.state.values()]
    buffer.flush()
    buffer.add(*trainer.take_step())
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())
    after = [state["exp_avg_sq"] for state in trainer.optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
    (row,) = buffer.flush()
    bad = {path for path, number in row.items() if not torch.isfinite(torch.tensor(float(number)))}
    assert bad == {"grad_norm/total", "grad_norm/layer_01", "grad_norm/layer_01/mlp.out"}
    buffer.add(*trainer.take_step())  # and the next step is an ordinary one
    assert all(torch.isfinite(torch.tensor(float(number))) for number in buffer.flush()[0].values())


def test_an_infinite_input_does_not_reach_the_running_statistics():
    trainer = tiny.trainer("bn")
    trainer.take_step()
    before = {name: buffer.clone() for name, buffer in trainer.model.named_buffers()}
    weight = trainer.model.embed.token.weight
    kept = weight.detach().clone()
    weight.data[:] = float("inf")
    trainer.take_step()
    weight.data.copy_(kept)
    assert len(before) == 10
    assert all(torch.equal(before[name], buffer) for name, buffer in trainer.model.named_buffers())


def test_a_hopeless_learning_rate_is_recorded_not_raised(tmp_path):
    trainer, rows = tiny.trainer("ln", "post", optim=replace(tiny.OPTIM, lr=1e30, warmup_steps=0)), []
    assert train(trainer, tmp_path, rows).step == 8
    assert rows[-1]["grad_norm/total"] != rows[-1]["grad_norm/total"]  # NaN, as it was
    assert any(path.startswith("grad_norm/layer_00") for path in rows[-1])


@pytest.mark.parametrize("second", [cell for cell in tiny.CELLS if cell != ("ln", "pre")])
def test_two_cells_differ_in_norm_and_placement_alone(second):
    """Shared parameters, batches, dropout draws and the weight-decay set are the same, step by step."""
    cells = [tiny.trainer(*cell, dropout=0.5) for cell in (("ln", "pre"), second)]
    first, other = (dict(trainer.model.named_parameters()) for trainer in cells)
    shared = [name for name in first if name in other and "norm" not in name]
    assert len(shared) == 28
    assert all(torch.equal(first[name], other[name]) for name in shared)
    decayed = [
        {n for n, p in t.model.named_parameters() if any(p is q for q in t.optimizer.param_groups[0]["params"])}
        for t in cells
    ]
    assert decayed[0] == decayed[1]
    seen = []
    for trainer in cells:
        batches, draws = [], []
        batch = trainer.source.batch

        def recorded(*arguments, batches=batches, batch=batch):
            batches.append(batch(*arguments))
            return batches[-1]

        trainer.source.batch = recorded
        for module in trainer.model.modules():
            if type(module).__name__ == "Embed":
                module.register_forward_hook(lambda _, __, out, draws=draws: draws.append(out == 0))
            if type(module).__name__ in ("Attention", "MLP"):
                module.register_forward_hook(lambda _, __, out, draws=draws: draws.append(out == 0))
        for _ in range(3):
            trainer.take_step()
        seen.append((batches, draws))
    for a, b in zip(*(batches for batches, _ in seen), strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.targets, b.targets)
    masks = [draws for _, draws in seen]
    assert len(masks[0]) == 3 * 5
    assert all(torch.equal(a, b) for a, b in zip(*masks, strict=True))
    assert not torch.equal(masks[0][0], masks[0][5])  # and another step draws others


def test_micro_batches_and_random_streams():
    batch = tiny.Source(padded=True).batch(0, 1, 6)
    parts = list(micro_batches(batch, 2))
    assert [len(part.tokens) for part in parts] == [2, 2, 2]
    assert torch.equal(torch.cat([part.mask for part in parts]), batch.mask)
    values = {stream(seed, step, part) for seed in range(4) for step in range(50) for part in range(4)}
    assert len(values) == 800
    assert all(0 <= value < 2**63 for value in values)


def test_auxiliary_losses_and_after_step_hooks(tmp_path):
    model_hooks = {"aux": 0, "after": 0}
    trainer = tiny.trainer(train=replace(tiny.TRAIN, grad_accum=2, batch_size=2))
    plain = tiny.trainer(train=replace(tiny.TRAIN, grad_accum=2, batch_size=2))
    gain = trainer.model.blocks[0].norm["attn_in"].weight
    trainer.aux_losses = [lambda: (model_hooks.update(aux=model_hooks["aux"] + 1), 3 * gain.sum())[1]]
    trainer.after_step = [lambda: model_hooks.update(after=model_hooks["after"] + 1)]
    captured = []
    for each in (trainer, plain):
        loss = each._backward() if not each.step else None
        captured.append((loss, each.model.blocks[0].norm["attn_in"].weight.grad.clone()))
    torch.testing.assert_close(captured[0][1], captured[1][1] + 3)  # the mean over micro-batches
    assert captured[0][0] == captured[1][0]  # the reported loss is the cross-entropy alone
    trainer.optimizer.zero_grad()
    trainer.take_step()
    assert model_hooks == {"aux": 4, "after": 1}


def test_early_stop_asks_after_evaluations_only(tmp_path):
    asked = []
    trainer = tiny.trainer(train=replace(tiny.TRAIN, early_stop=True))
    outcome = train(trainer, tmp_path, [], hopeless=lambda: asked.append(trainer.step) or True)
    assert (outcome, asked) == (Outcome(4, None, True), [4])
    assert checkpoint.load(tmp_path / "checkpoint.pt")["step"] == 4
    killed_after = tiny.trainer(train=replace(tiny.TRAIN, early_stop=True))
    killed_after.load(checkpoint.load(tmp_path / "checkpoint.pt"))
    assert train(killed_after, tmp_path, [], hopeless=lambda: True) == Outcome(4, None, True)
    off = tiny.trainer()
    assert train(off, tmp_path, [], hopeless=lambda: True) == Outcome(8, None, False)


def test_a_signal_at_an_early_stop_leaves_a_stopped_run(tmp_path):
    trainer, received = tiny.trainer(train=replace(tiny.TRAIN, early_stop=True)), []
    hopeless = lambda: received.append(signal.SIGTERM) is None  # noqa: E731
    assert fit(trainer, log=len, save=len, hopeless=hopeless, received=received) == Outcome(4, None, True)


@pytest.mark.parametrize(("begins", "asked"), [(0, [4, 8]), (3, [4, 8]), (4, [4, 8]), (5, [8]), (8, [8]), (12, [])])
def test_a_resumed_run_may_stop_early_where_the_whole_one_might(begins, asked, tmp_path):
    """After an evaluation that is not the last; after the last step there is nothing left to stop."""
    trainer, seen = tiny.trainer(train=replace(tiny.TRAIN, steps=12, early_stop=True)), []
    tiny.rows_of(trainer, begins)
    outcome = train(trainer, tmp_path, [], hopeless=lambda: seen.append(trainer.step))
    assert (outcome, seen) == (Outcome(12, None, False), asked)


def test_when_a_run_evaluates_writes_and_saves():
    """Each by its own number of steps, and all at the last; what is evaluated or saved is written at once."""
    train = replace(tiny.TRAIN, steps=11, eval_every=5, checkpoint_every=4)
    trainer, rows, written, saved = (
        tiny.trainer(train=train, telemetry=replace(tiny.TELEMETRY, flush_every=3)),
        [],
        [],
        [],
    )

    def log(new):
        rows.extend(new)
        written.append(new[-1]["step"])

    fit(trainer, log=log, save=lambda state: saved.append(state["step"]), hopeless=lambda: True, received=())
    assert [row["step"] for row in rows if "val/loss" in row] == [0, 5, 10, 11]
    assert saved == [4, 8, 11]
    assert written == [3, 4, 5, 6, 8, 9, 10, 11]


def test_bfloat16_stays_near_float32_and_keeps_float32_parameters(tmp_path):
    rows = {}
    for dtype in ("float32", "bfloat16"):
        trainer, rows[dtype] = tiny.trainer(train=replace(tiny.TRAIN, dtype=dtype)), []
        train(trainer, tmp_path, rows[dtype])
        assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    losses = [[row["train/loss"] for row in rows[dtype][1:]] for dtype in rows]
    assert losses[0] == pytest.approx(losses[1], abs=0.03)
    assert losses[0] != losses[1]


def test_an_evaluation_between_two_steps_changes_nothing():
    """Nor does it fail in place, BatchNorm and accumulation included."""
    trainers = [tiny.trainer("bn", train=replace(tiny.TRAIN, grad_accum=2)) for _ in range(2)]
    for index, trainer in enumerate(trainers):
        for _ in range(3):
            trainer.take_step()
            if index:
                trainer.evaluate()
    assert same_weights(trainers[0].model, trainers[1].model)
    assert trainers[1].model.training


def test_pads_are_not_counted_as_tokens():
    trainer = tiny.trainer(source=tiny.Source(padded=True))
    trainer.take_step()
    assert trainer.tokens == int(tiny.Source(padded=True).batch(0, 1, 4).mask.sum())


def test_a_signal_during_an_evaluation_is_not_lost(tmp_path):
    """It ends the next step, and the checkpoint that it saves is of that step."""
    trainer, evaluate = tiny.trainer(), tiny.Trainer.evaluate

    def interrupted():
        if trainer.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(trainer)

    trainer.evaluate = interrupted
    outcome = train(trainer, tmp_path, [])
    assert outcome.signal == signal.SIGTERM
    assert checkpoint.load(tmp_path / "checkpoint.pt")["step"] == outcome.step


@pytest.mark.parametrize("decay", ["constant", "cosine"])
def test_every_step_moves_by_its_own_learning_rate(decay):
    """ΔW = −lr(step) · g under SGD, through the warmup and the decay; momentum 0."""
    optim = replace(tiny.OPTIM, name="sgd", lr=0.5, warmup_steps=3, decay=decay, final_lr_fraction=0.1)
    trainer, buffer = tiny.trainer(optim=optim), Buffer()
    for step in range(1, 9):
        weight = trainer.model.head.weight
        before, norm = weight.detach().clone(), None
        buffer.add(*trainer.take_step())
        (row,) = buffer.flush()
        moved = (weight - before).norm().item()
        if norm := row.get("grad_norm/head/weight"):
            assert moved == pytest.approx(learning_rate(step, optim, 8) * norm, rel=1e-4)
        assert row["train/lr"] == learning_rate(step, optim, 8)


@pytest.mark.parametrize("name", ["adamw", "stableadamw", "sgd"])
def test_weight_decay_shrinks_the_matrices_and_nothing_else(name):
    """With no gradient at all, a step is W ← W (1 − lr · decay)."""

    class Nothing(tiny.Source):
        def batch(self, seed, step, rows):
            batch = super().batch(seed, step, rows)
            return batch._replace(targets=torch.full_like(batch.targets, -100))

    optim = replace(tiny.OPTIM, name=name, lr=0.1, warmup_steps=0, weight_decay=0.5)
    trainer = tiny.trainer(optim=optim, source=Nothing())
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.take_step()
    for name, parameter in trainer.model.named_parameters():
        factor = 0.95 if parameter.ndim > 1 else 1.0
        torch.testing.assert_close(parameter, factor * before[name])


def test_threads_are_the_configs(tmp_path):
    before = torch.get_num_threads()
    try:
        train(tiny.trainer(train=replace(tiny.TRAIN, threads=2)), tmp_path, [])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_validation_loss_is_the_mean_over_real_tokens():
    trainer = tiny.trainer(source=tiny.Source(padded=True))
    batches = trainer.source.validation(4, 2)
    total, count = 0.0, 0
    for batch in batches:
        log_p = trainer.model(batch.tokens, batch.mask).log_softmax(-1)
        total -= log_p.gather(-1, batch.targets.clamp(min=0).unsqueeze(-1))[batch.mask].sum().item()
        count += int(batch.mask.sum())
    (reading,) = trainer.evaluate()
    assert reading.values.item() == pytest.approx(total / count, rel=1e-5)


def mean_loss(model, batches):
    with torch.no_grad():
        losses = [cross_entropy_sum(model(batch.tokens, batch.mask), batch.targets).item() for batch in batches]
    return pytest.approx(sum(losses) / sum(int(batch.mask.sum()) for batch in batches), rel=1e-6)


def test_batch_norm_is_told_the_pads_and_validated_by_both_statistics():
    """The model itself, called with the mask: in training, by batch statistics; in evaluation, by running ones."""
    trainer = tiny.trainer("bn", source=tiny.Source(padded=True))
    expected = mean_loss(copy.deepcopy(trainer.model), [trainer.source.batch(0, 1, 4)])
    assert tiny.rows_of(trainer, 3)[0]["train/loss"] == expected
    batches = trainer.source.validation(4, 2)
    running, batch = (mean_loss(copy.deepcopy(trainer.model).train(mode), batches) for mode in (False, True))
    found = {reading.paths[0]: reading.values.item() for reading in trainer.evaluate()}
    assert found == {"val/loss": running, "val/loss_batch_stats": batch}
    assert found["val/loss"] != batch


@pytest.mark.parametrize("stats", ["batch_time", "position", "cumulative"])
@pytest.mark.parametrize("padded", [False, True])
def test_an_evaluation_between_forward_and_backward(stats, padded):
    """No in-place error, and the gradient that would have been."""
    gradients = []
    for evaluated in (False, True):
        trainer = tiny.trainer("bn", source=tiny.Source(padded))
        for norm in batch_norms(trainer.model):
            norm.stats = stats
            if stats == "position":
                norm.running_mean, norm.running_var = torch.zeros(16, 16), torch.ones(16, 16)
        loss = trainer._loss_sum(trainer.source.batch(0, 1, 4))
        if evaluated:
            trainer.evaluate()
        loss.backward()
        gradients.append(trainer.model.embed.token.weight.grad)
    assert torch.equal(*gradients)


def test_running_statistics_that_overflow_skip_the_step():
    trainer = tiny.trainer("bn")
    trainer.take_step()
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    for parameter in trainer.model.embed.parameters():
        parameter.data *= 1e20  # finite activations whose variance is not
    trainer.take_step()
    after = trainer.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith("embed."))


def test_another_type_of_device_does_not_go_on():
    state = tiny.trainer().state() | {"device": "cuda"}
    with pytest.raises(UserError, match="device=cpu: the run was begun on cuda"):
        tiny.trainer().load(state)


def test_compiled_gradient_norms_are_the_eager_ones(tmp_path, monkeypatch):
    """Per layer, at every step, with no graph break, evaluations included; and the checkpoint knows nothing of it."""
    compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", compiled)
    rows = {}
    for wanted in (False, True):
        trainer, rows[wanted] = tiny.trainer("rms", train=replace(tiny.TRAIN, compile=wanted)), []
        train(trainer, tmp_path, rows[wanted])
    for eager, other in zip(rows[False], rows[True], strict=True):
        assert set(eager) == set(other)
        for path in eager.keys() - VOLATILE:
            assert other[path] == pytest.approx(eager[path], rel=1e-3, abs=1e-6), path
    assert not [name for name in checkpoint.load(tmp_path / "checkpoint.pt")["model"] if "_orig_mod" in name]
