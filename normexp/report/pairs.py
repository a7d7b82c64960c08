"""Pairs of cells that differ in one thing, compared seed by seed, with Holm's correction over the whole table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

from normexp import stats
from normexp.report.formats import Column, Table, Value
from normexp.report.study import (
    Frame,
    Study,
    Values,
    describe,
    factor_text,
    is_number,
    is_of_data,
    learned,
    losses,
    split,
    text,
)


def comparisons(study: Study) -> Table:
    """Cells that differ in one thing without an order (a norm, a placement, an init, a switch), paired by seed."""
    pairs = [pair for things in _things(study) for pair in _pairs(study, things)]
    corrected = stats.holm([p_value for _, p_value in pairs])
    rows = [row | {"p": p_value, "p_holm": holm} for (row, p_value), holm in zip(pairs, corrected, strict=True)]
    columns = [
        Column("pair", "pair"),
        Column("cell", "in"),
        Column("difference", "difference in validation loss (nats/token)"),
        Column("test", "test"),
        Column("p", "p"),
        Column("p_holm", "p (Holm)"),
    ]
    tests = sum(not math.isnan(p) for p in corrected)
    note = (
        "n: seeds that both cells have. First minus second, 95 % intervals; p-values two-sided, corrected by Holm over "
        f"the {tests} tests of this table. Wilcoxon's test and the Hodges-Lehmann estimate where a cell trains with "
        f"some seeds only and at least {stats.SMALLEST_WILCOXON} pairs exist; with fewer the t interval of such a cell "
        "is rough, and says so."
    )
    if any(is_of_data(factor) for factor in study.varying):
        note += " Cells with other data are not compared: nats per token of one text are not those of another."
    return Table("comparisons", "Paired differences", note, columns, rows)


Row = dict[str, Value]
Cell = tuple[Values, Frame]


def _things(study: Study) -> list[tuple[str, ...]]:
    """A norm with its own fields is one thing, and so is a placement; any other factor stands alone."""
    own = {group: tuple(f for f in study.factors if f.startswith(f"{group}.")) for group in ("norm", "placement")}
    within = {*own, *sum(own.values(), ())}
    alone = [(factor,) for factor in study.factors if factor not in within and not is_of_data(factor)]
    things = [*((group, *fields) for group, fields in own.items()), *alone]
    return [thing for thing in things if any(_is_unordered(study, factor) for factor in thing)]


def _is_unordered(study: Study, factor: str) -> bool:
    return factor in study.varying and not is_number(study.levels(factor))


def _pairs(study: Study, things: tuple[str, ...]) -> Iterator[tuple[Row, float]]:
    """A row of the table and its uncorrected p-value for each pair of cells that agree in all but `things`."""
    rest = tuple(other for other in study.factors if other not in things)
    for values, part in split(study.finished, rest):
        for first, second in combinations(split(part, things), 2):
            yield _pair(values, first, second)


def _name(values: Values) -> str:
    """The first value alone (`bn`), its own fields with their names where it has them (`norm.stats position`)."""
    (_, first), *fields = values.items()
    return " ".join([text(first), *(factor_text(name, value) for name, value in fields if value is not None)])


def _pair(values: Values, first: Cell, second: Cell) -> tuple[Row, float]:
    mixed = any(0 < learned(rows) < len(rows) for _, rows in (first, second))
    by_seed = [dict(zip(rows["seed"], losses(rows), strict=True)) for _, rows in (first, second)]
    enough = len(by_seed[0].keys() & by_seed[1].keys()) >= stats.SMALLEST_WILCOXON
    found = stats.paired(by_seed[0], by_seed[1], "wilcoxon" if mixed and enough else "t")
    row: Row = {
        "pair": f"{_name(first[0])} − {_name(second[0])}",
        "cell": describe(values),
        "difference": found.difference,
        "test": found.test + (" (rough: some seeds train, some do not)" if mixed and found.test == "t" else ""),
    }
    return row, found.p_value
