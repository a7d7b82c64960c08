"""What is known of the cells, as tables: every number with its interval and n."""

from __future__ import annotations

import math

from normexp import stats
from normexp.report.formats import Column, Table, Value, factor_columns, show
from normexp.report.grids import learning_rates, warmups
from normexp.report.pairs import comparisons
from normexp.report.study import Frame, Study, learned, losses, missing, split, verdict_counts

LEARNS = (
    "A seed trains if its verdict is trained or unstable (learned, with spikes); undecided counts as not. BatchNorm's "
    "loss is with running statistics."
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
        Column("trains", "share that trains (Wilson)", 2),
        Column("trains_exact", "the same (Clopper-Pearson)", 2),
        Column("val_loss", "validation loss (nats/token, Student t)"),
        Column("statistics_gap", "running minus batch statistics (nats/token, Student t)"),
        Column("layer_ratio", "last layer ratio (median)", 4),
        Column("first_bad_step", "first bad step (median)", 0),
        Column("loss_spikes", "loss spike score (Student t)", 4),
    ]
    shown = [column for column in columns if any(row.get(column.key) is not None for row in rows)]
    note = (
        "n: seeds; intervals: 95 %, for medians the range of the seeds, which covers the true median with probability "
        f"1 − 2^(1−n). {LEARNS} Layer ratio: first over last block's gradient norm of the MLP's output matrix. First "
        "bad step: of the seeds that have one."
    )
    return Table("cells", "Cells", note, shown, rows)


def _cell(study: Study, part: Frame) -> dict[str, Value]:
    bad = [float(step) for step in part.get("first_bad_step", []) if not missing(step)]
    ratios = [_last(study.runs.histories[run_id], "layer_ratio") for run_id in part["run_id"]]
    row: dict[str, Value] = {
        "verdicts": ", ".join(f"{count} {verdict}" for verdict, count in verdict_counts(part).items()),
        "trains": stats.share(learned(part), len(part)),
        "trains_exact": stats.share(learned(part), len(part), "clopper-pearson"),
        "val_loss": stats.mean(losses(part)),
        "layer_ratio": None if all(map(math.isnan, ratios)) else stats.median_over_seeds(ratios),
        "first_bad_step": stats.median_over_seeds(bad) if bad else None,
    }
    if "loss_spike_score" in part:
        row["loss_spikes"] = stats.mean(_floats(part, "loss_spike_score"))
    if "val_loss_batch_stats" in part and part["val_loss_batch_stats"].notna().any():
        pairs = zip(_floats(part, "val_loss"), _floats(part, "val_loss_batch_stats"), strict=True)
        row["statistics_gap"] = stats.mean([running - batch for running, batch in pairs])
    return row


def _floats(part: Frame, column: str) -> list[float]:
    return [math.nan if missing(value) else float(value) for value in part[column]]


def _last(history: Frame, path: str) -> float:
    logged = history[path].dropna().tolist() if path in history else []
    return float(logged[-1]) if logged else math.nan


def runs(study: Study) -> Table:
    """Every readable run, those that are not finished included: they enter no other table."""
    table = study.runs.table
    outcome = ("seed", "status", "verdict", "val_loss", "first_bad_step", "first_bad_layer", "reason")
    keys = [key for key in ("run_id", *study.factors, *outcome) if key in table.columns]
    rows = [{key: None if missing(row[key]) else row[key] for key in keys} for row in table.to_dict("records")]
    named = {"run_id": Column("run_id", "run"), "val_loss": Column("val_loss", "validation loss (nats/token)", 3)}
    columns = [named.get(column.key, column) for column in factor_columns(keys)]
    note = "Every readable run. Those that are not finished enter no statistic and no figure."
    return Table("runs", "Runs", note, columns, rows)
