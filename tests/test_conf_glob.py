"""Every choice of every group in conf/ composes, is checked, builds, takes one training step: new file, new test."""

import math
from pathlib import Path

import pytest
import torch
import yaml

import normexp
from normexp import cell
from tests.tiny import load

FILES = sorted(normexp.CONF.rglob("*.yaml"))
CHOICES = [path.relative_to(normexp.CONF) for path in FILES if path.parent.parent == normexp.CONF]
DEFAULT_GROUPS = {
    group
    for entry in yaml.safe_load((normexp.CONF / "config.yaml").read_text())["defaults"]
    if isinstance(entry, dict)
    for group in entry
}
SMALL = ["device=cpu", "model.depth=1", "model.width=16", "model.heads=2", "model.context=16", "train.batch_size=2"]
HERE = ["data.name='{corpus}.jsonl'", "data.config=null", "data.revision=null"]  # for a dataset of the hub
GIVEN = {  # what a choice leaves to the user
    "data/text": ["data.path='{corpus}'"],
    "data/hf": HERE,
    "data/wikitext": HERE,
    "data/tinystories": HERE,
    "data/fineweb_edu": HERE,
    "placement/rezero": ["norm=none"],
    "placement/tfixup": ["norm=none"],
    "placement/ngpt": ["norm=none"],
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("In the beginning was the text, and it was long enough.\n" * 50)
    path.with_name("text.txt.jsonl").write_text('{"text": "In the beginning was the text."}\n' * 50)
    return path


def test_there_is_something_to_test():
    assert {"norm/ln.yaml", "placement/post.yaml", "model/tiny.yaml"} <= {str(path) for path in CHOICES}


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_choice_composes_builds_and_takes_a_step(choice, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    group, name = str(choice.parent), choice.stem
    given = [override.format(corpus=corpus) for override in GIVEN.get(f"{group}/{name}", [])]
    added = "" if group in DEFAULT_GROUPS else "+"  # a recipe or a sweep
    loaded = load(f"{added}{group}={name}", *given, *SMALL)
    if group in loaded.cell:
        assert loaded.cell[group] == name
    source = cell.open_source(loaded)
    trainer = cell.build_trainer(loaded, source, cell.build(loaded, source))
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    host, _ = trainer.take_step()
    assert host["step"] == 1
    assert math.isfinite(host["train/lr"])
    after = list(trainer.model.parameters())
    assert all(torch.isfinite(parameter).all() for parameter in after)
    assert any(not torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("model", sorted(path.stem for path in FILES if path.parent.name == "model"))
def test_a_model_at_its_own_size_passes_the_checks(model):
    loaded = load(f"model={model}", "device=cpu")
    assert loaded.model.width % loaded.model.heads == 0
