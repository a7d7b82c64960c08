"""The figures of a report: those that the runs support, and which are missing and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from normexp.report import canvas
from normexp.report.curves import loss_against, loss_curves
from normexp.report.figure import Drawing, Missing
from normexp.report.gradients import gradient_figures
from normexp.report.phase import phase_diagrams
from normexp.report.study import NAMED, Study, is_number, is_of_data

MOST_FILES = 12  # of one kind: beyond it nobody looks


def draw(study: Study, folder: Path) -> tuple[list[Drawing], list[Missing]]:
    """Writes each figure as PNG and PDF as soon as it is drawn, so that one is in memory at a time."""
    drawn: list[Drawing] = []
    missing: list[Missing] = []
    files: Counter[str] = Counter()
    with canvas.style():
        for figure in figures(study):
            kind = figure.name.partition("-")[0]
            files[kind] += 1
            if isinstance(figure, Missing):
                missing.append(figure)
            elif files[kind] <= MOST_FILES:
                figure.sheet.save(folder, figure.name)
                drawn.append(figure)
    too_many = [(kind, count) for kind, count in files.items() if count > MOST_FILES]
    missing += [
        Missing(kind, f"{count - MOST_FILES} of {count} files left out: report fewer runs") for kind, count in too_many
    ]
    return drawn, missing


def figures(study: Study) -> Iterator[Drawing | Missing]:
    if study.finished.empty:
        yield Missing("all figures", "no run is finished")
        return
    others = [factor for factor in study.varying if factor not in NAMED and not is_of_data(factor)]
    numbers = [factor for factor in others if is_number(study.levels(factor))]
    yield from chain(
        phase_diagrams(study),
        loss_curves(study),
        gradient_figures(study),
        loss_against(study, "lr", "lr_sensitivity", "Sensitivity to the learning rate", "learning rate"),
        loss_against(study, "depth", "loss_depth", "Loss against depth", "depth (blocks)"),
        *(
            loss_against(study, factor, f"loss_{factor.replace('.', '_')}", f"Loss against {factor}", factor)
            for factor in numbers
        ),
    )
