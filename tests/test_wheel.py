"""The wheel carries conf/ and trains from another directory, without the checkout."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run([*pip, *build], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    return wheel, folder / "site"


def test_the_wheel_holds_every_yaml_and_no_test(installed):
    wheel, _ = installed
    names = set(zipfile.ZipFile(wheel).namelist())
    yamls = {f"normexp/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert len(yamls) > 10
    assert yamls <= names
    assert {f"normexp/{path.relative_to(ROOT / 'normexp')}" for path in (ROOT / "normexp").rglob("*.py")} <= names
    assert not any(name.startswith(("tests/", "results/", "scripts/")) for name in names)


def test_an_installed_wheel_trains_from_another_directory(installed, tmp_path):
    _, site = installed
    command = [
        sys.executable,
        "-P",
        "-m",
        "normexp.train",
        "norm=rms",
        "placement=pre",
        "train.steps=2",
        "train.eval_batches=1",
    ]
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (summary,) = tmp_path.glob("results/runs/*/summary.json")
    assert json.loads(summary.read_text())["steps"] == 2
    where = [sys.executable, "-P", "-c", "import normexp; print(normexp.CONF)"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()) == site / "normexp" / "conf"
