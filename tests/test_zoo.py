"""The tables of norms and placements: whole, sourced, and in the README as the command prints them."""

import itertools

import pytest

import normexp
from normexp import zoo
from tests.tiny import load

README = (normexp.CONF.parent / "README.md").read_text()
NAMED = [(group, name) for group in ("norm", "placement") for name in zoo.names(group) if name != "none"]


@pytest.mark.parametrize(("group", "name"), NAMED)
def test_every_class_names_its_source_and_what_was_checked(group, name):
    equation, _, source, checked = zoo.described(zoo.target(group, name))
    assert "x" in equation or "h" in equation
    assert source != "–"
    assert source not in equation
    assert checked != "–"


def test_a_docstring_is_taken_apart():
    class Toy:
        """x / 2 (per token), since 2 is even (Toy, 1234.56789; ICML 2020). More.

        Init: N(0, 0.02), not 1. Checked: the paper,
        twice. And more.
        """

    assert zoo.described(Toy) == (
        "x / 2 (per token), since 2 is even. More",
        "N(0, 0.02), not 1",
        "Toy, 1234.56789; ICML 2020",
        "the paper, twice",
    )


def test_every_norm_and_placement_is_run_once():
    cells = {}
    for grid in zoo.grids():
        values = dict(override.split("=", 1) for override in grid)
        norms, placements = values["norm"].split(","), values["placement"].split(",")
        for norm, placement in itertools.product(norms, placements):
            cells[norm, placement] = [o for o in grid if not o.startswith(("norm=", "placement=", "seed=", "results="))]
    assert {norm for norm, placement in cells if placement == "pre"} == set(zoo.names("norm"))
    assert {placement for norm, placement in cells} == set(zoo.names("placement"))
    assert "model.init=placement" in cells["ln", "deepnorm"]
    assert "model.init=placement" not in cells["ln", "post"]
    for (norm, placement), others in cells.items():
        load(f"norm={norm}", f"placement={placement}", "device=cpu", *others)


def test_what_is_said_of_the_runs():
    run = {"verdict": "trained", "val_loss": "2.5"}
    assert zoo.trains([]) == "not run"
    assert zoo.trains([run, run | {"verdict": "unstable", "val_loss": "2.0"}]) == "2 of 2, 2.25"
    lost = {"verdict": "diverged", "val_loss": ""}
    assert zoo.trains([run, lost]) == "1 of 2, 2.50 (diverged)"


def test_the_readme_has_the_tables_that_the_command_prints():
    runs = zoo.read(normexp.CONF.parent / zoo.RESULTS)
    assert len(runs) == len(zoo.names("norm")) + len(zoo.names("placement")) - 1  # LayerNorm at `pre` is in both
    for table in zoo.tables(runs).split("\n\n"):
        assert table.strip() in README


def test_the_command_takes_the_folder_of_a_report(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    report = normexp.CONF.parent / zoo.RESULTS
    assert zoo.main([str(report)]) == 0
    assert capfd.readouterr().out == zoo.tables(zoo.read(report))
    assert zoo.main([]) == 0  # equations, from any folder
    assert "| not run |" in capfd.readouterr().out


def test_what_is_no_report_is_one_line(tmp_path, capfd):
    (tmp_path / "tables").mkdir()
    for text in (None, "norm,placement\nln,pre\n", "status,norm,placement\nfailed,ln,pre\n"):
        if text:
            (tmp_path / "tables" / "runs.csv").write_text(text)
        assert zoo.main([str(tmp_path)]) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.splitlines() == [
            f"error: {tmp_path}: has no report of finished runs; give a folder that normexp.report has written into"
        ]
    for arguments in (["--nope"], ["one", "two"]):
        with pytest.raises(SystemExit, match=r"^2$"):
            zoo.main(arguments)
        assert capfd.readouterr().out == ""
