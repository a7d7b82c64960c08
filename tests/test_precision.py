"""float16 and bfloat16: the logged gradients are those of float32, and an overflow costs a step, not the run."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from tests import tiny
from tests.tiny import rows_of

HALF = replace(tiny.TRAIN, dtype="float16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("norm", ["ln", "rms", "bn"])
def test_gradient_norms_are_those_of_float32(norm, dtype):
    """Unscaled, of every group and matrix, before the weights can part: within 2 %."""
    (exact,) = rows_of(tiny.trainer(norm), 1)
    (low,) = rows_of(tiny.trainer(norm, train=replace(HALF, dtype=dtype)), 1)
    paths = [path for path in exact if path.startswith(("grad_norm/", "train/loss"))]
    assert len(paths) > 20
    for path in paths:
        if exact[path] > 1e-6:  # BatchNorm leaves nothing but rounding of a bias before it
            assert low[path] == pytest.approx(exact[path], rel=0.02 if dtype == "float16" else 0.06), path


def test_the_validation_loss_is_that_of_the_precision_too():
    losses = {}
    for dtype in ("float32", "bfloat16"):
        trainer = tiny.trainer(train=replace(tiny.TRAIN, dtype=dtype))
        batches = trainer.source.validation(4, 2)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = torch.cat([trainer.model(batch.tokens) for batch in batches]).float().flatten(0, 1)
        losses[dtype] = F.cross_entropy(logits, torch.cat([batch.targets for batch in batches]).flatten()).item()
        assert trainer.evaluate()[0].values.item() == pytest.approx(losses[dtype], rel=1e-6)  # the order of sums
    assert abs(losses["float32"] - losses["bfloat16"]) > 1e-5


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_the_scale_does_not_show(clip):
    """A scale 1,024 times as large: the same norms, the same weights after clipping."""
    sgd = replace(tiny.OPTIM, name="sgd", lr=0.1)  # Adam would blow up the rounding of small gradients
    trainers = [tiny.trainer(optim=sgd, train=replace(HALF, clip=clip)) for _ in range(2)]
    trainers[1].scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    first, second = (rows_of(trainer, 3) for trainer in trainers)
    for one, other in zip(first, second, strict=True):
        assert one["train/loss_scale"] == 1024 * other["train/loss_scale"]
        assert one["grad_norm/total"] == pytest.approx(other["grad_norm/total"], rel=5e-3)
    for a, b in zip(trainers[0].model.parameters(), trainers[1].model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_an_overflow_is_recorded_skipped_and_survived():
    trainer = tiny.trainer(train=HALF)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    rows = rows_of(trainer, 1)
    assert all(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())
    assert not trainer.optimizer.state
    rows += rows_of(trainer, 40)
    skipped = [row for row in rows if not torch.isfinite(torch.tensor(row["grad_norm/total"]))]
    assert 2 <= len(skipped) <= 30  # in a row, the scale halved by each
    assert rows[: len(skipped)] == skipped
    assert [row["train/loss_scale"] for row in skipped] == [2.0 ** (40 - n) for n in range(1, len(skipped) + 1)]
    assert rows[-1]["train/loss_scale"] == skipped[-1]["train/loss_scale"]
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    assert all(row["train/lr"] > 0 for row in rows)


def test_the_scale_is_resumed(tmp_path):
    straight, fresh = (tiny.trainer(train=HALF) for _ in range(2))
    straight.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    rows = tiny.goes_on(straight, fresh, tmp_path, before=3, after=3)
    assert rows[-1]["train/loss_scale"] == 2.0**15
