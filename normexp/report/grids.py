"""What happens along a grid of warmups or of learning rates, seed by seed: boundaries, sensitivity, usable range."""

from __future__ import annotations

import math
from typing import NamedTuple

from normexp import stats
from normexp.report.formats import Column, Table, Value, factor_columns, fixed, significant
from normexp.report.study import BATCH_NORM, Frame, Study, losses, split, text
from normexp.results import LEARNED
from normexp.stats import Estimate


def warmups(study: Study) -> Table:
    """For each cell but its warmup: the shortest warmup from which on a seed trains."""
    kept = tuple(factor for factor in study.factors if factor != "warmup_steps")
    rows: list[dict[str, Value]] = []
    for values, part in split(study.finished, kept):
        grid = sorted(part["warmup_steps"].unique())
        if len(grid) < 2:
            continue
        boundaries = [
            stats.warmup_boundary(dict(zip(seed["warmup_steps"], seed["verdict"].isin(LEARNED), strict=True)))
            for _, seed in split(part, ("seed",))
            if len(seed) == len(grid)
        ]
        boundary = stats.median_over_seeds(boundaries, upper=True)
        told = {"boundary": boundary, "reading": _reading(boundary, grid), "grid": ", ".join(map(str, grid))}
        rows.append(values | told)
    columns = [
        *factor_columns(kept),
        Column("boundary", "warmup from which it trains (steps, median)", fixed(0)),
        Column("reading", "the boundary lies"),
        Column("grid", "warmups tried"),
    ]
    note = (
        "n: seeds. The shortest warmup of the grid from which on a seed trains at every longer one too; ∞: not at "
        "the longest. Interval: the range of the seeds, which covers the true median with probability 1 − 2^(1−n). "
        "Only seeds run at every warmup count."
    )
    return Table("warmup", "Warmup at which training starts", note, columns, rows)


def _reading(boundary: Estimate, grid: list[int]) -> str:
    if math.isnan(boundary.value):
        return "unknown: no seed has every warmup"
    if math.isinf(boundary.value):
        return f"above {grid[-1]}"
    at = grid.index(int(boundary.value))
    return f"in ({grid[at - 1]}, {grid[at]}]" if at else f"at or below {grid[0]}"


def learning_rates(study: Study) -> Table:
    kept = tuple(factor for factor in study.factors if factor != "lr")
    rows: list[dict[str, Value]] = []
    never = seeds = 0
    for values, part in split(study.finished, kept):
        if part["lr"].nunique() > 1:
            grids = lr_grids(part)
            unlearned = sum(not seed.learned for seed in grids)
            rows.append(values | _learning_rates(part, grids) | {"never": f"{unlearned} of {len(grids)}"})
            never, seeds = never + unlearned, seeds + len(grids)
    columns = [
        *factor_columns(kept),
        Column("never", "seeds that learn at no LR"),
        Column("sensitivity", "LR sensitivity (nats, Student t)"),
        Column("edge", "LR edge (median)", significant(3)),
        Column("lowest", "usable from (median)", significant(3)),
        Column("highest", "usable to (median)", significant(3)),
        Column("grid", "LRs tried"),
    ]
    note = (
        f"n: seeds. {never} of {seeds} seeds learn at no LR: they have none of these numbers and are left out of them. "
        "Sensitivity: mean over the LRs of min(loss, ln V) minus the best; a diverged run counts as ln V. Edge: the "
        "lowest LR above the best with a loss 0.1 above it; ∞: none in the grid. Usable: the unbroken stretch of LRs "
        f"at which the seed learns, within 0.02 of the best. {BATCH_NORM} Not comparable between cells where an LR "
        "means something else. Only seeds run at every LR count."
    )
    return Table("learning_rates", "Learning rates", note, columns, rows)


def _learning_rates(part: Frame, seeds: list[LrGrid]) -> dict[str, Value]:
    ceiling = math.log(float(part["vocab_size"].iloc[0]))
    ranges = [stats.usable_range(*seed) for seed in seeds]
    return {
        "sensitivity": stats.mean([stats.lr_sensitivity(*seed, ceiling) for seed in seeds]),
        "edge": stats.median_over_seeds([stats.lr_edge(*seed) for seed in seeds], upper=True),
        "lowest": stats.median_over_seeds([low for low, _ in ranges], upper=True),
        "highest": stats.median_over_seeds([high for _, high in ranges], upper=True),
        "grid": ", ".join(map(text, sorted(part["lr"].unique()))),
    }


class LrGrid(NamedTuple):
    """One seed over the LRs."""

    losses: dict[float, float]  # a run judged diverged is `inf`, whatever its last loss was
    learned: set[float]


def lr_grids(part: Frame) -> list[LrGrid]:
    """The seeds that were run at every LR."""
    complete = part["lr"].nunique()
    return [_lr_grid(seed) for _, seed in split(part, ("seed",)) if len(seed) == complete]


def _lr_grid(seed: Frame) -> LrGrid:
    found = zip(seed["lr"], seed["verdict"], losses(seed), strict=True)
    by_lr = {float(lr): math.inf if verdict == "diverged" else loss for lr, verdict, loss in found}
    return LrGrid(by_lr, {float(lr) for lr in seed["lr"][seed["verdict"].isin(LEARNED)]})
