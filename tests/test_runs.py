"""Run identity (what changes it and what must not) and the run folder."""

import copy
import json
import multiprocessing
import os
import re
import time
from pathlib import Path

import pytest
import yaml

from normexp import runs
from normexp.fields import UserError
from normexp.runs import RunFolder, digest, run_id, strict_json

CORPUS = "c0ffee"
RESOLVED = {
    "model": {"depth": 6, "width": 64},
    "norm": {"_target_": "normexp.norms.RMSNorm", "_partial_": True, "eps": 1e-6, "kernel": "auto"},
    "placement": {"_target_": "normexp.placements.PreNorm", "_partial_": True},
    "data": {"_target_": "normexp.data.text", "_partial_": True, "path": "/a/text.txt", "context": 64},
    "optim": {"lr": 3e-3, "warmup_steps": 20, "betas": [0.9, 0.98]},
    "train": {"steps": 400, "threads": 1},
    "telemetry": {"every": 10},
    "tracker": {"mode": "auto", "tags": []},
    "seed": 3,
    "device": "auto",
    "results": "/r",
    "cell": {"norm": "rms", "placement": "pre", "model": "tiny", "data": "text", "optim": "adamw"},
}


def changed(path: str, value: object) -> dict:
    resolved = copy.deepcopy(RESOLVED)
    *parents, name = path.split(".")
    node = resolved
    for parent in parents:
        node = node[parent]
    node[name] = value
    return resolved


def test_run_id_spells_the_cell():
    assert re.fullmatch(r"rms-pre-L6-w20-s3-[0-9a-f]{10}", run_id(RESOLVED, CORPUS))


def test_the_hash_is_golden():
    """It names the folders of all runs made so far. It may change only with NUMERICS, when a fix changes numbers."""
    assert digest(RESOLVED, CORPUS)[:10] == "140043ae2c"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("optim.lr", 1e-3),
        ("seed", 4),
        ("train.threads", 2),
        ("telemetry.every", 5),
        ("norm._target_", "mine.MyNorm"),
        ("norm.kernel", "torch"),
        ("optim.betas", [0.9, 0.99]),
        ("data.context", 32),
    ],
)
def test_what_can_change_a_number_changes_the_hash(path, value):
    assert digest(changed(path, value), CORPUS) != digest(RESOLVED, CORPUS)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("tracker.mode", "disabled"),
        ("results", "/elsewhere"),
        ("device", "cpu"),
        ("data.path", "/b/same_text.txt"),
        ("data.name", "/b/same_text"),
        ("data.config", "other"),
        ("data.revision", "a" * 40),
        ("data.split", "validation"),
        ("data.documents", 100),
        ("data.streaming", False),
        ("data.column", "story"),
        ("cell.norm", "another_name"),
        ("norm._partial_", False),
    ],
)
def test_what_cannot_change_a_number_does_not(path, value):
    assert digest(changed(path, value), CORPUS) == digest(RESOLVED, CORPUS)


@pytest.mark.parametrize(
    ("name", "decay", "unused", "used"),
    [
        ("adamw", "constant", {"momentum": 0.5, "final_lr_fraction": 0.5}, {"betas": [0.8, 0.9], "eps": 1e-6}),
        ("sgd", "cosine", {"betas": [0.8, 0.9], "eps": 1e-6}, {"momentum": 0.5, "final_lr_fraction": 0.5}),
    ],
)
def test_a_field_that_another_puts_out_of_use_does_not_change_a_run(name, decay, unused, used):
    optim = {"name": name, "decay": decay, "momentum": 0.9, "final_lr_fraction": 0.1, "betas": [0.9, 0.98], "eps": 1e-8}
    plain = digest({"optim": optim}, CORPUS)
    assert all(digest({"optim": optim | {field: value}}, CORPUS) == plain for field, value in unused.items())
    assert all(digest({"optim": optim | {field: value}}, CORPUS) != plain for field, value in used.items())


def test_the_corpus_is_in_the_hash_by_its_content():
    assert digest(RESOLVED, "another") != digest(RESOLVED, CORPUS)


def test_the_order_of_fields_does_not_matter():
    assert digest(dict(reversed(RESOLVED.items())), CORPUS) == digest(RESOLVED, CORPUS)


def test_numerics_is_in_the_hash(monkeypatch):
    before = digest(RESOLVED, CORPUS)
    monkeypatch.setattr(runs, "NUMERICS", runs.NUMERICS + 1)
    assert digest(RESOLVED, CORPUS) != before


def test_a_field_added_later_leaves_old_names_while_it_is_neutral(monkeypatch):
    old = digest(RESOLVED, CORPUS)
    monkeypatch.setattr(runs, "NEUTRAL", {**runs.NEUTRAL, "train.compile": False, "model.moe.experts": 1})
    assert digest(changed("train.compile", False), CORPUS) == old
    assert digest(changed("train.compile", True), CORPUS) != old
    assert digest(changed("model.moe", {"experts": 1}), CORPUS) != old  # a whole new group is not a neutral value


@pytest.mark.parametrize(("field", "neutral", "other"), [("vocab_size", 4096, 8192)])
def test_fields_of_data_that_were_added_later(field, neutral, other):
    assert digest(changed(f"data.{field}", neutral), CORPUS) == digest(RESOLVED, CORPUS)
    assert digest(changed(f"data.{field}", other), CORPUS) != digest(RESOLVED, CORPUS)


def test_the_config_is_left_as_it_was():
    digest(RESOLVED, CORPUS)
    assert RESOLVED["data"]["path"] == "/a/text.txt"
    assert RESOLVED["norm"]["kernel"] == "auto"


def test_names_of_choices_are_made_fit_for_a_folder():
    assert run_id(changed("cell.norm", "family/a b"), CORPUS).startswith("family_a_b-pre-L6")


def test_strict_json_names_what_is_not_finite():
    text = strict_json({"val_loss": float("nan"), "nested": {"x": float("inf"), "y": 1}, "nonfinite": ["before"]})
    loaded = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in strict JSON"))
    assert loaded == {"val_loss": None, "nested": {"x": None, "y": 1}, "nonfinite": ["before", "nested.x", "val_loss"]}


def test_summary_and_status(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.summary() == {}
    assert folder.status() is None
    folder.write_summary({"status": "running", "device": "cpu"})
    assert folder.status() == "running"
    assert folder.summary() == {"status": "running", "device": "cpu", "nonfinite": []}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["summary.json"]


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.write_summary({"status": "running"})

    def power_cut(descriptor: int) -> None:
        raise OSError("gone")

    monkeypatch.setattr(os, "fsync", power_cut)
    with pytest.raises(OSError, match="gone"):
        folder.write_summary({"status": "finished"})
    assert folder.status() == "running"
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_reader_never_sees_half_a_file(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_summary({"status": "running"})
    with (tmp_path / "summary.json").open() as reader:
        folder.write_summary({"status": "finished"})
        assert json.load(reader)["status"] == "running"  # another file has taken the name


def test_config_is_read_back_with_its_types(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_config(RESOLVED)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == RESOLVED


def test_another_device_may_not_go_on_with_a_run(tmp_path):
    folder = RunFolder(tmp_path)
    folder.refuse_other_device("cuda")  # nothing there yet
    folder.write_summary({"status": "interrupted", "device": "cpu"})
    folder.refuse_other_device("cuda")  # nothing to go on with
    folder.checkpoint.touch()
    folder.refuse_other_device("cpu")
    with pytest.raises(UserError, match=r"^device=cuda: .*begun on cpu; give device=cpu"):
        folder.refuse_other_device("cuda")


def test_a_folder_that_cannot_be_written_is_the_users_mistake(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^results: cannot write"), RunFolder(tmp_path / "file" / "run").lock(print):
        pass


def _hold(path: Path, ready: "multiprocessing.synchronize.Event", release: "multiprocessing.synchronize.Event") -> None:
    with RunFolder(path).lock(lambda line: None):
        ready.set()
        release.wait(30)
        RunFolder(path).write_summary({"status": "finished"})


def test_a_second_writer_says_who_holds_the_run_and_waits(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, release = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, ready, release))
    holder.start()
    assert ready.wait(30)
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        release.set()

    (tmp_path / "lock").write_text("")  # as for a moment after it was taken
    assert RunFolder(tmp_path).holder() is None
    (tmp_path / "lock").write_text(f"process {holder.pid} on {os.uname().nodename}\n")
    with RunFolder(tmp_path).lock(tell):
        assert RunFolder(tmp_path).status() == "finished"  # the other one had ended before we came in
    holder.join(30)
    assert told == [
        f"run {tmp_path.name} is taken by process {holder.pid} on {os.uname().nodename}; waiting for it to end"
    ]


def test_the_lock_ends_with_its_holder(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, release = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, ready, release))
    holder.start()
    assert ready.wait(30)
    holder.kill()
    holder.join(30)
    before = time.monotonic()
    with RunFolder(tmp_path).lock(pytest.fail):
        assert time.monotonic() - before < 1


def test_facts_of_the_machine():
    assert re.fullmatch(r".+, \d+ cores", runs.machine())
    assert {"python", "normexp", "torch", "hydra-core"} <= set(runs.versions())
    assert runs.git_commit() is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", runs.git_commit())
