"""What is known of the cells, as tables: every number with its interval and n."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from normexp import stats
from normexp.report.formats import Column, Table, Value, factor_columns, fixed, show, significant
from normexp.report.grids import learning_rates, warmups
from normexp.report.pairs import comparisons
from normexp.report.study import (
    BATCH_NORM,
    Frame,
    Study,
    batch_losses,
    commits,
    learned,
    losses,
    missing,
    split,
    verdict_counts,
)

LEARNS = (
    f"A seed trains if its verdict is trained or unstable (learned, with spikes); undecided counts as not. {BATCH_NORM}"
)


def tables(study: Study) -> list[Table]:
    """Those that the runs support, the one that answers the question first."""
    made = [phase_map(study), cells(study), warmups(study), learning_rates(study), comparisons(study), runs(study)]
    return [table for table in made if table.rows]


def phase_map(study: Study) -> Table:
    """Depth (and all else that varies) down, warmup across."""
    down = ("norm", "placement", *study.others("norm", "placement", "warmup_steps"))
    rows: list[dict[str, Value]] = []
    for values, part in split(study.finished, down):
        across = split(part, ("warmup_steps",))
        rows.append(values | {f"warmup {at['warmup_steps']}": _share_and_loss(cell) for at, cell in across})
    names = [f"warmup {warmup}" for warmup in study.levels("warmup_steps")]
    columns = [*factor_columns(down), *(Column(name, f"{name} steps") for name in names)]
    note = f"Seeds that train of seeds run (95 % Wilson), mean final validation loss (nats/token, Student t). {LEARNS}"
    return Table("map", "Which cells train", note, columns, rows)


def _share_and_loss(cell: Frame) -> str:
    share = stats.share(learned(cell), len(cell))
    interval = " [{:.2f}, {:.2f}]".format(*share.interval) if share.interval else ""
    return f"{learned(cell)}/{len(cell)}{interval}; {show(stats.mean(losses(cell)))}"


def cells(study: Study) -> Table:
    rows = [values | _cell(study, part) for values, part in study.cells()]
    columns = [
        *factor_columns(study.factors),
        Column("verdicts", "verdicts"),
        Column("trains", "share that trains (Wilson)", fixed(2)),
        Column("trains_exact", "the same (Clopper-Pearson)", fixed(2)),
        Column("val_loss", "validation loss (nats/token, Student t)"),
        Column("val_loss_bca", "the same (BCa bootstrap)"),
        Column("val_loss_batch_stats", "validation loss by batch statistics (nats/token, Student t)"),
        Column("statistics_gap", "running minus batch statistics (nats/token, Student t)"),
        Column("layer_ratio", "last layer ratio (median)", significant(3)),
        Column("quant_error", "relative rounding error (median)", significant(3)),
        Column("first_bad_step", "first bad step (median)", fixed(0)),
        Column("loss_spikes", "loss spike score (share of steps, median)", significant(2)),
    ]
    shown = [column for column in columns if any(row.get(column.key) is not None for row in rows)]
    note = (
        "n: seeds; intervals: 95 %, for medians the range of the seeds, which covers the true median with probability "
        f"1 − 2^(1−n). {LEARNS} Layer ratio: first over last block's gradient norm of the MLP's output matrix. First "
        "bad step: of the seeds that have one."
    )
    if any(column.key == "quant_error" for column in shown):
        note += " Rounding error: the median over a run's norms at its last reading."
    return Table("cells", "Cells", note, shown, rows)


def _cell(study: Study, part: Frame) -> dict[str, Value]:
    bad = [float(step) for step in part.get("first_bad_step", []) if not missing(step)]
    ratios = [_last(study.runs.histories[run_id], "layer_ratio") for run_id in part["run_id"]]
    errors = [_rounding(study.runs.histories[run_id]) for run_id in part["run_id"]]
    row: dict[str, Value] = {
        "verdicts": ", ".join(f"{count} {verdict}" for verdict, count in verdict_counts(part).items()),
        "trains": stats.share(learned(part), len(part)),
        "trains_exact": stats.share(learned(part), len(part), "clopper-pearson"),
        "val_loss": stats.mean(losses(part)),
        "layer_ratio": None if all(map(math.isnan, ratios)) else stats.median_over_seeds(ratios),
        "quant_error": None if all(map(math.isnan, errors)) else stats.median_over_seeds(errors),
        "first_bad_step": stats.median_over_seeds(bad) if bad else None,
    }
    if "loss_spike_score" in part:
        row["loss_spikes"] = stats.median_over_seeds(_floats(part, "loss_spike_score"))
    if len(part) >= stats.SMALLEST_BCA:
        row["val_loss_bca"] = stats.mean(losses(part), "bca")
    if by_batch := batch_losses(part):
        row["val_loss_batch_stats"] = stats.mean(by_batch)
        row["statistics_gap"] = stats.mean([a - b for a, b in zip(losses(part), by_batch, strict=True)])
    return row


def _floats(part: Frame, column: str) -> list[float]:
    return [math.nan if missing(value) else float(value) for value in part[column]]


def _last(history: Frame, path: str) -> float:
    logged = history[path].dropna().tolist() if path in history else []
    return float(logged[-1]) if logged else math.nan


def _rounding(history: Frame) -> float:
    """The median over the norms of what `model.quant` made of them, NaN for a run without it."""
    found = [_last(history, str(path)) for path in history.columns if str(path).startswith("quant_error/")]
    return statistics.median(found) if found else math.nan


RUN = {
    "run_id": Column("run_id", "run"),
    "val_loss": Column("val_loss", "validation loss (nats/token)", fixed(3)),
    "val_loss_batch_stats": Column("val_loss_batch_stats", "the same by batch statistics", fixed(3)),
    "val_step": Column("val_step", "step of that loss"),
    "git_commit": Column("git_commit", "commit"),
}


def runs(study: Study) -> Table:
    """Every readable run, those that are not finished included: they enter no other table."""
    table = study.runs.table
    outcome = ("seed", "status", "verdict", "val_loss", "first_bad_step", "first_bad_layer", "reason")
    keys = [key for key in ("run_id", *study.factors, *outcome, *_worth_a_column(table)) if key in table.columns]
    rows = [{key: None if missing(row[key]) else row[key] for key in keys} for row in table.to_dict("records")]
    columns = [RUN.get(column.key, column) for column in factor_columns(keys)]
    note = "Every readable run. Those that are not finished enter no statistic and no figure."
    return Table("runs", "Runs", note, columns, rows)


def _worth_a_column(table: Frame) -> Iterator[str]:
    """What goes without saying for most sets of runs."""
    if batch_losses(table):
        yield "val_loss_batch_stats"
    if "val_step" in table and (table["val_step"] != table["steps"])[table["status"] == "finished"].any():
        yield "val_step"
    if len(commits(table)) > 1:
        yield "git_commit"
