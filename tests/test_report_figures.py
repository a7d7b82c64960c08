"""Figures: which are drawn for which runs, and that nothing in them overlaps, is cut off or lacks a label."""

import itertools
import re
from pathlib import Path

import pytest
from matplotlib.text import Text

import normexp.report.figures
from normexp import results
from normexp.report import canvas
from normexp.report.figure import Drawing, Missing
from normexp.report.figures import draw, figures
from normexp.report.study import study
from tests import fake_runs

CELL = {"norms": "ln", "placements": "pre post", "depths": (6,), "warmups": (0,), "seeds": 2}
RATES, INITS, SIZES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), ("gpt2", "xavier"), (1, 2, 16)
LONG = "bn ln rms dyt a_norm_with_a_long_name"
SETS = {
    "depth and warmup": fake_runs.grid("bn ln rms", "pre post", (2, 6), (0, 50, 200), 2),
    "one run": fake_runs.grid("rms", "pre", (6,), (0,), 1),
    "norms and placements": fake_runs.grid("bn ln rms", "pre post", (6,), (0,), 2),
    "learning rates": [node for lr in RATES for node in fake_runs.grid(**CELL, optim__lr=lr)],
    "inits": [node for init in INITS for node in fake_runs.grid(**CELL, model__init=init)],
    "batch sizes": [node for size in SIZES for node in fake_runs.grid(**CELL, train__batch_size=size)],
    "many norms": fake_runs.grid(LONG, "pre post reordered", (24,), (0, 200), 1),
    "one step": [fake_runs.config("ln", "pre", 2, 0, 0, train__steps=1)],
}


def cells(folder):
    return study(results.read(results.locate(folder), re.compile(".*")))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """name of a set of runs -> (drawings, missing ones); each set is drawn once."""
    known = {}

    def get(name):
        if name not in known:
            folder = tmp_path_factory.mktemp("runs")
            for node in SETS[name]:
                fake_runs.write_run(folder, node, *fake_runs.outcome(node))
            with canvas.style():
                found = list(figures(cells(folder)))
            known[name] = [[one for one in found if isinstance(one, kind)] for kind in (Drawing, Missing)]
        return known[name]

    return get


EXPECTED = {
    "depth and warmup": {"phase_diagram", "loss_depth", *(f"{kind}-depth-{depth}" for depth in (2, 6)
                         for kind in ("loss_curves", "gradient_heatmap", "gradient_profile"))},
    "one run": {"loss_curves", "gradient_heatmap", "gradient_profile"},
    "norms and placements": {"phase_diagram", "loss_curves", "gradient_heatmap", "gradient_profile"},
    "learning rates": {"phase_diagram", "loss_curves", "gradient_heatmap", "gradient_profile", "lr_sensitivity"},
    "inits": {"phase_diagram", "loss_curves", "gradient_heatmap", "gradient_profile"},
    "batch sizes": {"phase_diagram", "loss_curves", "gradient_heatmap", "gradient_profile", "loss_train_batch_size"},
    "one step": {"loss_curves", "gradient_heatmap", "gradient_profile"},
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_a_figure_is_drawn_where_the_runs_support_it_and_else_said_to_be_missing(drawn, name):
    figures, missing = drawn(name)
    assert {figure.name for figure in figures} == EXPECTED[name]
    kinds = {figure.name.partition("-")[0] for figure in figures}
    assert {figure.name for figure in missing} == {"phase_diagram", "lr_sensitivity", "loss_depth"} - kinds
    assert all(figure.why for figure in missing)


def texts(figure):
    """Every text that is drawn, with its box in pixels."""
    renderer = figure.canvas.get_renderer()
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in itertools.chain(axis.get_major_ticks(), axis.get_minor_ticks()):
                hidden |= {tick.label2} if low <= tick.get_loc() <= high else {tick.label1, tick.label2}
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and text not in hidden:
            yield text, text.get_window_extent(renderer)


@pytest.mark.parametrize("name", SETS)
def test_no_text_overlaps_another_or_is_cut_off(drawn, name):
    for figure in drawn(name)[0]:
        sheet = figure.sheet.figure
        sheet.canvas.draw()
        width, height = sheet.bbox.size
        boxes = list(texts(sheet))
        assert len(boxes) > 5
        for text, box in boxes:
            inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
            assert inside, f"{figure.name}: {text.get_text()!r} is cut off"
        for (one, first), (other, second) in itertools.combinations(boxes, 2):
            assert not first.overlaps(second), f"{figure.name}: {one.get_text()!r} over {other.get_text()!r}"


@pytest.mark.parametrize("name", SETS)
def test_every_figure_names_its_axes_with_units_its_n_and_its_init(drawn, name):
    for figure in drawn(name)[0]:
        layout = figure.sheet.layout
        assert layout.title
        assert layout.x_label
        assert layout.y_label
        assert re.search(r"n\s=\s\d+(–\d+)? seeds? a cell", layout.subtitle)
        shown = " ".join([layout.subtitle, layout.x_label, *layout.columns, *layout.rows])
        assert re.search(r"init|xavier", shown), figure.name
        if "loss" in layout.y_label:
            assert "nats per token" in layout.y_label


def test_runs_without_layers_or_losses_still_get_what_they_support(tmp_path):
    folder = fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, 0))
    (folder / "metrics.jsonl").write_text('{"step": 400}\n')
    figures, missing = draw(cells(tmp_path), tmp_path / "figures")
    assert [figure.name for figure in figures] == ["loss_curves"]
    assert {"gradient_heatmap", "gradient_profile"} <= {figure.name for figure in missing}


def test_too_many_files_of_a_kind_are_cut_with_a_word(tmp_path, monkeypatch):
    monkeypatch.setattr(normexp.report.figures, "MOST_FILES", 1)
    for name in ("relu", "gelu", "swiglu"):
        for lr in (1e-3, 3e-3):
            fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, 0, model__mlp=name, optim__lr=lr))
    drawn, missing = draw(cells(tmp_path), tmp_path / "figures")
    assert [figure.name for figure in drawn if figure.name.startswith("gradient_heatmap")] == [
        "gradient_heatmap-mlp-gelu"
    ]
    assert "2 of 3 files left out: report fewer runs" in {f.why for f in missing if f.name == "gradient_heatmap"}


def test_one_module_imports_matplotlib():
    folder = Path(normexp.report.__file__).parent.parent
    importing = re.compile(r"^\s*(import|from) matplotlib", re.MULTILINE)
    importers = {path.name for path in folder.rglob("*.py") if importing.search(path.read_text())}
    assert importers == {"canvas.py"}
