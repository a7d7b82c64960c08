"""Checkpoints: atomic, verified, plain."""

import logging
import multiprocessing
import os
import random
import resource
import signal
import time
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from normexp import checkpoint


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint.pt"


def state(step):
    generator = torch.Generator().manual_seed(step)
    return {
        "step": step,
        "seconds": 0.1 + step,
        "device": "cpu",
        "model": OrderedDict(weight=torch.randn(8, 8, generator=generator), count=torch.tensor(step)),
        "optimizer": {
            "state": {0: {"exp_avg": torch.randn(8, generator=generator)}},
            "groups": [{"betas": (0.9, None)}],
        },
    }


def same(found, step):
    expected = state(step)
    return (
        found is not None
        and {key: found[key] for key in ("step", "seconds", "device")}
        == {"step": step, "seconds": 0.1 + step, "device": "cpu"}
        and all(torch.equal(found["model"][name], tensor) for name, tensor in expected["model"].items())
        and torch.equal(found["optimizer"]["state"][0]["exp_avg"], expected["optimizer"]["state"][0]["exp_avg"])
        and found["optimizer"]["groups"] == expected["optimizer"]["groups"]
    )


def names(path):
    return sorted(file.name for file in path.parent.iterdir())


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_is_saved_is_loaded_and_the_one_before_is_kept(path, caplog):
    assert checkpoint.load(path) is None
    for step in (1, 2, 3):
        checkpoint.save(path, state(step))
        assert same(checkpoint.load(path), step)
    assert names(path) == ["checkpoint.previous.pt", "checkpoint.pt"]
    assert same(torch.load(path, weights_only=True), 3)
    assert same(torch.load(path.with_name("checkpoint.previous.pt"), weights_only=True), 2)
    assert warnings(caplog) == []


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def weight_position(path):
    """Of a byte within the tensors, which are stored as they are."""
    return path.read_bytes().index(state(2)["model"]["weight"].numpy().tobytes()) + 100


def directory_entry(path):
    """Where the zip's directory describes the weight (8 x 8 x 4 bytes)."""
    with zipfile.ZipFile(path) as archive:
        (name,) = [entry.filename for entry in archive.infolist() if entry.file_size == 256]
    return path.read_bytes().rindex(name.encode()) - 46


@pytest.mark.parametrize("damage", ["flip", "folder", "size", "empty", "half", "zeros", "text"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(path, caplog, damage):
    checkpoint.save(path, state(1))
    checkpoint.save(path, state(2))
    content = path.read_bytes()
    if damage == "flip":
        flip(path, weight_position(path))
    elif damage == "folder":  # a bit by which torch would leave the tensor as memory happens to be
        flip(path, directory_entry(path) + 38)
    elif damage == "size":  # 0, by which zipfile would check nothing
        start = directory_entry(path) + 24
        path.write_bytes(content[:start] + bytes(4) + content[start + 4 :])
    else:
        half = len(content) // 2
        forms = {"empty": b"", "half": content[:half], "zeros": content[:half] + bytes(half), "text": b"not a zip"}
        path.write_bytes(forms[damage])
    assert same(checkpoint.load(path), 1)
    (warning,) = warnings(caplog)
    assert warning.startswith(f"{path} is damaged (")
    # Else the next save would put the damaged file in the place of the good one.
    checkpoint.save(path, state(3))
    assert same(checkpoint.load(path), 3)
    assert names(path) == ["checkpoint.damaged.pt", "checkpoint.previous.pt", "checkpoint.pt"]


def test_no_single_damaged_byte_goes_unnoticed(path):
    """It is noticed, or it is one that carries nothing (padding, dates): never are other numbers loaded."""
    checkpoint.save(path, state(2))
    content = path.read_bytes()
    directory = content.index(b"PK\x01\x02")
    noticed = 0
    # One entry and the end of the directory, which no checksum covers, and a sample of the rest.
    described = [*range(directory, directory + 80), *range(len(content) - 80, len(content))]
    for position in [*described, *random.Random(0).sample(range(directory), 80)]:
        path.write_bytes(content)
        flip(path, position)
        try:
            assert same(checkpoint._read(path), 2), position
        except AssertionError:
            raise
        except Exception:
            noticed += 1
    assert noticed > 100


def test_both_damaged_is_a_fresh_start_with_a_warning(path, caplog):
    checkpoint.save(path, state(1))
    checkpoint.save(path, state(2))
    for file in (path, path.with_name("checkpoint.previous.pt")):
        file.write_bytes(file.read_bytes()[:500])
    assert checkpoint.load(path) is None
    messages = warnings(caplog)
    assert [message.split(" ")[0] for message in messages] == [
        str(path),
        str(path.with_name("checkpoint.previous.pt")),
        f"{path.parent}:",
    ]
    assert "begins anew" in messages[-1]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (np.float64(0.5), r"state\['optimizer'\]\['groups'\]\[1\] is a numpy.float64"),
        (Path("x"), "PosixPath"),
        ({1.5: 0}, "the key 1.5 of"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (lambda: 0, "function"),
    ],
)
def test_anything_but_tensors_and_plain_python_is_refused_by_name(path, value, named):
    checkpoint.save(path, state(1))
    with pytest.raises(TypeError, match=named):
        checkpoint.save(path, {**state(2), "optimizer": {"groups": [0, value]}})
    assert names(path) == ["checkpoint.pt"]
    assert same(checkpoint.load(path), 1)


@pytest.mark.parametrize("size", [100, 1000, 3000])
def test_a_full_disk_leaves_the_old_checkpoints(path, size):
    checkpoint.save(path, state(1))
    checkpoint.save(path, state(2))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises(OSError, match=r"cannot save the checkpoint: File too large.*checkpoint\.pt"):
            checkpoint.save(path, state(3) | {"large": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(path) == ["checkpoint.previous.pt", "checkpoint.pt"]
    assert same(checkpoint.load(path), 2)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads there which file a handle is")
def test_the_file_is_on_the_disk_before_it_gets_its_name(path, monkeypatch):
    events, sync, replace = [], os.fsync, Path.replace

    def synced(handle):
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        sync(handle)

    def replaced(source, target):
        events.append(f"{source.name} -> {Path(target).name}")
        return replace(source, target)

    checkpoint.save(path, state(1))
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    checkpoint.save(path, state(2))
    assert events == [
        "sync checkpoint.pt.writing",
        "checkpoint.pt -> checkpoint.previous.pt",
        "checkpoint.pt.writing -> checkpoint.pt",
        f"sync {path.parent.name}",
    ]


def save_for_ever(path):
    step = 1
    while True:
        checkpoint.save(path, state(step))
        step += 1


def test_a_kill_at_any_moment_leaves_a_checkpoint(path, caplog):
    last = 0
    for kill in range(12):
        process = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(path,))
        process.start()
        while not path.exists():
            time.sleep(0.001)
        time.sleep(0.02 + 0.0037 * kill)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        found = checkpoint.load(path)
        assert same(found, found["step"])
        last = max(last, found["step"])
    assert last > 3
    assert warnings(caplog) == []
