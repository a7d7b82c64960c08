"""What a reader must know before the numbers: what was run, by what, where; and what is not counted."""

from __future__ import annotations

from collections.abc import Hashable
from datetime import UTC, datetime
from typing import Any

from normexp.report.study import Frame, Study, commits, missing, text, verdict_counts
from normexp.results import STATUSES, VERDICTS

Facts = list[tuple[str, str]]

LISTED = 3  # of those left out for one reason


def facts(study: Study, command: str) -> Facts:
    """(name, text) pairs; those that the runs say nothing about are left out."""
    table, sweep = study.runs.table, study.runs.source.sweep
    counted = study.finished if len(study.finished) else table
    known = [
        ("runs", _counts(study)),
        ("verdicts", ", ".join(f"{count} {verdict}" for verdict, count in _verdicts(study.finished))),
        ("varied", "; ".join(f"{name}: {', '.join(map(text, study.levels(name)))}" for name in study.varying)),
        ("fixed", ", ".join(f"{name} {text(value)}" for name, value in study.fixed.items())),
        ("seeds", ", ".join(map(text, sorted(set(study.finished["seed"]))))),
        ("made by", str(sweep.get("command", ""))),
        ("reported by", command),
        ("commit", _commits(counted)),
        ("versions", _unique(counted, "versions.")),
        ("machine", _unique(counted, "machine")),
        ("norm path", _unique(counted, "norm_path")),
        ("initial weights by placement", _by_placement(counted)),
        ("training time", _seconds(table)),
        ("written", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")),
    ]
    return [(name, value) for name, value in known if value]


def _counts(study: Study) -> str:
    table, source = study.runs.table, study.runs.source
    statuses = [(int((table["status"] == status).sum()) if len(table) else 0, status) for status in STATUSES]
    left_out = {"twins": study.twins, "damaged": study.runs.damaged, "not started": source.absent}
    parts = [f"{len(study.finished)} counted"]
    parts += [f"{count} {status}" for count, status in statuses if status != "finished" and count]
    parts += [f"{len(found)} {name}" for name, found in left_out.items() if found]
    return ", ".join(parts)


def _verdicts(finished: Frame) -> list[tuple[str, int]]:
    counts = verdict_counts(finished) if len(finished) else {}
    return [(verdict, counts[verdict]) for verdict in VERDICTS if verdict in counts]


def _commits(counted: Frame) -> str:
    known = commits(counted)
    if len(known) < 2:
        return "".join(known)
    told = ", ".join(f"{commit} ({count} runs)" for commit, count in known.items())
    return f"{len(known)} DIFFERENT ones, compare their runs with care (the table of runs says which is whose): {told}"


def _unique(table: Frame, prefix: str) -> str:
    """`torch 2.13.0, normexp 0.1.0`: the values of the columns with this prefix; several where the runs differ."""
    told = []
    for column in sorted(column for column in table.columns if column.startswith(prefix)):
        values = sorted({text(value) for value in table[column] if not missing(value)})
        told += [" ".join(filter(None, [column[len(prefix) :].strip("."), " / ".join(values)]))] if values else []
    return ", ".join(told)


def _by_placement(counted: Frame) -> str:
    """The rule of `model.init=placement`, with its gains, for each placement and depth drawn by it."""
    if "initial_weights" not in counted:
        return ""
    drawn = counted[counted["init"] == "placement"]
    rules = sorted(set(zip(drawn["placement"], drawn["depth"], drawn["initial_weights"], strict=True)))
    several = len({depth for _, depth, _ in rules}) > 1
    return "; ".join(f"{name}{f' of {depth} blocks' if several else ''}: {rule}" for name, depth, rule in rules)


def _seconds(table: Frame) -> str:
    seconds = [float(value) for value in table.get("seconds", []) if not missing(value)]
    return f"{sum(seconds) / 60:.1f} minutes over {len(seconds)} runs" if seconds else ""


def uncounted(study: Study) -> list[tuple[str, str]]:
    """(what, why) of everything that enters no statistic and no figure."""
    found = [(damaged.folder.name, f"damaged: {damaged.reason}") for damaged in study.runs.damaged]
    found += [(absent.overrides, f"not started: {absent.reason}") for absent in study.runs.source.absent]
    found += [(left_out, f"same cell and seed as {counted}") for left_out, counted in study.twins]
    table = study.runs.table
    rows = table[table["status"] != "finished"].to_dict("records") if len(table) else []
    return _shortened(found + [(str(row["run_id"]), _unfinished(row)) for row in rows])


def _shortened(found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Many for one reason, as in a report on a sweep that has just begun, are a number."""
    by_reason: dict[str, list[str]] = {}
    for what, why in found:
        by_reason.setdefault(why, []).append(what)
    told: list[tuple[str, str]] = []
    for why, whats in by_reason.items():
        told += [(what, why) for what in whats[:LISTED]]
        told += [(f"{len(whats) - LISTED} more", why)] if len(whats) > LISTED else []
    return told


def _unfinished(row: dict[Hashable, Any]) -> str:
    told = [row["status"], row.get("error"), row.get("reason")]
    return ": ".join(str(part) for part in told if not missing(part))
