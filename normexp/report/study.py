"""Runs -> cells. A cell is every value of the config that can change a number, the seed aside.

Six factors have short names and are always told (norm, placement, depth, warmup_steps, lr, init); any further field
that varies among the runs is a factor too, under its name on the command line, so that seeds are never pooled over it.
Where recipes or corpora vary, the choice of it is a factor in the place of the fields that tell one from another; texts
of one choice that no field tells apart are told by their hash.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from normexp.results import FACTORS, LEARNED, VERDICTS, Runs

NAMED = tuple(name for name in FACTORS if name != "seed")
# What of a config can change a number; `telemetry` and `tracker` only watch.
NUMERIC_FIELDS = re.compile(r"(norm|placement|model|data|optim|train)\..+")
CHOICES = {"cell.recipe": "recipe", "cell.data": "data"}  # factors as well, where they vary
CORPUS = ("data._target_", "data.name", "data.path")  # what differs between corpora by nature
# What a reader wants to know of the fields that do not vary.
TOLD = ("train.steps", "train.batch_size", "train.grad_accum", "model.context", "model.width", "optim.name")

BATCH_NORM = "BatchNorm's verdict is by batch statistics; its loss column by running ones."

Frame = pd.DataFrame
Values = dict[str, Any]  # factor -> its value


@dataclass(frozen=True)
class Study:
    runs: Runs
    finished: Frame  # the rows that count: every statistic and figure is of these
    factors: tuple[str, ...]  # the named ones, then the further fields that vary
    varying: tuple[str, ...]  # factors with two values or more
    fixed: Values  # fields that are the same everywhere
    twins: tuple[tuple[str, str], ...]  # (left out, counted): run ids with the same cell and seed

    def levels(self, factor: str) -> list[Any]:
        return levels(self.finished, factor)

    def others(self, *used: str) -> tuple[str, ...]:
        return tuple(factor for factor in self.varying if factor not in used)

    def apart(self, *used: str) -> tuple[str, ...]:
        """The others that one norm at one placement has several values of: what a figure must keep apart."""
        return tuple(factor for factor in self.others(*used) if factor not in self.nested)

    @cached_property
    def nested(self) -> tuple[str, ...]:
        """Varying factors that norm and placement fix together, such as initial weights that go with a placement."""
        pair = ["norm", "placement"]
        parts = [part for _, part in self.finished.groupby(pair)] if len(self.finished) else []
        others = [factor for factor in self.others(*pair) if len(parts) > 1]
        return tuple(factor for factor in others if all(len(levels(part, factor)) == 1 for part in parts))

    def cells(self) -> Iterator[tuple[Values, Frame]]:
        return split(self.finished, self.factors)


def study(runs: Runs) -> Study:
    table = _with_corpus(runs.table.rename(columns=CHOICES))
    finished = (
        table[table["status"] == "finished"] if len(table) else pd.DataFrame(columns=["run_id", "written", *FACTORS])
    )
    fields = [name for name in finished.columns if NUMERIC_FIELDS.fullmatch(name) and name not in FACTORS.values()]
    choices = [name for name in CHOICES.values() if name in finished and len(levels(finished, name)) > 1]
    factors = (*NAMED, *choices, *(name for name in fields if _is_factor(finished, name, choices)))
    factors += ("corpus",) if _unnamed_corpora(finished, factors) else ()
    finished, twins = _without_twins(finished, [*factors, "seed"])
    varying = tuple(name for name in factors if len(levels(finished, name)) > 1)
    told = [name for name in (*NAMED, *TOLD) if name in finished.columns and name not in varying]
    fixed = {name: finished[name].iloc[0] for name in told if len(finished)}
    return Study(runs, finished, factors, varying, fixed, twins)


def _with_corpus(table: Frame) -> Frame:
    """With the first digits of the text's hash, where runs have told it."""
    known = table.get("corpus_sha256")
    return table if known is None else table.assign(corpus=known.str[:8])


def _unnamed_corpora(table: Frame, factors: tuple[str, ...]) -> bool:
    """Whether runs that no factor of their data tells apart were of several texts, as where a file has changed."""
    by = [name for name in factors if name == "data" or name.startswith("data.")]
    parts = [part for _, part in table.groupby(by, dropna=False)] if by else [table]
    return "corpus" in table and any(part["corpus"].nunique() > 1 for part in parts)


def _without_twins(table: Frame, key: list[str]) -> tuple[Frame, tuple[tuple[str, str], ...]]:
    """A cell and seed counts once, by its newest run: others had other telemetry, or an older version made them."""
    newest: dict[tuple[str, ...], str] = {}
    twins = []
    by_age = table.sort_values(["written", "run_id"], ascending=False)
    for run_id, *values in by_age[["run_id", *key]].itertuples(index=False):
        counted = newest.setdefault(tuple(text(value) for value in values), run_id)
        if counted != run_id:
            twins.append((run_id, counted))
    return table[~table["run_id"].isin([left_out for left_out, _ in twins])], tuple(twins)


def _is_factor(table: Frame, name: str, choices: list[str]) -> bool:
    """A norm's own field differs between norms by nature, a corpus's own between corpora, and many differ between
    recipes: they are factors only if they differ within one norm, one corpus, one recipe."""
    group = name.partition(".")[0]
    own = group in ("norm", "placement") or (group == "data" and (name in CORPUS or bool(table[name].isna().any())))
    by = [*([group] if own and group in table else []), *(choice for choice in choices if choice == "recipe")]
    parts = [part for _, part in table.groupby(by, dropna=False)] if by else [table]
    return any(len(levels(part, name)) > 1 for part in parts)


def levels(table: Frame, factor: str) -> list[Any]:
    """Numbers by size; names by the alphabet, but `pre`, the usual baseline, first; a field that a cell lacks last."""
    found = list({None if missing(value) else value for value in table[factor]})
    if is_number(found):
        return sorted(found, key=lambda value: math.inf if value is None else value)
    return sorted(found, key=lambda value: (value is None, value != "pre", str(value)))


def is_number(values: list[Any]) -> bool:
    known = [value for value in values if value is not None]
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)


def is_of_data(factor: str) -> bool:
    """The text, its tokens, its part for validation, or how it is cut into rows: nats per token of one are not those of
    another."""
    return factor in ("data", "corpus") or factor.startswith("data.")


def missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def split(table: Frame, factors: tuple[str, ...]) -> Iterator[tuple[Values, Frame]]:
    """(factor values, rows) of each combination that occurs, in the order of the factors' levels."""
    if not factors:
        yield {}, table
        return
    first, *rest = factors
    for level in levels(table, first):
        for values, part in split(at(table, {first: level}), tuple(rest)):
            yield {first: level} | values, part


def at(table: Frame, values: Values) -> Frame:
    """The rows with these values; None finds those that lack the field."""
    for name, value in values.items():
        table = table[table[name].isna() if value is None else table[name] == value]
    return table


def learned(rows: Frame) -> int:
    return int(rows["verdict"].isin(LEARNED).sum())


def losses(rows: Frame) -> list[float]:
    """Final validation losses in nats per token; a non-finite one, or none at all, is `inf`."""
    return [math.inf if missing(value) else float(value) for value in rows["val_loss"]]


def batch_losses(rows: Frame) -> list[float]:
    """Final validation losses with batch statistics, NaN where the norm has none; empty where no run has any."""
    column = "val_loss_batch_stats"
    if column not in rows or not rows[column].notna().any():
        return []
    return [math.nan if missing(value) else float(value) for value in rows[column]]


def verdict_counts(rows: Frame) -> dict[str, int]:
    counts = rows["verdict"].value_counts()
    return {verdict: int(counts[verdict]) for verdict in VERDICTS if verdict in counts}


def commits(rows: Frame) -> dict[str, int]:
    """The commits at which runs were made, most runs first."""
    made = rows["git_commit"].fillna("unknown") if "git_commit" in rows else pd.Series(dtype=str)
    return {str(commit): int(count) for commit, count in made.value_counts().items()}


def factor_text(name: str, value: object) -> str:
    """`depth 6`, `warmup 200`, `init xavier`; a further field under its name on the command line."""
    return f"{'warmup' if name == 'warmup_steps' else name} {text(value)}"


def describe(values: Values) -> str:
    """`ln post, depth 6, warmup 200, lr 0.003, init xavier`: the norm and the placement need no word before them."""
    alone = [text(values[name]) for name in ("norm", "placement") if name in values]
    named = [factor_text(name, value) for name, value in values.items() if name not in ("norm", "placement")]
    return ", ".join([*([" ".join(alone)] if alone else []), *named])


def text(value: object) -> str:
    """A factor's value as people write it: 0.003, 1e-05 as 1e-5, a missing one as a dash."""
    if missing(value):
        return "–"
    if isinstance(value, float):
        return re.sub(r"e([-+])0*(\d)", r"e\1\2", f"{value:.4g}").replace("e+", "e")
    return str(value)


def slug(values: Values) -> str:
    """A file-name part with neither `=`, `,` nor spaces."""
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", f"{name.split('.')[-1]}-{text(v)}") for name, v in values.items())
