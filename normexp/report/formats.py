"""A table of plain values and estimates -> CSV, Markdown, HTML (latex.py: LaTeX). Text is escaped for each."""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from normexp.report.study import text
from normexp.stats import Estimate

Value = str | float | int | Estimate | None


Writer = Callable[[float], str]


def fixed(digits: int) -> Writer:
    """So many digits after the point; two figures of what would be 0."""

    def write(value: float) -> str:
        if value and abs(value) < 10.0**-digits:
            return significant(2)(value)
        return f"{value:.{digits}f}" if math.isfinite(value) else _not_finite(value)

    return write


def significant(figures: int) -> Writer:
    """So many figures: for what spans decades."""
    return lambda value: text(float(f"{value:.{figures}g}")) if math.isfinite(value) else _not_finite(value)


def _not_finite(value: float) -> str:
    return "–" if math.isnan(value) else ("∞" if value > 0 else "−∞")


@dataclass(frozen=True)
class Column:
    key: str
    title: str  # with the unit
    write: Writer | None = None  # None: three digits of an estimate, four figures of a plain number


@dataclass(frozen=True)
class Table:
    name: str  # of its files
    title: str
    note: str
    columns: Sequence[Column]
    rows: Sequence[dict[str, Value]]


def factor_columns(names: Sequence[str]) -> list[Column]:
    titles = {"warmup_steps": "warmup (steps)", "depth": "depth (blocks)"}
    return [Column(name, titles.get(name, name.replace("first_bad_", "first bad "))) for name in names]


def show(value: Value, write: Writer | None = None) -> str:
    """An estimate as `2.31 [2.28, 2.34] (n=3)`, without an interval as `2.31 (n=1; one value: no interval)`."""
    if isinstance(value, float) and write:
        return write(value)
    if not isinstance(value, Estimate):
        return text(value)
    write = write or fixed(3)
    if value.interval is None:
        return f"{write(value.value)} (n={value.n}; {value.note})"
    low, high = map(write, value.interval)
    note = f"; {value.note}" if value.note else ""
    return f"{write(value.value)} [{low}, {high}] (n={value.n}{note})"


def to_csv(table: Table) -> str:
    """One column a number: an estimate becomes its value, low, high, n, method and note."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    parts = {column.key: _has_estimate(table, column.key) for column in table.columns}
    ends = ("", "_low", "_high", "_n", "_method", "_note")
    writer.writerow([key + end for key, wide in parts.items() for end in (ends if wide else ends[:1])])
    for row in table.rows:
        writer.writerow([cell for key, wide in parts.items() for cell in _csv_cells(row.get(key), wide)])
    return out.getvalue()


def _has_estimate(table: Table, key: str) -> bool:
    return any(isinstance(row.get(key), Estimate) for row in table.rows)


def _csv_cells(value: Value, wide: bool) -> list[object]:
    if isinstance(value, Estimate):
        return [value.value, *(value.interval or ("", "")), value.n, value.method, value.note]
    return ["" if value is None else value, *[""] * (5 if wide else 0)]


def to_markdown(table: Table) -> str:
    lines = [[column.title for column in table.columns], ["---"] * len(table.columns)]
    lines += [[show(row.get(column.key), column.write) for column in table.columns] for row in table.rows]
    return "\n".join("| " + " | ".join(markdown(cell) for cell in line) + " |" for line in lines) + "\n"


def markdown(value: str) -> str:
    """Escapes what would become markup; an underscore inside a word and a bracket that is no link stay readable."""
    value = re.sub(r"([\\|*`<>]|(?<!\w)_|_(?!\w))", r"\\\1", value)
    return value.replace("](", "\\](").replace("\n", " ")


def to_html(table: Table) -> str:
    """Cells carry the plain value in `data-value`, by which the page sorts; a run is a link to its curves."""
    head = "".join(
        f'<th scope="col" data-column="{html.escape(column.key)}">{html.escape(column.title)}</th>'
        for column in table.columns
    )
    body = "".join(
        f"<tr>{''.join(_html_cell(column, row.get(column.key)) for column in table.columns)}</tr>\n"
        for row in table.rows
    )
    return f'<table id="table-{table.name}"><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>'


def _html_cell(column: Column, value: Value) -> str:
    shown = html.escape(show(value, column.write))
    plain = value.value if isinstance(value, Estimate) else value
    if column.key == "run_id":
        shown = f'<a href="#run={quote(str(value))}">{shown}</a>'
    if column.key == "verdict" and value is not None:
        shown = f'<span class="verdict {shown}">{shown}</span>'
    return f'<td data-value="{"" if plain is None else html.escape(str(plain))}">{shown}</td>'
