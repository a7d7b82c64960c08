"""The command line as a user meets it: exit codes, one-line mistakes, nothing created, sweeps. In one process where
that is possible; the few tests that start Python say why."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from normexp import cell, train
from normexp.runs import RunFolder
from tests.tiny import SHORT

MY_NORM = """
from torch import nn

class MyNorm(nn.Module):
    def __init__(self, dim: int, *, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x, mask=None):
        return self.scale * x / x.norm(dim=-1, keepdim=True)
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty directory in which the command is given."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    return folder


def normexp(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "normexp.train", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(train.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def runs_in(folder: Path) -> list[RunFolder]:
    return [RunFolder(path) for path in sorted((folder / "results" / "runs").glob("*"))]


def numbers(metrics: Path) -> list[dict]:
    """The rows without what a clock says."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [{path: row[path] for path in row if path not in ("time", "tokens_per_second")} for row in rows]


def sweep_in(folder: Path) -> dict:
    (path,) = (folder / "results" / "sweeps").glob("*/sweep.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["norm=rsm"], "error: norm=rsm: there is no such choice (did you mean rms or prms?)"),
        (["plcement=pre"], "error: plcement=pre: there is no such field (did you mean placement or telemetry?)"),
        (["optim.lr=-1"], "error: optim.lr=-1: must be a finite number > 0"),
        (
            ["optim.warmup_steps=900", "train.steps=500"],
            "error: optim.warmup_steps=900: is longer than train.steps=500; give 500 or less",
        ),
        (
            ["model.width=100", "model.heads=3"],
            "error: model.heads=3: does not divide model.width=100; give another number, or a width of 99 or 102",
        ),
        (["norm=null"], "error: norm=null: is not a choice; give norm=<name>"),
        (["tracker="], "error: tracker=: is not a choice; give tracker=<name>"),
        (["data=3.5"], "error: data=3.5: is not a choice; give data=<name>"),
        (["~optim=int(3)"], "error: ~optim=int(3): is not a choice; give optim=<name>"),
        (["norm=" + "x" * 300], "error: norm=xxx"),
        (["sweep=smoke"], "error: sweep=smoke: is not chosen by default; give +sweep=<name>\n"),
        (["optim.lr:3"], "error: optim.lr:3: is not field=value\n"),
        (["+=3"], "error: +=3: is not field=value\n"),
        (["--resolve"], "error: --resolve: belongs to --cfg; give --cfg job --resolve\n"),
        (["optim.name=a\nb"], "error: optim.name=a\\nb: is not field=value; quote"),
        (["norm={a:1}"], "error: norm={a:1}: is not a choice; give norm=<name>"),
        (["norm._target_=os.system"], "error: norm._target_=os.system: is set by the choice; give norm=<name>"),
        (
            ["norm=ln", "norm.statz=position"],
            "error: norm.statz=position: the chosen norm has no such field (did you mean norm.stats of norm=bn?)",
        ),
        (["norm.foo=1"], "error: norm.foo=1: the chosen norm has no such field\n"),
        (["results="], "error: results=: must be a path"),
        (["train.batch_size=1e8"], "error: train.batch_size=100000000 model.context=64 model.width=64 model.depth=6: "),
        (["model.width=1e9"], "error: model.width=1000000000 model.depth=6 model.mlp_ratio=4.0: needs 1,"),
        (["train.eval_batches=1e12"], "error: train.batch_size=8 model.context=64 train.eval_batches=1000000000000: "),
        (["train.grad_accum=1e12"], "error: train.batch_size=8 model.context=64 train.grad_accum=1000000000000: "),
        (["data=text", "data.path="], "error: data.path=: is empty; give a file or a folder"),
        (["data=text", "data.path=~/no/such.txt"], "error: data.path={home}/no/such.txt: "),
        (["--nonsense"], "error: unrecognized arguments: --nonsense; see --help"),
        (["--config-dir=nowhere"], "error: --config-dir=nowhere: there is no such folder as {here}/nowhere"),
        (["-m", "norm=rms,rsm"], "error: norm=rsm: there is no such choice (did you mean rms or prms?)"),
        (["-m", "plcement=pre,post"], "error: plcement=pre: there is no such field (did you mean placement"),
        (["-m", "norm=rms,ln", "optim.lr=-1,nan"], "error: optim.lr=-1: must be a finite number > 0"),
        (["-m", "norm=rms,ln", "data=text", "data.path=no.txt"], "error: data.path={here}/no.txt: "),
    ],
)
def test_a_mistake_is_one_line_with_exit_code_2_and_creates_nothing(here, capfd, arguments, line):
    assert train.main(arguments) == 2
    out, err = capfd.readouterr()
    assert err.startswith(line.replace("{here}", str(here)).replace("{home}", str(Path.home())))
    assert err.count("\n") == 1
    assert out == ""
    assert list(here.iterdir()) == []


def test_the_full_traceback_is_there_for_those_who_ask(monkeypatch, capfd):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert train.main(["norm=rsm"]) == 2
    err = capfd.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1] == "error: norm=rsm: there is no such choice (did you mean rms or prms?)"
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


def test_a_run_leaves_the_contract_and_the_same_command_finds_it(here, capfd, monkeypatch):
    assert train.main(["norm=rms", *SHORT]) == 0
    (run,) = runs_in(here)
    assert run.path.name.startswith("rms-pre-L1-w0-s0-")
    assert {"config.yaml", "metrics.jsonl", "summary.json", "checkpoint.pt"} <= {p.name for p in run.path.iterdir()}
    summary = run.summary()
    assert summary["status"] == "finished"
    assert summary["cell"] == {"norm": "rms", "placement": "pre", "model": "tiny", "data": "kjv", "optim": "adamw"}
    assert (summary["steps"], summary["tokens"], summary["device"]) == (3, 3 * 8 * 16, "cpu")
    assert 3 < summary["val_loss"] < 5
    assert (summary["norm_path"], summary["stopped_early"]) == ("native", False)
    steps = [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]
    assert steps == [0, 1, 2, 3]
    capfd.readouterr()

    monkeypatch.setattr(cell, "fit", lambda *a, **k: pytest.fail("a finished run was trained again"))
    before = {path: path.stat().st_mtime_ns for path in run.path.iterdir()}
    assert train.main(["norm=rms", *SHORT]) == 0
    assert {path: path.stat().st_mtime_ns for path in run.path.iterdir()} == before
    out, err = capfd.readouterr()
    assert str(run.path) in out
    assert err.startswith(f"run {run.path.name} is finished already")


def test_two_runs_in_one_process_have_their_own_folders(here):
    assert [train.main(["seed=0", *SHORT]), train.main(["seed=1", *SHORT])] == [0, 0]
    assert [run.summary()["seed"] for run in runs_in(here)] == [0, 1]


def test_a_run_that_diverges_is_a_result(here):
    assert train.main([*SHORT, "optim.lr=1e6", "train.steps=8"]) == 0
    (run,) = runs_in(here)
    summary = run.summary()
    assert (summary["status"], summary["verdict"], summary["first_bad_step"]) == ("finished", "diverged", 2)
    assert "nan" not in (run.path / "summary.json").read_text().lower()


def test_a_fault_of_the_program_is_recorded_and_has_exit_code_1(here, capfd, monkeypatch):
    def broken(*arguments, **keywords):
        raise ZeroDivisionError("deep inside")

    monkeypatch.setattr(cell, "fit", broken)
    assert train.main(SHORT) == 1
    assert "ZeroDivisionError: deep inside" in capfd.readouterr().err
    (run,) = runs_in(here)
    assert run.summary()["status"] == "failed"
    assert run.summary()["error"] == "ZeroDivisionError: deep inside"
    assert "in broken" in (run.path / "traceback.txt").read_text()
    monkeypatch.undo()
    os.chdir(here)
    assert train.main(SHORT) == 0  # the same command tries again
    assert run.summary()["status"] == "finished"
    assert not (run.path / "traceback.txt").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_an_interrupted_run_that_goes_on_as_if_undisturbed(here, monkeypatch, number, code):
    real = cell.Trainer.take_step

    def take_step(self):
        if self.step == 1:
            os.kill(os.getpid(), number)
        return real(self)

    monkeypatch.setattr(cell.Trainer, "take_step", take_step)
    assert train.main(SHORT) == code
    (run,) = runs_in(here)
    assert run.summary()["status"] == "interrupted"
    judged = {"verdict", "reason", "first_bad_step", "first_bad_layer"}
    assert {name: run.summary()[name] for name in judged} == dict.fromkeys(judged)
    monkeypatch.undo()
    os.chdir(here)
    assert train.main(SHORT) == 0
    assert train.main([*SHORT, "results=undisturbed"]) == 0
    assert numbers(run.metrics) == numbers(*(here / "undisturbed" / "runs").glob("*/metrics.jsonl"))


def test_rows_after_the_last_checkpoint_are_made_again_and_not_kept_twice(here, monkeypatch):
    frequent = ["telemetry.flush_every=1", "train.checkpoint_every=2", *SHORT, "train.steps=5"]
    real = cell.Trainer.take_step
    monkeypatch.setattr(cell.Trainer, "take_step", lambda self: 1 / 0 if self.step == 3 else real(self))
    assert train.main(frequent) == 1
    (run,) = runs_in(here)
    assert [row["step"] for row in numbers(run.metrics)] == [0, 1, 2, 3]  # and the checkpoint is of step 2
    monkeypatch.setattr(cell.Trainer, "take_step", real)
    assert train.main(frequent) == 0
    assert train.main([*frequent, "results=undisturbed"]) == 0
    assert [row["step"] for row in numbers(run.metrics)] == [0, 1, 2, 3, 4, 5]
    assert numbers(run.metrics) == numbers(*(here / "undisturbed" / "runs").glob("*/metrics.jsonl"))


def test_another_device_may_not_resume(here, capfd):
    assert train.main(SHORT) == 0
    (run,) = runs_in(here)
    run.write_summary(run.summary() | {"status": "interrupted", "device": "cuda"})
    assert train.main(SHORT) == 2
    assert capfd.readouterr().err.startswith(f"error: device=cpu: the run {run.path.name} was begun on cuda")


def test_a_sweep_runs_the_good_cells_and_tells_of_the_bad_ones(here, capfd):
    assert train.main(["-m", "norm=ln,rms", "optim.warmup_steps=0,900", *SHORT]) == 1
    assert [run.summary()["cell"]["norm"] for run in runs_in(here)] == ["ln", "rms"]
    cells = sweep_in(here)["cells"]
    assert [record["status"] for record in cells] == ["finished", "refused", "finished", "refused"]
    assert [record["run_id"] for record in cells][::2] == [run.path.name for run in runs_in(here)]
    out = capfd.readouterr().out.splitlines()
    table = out[next(i for i, line in enumerate(out) if line.startswith("cell ")) :]
    assert [line.split()[:2] for line in table[1:3]] == [
        ["norm=ln", "optim.warmup_steps=0"],
        ["norm=ln", "optim.warmup_steps=900"],
    ]
    assert "refused" in table[2]
    error = "optim.warmup_steps=900: is longer than train.steps=3; give 3 or less"
    assert f"norm=ln optim.warmup_steps=900: {error}" in table
    assert sorted(path.name for path in here.iterdir()) == ["results"]


@pytest.mark.parametrize("fault", [ValueError("broken"), SystemExit(3)])
def test_a_cell_that_raises_or_exits_does_not_end_the_sweep(here, monkeypatch, fault):
    real = cell.fit

    def sometimes(trainer, **keywords):
        if trainer.seed == 1:
            raise fault
        return real(trainer, **keywords)

    monkeypatch.setattr(cell, "fit", sometimes)
    assert train.main(["-m", "seed=0,1,2", *SHORT]) == 1
    assert [run.summary()["status"] for run in runs_in(here)] == ["finished", "failed", "finished"]
    assert [(run.path / "traceback.txt").exists() for run in runs_in(here)] == [False, True, False]
    failed = sweep_in(here)["cells"][1]
    assert failed["status"] == "failed"
    assert failed["error"] == f"{type(fault).__name__}: {fault}"
    monkeypatch.undo()
    os.chdir(here)
    trained: list[int] = []
    monkeypatch.setattr(cell, "fit", lambda trainer, **k: trained.append(trainer.seed) or real(trainer, **k))
    assert train.main(["-m", "seed=0,1,2", *SHORT]) == 0
    assert trained == [1]  # the finished cells are skipped


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_sweep_with_a_table(here, monkeypatch, capfd, number, code):
    real = cell.Trainer.take_step

    def take_step(self):
        if self.seed == 1:
            os.kill(os.getpid(), number)
        return real(self)

    monkeypatch.setattr(cell.Trainer, "take_step", take_step)
    assert train.main(["-m", "seed=0,1,2", *SHORT]) == code
    assert [record["status"] for record in sweep_in(here)["cells"]] == ["finished", "interrupted", "not run"]
    assert sweep_in(here)["status"] == "interrupted"
    assert "not run" in capfd.readouterr().out


def test_a_mistake_in_the_users_own_code_of_one_cell_leaves_the_others(here, monkeypatch):
    (here / "bad_norm.py").write_text("def Bad(dim, *, eps):\n    raise RuntimeError('no')\n")
    (here / "conf" / "norm").mkdir(parents=True)
    (here / "conf" / "norm" / "bad.yaml").write_text("_target_: bad_norm.Bad\n_partial_: true\neps: 1.0\n")
    monkeypatch.syspath_prepend(str(here))
    assert train.main(["-m", "--config-dir=conf", "norm=bad,rms", *SHORT]) == 1
    assert [record["status"] for record in sweep_in(here)["cells"]] == ["refused", "finished"]


def test_everything_of_a_sweep_lies_under_results_whatever_hydra_does_with_directories(here):
    assert train.main(["-m", "seed=0,1", "results=out", "hydra.job.chdir=true", *SHORT]) == 0
    assert [path.name for path in here.iterdir()] == ["out"]
    assert sorted(path.name for path in (here / "out").iterdir()) == ["cache", "runs", "sweeps"]
    (folder,) = (here / "out" / "sweeps").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["sweep.json"]


def test_the_cells_of_a_sweep_have_their_own_runs_in_wandb(here, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert train.main(["-m", "seed=0,1", *SHORT, "tracker.mode=offline"]) == 0
    for run in runs_in(here):
        (log,) = run.path.glob("wandb/offline-run-*/*.wandb")
        assert log.name == f"run-{run.path.name}.wandb"
        assert log.stat().st_size > 1000
    assert len(runs_in(here)) == 2


def test_a_sweep_file_names_its_folder(here):
    (here / "conf" / "sweep").mkdir(parents=True)
    sweep = "# @package _global_\nhydra:\n  sweeper:\n    params:\n      norm: ln,rms\n      seed: 0,1\n"
    (here / "conf" / "sweep" / "two_norms.yaml").write_text(sweep)
    assert train.main(["--config-dir=conf", "+sweep=two_norms", "seed=0", *SHORT]) == 0  # without -m
    assert [run.summary()["cell"]["norm"] for run in runs_in(here)] == ["ln", "rms"]
    assert sweep_in(here)["name"].startswith("two_norms-")  # with values of its own, so not the sweep as it is on file


def test_paths_are_those_of_the_directory_that_the_command_was_given_in(here):
    (here / "my text=1, 2.txt").write_text("To be, or not to be: that is the question.\n" * 100)
    assert train.main(["data=text", "data.path='my text=1, 2.txt'", "hydra.job.chdir=true", *SHORT]) == 0
    (run,) = runs_in(here)
    assert yaml.safe_load((run.path / "config.yaml").read_text())["data"]["path"] == f"{here}/my text=1, 2.txt"


def test_help_is_light_and_names_the_choices():  # a fresh interpreter, since this one has imported torch
    program = "import sys; from normexp.train import main\ntry: main(['--help'])\nfinally: print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env={
        **os.environ, "PYTHONPATH": str(Path(train.__file__).parent.parent)})  # fmt: skip
    text, _, modules = result.stdout.rpartition("\n\n")
    for group, names in {"norm": {"bn", "ln", "rms"}, "placement": {"post", "pre"}}.items():
        (line,) = (line for line in text.splitlines() if line.startswith(f"{group}: "))
        assert names <= set(line.removeprefix(f"{group}: ").split(", "))
    assert "warmup_steps: 0" in text
    assert not {"torch", "wandb", "datasets", "triton"} & set(modules.split())


def test_a_norm_of_the_users_own_from_another_directory(here):  # a fresh interpreter: is the directory importable?
    (here / "my_norms.py").write_text(MY_NORM)
    (here / "my_conf" / "norm").mkdir(parents=True)
    (here / "my_conf" / "norm" / "mine.yaml").write_text("_target_: my_norms.MyNorm\n_partial_: true\nscale: 8\n")
    result = normexp("norm=mine", "--config-dir", "my_conf", *SHORT)
    assert result.returncode == 0, result.stderr
    (run,) = runs_in(here)
    assert run.path.name.startswith("mine-pre-")
    assert "scale: 8.0" in (run.path / "config.yaml").read_text()


def test_cfg_prints_the_config_and_runs_nothing(here, capfd):
    assert train.main(["--cfg", "job", "norm=rms"]) == 0
    assert "_target_: normexp.norms.RMSNorm" in capfd.readouterr().out
    assert list(here.iterdir()) == []


def test_two_identical_commands_at_once(here):  # two processes are the point
    program = [sys.executable, "-m", "normexp.train", *SHORT, "train.steps=40"]
    environment = {**os.environ, "PYTHONPATH": str(Path(train.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    both = [subprocess.Popen(program, text=True, env=environment, **pipes) for _ in range(2)]
    printed = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    (run,) = runs_in(here)
    steps = [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]
    assert steps == list(range(41))
    assert sum(f"{run.path.name}: 40 steps" in out for out, _ in printed) == 1  # one trains
    assert sum("is taken by process" in err or "is finished already" in err for _, err in printed) == 1
    assert all(f"files   {run.path}" in out for out, _ in printed)


def test_a_choice_that_yaml_takes_for_a_truth_value(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.main(["telemetry=off", *SHORT]) == 0
    (metrics,) = tmp_path.glob("results/runs/*/metrics.jsonl")
    assert "layer_ratio" not in metrics.read_text()
