"""One cell, from a checked config to a judged run in its folder."""

import os
import statistics
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields
from typing import Any

import torch

from normexp import checkpoint
from normexp.arithmetic import flops_per_token, keep_compiled, product_rate
from normexp.config import Config, norm_path
from normexp.data import Source
from normexp.fields import UserError
from normexp.init import initialise, scheme
from normexp.interruption import interruption
from normexp.model import Transformer
from normexp.norms import batch_statistics
from normexp.progress import Progress
from normexp.runs import RunFolder, git_commit, machine, run_id, versions
from normexp.summary import read_rows, summarise
from normexp.trackers import Jsonl, Null, Wandb, open_tracker
from normexp.trainer import Outcome, Trainer, fit
from normexp.verdict import Verdict

KEPT = 4  # corpora of different configs
JUDGED = [field.name for field in fields(Verdict)]


def open_source(config: Config) -> Source:
    return config.data(cache=config.results / "cache")


class Sources:
    """The newest few corpora that were opened: the cells of a sweep mostly share one."""

    def __init__(self) -> None:
        self.open: dict[str, Source] = {}

    def __call__(self, config: Config) -> Source:
        corpus = str((config.resolved["data"], config.results))
        if corpus not in self.open:
            self.open = dict(list(self.open.items())[1 - KEPT :]) | {corpus: open_source(config)}
        return self.open[corpus]


def run_folder(config: Config, source: Source) -> RunFolder:
    return RunFolder(config.results / "runs" / run_id(config.resolved, source.sha256))


def run(config: Config, source: Source, group: str | None, tell: Callable[[str], None], bar: bool) -> RunFolder:
    """Trains the cell, goes on with it where it was broken off, or finds it finished. `group`: of runs, for wandb.
    `bar`: whether its progress is shown."""
    folder = run_folder(config, source)
    if folder.status() == "finished":
        tell(f"run {folder.path.name} is finished already; another value of any field is another run")
        return folder
    with folder.lock(tell), interruption() as received:
        if folder.status() != "finished":  # else the process that held it has done all
            folder.refuse_other_device(config.device.type)
            _train(config, source, folder, group, bar, received)
    if received and folder.status() == "finished":
        os.kill(os.getpid(), received[0])  # it came too late for this run, but not for what it is part of
    return folder


def build(config: Config, source: Source) -> Transformer:
    """The model at its initial weights."""
    torch.manual_seed(config.seed)  # for what a user's own norm or placement may draw in its constructor
    model = Transformer(config.model, source.vocab_size, norm=config.norm, placement=config.placement)
    initialise(model, config.seed)
    if any(hasattr(block, "calibrate") for block in model.blocks):
        batch = source.batch(config.seed, 1, config.train.batch_size)
        with batch_statistics(model):  # running ones begin with the first step
            model.calibrate(batch.tokens, batch.mask)
    return model


def _train(
    config: Config, source: Source, folder: RunFolder, group: str | None, bar: bool, received: Sequence[int]
) -> None:
    facts = _facts(config, folder)
    with _recorded_fault(folder, facts):
        folder.write_config(config.resolved)
        folder.write_summary(facts)
        model = build(config, source)
        facts["corpus_sha256"] = source.sha256
        facts["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        facts["initial_weights"] = str(scheme(model))
        keep_compiled(config.results / "cache" / "inductor")
        trainer = build_trainer(config, source, model)
        state = checkpoint.load(folder.checkpoint)
        if state is not None:
            trainer.load(state)
        last_step = -1 if state is None else trainer.step
        with Jsonl(folder.metrics, last_step) as local, open_mirror(config, folder, local, group) as tracker:
            if local.last_step != last_step:
                raise UserError(
                    f"{folder.metrics}: ends at step {local.last_step}, before the checkpoint of step {last_step}; "
                    f"delete {folder.path} to begin anew"
                )
            outcome = _fit(config, source, folder, trainer, local, tracker, bar, received)
            history = _summarise(config, source, folder)
            summary = facts | history | _speed(config, source, trainer) | _ended(outcome)
            folder.write_summary(summary)  # before the mirror, which may have to wait for a network
            tracker.finish(summary)
        folder.write_summary(summary | {"wandb_url": tracker.url})


def _speed(config: Config, source: Source, trainer: Trainer) -> dict[str, Any]:
    """What the steps used of the machine, pads counted like tokens, by this machine's own matrix product."""
    flops = flops_per_token(config.model, source.vocab_size)
    rate = product_rate(config.device, getattr(torch, config.train.dtype))
    tokens = config.train.batch_size * config.train.grad_accum * config.model.context  # of a step
    seconds = statistics.median(trainer.step_seconds) if trainer.step_seconds else None
    return {
        "flops_per_token": flops,
        "matrix_flops_per_second": rate,
        "model_flops_utilisation": flops * tokens / seconds / rate if seconds and rate else None,
        **(trainer.compiled.facts() if trainer.compiled else {}),
    }


def build_trainer(config: Config, source: Source, model: Transformer) -> Trainer:
    schedules = {"optim": config.optim, "train": config.train, "telemetry": config.telemetry}
    return Trainer(model, source, seed=config.seed, device=config.device, **schedules)  # type: ignore[arg-type]


def open_mirror(config: Config, folder: RunFolder, local: Jsonl, group: str | None) -> Wandb | Null:
    return open_tracker(
        config.tracker,
        folder=folder.path,
        run_id=folder.path.name,
        name=folder.path.name,
        group=group,
        tags=config.tracker.tags,
        resolved=config.resolved,
        history=local.history(),
    )


def _fit(
    config: Config,
    source: Source,
    folder: RunFolder,
    trainer: Trainer,
    local: Jsonl,
    tracker: Null,
    bar: bool,
    received: Sequence[int],
) -> Outcome:
    def hopeless() -> bool:
        return _summarise(config, source, folder)["verdict"] in ("collapsed", "diverged")

    with Progress(config.train.steps, folder.path.name, trainer.step) if bar else nullcontext() as progress:

        def log(rows: list[dict[str, float]]) -> None:
            local.write(rows)
            tracker.log(rows)
            with suppress(OSError):  # a terminal that is gone is no reason to stop
                for row in rows:
                    _show(progress, row)

        def save(state: dict[str, Any]) -> None:
            local.sync()
            checkpoint.save(folder.checkpoint, state)

        try:
            return fit(trainer, log=log, save=save, hopeless=hopeless, received=received)
        except RuntimeError as error:
            if config.train.deterministic and "deterministic" in str(error):
                reason = str(error).partition(",")[0].partition(". ")[0]
                raise UserError(f"train.deterministic=true: {reason}; give false, or another norm or device") from error
            raise


def _show(progress: Progress | None, row: dict[str, float]) -> None:
    if progress is None:
        return
    progress.update(
        int(row["step"]),
        loss=row.get("train/loss"),
        lr=row.get("train/lr"),
        grad_norm=row.get("grad_norm/total"),
        tokens_per_second=row.get("tokens_per_second"),
    )


def _facts(config: Config, folder: RunFolder) -> dict[str, Any]:
    """What is known of a run before its first step."""
    return {
        "run_id": folder.path.name,
        "status": "running",
        "cell": config.cell,
        "depth": config.model.depth,
        "warmup_steps": config.optim.warmup_steps,
        "lr": config.optim.lr,
        "seed": config.seed,
        "init": config.model.init,
        "norm_path": norm_path(config),
        "device": config.device.type,
        "versions": versions(),
        "git_commit": git_commit(),
        "machine": _machine(config.device),
    }


def _machine(device: torch.device) -> str:
    return f"{machine()}, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else machine()


def _summarise(config: Config, source: Source, folder: RunFolder) -> dict[str, Any]:
    return summarise(
        read_rows(folder.metrics),
        unigram_entropy=source.unigram_entropy,
        vocab_size=source.vocab_size,
        bytes_per_token=source.bytes_per_token,
        entropy_rate=source.entropy_rate,
        warmup_steps=config.optim.warmup_steps,
    )


def _ended(outcome: Outcome) -> dict[str, Any]:
    if outcome.signal is not None:  # a part of a run has no verdict
        return {"status": "interrupted", "signal": outcome.signal, **dict.fromkeys(JUDGED)}
    return {"status": "finished", "stopped_early": outcome.stopped_early}


@contextmanager
def _recorded_fault(folder: RunFolder, facts: dict[str, Any]) -> Iterator[None]:
    """Leaves `traceback.txt` and the status `failed` (Ctrl-C: `interrupted`) behind, and lets the exception pass."""
    (folder.path / "traceback.txt").unlink(missing_ok=True)
    try:
        yield
    except BaseException as error:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        with suppress(OSError):  # of a disk that is full: the status matters more
            (folder.path / "traceback.txt").write_text(traceback.format_exc(), encoding="utf-8")
        folder.write_summary(facts | {"status": status, "error": reason})
        raise
