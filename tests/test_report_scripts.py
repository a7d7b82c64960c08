"""The scripts that sweep and report, and the one that measures sweeps: what they pass on and what they leave behind."""

import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from normexp import train

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.mark.parametrize("name", ["depth_warmup", "lr"])
@pytest.mark.parametrize(("made", "code"), [(True, 3), (False, 2)])
def test_a_sweep_script_passes_its_arguments_on_and_reports_what_was_made(tmp_path, monkeypatch, name, made, code):
    swept, called = [], []
    monkeypatch.setattr(
        train, "sweep", lambda given: swept.append(given) or (0 if made else 2, tmp_path if made else None)
    )
    monkeypatch.setattr(subprocess, "call", lambda command: called.append(command) or 3)
    monkeypatch.setattr(sys, "argv", ["script", "seed=0", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPTS / f"sweep_{name}.py"), run_name="__main__")
    assert swept == [["-m", f"+sweep={name}", "hydra/launcher=local", "seed=0", "--help"]]
    assert called == ([[sys.executable, "-m", "normexp.report", str(tmp_path)]] if made else [])
    assert ended.value.code == code


def test_measuring_sweeps_leaves_no_folder_behind_even_when_one_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    bench = runpy.run_path(str(SCRIPTS / "bench_sweep.py"))
    seen = []

    def sweep(results, steps, launcher):
        (results / "runs").mkdir(exist_ok=True)
        seen.append(results)
        return 1.0

    def fail(results):
        raise OSError

    names = bench["measure"].__globals__
    monkeypatch.setitem(names, "sweep", sweep)
    monkeypatch.setitem(names, "beyond_training", lambda results: [0.5])
    assert bench["measure"](steps=1, repeats=2)["one process"]["seconds"] == 1.0
    assert (len(seen), len(set(seen))) == (8, 4)  # each folder is swept twice: the second time all is finished
    monkeypatch.setitem(names, "beyond_training", fail)
    with pytest.raises(OSError):  # noqa: PT011
        bench["measure"](steps=1, repeats=1)
    assert list(tmp_path.iterdir()) == []
