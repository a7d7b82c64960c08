"""The bar, its plain lines, and the closing table, as they stand on the screen."""

import io
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from normexp import progress
from normexp.progress import Progress, closing_table

RUN = "rms-pre-L6-w0-s0-0123456789"
SUMMARY = {
    "run_id": RUN,
    "status": "finished",
    "verdict": "trained",
    "reason": "validation loss 2.213, 0.811 below the unigram entropy",
    "first_bad_step": None,
    "first_bad_layer": None,
    "val_loss": 2.2134,
    "best_val_loss": 2.2101,
    "val_loss_batch_stats": None,
    "unigram_entropy": 3.0244,
    "steps": 400,
    "skipped_steps": 0,
    "seconds": 21.4,
    "tokens_per_second": 9712.3,
    "nonfinite": [],
}


@pytest.fixture(autouse=True)
def _width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def train(steps, first_step=0, every=1):
    with Progress(steps, RUN, first_step) as bar:
        for step in range(first_step + 1, steps + 1):
            known = step % every == 0
            bar.update(
                step,
                loss=4.0 - step / 1000 if known else None,
                lr=3e-3,
                grad_norm=0.8123 if known else None,
                tokens_per_second=11_234.0 if known else None,
            )


def table(capsys, changes, folder="/results/runs/x", sync_command=None):
    closing_table(SUMMARY | changes, Path(folder), sync_command)
    return capsys.readouterr().out


def rows(text):
    """The two cells of each line of the table."""
    return [tuple(cell.strip() for cell in line.split("│")[1:3]) for line in text.splitlines() if "│" in line]


def test_without_a_terminal_a_run_is_about_ten_lines(capsys):
    train(1000, every=5)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"{RUN}: 1000 steps"
    assert len(lines) == 10
    assert re.fullmatch(
        rf"{RUN}   400/1000  loss 3\.600  lr 3\.0e-03  grad 0\.81  11\.2k tok/s  \d+:\d\d left", lines[3]
    )
    assert re.fullmatch(r".* 1000/1000  loss 3\.000 .* \d+:\d\d taken", lines[9])


@pytest.mark.parametrize(("steps", "lines"), [(1, 1), (7, 7), (10, 10), (11, 10)])
def test_short_runs_have_no_more_lines_than_steps(capsys, steps, lines):
    train(steps)
    assert len(capsys.readouterr().out.splitlines()) == 1 + lines


def test_a_resumed_run_goes_on_where_it_was(capsys):
    train(100, first_step=95)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]] == ["100/100"]


def test_values_that_are_not_known_yet_are_left_out(capsys):
    with Progress(10, RUN, 0) as bar:
        bar.update(1, loss=None, lr=None, grad_norm=None, tokens_per_second=None)
        bar.update(2, loss=float("nan"), lr=None, grad_norm=None, tokens_per_second=None)
        bar.update(3, loss=None, lr=0.1, grad_norm=12_345.0, tokens_per_second=2.5e6)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [re.sub(r"  \d+:\d\d left", "", line).removeprefix(RUN).strip() for line in lines] == [
        "1/10",
        "2/10  loss nan",
        "3/10  loss nan  lr 1.0e-01  grad 1.2e+04  2.50M tok/s",
    ]


def test_time_left_counts_the_steps_of_this_start_only(monkeypatch, capsys):
    clock = iter([0.0, 0.0, 30.0, 5000.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    with Progress(400, RUN, 100) as bar:
        bar.update(130, loss=1.0, lr=None, grad_norm=None, tokens_per_second=None)  # 30 steps in 30 s: 270 s for 270
        bar.update(400, loss=1.0, lr=None, grad_norm=None, tokens_per_second=None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("4:30 left")
    assert lines[2].endswith("1:23:20 taken")


def on_a_terminal(program, columns=80):
    """What a program writes to a terminal, as text."""
    outer, inner = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color"}
    with subprocess.Popen([sys.executable, "-c", program], stdout=inner, stderr=inner, env=environment) as process:
        os.close(inner)
        output = io.BytesIO()
        while chunk := read(outer):
            output.write(chunk)
    os.close(outer)
    assert process.returncode == 0, output.getvalue().decode()
    return output.getvalue().decode()


def read(handle):
    try:
        return os.read(handle, 65536)
    except OSError:  # the end of a terminal
        return b""


def test_on_a_terminal_the_bar_fits_into_80_columns():
    text = on_a_terminal(f"""
import time
from normexp.progress import Progress
with Progress(4000, "{RUN}", 0) as bar:
    for step in range(1, 4001):
        bar.update(step, loss=2.345, lr=3e-3, grad_norm=0.8123, tokens_per_second=11234.0)
        time.sleep(0.0003)
""")
    drawn = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip() for line in re.split(r"[\r\n]+", text)]
    drawn = [line for line in drawn if line]
    assert drawn[0] == RUN
    assert re.fullmatch(r"━+ +4000/4000 loss 2\.345  lr 3\.0e-03  grad 0\.81  11\.2k tok/s  0:0\d taken", drawn[-1])
    assert all(len(line) <= 80 for line in drawn)
    assert 3 <= len(drawn) <= 20  # two redraws per second


def test_updates_between_redraws_cost_next_to_nothing(monkeypatch):
    redraws = []
    bar = Progress(10**6, RUN, 0)
    bar._bar = object()
    monkeypatch.setattr(bar, "_draw", redraws.append)
    began = time.perf_counter()
    for step in range(1, 5001):
        bar.update(step, loss=1.0, lr=1.0, grad_norm=1.0, tokens_per_second=None)
    assert (time.perf_counter() - began) / 5000 < 1e-4  # measured 1 µs; a step takes 40,000
    assert redraws == []


def test_the_closing_table_says_how_it_ended_and_where_the_files_are(capsys):
    folder = f"/a/long/path/that/leads/to/the/results/of/this/machine/results/runs/{RUN}"
    command = f"wandb sync {folder}/wandb/offline-run-20260101_010101-{RUN}"
    text = table(capsys, {}, folder, command)
    assert text.splitlines()[0].strip() == RUN
    assert rows(text) == [
        ("verdict", "trained"),
        ("", "validation loss 2.213, 0.811 below the unigram entropy"),
        ("validation loss", "2.213"),
        ("best", "2.210"),
        ("unigram entropy H₁", "3.024  where a collapsed run stays"),
        ("steps", "400, in 0:21, 9.7k tok/s"),
    ]
    assert text.splitlines()[-2:] == [f"  files   {folder}", f"  upload  {command}"]
    assert max(len(line) for line in text.splitlines()[:-2]) <= 80


def test_a_collapsed_run_names_step_and_layer(capsys):
    reason = "validation loss 3.031 is within 0.05 of the unigram entropy and the training loss has not moved for long"
    changes = {"verdict": "collapsed", "reason": reason, "first_bad_step": 5, "first_bad_layer": "layer_00"}
    text = table(capsys, {**changes, "skipped_steps": 3})
    assert ("first bad step", "5, in layer_00") in rows(text)
    assert ("steps", "400, 3 of them skipped, in 0:21, 9.7k tok/s") in rows(text)
    assert reason in " ".join(cell for name, cell in rows(text)[1:3])
    assert max(map(len, text.splitlines())) <= 80


def test_a_batch_norm_shows_both_losses(capsys):
    found = rows(table(capsys, {"val_loss": 2.3976, "val_loss_batch_stats": 2.4071}))
    assert ("validation loss", "2.398  by running statistics") in found
    assert ("", "2.407  by batch statistics") in found
    found = rows(table(capsys, {"val_loss": None, "nonfinite": ["val_loss"], "val_loss_batch_stats": 2.4071}))
    assert ("validation loss", "not finite  by running statistics") in found


def test_a_loss_from_before_the_end_says_of_which_step_it_is(capsys):
    assert ("validation loss", "2.213  at step 300") in rows(table(capsys, {"val_step": 300, "steps": 340}))
    assert ("validation loss", "2.213") in rows(table(capsys, {"val_step": 340, "steps": 340}))


@pytest.mark.parametrize("columns", ["0", "1", "20"])
def test_a_very_narrow_terminal_keeps_the_verdict(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    text = table(capsys, {})
    assert "trained" in text
    assert "files" in text


def test_an_interrupted_run_says_how_it_goes_on(capsys):
    closing_table({"run_id": RUN, "status": "interrupted", "reason": None}, Path("/x"), None)
    assert rows(capsys.readouterr().out) == [("verdict", "interrupted"), ("", "the same command goes on from here")]


def test_a_run_without_a_verdict_shows_its_status(capsys):
    closing_table({"run_id": RUN, "status": "failed", "error": "OSError: [Errno 28] no space"}, Path("/x"), None)
    text = capsys.readouterr().out
    assert rows(text) == [("verdict", "failed"), ("", "OSError: [Errno 28] no space")]
    assert text.splitlines()[-1] == "  files   /x"


@pytest.mark.parametrize(
    ("verdict", "colour"),
    [("trained", 32), ("unstable", 33), ("collapsed", 31), ("diverged", 31), ("undecided", 36)],
)
def test_the_verdict_has_its_colour(monkeypatch, capsys, verdict, colour):
    from rich.console import Console

    monkeypatch.setattr(
        progress, "_console", lambda: Console(force_terminal=True, width=80, color_system="standard", no_color=False)
    )
    assert f"\x1b[1;{colour}m{verdict}" in table(capsys, {"verdict": verdict})


def test_a_page_online_is_shown(capsys):
    text = table(capsys, {"wandb_url": "https://wandb.ai/me/normexp/runs/x"})
    assert text.splitlines()[-1] == "  wandb   https://wandb.ai/me/normexp/runs/x"


def test_a_screen_that_knows_ascii_only_shows_the_table():
    program = f"from normexp.progress import *; closing_table({SUMMARY}, Path('/x'), None)"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
    assert "| unigram entropy H? | 3.024" in run.stdout.decode("ascii")
