"""How the cells of a sweep are composed, launched on this machine's cores, watched, and ended with their parent."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.types import RunMode

import normexp
from normexp import cell, commandline, launching, progress, sweeps, train, workers
from normexp.commandline import base, grids
from normexp.fields import UserError
from normexp.runs import RunFolder
from tests.tiny import SHORT

SWEEPS = sorted(path.stem for path in (normexp.CONF / "sweep").glob("*.yaml"))
LOCAL = ["hydra/launcher=local", "hydra.launcher.n_jobs=2"]
SEEDS = "seed=0,1,2,3,4"
LONG = [*SHORT, "train.steps=500", "telemetry.flush_every=5", "train.checkpoint_every=50"]

MOODY_NORM = """
import os, sys
from typing import Literal
import torch
from torch import nn

class Moody(nn.Module):
    def __init__(self, dim: int, *, mood: Literal["calm", "kind", "glad", "raise", "exit", "die"]) -> None:
        super().__init__()
        self.mood = mood

    def forward(self, x, mask=None):
        if not x.requires_grad:  # it is only tried or evaluated
            return x
        if self.mood == "raise":
            raise ValueError("moody")
        if self.mood == "exit":
            sys.exit(3)
        if self.mood == "die":
            os._exit(9)
        with open("threads.txt", "a") as file:
            print(os.getpid(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], file=file)
        return x
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty directory in which the command is given."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def moody(here):
    """A norm that does what the field `mood` says once it trains."""
    (here / "moody.py").write_text(MOODY_NORM)
    (here / "conf" / "norm").mkdir(parents=True)
    (here / "conf" / "norm" / "moody.yaml").write_text("_target_: moody.Moody\n_partial_: true\nmood: calm\n")
    return ["--config-dir=conf", "norm=moody"]


def start(*arguments: str) -> subprocess.Popen[str]:
    """The command in a process of its own, which can be killed."""
    environment = {**os.environ, "PYTHONPATH": str(Path(train.__file__).parent.parent)}
    command = [sys.executable, "-m", "normexp.train", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def summaries(results: Path) -> dict[str, dict[str, Any]]:
    return {path.parent.name: json.loads(path.read_text()) for path in results.glob("runs/*/summary.json")}


def statuses(results: Path) -> list[str]:
    return sorted(summary["status"] for summary in summaries(results).values())


def rows(results: Path) -> dict[str, list[dict[str, Any]]]:
    """Of every run, what does not depend on a clock."""
    clock = ("time", "tokens_per_second")
    lines = {path.parent.name: path.read_text().splitlines() for path in results.glob("runs/*/metrics.jsonl")}
    return {
        run: [{key: value for key, value in json.loads(line).items() if key not in clock} for line in own]
        for run, own in lines.items()
    }


def table(results: Path) -> list[tuple[str, ...]]:
    (path,) = results.glob("sweeps/*/sweep.json")
    return [(cell["run_id"], cell["status"], cell["verdict"]) for cell in json.loads(path.read_text())["cells"]]


def wait_until(condition: Callable[[], object], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def children(process: int) -> set[int]:
    """All descendants that live."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state not in "ZX":
            parents[int(path.parent.name)] = int(parent)
    found: set[int] = set()
    while fresh := {own for own, parent in parents.items() if parent in found | {process}} - found:
        found |= fresh
    return found


def alive(processes: set[int]) -> set[int]:
    return {process for process in processes if Path(f"/proc/{process}").exists() and not zombie(process)}


def zombie(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


# --- the files in conf/sweep/ ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def all_grids(tmp_path_factory) -> dict[str, commandline.Grid]:
    results = f"results={tmp_path_factory.mktemp('results')}"
    return {name: commandline.compose_grid(commandline.parse([f"+sweep={name}", results])) for name in SWEEPS}


def test_sweeps_have_the_sizes_that_they_say_and_name_no_launcher(all_grids):
    assert {"depth_warmup", "norm_placement", "lr", "init_placement", "bn_padding", "bn_batch", "smoke"} <= set(SWEEPS)
    for name, grid in all_grids.items():
        text = (normexp.CONF / "sweep" / f"{name}.yaml").read_text()
        (said,) = re.findall(r"(\d+) runs\.", text)
        assert len(grid.cells) == int(said), name
        assert "launcher" not in text
        assert (grid.name, grid.launcher, grid.processes) == (name, "basic", None)


def test_every_cell_of_every_sweep_is_a_run_of_its_own_and_none_is_refused(all_grids):
    for name, grid in all_grids.items():
        planner = launching.Planner()
        assert len({planner(composed).folder for _, composed in grid.cells}) == len(grid.cells), name


def test_depth_warmup_is_the_grid_that_the_study_is_about(all_grids):
    values = [composed().values for _, composed in all_grids["depth_warmup"].cells]
    assert {(v["model"]["depth"], v["optim"]["warmup_steps"], v["seed"]) for v in values} == {
        (depth, warmup, seed) for depth in (2, 6, 12) for warmup in (0, 50, 200) for seed in (0, 1, 2)
    }
    assert {v["optim"]["lr"] for v in values} == {3e-3}


@pytest.mark.parametrize("name", SWEEPS)
def test_a_planned_cell_has_the_config_that_hydra_will_give_it(name, all_grids):
    cells = all_grids[name].cells
    with base.loader() as composer:
        common = composer.load_configuration("config", [f"+sweep={name}"], RunMode.MULTIRUN)
        for overrides, composed in (*cells[::13], cells[-1]):
            expected = base.read(composer.load_sweep_config(common, overrides))
            assert (composed().values, composed().choices) == (expected.values, expected.choices)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["norm=ln,bn", "norm.stats=position"],
            "norm.stats=position: the chosen norm has no such field; it belongs to norm=bn",
        ),
        (["seed=0,1", "+model.depth=3"], "+model.depth: is there already; leave out the +"),
        (["optim.lr=1e-3,1e-2", "optim.lrr=3"], "optim.lrr=3: there is no such field (did you mean optim.lr"),
    ],
)
def test_a_mistake_in_a_grid_is_told_in_hydras_way(overrides, line):
    with pytest.raises(Exception) as refused:  # noqa: PT011  # Hydra's, whatever it is
        commandline.compose_grid(commandline.parse(["-m", *overrides]))
    assert commandline.explain(refused.value).startswith(line)


def test_to_plan_a_finished_sweep_takes_milliseconds_a_cell(here, capfd):
    names = ["seed=" + ",".join(str(seed) for seed in range(160)), *SHORT]
    command = commandline.parse(["-m", *names])
    for planned in sweeps.plan(commandline.compose_grid(command).cells, launching.Planner()):
        planned.folder.mkdir(parents=True)
        RunFolder(planned.folder).write_summary({"status": "finished", "verdict": "trained"})
    started = time.process_time()
    assert train.main(["-m", *names, *LOCAL]) == 0
    assert time.process_time() - started < 8  # 2 on an idle machine; composing each by Hydra would take 12 and more
    assert capfd.readouterr().err == "160 cells: 160 finished already\n"


# --- launching -------------------------------------------------------------------------------------------------------


def test_processes_make_the_numbers_that_one_makes_and_share_a_group(here, capfd, monkeypatch):
    grid = ["-m", "norm=ln,bn", "seed=0,1", *SHORT]
    assert train.main([*grid, *LOCAL]) == 0
    out, err = capfd.readouterr()
    assert err == "4 cells: 4 to run, 2 at a time\n"
    assert sorted(line.split()[0] for line in out.splitlines()[:4]) == ["1/4", "2/4", "3/4", "4/4"]
    holders = {path.read_text().split()[1] for path in here.glob("results/runs/*/lock")}
    assert str(os.getpid()) not in holders
    groups: list[str] = []
    real = cell.open_tracker
    monkeypatch.setattr(cell, "open_tracker", lambda *a, **k: groups.append(k["group"]) or real(*a, **k))
    assert train.main([*grid, "results=one"]) == 0
    assert rows(here / "results") == rows(here / "one")
    assert len(groups) == 4
    assert set(groups) == {path.name for path in (here / "one" / "sweeps").iterdir()}


def test_a_bad_value_a_raise_and_an_exit_leave_the_other_cells_alone(here, moody, capfd):
    moods = "norm.mood=calm,raise,exit,kind,cross,glad"
    assert train.main(["-m", moods, *moody, *SHORT, *LOCAL]) == 1
    (path,) = here.glob("results/sweeps/*/sweep.json")
    cells = json.loads(path.read_text())["cells"]
    assert [c["status"] for c in cells] == ["finished", "failed", "failed", "finished", "refused", "finished"]
    errors = [c["error"] for c in cells]
    assert errors[1:3] == ["ValueError: moody", "SystemExit: 3"]
    assert errors[4].startswith("norm.mood=cross: must be one of calm")
    printed = capfd.readouterr().out
    for error in filter(None, errors):
        assert error in printed.partition("cell ")[2]
    for failed in cells[1:3]:
        assert "in forward" in (Path(failed["folder"]) / "traceback.txt").read_text()


def test_a_worker_that_dies_costs_its_own_cell_only(here, moody, capfd):
    given = ["-m", "norm.mood=die,calm,kind", *moody, *SHORT, *LOCAL]
    planned = sweeps.plan(commandline.compose_grid(commandline.parse(given)).cells, launching.Planner())
    planned[2].folder.mkdir(parents=True)
    RunFolder(planned[2].folder).write_summary({"status": "interrupted"})  # by an earlier command
    assert train.main(given) == 1
    assert [row[:2] for row in table(here / "results")] == [
        (planned[0].name, "failed"),
        (planned[1].name, "finished"),
        (planned[2].name, "finished"),
    ]
    assert "its process was killed" in capfd.readouterr().out.partition("cell ")[2]


def test_a_worker_that_dies_before_its_run_has_a_folder_costs_its_own_cell_only(here):
    (here / "deadly.py").write_text(
        "import os, joblib\nif os.getpid() != int(os.environ['PARENT']): os._exit(9)\n" + MOODY_NORM
    )
    (here / "conf" / "norm").mkdir(parents=True)
    (here / "conf" / "norm" / "deadly.yaml").write_text("_target_: deadly.Moody\n_partial_: true\nmood: calm\n")
    os.environ["PARENT"] = str(os.getpid())
    assert train.main(["-m", "norm=ln,deadly", "--config-dir=conf", *SHORT, *LOCAL]) == 1
    rows = table(here / "results")
    assert [row[1] for row in rows] == ["finished", "failed"]


def test_threads_times_processes_are_not_more_than_the_cores(here, moody, monkeypatch):
    monkeypatch.setattr(workers, "_cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    given = [*moody, *SHORT, "train.steps=1", "train.threads=2", "hydra/launcher=local"]
    assert train.main(["-m", "seed=0,1", *given]) == 0
    used = {tuple(line.split()[1:]) for line in (here / "threads.txt").read_text().splitlines()}
    assert used == {("2", "2")}  # torch's own threads, and those of the libraries below it
    assert os.environ["OMP_NUM_THREADS"] == "8"


@pytest.mark.parametrize(("cores", "threads", "processes"), [(8, 1, 8), (8, 3, 2), (2, 4, 1)])
def test_how_many_processes_fit(cores, threads, processes, monkeypatch):
    monkeypatch.setattr(workers, "_cores", lambda: cores)
    assert workers.fitting(threads) == processes


@pytest.mark.parametrize("number", ["0", "-2", "many"])
def test_a_wrong_number_of_processes_is_refused(here, number, capfd):
    assert train.main(["-m", "seed=0,1", *SHORT, "hydra/launcher=local", f"hydra.launcher.n_jobs={number}"]) == 2
    assert capfd.readouterr().err.startswith(f"error: hydra.launcher.n_jobs={number}: ")
    assert list(here.iterdir()) == []


def test_without_the_extra_a_sweep_runs_in_sequence_and_says_so(here, capfd, monkeypatch):
    monkeypatch.setattr(grids, "_installed", lambda target: False)
    assert train.main(["-m", "seed=0,1", *SHORT, "hydra/launcher=local", "hydra.launcher.n_jobs=2"]) == 0
    assert statuses(here / "results") == ["finished", "finished"]
    (line,) = capfd.readouterr().err.splitlines()
    assert line == (
        "2 cells: 2 to run, one after the other, since hydra/launcher=local needs hydra-joblib-launcher: "
        "pip install 'normexp[parallel]'"
    )
    monkeypatch.undo()
    assert not grids._installed("hydra_plugins.no_such_launcher.Launcher")


def test_the_preset_is_data_for_joblibs_launcher():
    preset = yaml.safe_load((normexp.CONF / "hydra" / "launcher" / "local.yaml").read_text())
    assert preset["_target_"] == grids.PROCESSES
    assert (preset["n_jobs"], preset["batch_size"]) == (-1, 1)  # more would hold back cells that are finished soon


def test_two_sweeps_at_once_share_their_cells(here):
    both = [start("-m", "seed=0,1", *SHORT, "train.steps=60") for _ in range(2)]
    for process in both:
        _, err = process.communicate(timeout=180)
        assert process.returncode == 0, err
    assert statuses(here / "results") == ["finished", "finished"]
    assert all([row["step"] for row in own] == list(range(61)) for own in rows(here / "results").values())


def test_the_scripts_sweep_and_then_report(here):
    script = Path(train.__file__).parent.parent / "scripts" / "sweep_lr.py"
    cells = ["norm=ln", "placement=pre", "optim.lr=1e-3,1e-2", "seed=0", "optim.warmup_steps=0", *SHORT, *LOCAL]
    made = subprocess.run([sys.executable, script, *cells], capture_output=True, text=True, timeout=180, check=False)
    assert made.returncode == 0, made.stderr
    (folder,) = (here / "results" / "sweeps").iterdir()
    assert {"sweep.json", "REPORT.md", "report.html"} <= {path.name for path in folder.iterdir()}
    shown = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert (shown.returncode, shown.stdout.splitlines()[0]) == (0, "python -m normexp.train norm=rms placement=pre")


# --- signals and kills -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The results of the sweep that the tests below disturb."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert train.main(["-m", SEEDS, *LONG, f"results={folder}"]) == 0
    return folder


def at_work(results: Path) -> int:
    """How many runs are some steps away from their beginning and their end."""
    return sum(20 < len(path.read_text().splitlines()) < 300 for path in results.glob("runs/*/metrics.jsonl"))


def finished_files(results: Path) -> dict[Path, int]:
    done = [name for name, summary in summaries(results).items() if summary["status"] == "finished"]
    files = [results / "runs" / name / file for name in done for file in ("metrics.jsonl", "checkpoint.pt")]
    return {file: file.stat().st_mtime_ns for file in files}


def kill(results: Path, moment: Callable[[subprocess.Popen[str]], object]) -> None:
    """The parent dies; within 5 seconds nothing of the sweep lives, and nothing new has begun."""
    process = start("-m", SEEDS, *LONG, *LOCAL)
    moment(process)
    family = children(process.pid)
    process.kill()
    begun = set(summaries(results))
    wait_until(lambda: not alive(family), seconds=5.0)
    process.communicate()
    fresh = set(summaries(results)) - begun  # had the lock in that moment, if any, and ended at its first step
    assert all(len(rows(results).get(run, [])) <= 2 for run in fresh)


def test_after_the_parents_death_its_workers_save_and_end_and_the_sweep_goes_on_from_there(here, undisturbed):
    results = here / "results"

    kill(results, lambda process: wait_until(lambda: "finished" in statuses(results) and at_work(results)))
    assert "interrupted" in statuses(results)
    done = finished_files(results)
    assert done
    for run in (RunFolder(path) for path in results.glob("runs/*")):
        assert run.checkpoint.exists() or run.status() in (None, "running")  # killed before its first step
    assert train.main(["-m", SEEDS, *LONG, *LOCAL]) == 0
    assert {file: file.stat().st_mtime_ns for file in done} == done  # not trained again
    assert table(results) == table(undisturbed)
    assert rows(results) == rows(undisturbed)


@pytest.mark.slow
def test_three_kills_at_random_moments_leave_no_trace(here, undisturbed):
    results, done = here / "results", {}
    for _ in range(3):
        started, wait = time.time(), random.uniform(0, 10)  # seconds after the first sign of a cell
        print(f"killed after {wait:.3f} s")

        def moment(process: subprocess.Popen[str], started=started, wait=wait) -> None:
            files = [f"runs/*/{name}" for name in ("summary.json", "metrics.jsonl")]
            newest = lambda: max((p.stat().st_mtime for f in files for p in results.glob(f)), default=0)  # noqa: E731
            wait_until(lambda: newest() > started or process.poll() is not None)
            time.sleep(wait)

        kill(results, moment)
        assert all(file.stat().st_mtime_ns == stamp for file, stamp in done.items())
        done = finished_files(results)
        print(statuses(results))
    assert train.main(["-m", SEEDS, *LONG, *LOCAL]) == 0
    assert all(file.stat().st_mtime_ns == stamp for file, stamp in done.items())  # none trained twice
    assert table(results) == table(undisturbed)
    assert rows(results) == rows(undisturbed)


def test_no_cell_begins_once_the_sweep_is_told_to_stop(tmp_path):
    crew = workers.Crew(os.getpid(), children=False, stop=tmp_path / "stop")
    assert workers.begin(crew)
    workers.end(crew, None)
    crew.stop.touch()
    assert not workers.begin(crew)
    workers.end(crew, None)
    with pytest.raises(workers.Interrupted):  # a cell of this very process was interrupted, and so the sweep is
        workers.end(crew, signal.SIGTERM)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_reaches_the_workers_which_save_and_the_table_tells(here, undisturbed, number, code):
    results = here / "results"
    process = start("-m", SEEDS, *LONG, *LOCAL)
    wait_until(lambda: at_work(results) == 2)
    family = children(process.pid)
    process.send_signal(number)
    out, err = process.communicate(timeout=40)
    assert process.returncode == code, err
    assert statuses(results) == ["interrupted", "interrupted"]
    assert all((results / "runs" / name / "checkpoint.pt").exists() for name in summaries(results))
    assert out.count("interrupted  -") == 2
    assert "3 not run, 2 interrupted" in out
    wait_until(lambda: not alive(family), seconds=5.0)
    assert [path.name for path in next((results / "sweeps").iterdir()).iterdir()] == ["sweep.json"]


# --- the view --------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def test_the_view_counts_verdicts_and_reckons_with_the_size_of_what_is_left(clock, capsys):
    view = progress.SweepProgress({"small": 1.0, "other": 1.0, "large": 8.0})
    view.start()
    clock[0] = 10.0
    view.ended("small", {"verdict": "trained", "status": "finished"})
    clock[0] = 20.0
    view.ended("other", {"verdict": None, "status": "failed", "error": "ValueError: no"})
    clock[0] = 100.0
    view.ended("large", {"verdict": "trained", "status": "finished"})
    view.draw()
    view.stop()
    assert capsys.readouterr().out.splitlines() == [
        "1/3  small  trained  (1 trained  1:30 left)",
        "2/3  other  failed: ValueError: no  (1 trained, 1 failed  1:20 left)",
        "3/3  large  trained  (2 trained, 1 failed  1:40 taken)",
    ]


def test_the_watch_tells_of_a_run_once_it_has_ended_in_this_sweep(tmp_path, capsys):
    def planned(name: str) -> sweeps.Cell:
        (tmp_path / name).mkdir()
        return sweeps.Cell((f"norm={name}",), sweeps.Place(tmp_path / name, threads=1, work=1.0), None)

    cells = [planned("ln"), planned("rms"), planned("bn")]
    RunFolder(cells[1].folder).write_summary({"status": "interrupted"})  # of an earlier command
    with launching.Watch(cells):
        RunFolder(cells[0].folder).write_summary({"status": "running"})
        RunFolder(cells[0].folder).write_summary({"status": "finished", "verdict": "collapsed"})
        wait_until(lambda: "collapsed" in capsys.readouterr().out, seconds=10)
        RunFolder(cells[2].folder).write_summary({"status": "running"})
        time.sleep(2 * launching.POLL_SECONDS)
        assert capsys.readouterr().out == ""


def test_a_choice_without_a_launcher_of_that_name_is_refused():
    with pytest.raises(Exception, match="hydra/launcher"):
        commandline.compose_grid(commandline.parse(["-m", "seed=0,1", "hydra/launcher=lokal"]))
    assert issubclass(commandline.WorkerDied, Exception)
    assert not issubclass(commandline.WorkerDied, UserError)
