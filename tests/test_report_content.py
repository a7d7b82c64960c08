"""Figures: what they say. Colours of verdicts and losses, marks, curves and means over the seeds."""

import json
import re
import shutil

import numpy as np
import pytest
from matplotlib.text import Text

from normexp import results
from normexp.report import canvas
from normexp.report.curves import smoothed
from normexp.report.figure import Drawing, file_name
from normexp.report.figures import figures
from normexp.report.gradients import layer_norms
from normexp.report.palette import VERDICTS, contrast, ink, shade
from normexp.report.study import study
from tests import fake_runs

LEVELS = np.linspace(0, 1, 21)


def cells(folder):
    return study(results.read(results.locate(folder), re.compile(".*")))


def figure_of(folder, name="phase_diagram"):
    with canvas.style():
        return next(one for one in figures(cells(folder)) if isinstance(one, Drawing) and one.name == name)


# --- colours ---------------------------------------------------------------------------------------------------------


def grey(red, green, blue):
    return 0.299 * red + 0.587 * green + 0.114 * blue


def rgb(color):
    return np.array([int(color[start : start + 2], 16) for start in (1, 3, 5)])


def test_verdicts_differ_by_hatch_and_losses_by_lightness_in_grey_print_too():
    assert len({style.hatch for style in VERDICTS.values()}) == len(VERDICTS)
    assert len({style.full for style in VERDICTS.values()}) == len(VERDICTS)
    for verdict in VERDICTS:
        falling = [grey(*rgb(shade(verdict, level))) / 255 for level in LEVELS]
        assert falling == sorted(falling, reverse=True)
        assert falling[0] - falling[-1] > (0.1 if verdict == "diverged" else 0.2)
    lightness = [canvas.log_colors(np.array([0.1, 1.0]))[0](place) for place in np.linspace(0, 1, 20)]
    rising = [grey(*color[:3]) for color in lightness]
    assert rising == sorted(rising)


@pytest.mark.parametrize("verdict", VERDICTS)
def test_the_text_of_a_tile_can_be_read_at_every_loss(verdict):
    codes = {"black": "#000000", "white": "#FFFFFF"}
    for color in [shade(verdict, level) for level in LEVELS]:
        assert contrast(codes[ink(color)], color) >= 4.5
        assert contrast(codes[ink(color)], VERDICTS[verdict].hatch_color) >= 4.5


def test_contrast_by_hand():
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert contrast("#777777", "#FFFFFF") == pytest.approx(4.48, abs=0.01)
    assert (ink("#D55E00"), ink("#2B2B2B")) == ("black", "white")


def test_a_tile_has_the_colour_of_its_verdict_and_loss(tmp_path):
    outcomes = {0: ("trained", 2.0), 50: ("trained", 2.5), 200: ("collapsed", 3.03)}
    for warmup, outcome in outcomes.items():
        fake_runs.write_run(tmp_path, fake_runs.config("ln", "post", 6, warmup, 0, train__steps=1), *outcome)
    figure = figure_of(tmp_path).sheet.figure
    figure.canvas.draw()
    picture = np.asarray(figure.canvas.buffer_rgba())[..., :3].astype(int)
    middle = (2.5 - 2.0) / (fake_runs.UNIGRAM_ENTROPY - 2.0)
    for verdict, level in (("trained", 0.0), ("trained", middle), ("collapsed", 1.0)):
        share = (np.abs(picture - rgb(shade(verdict, level))).max(axis=-1) <= 1).mean()
        assert share > 0.01, f"{verdict} at {level:.2f} covers {share:.1%}"


# --- what is told ----------------------------------------------------------------------------------------------------


def test_a_mean_of_the_finite_losses_only_is_marked(tmp_path):
    for warmup, verdicts in ((0, ("trained", "trained")), (50, ("trained", "diverged")), (200, ("diverged",) * 2)):
        for seed, verdict in enumerate(verdicts):
            node = fake_runs.config("ln", "post", 6, warmup, seed, train__steps=1)
            fake_runs.write_run(tmp_path, node, verdict, 2.25 + warmup / 100)
    drawing = figure_of(tmp_path)
    assert {"2.25", "2.75*", "not finite"} < {text.get_text() for text in drawing.sheet.figure.findobj(Text)}
    assert "*: mean of the finite losses only" in drawing.sheet.layout.subtitle
    for run in tmp_path.glob("*-w50-*"):
        shutil.rmtree(run)
    assert "*" not in figure_of(tmp_path).sheet.layout.subtitle


def test_figures_of_losses_say_by_which_statistics_batch_norm_is_judged(tmp_path):
    for norm, by_batch in (("bn", 2.9), ("ln", None)):
        for depth in (2, 6):
            node = fake_runs.config(norm, "post", depth, 50, 0, train__steps=1)
            fake_runs.write_run(tmp_path, node, final=3.46, val_loss_batch_stats=by_batch)
    for name in ("phase_diagram", "loss_depth"):
        told = figure_of(tmp_path, name).sheet.layout.subtitle
        assert "bn: verdict by batch statistics, loss by running ones" in told
    for run in tmp_path.glob("bn-*"):
        shutil.rmtree(run)
    assert "statistics" not in figure_of(tmp_path).sheet.layout.subtitle


# --- curves and means ------------------------------------------------------------------------------------------------


def spoil(folder, steps):
    """Makes the training loss of some steps non-finite."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["step"] in steps:
            row |= {"train/loss": None, "nonfinite": ["train/loss"]}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_skipped_step_leaves_no_hole_in_the_loss_and_a_bad_end_does(tmp_path):
    names = []
    for seed, bad in enumerate(((), (100,), range(300, 401))):
        run = fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, seed))
        spoil(run, bad)
        names.append(run.name)
    found = cells(tmp_path)
    whole, skipped, ended = (smoothed(found, found.finished)[name] for name in names)
    losses = found.runs.histories[names[1]]["train/loss"]
    assert np.isfinite(whole).all()
    assert np.isfinite(skipped).all()
    assert skipped[100] == pytest.approx(losses.loc[91:99].mean())
    assert skipped[105] == pytest.approx(np.mean([losses[step] for step in range(96, 106) if step != 100]))
    assert ended.last_valid_index() == 299
    axes = figure_of(tmp_path, "loss_curves").sheet.axes[0][0]
    assert [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "x"] == [299]
    mean = next(line for line in axes.lines if len(line.get_xdata()) == 400)
    assert mean.get_ydata()[149] == pytest.approx(np.mean([whole[150], skipped[150], ended[150]]))


def test_layer_norms_are_a_geometric_mean_and_not_finite_where_a_seed_is_not(tmp_path):
    for seed, verdict in ((0, "trained"), (1, "diverged")):
        fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 12, 0, seed), verdict)
    found = cells(tmp_path)
    norms = layer_norms(found, found.finished)
    assert norms.values_LS.shape == (12, 58)  # blocks 0 to 11 in order; 20 dense steps and 38 more
    one, other = (history.loc[10, "grad_norm/layer_11"] for history in found.runs.histories.values())
    assert norms.values_LS[11, list(norms.steps).index(10)] == pytest.approx((one * other) ** 0.5)
    assert np.isinf(norms.values_LS[:, norms.steps > 100]).all()
    assert np.isfinite(norms.values_LS[:, norms.steps <= 100]).all()


def test_what_norm_and_placement_fix_together_spreads_no_panels(tmp_path):
    """Initial weights that go with a placement are told, and are no axis."""
    for placement, init in (("pre", "xavier"), ("deepnorm", "placement")):
        fake_runs.write_run(tmp_path, fake_runs.config("ln", placement, 2, 0, 0, model__init=init))
    found = cells(tmp_path)
    assert found.nested == ("init",)
    assert found.varying == ("placement", "init")
    drawing = figure_of(tmp_path)
    assert "init by norm and placement" in drawing.sheet.layout.subtitle
    fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", 2, 0, 0, model__init="gpt2"))
    assert cells(tmp_path).nested == ()


def test_a_loss_far_above_ln_v_is_cut_off(tmp_path):
    folders = [fake_runs.write_run(tmp_path, fake_runs.config("ln", "pre", depth, 0, 0)) for depth in (2, 6)]
    lines = (folders[0] / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows = [row | ({"train/loss": 500.0} if row["step"] > 50 and "train/loss" in row else {}) for row in rows]
    (folders[0] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (axes, *_), *_ = figure_of(tmp_path, "loss_curves").sheet.axes
    low, high = axes.get_ylim()
    assert high == pytest.approx(1.5 * np.log(65))
    assert 0 < low < 2.5


def test_a_files_name_has_room_for_whatever_varies():

    values = {f"model.field_{number}": "a-long-value" for number in range(20)}
    one, other = file_name("loss_curves", values), file_name("loss_curves", values | {"model.field_19": "another"})
    assert len(one) == len(other) == 150
    assert one != other
    assert file_name("loss_curves", {"depth": 2}) == "loss_curves-depth-2"
