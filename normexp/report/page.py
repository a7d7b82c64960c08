"""report.html: one file with everything in it (style, script, figures, curves), for a browser without a network."""

from __future__ import annotations

import base64
import html
import json
import math
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import pandas as pd

from normexp.report.facts import Facts
from normexp.report.figure import Drawing, Missing
from normexp.report.formats import Table, to_html
from normexp.report.gradients import blocks
from normexp.report.study import Study
from normexp.results import VERDICTS

POINTS = 400  # of one curve: more than a screen shows
FILTERS = ("norm", "placement", "verdict", "status")


def render(
    title: str,
    study: Study,
    facts: Facts,
    tables: list[Table],
    drawn: list[Drawing],
    missing: list[Missing],
    uncounted: list[tuple[str, str]],
    figures: Path,
) -> str:
    page = files("normexp.report")
    return Template((page / "page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(title),
        style=(page / "page.css").read_text(encoding="utf-8"),
        script=(page / "page.js").read_text(encoding="utf-8"),
        facts="".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in facts),
        figures="".join(_figure(drawing, figures) for drawing in drawn),
        missing=_list([(figure.name, f"not drawn: {figure.why}") for figure in missing]),
        open=" open" if uncounted else "",
        uncounted=_list(uncounted) or "<p>Everything counts.</p>",
        tables="".join(_table(table) for table in tables if table.name != "runs"),
        filters="".join(_filter(name, study) for name in FILTERS),
        runs="".join(to_html(table) for table in tables if table.name == "runs"),
        data=embedded({run_id: curves(history) for run_id, history in study.runs.histories.items()}),
    )


def _figure(drawing: Drawing, folder: Path) -> str:
    image = base64.b64encode((folder / f"{drawing.name}.png").read_bytes()).decode("ascii")
    layout = drawing.sheet.layout
    width = round(drawing.sheet.width * 96)  # CSS pixels to the inch
    alt = html.escape(f"{layout.title}. {layout.subtitle}", quote=True)
    return (
        f'<figure><img src="data:image/png;base64,{image}" width="{width}" alt="{alt}">'
        f'<figcaption><a href="figures/{drawing.name}.pdf">{drawing.name}.pdf</a></figcaption></figure>\n'
    )


def _list(items: list[tuple[str, str]]) -> str:
    rows = "".join(f"<li><code>{html.escape(what)}</code> {html.escape(why)}</li>" for what, why in items)
    return f"<ul>{rows}</ul>" if rows else ""


def _table(table: Table) -> str:
    return (
        f'<section id="{table.name}"><h2>{html.escape(table.title)}</h2><p>{html.escape(table.note)}</p>'
        f'<div class="wide">{to_html(table)}</div></section>\n'
    )


def _filter(name: str, study: Study) -> str:
    table = study.runs.table
    values = sorted({str(value) for value in table[name].dropna()}, key=_verdict_order) if name in table else []
    options = "".join(f"<option>{html.escape(value)}</option>" for value in values)
    return f'<label>{name} <select data-column="{name}"><option value="">all</option>{options}</select></label>\n'


def _verdict_order(value: str) -> tuple[int, str]:
    return (VERDICTS.index(value) if value in VERDICTS else 0, value)


def embedded(data: Any) -> str:
    """JSON that may stand inside a script element whatever strings it holds."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def curves(history: pd.DataFrame) -> dict[str, Any]:
    """The curves of one run, thinned to what a screen shows: series of [steps, values], and blocks × steps."""
    paths = {"train": "train/loss", "validation": "val/loss", "gradient": "grad_norm/total"}
    series = {name: _thin(history[path].dropna()) for name, path in paths.items() if path in history}
    by_block = history[blocks(history)].dropna(how="all")
    by_block = by_block.iloc[:: max(1, len(by_block) // 100)]
    rows = [[_number(value) for value in by_block[path]] for path in by_block]
    return series | {"blocks": [by_block.index.tolist(), rows]}


def _thin(values: pd.Series[float]) -> list[list[Any]]:
    """The lowest and the highest of each bucket, so that a spike of one step stays visible."""
    if len(values) > POINTS:
        parts = np.array_split(np.arange(len(values)), POINTS // 2)
        found = {int(part[pick(values.iloc[part])]) for part in parts for pick in (np.argmin, np.argmax)}
        values = values.iloc[sorted(found)]
    return [values.index.tolist(), [_number(value) for value in values]]


def _number(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
