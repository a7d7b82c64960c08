"""Every norm at every placement, packed and padded, from its config to three steps; or one line that says why not."""

import itertools
import math

import pytest

from normexp import cell, config, zoo
from normexp.fields import UserError
from tests.tiny import load

NORMS, PLACEMENTS = zoo.names("norm"), zoo.names("placement")
PAIRS = list(itertools.product(NORMS, PLACEMENTS))
ILLEGAL = {pair for pair in PAIRS if pair[0] != "none" and pair[1] in ("rezero", "tfixup", "ngpt")}
ILLEGAL |= {("none", placement) for placement in ("admin", "admin_fixed", "keel")}
SATURATED = {("derf", "keel"), ("dyt", "keel")}  # 2N x is far out in the tails, where no gradient comes through
SMALL = [
    *("model.depth=4", "model.width=16", "model.heads=2", "model.context=24", "train.batch_size=4", "optim.lr=1e-3"),
    *("train.eval_batches=1", "device=cpu"),
]
OPEN = cell.Sources()


def checked(norm: str, placement: str, shape: str) -> config.Config:
    given = [f"norm={norm}", f"placement={placement}", f"data.shape={shape}", *SMALL]
    share = ["norm.share=0.25"] if norm == "prms" else []  # 1 of 16 channels would be too small a divisor
    return load(*given, *share)


@pytest.mark.parametrize("shape", ["packed", "padded"])
@pytest.mark.parametrize(("norm", "placement"), [pair for pair in PAIRS if pair not in ILLEGAL])
def test_a_legal_pair_takes_three_steps(norm, placement, shape):
    loaded = checked(norm, placement, shape)
    source = OPEN(loaded)
    trainer = cell.build_trainer(loaded, source, cell.build(loaded, source))
    assert (source.batch(0, 1, 4).mask is not None) == (shape == "padded")
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    for _ in range(3):
        _, readings = trainer.take_step()
        loss, gradient = readings[0].values.tolist()
        assert math.isfinite(loss)
        assert 0 < gradient < math.inf
    still = [name for name, parameter in trainer.model.named_parameters() if parameter.equal(before[name])]
    assert not still or (norm, placement) in SATURATED, still
    assert math.isfinite(trainer.evaluate()[0].values.item())


@pytest.mark.parametrize(("norm", "placement"), sorted(ILLEGAL))
def test_an_illegal_pair_is_refused_in_one_line(norm, placement):
    with pytest.raises(UserError, match=rf"^norm={norm}: placement={placement} [^\n]*; give [^\n]*$"):
        checked(norm, placement, "packed")
