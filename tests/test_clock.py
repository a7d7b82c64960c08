"""What a run tells of its time and speed, by a clock that moves only while a batch is drawn: step s takes s seconds."""

from itertools import accumulate

import pytest

from normexp import checkpoint
from normexp.trainer import fit
from tests import tiny

TIMES = [0, *accumulate(range(1, 9))]
SPEEDS = {1: 64 / 1, 2: 64 / 2, 3: 64 / 3, 5: 2 * 64 / (4 + 5)}  # where the metrics are read: tokens, seconds since


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def trainer(clock):
    class Slow(tiny.Source):
        def batch(self, seed, step, rows):
            clock[0] += step if seed == 0 else 0  # not of validation
            return super().batch(seed, step, rows)

    return tiny.trainer(source=Slow())


def fitted(trainer, save=lambda _: None):
    rows = []
    fit(trainer, log=rows.extend, save=save, hopeless=lambda: False, received=())
    return rows


def told(rows, path):
    return {row["step"]: row[path] for row in rows if path in row}


def test_speed_is_of_the_steps_since_the_last_reading(clock):
    rows = fitted(trainer(clock))
    assert [row["time"] for row in rows] == TIMES
    assert told(rows, "tokens_per_second") == pytest.approx(SPEEDS)


@pytest.mark.parametrize(("cut", "speed"), [(3, SPEEDS[5]), (4, 64 / 5)])
def test_time_goes_on_after_a_resume_and_speed_is_of_this_process(cut, speed, clock, tmp_path):
    first = trainer(clock)
    tiny.rows_of(first, cut)
    checkpoint.save(tmp_path / "cut.pt", first.state())
    clock[0] += 500
    second = trainer(clock)
    clock[0] += 20  # what comes before the checkpoint is loaded is nobody's
    second.load(checkpoint.load(tmp_path / "cut.pt"))
    rows = fitted(second)
    assert [row["time"] for row in rows] == TIMES[cut + 1 :]
    assert told(rows, "tokens_per_second") == pytest.approx({5: speed})
    assert second.step_seconds == list(range(cut + 1, 9))
