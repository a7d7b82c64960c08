"""The list of a sweep's cells: what is refused, what it is called, and how it stands."""

import json
from pathlib import Path

import pytest

from normexp import sweeps
from normexp.fields import UserError
from normexp.runs import RunFolder


def place_of(path: Path | Exception) -> sweeps.Place:
    if isinstance(path, Exception):
        raise path
    return sweeps.Place(path, threads=1, work=1.0)


def cell(*overrides: str, folder: Path) -> sweeps.Cell:
    return sweeps.Cell(overrides, place_of(folder), None)


def test_a_mistake_in_one_cell_is_that_cells_and_one_in_all_is_raised(tmp_path):
    mistake, fault = UserError("optim.lr=-1: must be a finite number > 0"), KeyError("deep")
    planned = sweeps.plan([(["a=1"], tmp_path), (["a=2"], mistake), (["a=3"], fault)], place_of)
    assert [cell.error for cell in planned] == [None, str(mistake), "KeyError: 'deep'"]
    assert [cell.place and cell.folder for cell in planned] == [tmp_path, None, None]
    with pytest.raises(UserError, match=r"^optim"):
        sweeps.plan([(["a=2"], mistake), (["a=3"], fault)], place_of)


def test_what_is_left_to_do_is_one_cell_a_run_and_none_that_is_finished_or_refused(tmp_path):
    done, broken, new = (tmp_path / name for name in ("done", "broken", "new"))
    for folder, status in ((done, "finished"), (broken, "interrupted")):
        folder.mkdir()
        RunFolder(folder).write_summary({"status": status})
    cells = [
        cell("optim.lr=1e-3", folder=new),
        cell("optim.lr=.001", folder=new),
        cell("seed=1", folder=done),
        cell("seed=2", folder=broken),
        sweeps.Cell(("seed=-1",), None, "seed=-1: no"),
    ]
    assert [left.overrides for left in sweeps.unfinished(cells)] == [("optim.lr=1e-3",), ("seed=2",)]


@pytest.mark.parametrize(
    ("name", "overrides", "same"),
    [
        ("depth", ["+sweep=depth"], True),
        ("depth", ["+sweep=depth", "hydra/launcher=joblib", "results=out", "tracker.mode=disabled"], True),
        ("depth", ["+sweep=depth", "hydra.launcher.n_jobs=2"], True),
        ("depth", ["+sweep=depth", "train.steps=10"], False),
        ("depth", ["+sweep=depth", "hydra.sweeper.params.seed=0"], False),
        ("depth", ["+sweep=depth", "resultss=1"], False),
    ],
)
def test_a_named_sweep_keeps_its_name_while_it_is_as_on_file(name, overrides, same):
    assert (sweeps.folder_name(name, overrides) == name) == same
    assert sweeps.folder_name(name, overrides).startswith(name)


def test_a_sweep_without_a_name_has_that_of_its_overrides_in_any_order():
    first = sweeps.folder_name(None, ["norm=ln,rms", "seed=0,1"])
    assert sweeps.folder_name(None, ["seed=0,1", "norm=ln,rms", "device=cpu"]) == first
    assert sweeps.folder_name(None, ["seed=0,2", "norm=ln,rms"]) != first


def test_the_list_is_read_from_the_run_folders(tmp_path):
    run = tmp_path / "runs" / "ln-pre"
    run.mkdir(parents=True)
    RunFolder(run).write_summary({"status": "failed", "error": "ValueError: no"})
    cells = [
        cell("norm=ln", "seed=0", folder=run),
        cell("norm=rms", "seed=0", folder=tmp_path / "runs" / "rms-pre"),
        sweeps.Cell(("norm=bn", "seed=0"), None, "norm=bn: no"),
    ]
    records = sweeps.write(tmp_path / "sweeps" / "s", ["-m", "norm=ln,rms,bn", "data.path='a b'"], "running", cells)
    assert [record["status"] for record in records] == ["failed", "not run", "refused"]
    written = json.loads((tmp_path / "sweeps" / "s" / "sweep.json").read_text())
    assert written["cells"] == records
    assert written["command"] == """python -m normexp.train -m norm=ln,rms,bn 'data.path='"'"'a b'"'"''"""
    lines = sweeps.table(records, None).splitlines()
    assert lines[0].split() == ["cell", "status", "verdict", "loss", "run"]
    assert lines[1].split() == ["norm=ln", "failed", "-", "-", "ln-pre"]
    assert lines[3].split() == ["norm=bn", "refused", "-", "-", "-"]
    assert lines[4:] == ["norm=ln: ValueError: no", "norm=bn: no", "1 failed, 1 not run, 1 refused"]


def record(*overrides: str, **facts) -> dict:
    common = {"status": "finished", "verdict": "trained", "val_loss_batch_stats": None, "error": None}
    return {"overrides": list(overrides), "run_id": "ln-post-L12-w200-s0-0123456789", **common, **facts}


def test_the_table_has_the_losses_and_says_by_which_statistics():
    records = [
        record("norm=ln", val_loss=2.2144),
        record("norm=rms", val_loss=None, verdict="diverged"),
        record("norm=bn", val_loss=6.05, val_loss_batch_stats=2.3),
    ]
    lines = [line.split() for line in sweeps.table(records, None).splitlines()]
    assert [line[3] for line in lines[1:4]] == ["2.214", "not", "6.050"]
    assert lines[3][3:6] == ["6.050", "/", "2.300"]
    assert " ".join(lines[4]) == "loss: by running / by batch statistics, which decide the verdict"
    assert " ".join(lines[5]) == "2 trained, 1 diverged"


@pytest.mark.parametrize(
    ("width", "first"),
    [
        (80, "warmup_steps=1 batch_…  "),
        (90, "warmup_steps=1 batch_size=8   "),
        (100, "optim.warmup_steps=1 train.batch_size=8   "),
        (None, "optim.warmup_steps=1 train.batch_size=8   "),
    ],
)
def test_the_table_fits_a_terminal(width, first):
    names = [("norm=ln", f"optim.warmup_steps={n}", f"train.batch_size={8 * n}") for n in (1, 2, 3)]
    table = sweeps.table([record(*name, val_loss=2.2) for name in names], width).splitlines()[1:4]
    assert table[0].startswith(first)
    assert all(len(line) <= (width or 98) for line in table)
    assert all(line.split()[-1] == "ln-post-L12-w200-s0-0123456789" for line in table)
