"""Whole runs from other corpora: the same text by another way is the same training, and excess losses shrink."""

import json

import pytest

from normexp import train
from normexp.report.__main__ import main as report
from normexp.runs import RunFolder
from tests.tiny import SHORT

TEXTS = [f"Record {n}: and there was light, and it was good; {'so it was. ' * (n % 7)}" for n in range(400)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    pandas = pytest.importorskip("pandas")
    (tmp_path / "records").mkdir()
    (tmp_path / "parquet").mkdir()
    (tmp_path / "records" / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    pandas.DataFrame({"text": TEXTS}).to_parquet(tmp_path / "parquet" / "train.parquet")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def summaries(here):
    return [RunFolder(path).summary() for path in sorted(here.glob("results/runs/*"))]


def test_text_and_hub_records_packed_and_padded_in_one_report(here):
    sources = (["data=text", "data.path=records"], ["data=hf", "data.name=parquet"])
    for source in sources:
        for shape in ("packed", "padded"):
            assert train.main([*source, f"data.shape={shape}", *SHORT, "train.steps=12"]) == 0
    found = {(s["cell"]["data"], s["run_id"]): s["val_loss"] for s in summaries(here)}
    losses = {name: sorted(loss for (data, _), loss in found.items() if data == name) for name in ("text", "hf")}
    assert len(losses["text"]) == len(set(losses["text"])) == 2  # packed and padded
    assert losses["text"] == losses["hf"]  # to the bit
    assert report(["results/runs", "--out", "report"]) == 0
    page = (here / "report" / "report.html").read_text()
    assert all(summary["run_id"] in page for summary in summaries(here))
    table = (here / "report" / "tables" / "runs.csv").read_text().splitlines()
    assert len(table) == 5
    assert sum("packed" in row for row in table) == sum("padded" in row for row in table) == 2
    head = (here / "report" / "REPORT.md").read_text()
    assert "- **varied**: data: hf, text; data.shape: packed, padded\n" in head  # not each corpus's own fields
    assert {path.name for path in (here / "report" / "figures").glob("loss_curves*.png")} == {
        "loss_curves-shape-packed.png",
        "loss_curves-shape-padded.png",
    }


def test_excess_loss_is_positive_and_shrinks_with_steps(here):
    small = ["data=synthetic", "data.tokens=100000", "optim.lr=1e-2", *SHORT, "train.eval_batches=64"]
    for steps in (10, 150):
        assert train.main([*small, f"train.steps={steps}"]) == 0
    excess = {summary["steps"]: summary["excess_loss"] for summary in summaries(here)}
    assert 0 < excess[150] < 0.7 * excess[10]
