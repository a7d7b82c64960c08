"""Small models and sources that several test files share."""

from functools import partial

import torch
import yaml

import normexp
from normexp import checkpoint, commandline, config, norms, placements
from normexp.data import Batch
from normexp.init import initialise
from normexp.model import ModelConfig, Transformer
from normexp.optim import OptimConfig
from normexp.telemetry import METRICS, Buffer, TelemetryConfig
from normexp.trainer import TrainConfig, Trainer

CONTEXT, VOCABULARY = 16, 11
DEFAULTS = yaml.safe_load((normexp.CONF / "model" / "tiny.yaml").read_text())
CONFIG = DEFAULTS | {"depth": 2, "width": 16, "heads": 2, "context": CONTEXT}
NORMS = {
    "ln": partial(norms.LayerNorm, eps=1e-5, affine=True, cast="input", kernel="auto", gain_offset=0.0),
    "rms": partial(norms.RMSNorm, eps=1e-6, affine=True, cast="input", kernel="auto", gain_offset=0.0),
    "bn": partial(
        norms.BatchNorm, eps=1e-5, momentum=0.1, affine=True, stats="batch_time", mask_padding=True, context=CONTEXT
    ),
}
ACROSS = {"eps": 1e-5, "affine": True, "mask_padding": True}
ZOO = {
    "prms": partial(norms.PartialRMSNorm, share=0.25, eps=1e-6, affine=True),
    "scale": partial(norms.ScaleNorm, eps=1e-5, affine=True),
    "seednorm": partial(norms.SeeDNorm, eps=1e-6, affine=True),
    "dyt": partial(norms.DynamicTanh, alpha=1.0, affine=True, bias=False),
    "derf": partial(norms.DynamicErf, alpha=1.0, affine=True, bias=True),
    "none": norms.Identity,
    "rbn": partial(
        norms.RegularizedBatchNorm, momentum=0.05, mean_penalty=0.1, spread_penalty=0.01, spread="std", **ACROSS
    ),
    "switch": partial(norms.SwitchableNorm, momentum=0.1, **ACROSS),
    "power": partial(norms.PowerNorm, alpha_forward=0.9, alpha_backward=0.9, warmup_steps=2, **ACROSS),
}
PLACEMENTS = {"pre": placements.PreNorm, "post": placements.PostNorm}
CELLS = [(norm, placement) for norm in NORMS for placement in PLACEMENTS]


def load(*overrides: str, config_dir: str | None = None) -> config.Config:
    """The checked config of a command."""
    composed = commandline.compose(overrides, config_dir)
    return config.load(composed.values, composed.choices, composed.folder)


def model(norm="ln", placement="pre", seed: int = 0, **changes) -> Transformer:
    """`norm` and `placement`: a name from above, or a factory."""
    config = ModelConfig(**{**CONFIG, **changes})
    factories = {"norm": (NORMS | ZOO).get(norm, norm), "placement": PLACEMENTS.get(placement, placement)}
    built = Transformer(config, VOCABULARY, **factories)
    initialise(built, seed)
    return built


class Source:
    """Sequences in which token t + 1 is token t plus 1 or 2: there is something to learn. `padded` rows end early."""

    vocab_size, unigram_entropy, bytes_per_token, sha256, entropy_rate = VOCABULARY, 2.3979, 1.0, "0" * 64, None

    def __init__(self, padded: bool = False) -> None:
        self.padded = padded

    def batch(self, seed: int, step: int, rows: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        jumps = torch.randint(1, 3, (64, CONTEXT + 1), generator=generator)[:rows]
        tokens = jumps.cumsum(1) % VOCABULARY
        if not self.padded:
            return Batch(tokens[:, :-1], tokens[:, 1:], None)
        lengths = torch.randint(3, CONTEXT + 1, (64, 1), generator=generator)[:rows]
        mask = torch.arange(CONTEXT) < lengths
        return Batch(tokens[:, :-1] * mask, tokens[:, 1:].masked_fill(~mask, -100), mask)

    def validation(self, rows: int, batches: int) -> list[Batch]:
        return [self.batch(999, index, rows) for index in range(batches)]


# A command that trains the smallest cell.
SHORT = [
    "tracker.mode=disabled",
    "device=cpu",
    "model.depth=1",
    "model.width=16",
    "model.context=16",
    "train.steps=3",
    "train.eval_batches=1",
]

OPTIM = OptimConfig("adamw", 3e-3, 2, "constant", 0.0, 0.2, 0.0, (0.9, 0.98), 1e-8, 0.0)
TRAIN = TrainConfig(
    steps=8, batch_size=4, grad_accum=1, clip=0.0, z_loss=0.0, dtype="float32", threads=1, eval_every=4, eval_batches=2,
    checkpoint_every=3, early_stop=False, compile=False, deterministic=False, tf32=False,
)  # fmt: skip
TELEMETRY = TelemetryConfig(every=5, dense_steps=3, flush_every=4, metrics=tuple(METRICS))


def trainer(
    norm="ln", placement="pre", *, source=None, seed=0, optim=OPTIM, train=TRAIN, telemetry=TELEMETRY, **changes
):
    return Trainer(
        model(norm, placement, seed, **changes),
        source or Source(),
        optim=optim,
        train=train,
        telemetry=telemetry,
        seed=seed,
        device=torch.device("cpu"),
    )


VOLATILE = {"time", "tokens_per_second"}  # what a clock says


def numbers(rows):
    return [{path: value for path, value in row.items() if path not in VOLATILE} for row in rows]


def rows_of(trainer, steps=1):
    buffer = Buffer()
    for _ in range(steps):
        buffer.add(*trainer.take_step())
    return buffer.flush()


def same_weights(first, second):
    first, second = first.state_dict(), second.state_dict()
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


def goes_on(straight, fresh, folder, before=2, after=2):
    """Asserts that `fresh` goes on from a checkpoint of `straight` as that one itself does, to the bit; its rows."""
    rows_of(straight, before)
    checkpoint.save(folder / "cut.pt", straight.state())
    fresh.load(checkpoint.load(folder / "cut.pt"))
    rows = numbers(rows_of(fresh, after))
    assert rows == numbers(rows_of(straight, after))
    assert same_weights(straight.model, fresh.model)
    return rows
