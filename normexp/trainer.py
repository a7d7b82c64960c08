"""Training of one cell: steps, evaluation, checkpoints and interruption. It returns facts and judges nothing."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from normexp.arithmetic import Compiled, settle
from normexp.data import Batch, Source
from normexp.fields import NonNegativeFloat, PositiveInt, Range, UserError
from normexp.model import Transformer, cross_entropy_sum, draws, hooks, squared_log_z_sum
from normexp.norms import batch_norms, batch_statistics
from normexp.optim import OptimConfig, build_optimizer, learning_rate
from normexp.telemetry import METRICS, Buffer, Layout, Observed, Reading, Snapshot, TelemetryConfig


@dataclass(frozen=True)
class TrainConfig:
    steps: PositiveInt  # optimiser steps
    batch_size: PositiveInt  # sequences per micro-batch: what a batch norm sees
    grad_accum: PositiveInt  # micro-batches per step
    clip: NonNegativeFloat  # largest total gradient norm; 0: no clipping
    z_loss: NonNegativeFloat  # weight of the mean log² Z over the real tokens, in what is minimised; 0: none
    dtype: Literal["float32", "bfloat16", "float16"]  # of autocast; parameters are float32. float16 scales the loss
    threads: Annotated[int, Range(low=1, high=1024)]  # of one operation on a CPU; it changes the last bits
    eval_every: PositiveInt  # steps
    eval_batches: PositiveInt  # fixed validation batches of batch_size sequences
    checkpoint_every: PositiveInt  # steps
    early_stop: bool  # end a run once it is judged collapsed or diverged
    compile: bool  # the model by torch.compile
    deterministic: bool  # refuse operations that may differ between two runs
    tf32: bool  # on CUDA: matrix products with 10 bits of mantissa


@dataclass(frozen=True)
class Outcome:
    """Where `fit` ended. `signal` is the number of the signal that interrupted it, None if none did."""

    step: int
    signal: int | None
    stopped_early: bool


class Trainer:
    """Everything of a run that changes with its steps, and one method for each thing that happens to it."""

    def __init__(
        self,
        model: Transformer,
        source: Source,
        *,
        optim: OptimConfig,
        train: TrainConfig,
        telemetry: TelemetryConfig,
        seed: int,
        device: torch.device,
    ) -> None:
        settle(device, threads=train.threads, deterministic=train.deterministic, tf32=train.tf32)
        self.model, self.source = model.to(device).train(), source
        self.optim, self.train, self.telemetry = optim, train, telemetry
        self.seed, self.device = seed, device
        self.compiled = Compiled(self.model) if train.compile else None
        self.forward = self.compiled.forward if self.compiled else self.model
        self.optimizer = build_optimizer(model, optim)
        self.scaler = torch.amp.GradScaler(device.type, enabled=train.dtype == "float16")
        self.layout = Layout(model)
        self.metrics, self.observed = [METRICS[name] for name in telemetry.metrics], Observed(model)
        dtype = getattr(torch, train.dtype)
        self.autocast = nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)
        self.draws = draws(model)
        self.aux_losses, self.after_step = hooks(model, "aux_loss"), hooks(model, "after_step")
        kept = model.state_dict()
        self.moving = [buffer for name, buffer in model.named_buffers() if name in kept]  # running statistics
        self.validation: list[Batch] | None = None
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self._clock, self._last_reading = time.perf_counter(), (0, 0.0)
        self.step_seconds: list[float] = []  # of the steps of this process

    def take_step(self) -> tuple[dict[str, float], list[Reading]]:
        start = time.perf_counter()
        taken = self._take_step()
        self.step_seconds.append(time.perf_counter() - start)
        return taken

    def _take_step(self) -> tuple[dict[str, float], list[Reading]]:
        """One optimiser step on the batch of (seed, step). A step whose loss or gradient is not finite changes nothing:
        weights, moments and running statistics stay as they were, and its row names the layers. The schedule counts it.
        """
        self.step += 1
        rate = learning_rate(self.step, self.optim, self.train.steps)
        saved = [buffer.clone() for buffer in self.moving]
        loss = self._backward()
        self.scaler.unscale_(self.optimizer)
        gradients = self.layout.gradients()
        norms = self.layout.gradient_norms(gradients)
        total = torch.linalg.vector_norm(norms)
        moved = [buffer.sum() for buffer in self.moving if buffer.is_floating_point()]
        values = torch.stack([loss, total, *moved])
        finite = all(map(math.isfinite, values.tolist()))
        readings = [Reading(["train/loss", "grad_norm/total"], values[:2])]
        if finite and not self.telemetry.reads(self.step):
            self._update(rate, total)
        elif finite:
            readings += self._watched_update(rate, total, gradients, norms)
        else:
            for buffer, before in zip(self.moving, saved, strict=True):
                buffer.copy_(before)
            readings.append(Reading(self.layout.paths("grad_norm"), self.layout.collect(norms)))
        for parameter in self.layout.parameters:  # all that have one; `zero_grad` takes three times as long
            parameter.grad = None
        self.scaler.update()  # halved after an overflow, doubled after 2000 steps without one
        return self._host_values(rate), readings

    def _backward(self) -> Tensor:
        """Accumulates the gradient of the mean loss over the step's real tokens; returns that loss."""
        batch = self.source.batch(self.seed, self.step, self.train.batch_size * self.train.grad_accum)
        real = batch.real_targets()
        self.tokens += real
        loss: Tensor | None = None
        for index, part in enumerate(micro_batches(batch, self.train.batch_size)):
            if self.draws:  # the same numbers in every cell and after a resume
                seed_dropout(self.device, stream(self.seed, self.step, index))
            logits, targets = self._predict(part)
            part_loss = cross_entropy_sum(logits, targets) / max(real, 1)
            loss = part_loss.detach() if loss is None else loss + part_loss.detach()
            for hook in self.aux_losses:
                part_loss = part_loss + hook() / self.train.grad_accum
            if self.train.z_loss:
                part_loss = part_loss + self.train.z_loss * squared_log_z_sum(logits, targets) / max(real, 1)
            self.scaler.scale(part_loss).backward()  # type: ignore[no-untyped-call]
        assert loss is not None  # a step has a micro-batch
        return loss

    def _predict(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits and targets."""
        tokens, targets = batch.tokens.to(self.device), batch.targets.to(self.device)
        mask = None if batch.mask is None else batch.mask.to(self.device)
        with self.autocast:
            return self.forward(tokens, mask), targets

    def _loss_sum(self, batch: Batch) -> Tensor:
        return cross_entropy_sum(*self._predict(batch))

    def _update(self, rate: float, total: Tensor) -> None:
        if self.train.clip:
            torch.nn.utils.clip_grads_with_norm_(self.layout.parameters, self.train.clip, total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        for hook in self.after_step:
            hook()

    @torch.no_grad()
    def _watched_update(self, rate: float, total: Tensor, gradients: list[Tensor], norms: Tensor) -> list[Reading]:
        before = self.layout.flat_parameters()
        self._update(rate, total)
        change, moments = self.layout.flat_parameters().sub_(before), self._second_moments()
        snapshot = Snapshot(self.layout, norms, gradients, before, change, moments, self.optim.eps)
        return [metric(snapshot) for metric in self.metrics] + self.observed.read()

    def _second_moments(self) -> list[Tensor] | None:
        if self.optim.name == "sgd":
            return None
        state = self.optimizer.state
        return [state[p]["exp_avg_sq"] if p in state else torch.zeros_like(p) for p in self.layout.parameters]

    def _host_values(self, rate: float) -> dict[str, float]:
        row = {"step": self.step, "tokens": self.tokens, "time": self.elapsed(), "train/lr": rate}
        if self.scaler.is_enabled():
            row["train/loss_scale"] = self.scaler.get_scale()
        if self.telemetry.reads(self.step):
            tokens, seconds = self._last_reading
            row["tokens_per_second"] = (self.tokens - tokens) / max(row["time"] - seconds, 1e-9)
            self._last_reading = self.tokens, row["time"]
        return row

    def elapsed(self) -> float:
        """Seconds of this run so far, those before a resume included."""
        return self.seconds + time.perf_counter() - self._clock

    def evaluate(self) -> list[Reading]:
        """Validation loss in nats per token; where norms depend on the batch, by running and by batch statistics."""
        readings = [Reading(["val/loss"], self._validation_loss())]
        if batch_norms(self.model):
            with batch_statistics(self.model):
                readings.append(Reading(["val/loss_batch_stats"], self._validation_loss()))
        return readings

    @torch.no_grad()
    def _validation_loss(self) -> Tensor:
        """(1,)"""
        if self.validation is None:
            self.validation = self.source.validation(self.train.batch_size, self.train.eval_batches)
        self.model.eval()
        losses = [self._loss_sum(batch) for batch in self.validation]
        self.model.train()
        count = sum(batch.real_targets() for batch in self.validation)
        return torch.stack(losses).sum(0, keepdim=True) / max(count, 1)

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.elapsed(),
            "device": self.device.type,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),  # empty without a scale
        }

    def load(self, state: dict[str, Any]) -> None:
        """UserError for the state of another type of device: that one gives other numbers."""
        if state["device"] != self.device.type:
            raise UserError(
                f"device={self.device.type}: the run was begun on {state['device']}; give that, or delete it"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self._clock, self._last_reading = time.perf_counter(), (self.tokens, self.seconds)


def micro_batches(batch: Batch, size: int) -> Iterator[Batch]:
    if len(batch.tokens) <= size:
        yield batch
        return
    for start in range(0, len(batch.tokens), size):
        rows = slice(start, start + size)
        yield Batch(batch.tokens[rows], batch.targets[rows], None if batch.mask is None else batch.mask[rows])


def seed_dropout(device: torch.device, seed: int) -> None:
    """Seeds the generators that a forward pass on `device` draws from: torch.manual_seed would ask every backend."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        getattr(torch, device.type).manual_seed(seed)


def stream(seed: int, step: int, micro_batch: int) -> int:
    """The seed of everything random in one forward pass, dropout above all: a function of where it stands."""
    return int(np.random.SeedSequence([seed, step, micro_batch]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def fit(
    trainer: Trainer,
    *,
    log: Callable[[list[dict[str, float]]], None],
    save: Callable[[dict[str, Any]], None],
    hopeless: Callable[[], bool],
    received: Sequence[int],
) -> Outcome:
    """Trains from where `trainer` stands to the last step. `log` gets rows before `save` a state that covers them.

    `hopeless` is asked after each evaluation when `train.early_stop`. `received`: what `interruption` collects; once it
    holds a signal, the step in hand is ended and a checkpoint saved.
    """
    train, buffer = trainer.train, Buffer()
    if train.early_stop and 0 < trainer.step < train.steps and trainer.step % train.eval_every == 0 and hopeless():
        return Outcome(trainer.step, None, True)  # killed between its last checkpoint and its summary
    if trainer.step == 0:
        buffer.add({"step": 0, "tokens": 0, "time": trainer.elapsed()}, trainer.evaluate())
    while trainer.step < train.steps:
        host, readings = trainer.take_step()
        last = trainer.step == train.steps
        evaluated = last or trainer.step % train.eval_every == 0
        buffer.add(host, readings + (trainer.evaluate() if evaluated else []))
        if evaluated and trainer.compiled:
            trainer.compiled.settle()
        interrupted = bool(received) and not last  # asked once: a signal from here on ends the next step
        saving = last or interrupted or trainer.step % train.checkpoint_every == 0
        if saving or evaluated or trainer.step % trainer.telemetry.flush_every == 0:
            log(buffer.flush())
        stopped = evaluated and not last and train.early_stop and hopeless()
        if saving or stopped:
            save(trainer.state())
        if stopped or interrupted:
            return Outcome(trainer.step, None if stopped else received[0], stopped)
    return Outcome(trainer.step, None, False)
