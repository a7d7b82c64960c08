"""The wandb workspace, as the JSON that is written where there is no key."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("wandb_workspaces", reason="the extra `dashboard` brings wandb-workspaces")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb_workspaces", "ignore:Pydantic V1 style")
SCRIPT = Path(__file__).parent.parent / "scripts" / "wandb_dashboard.py"
LOGGED = (
    "grad_norm/total",
    "grad_norm/layer_00",
    "grad_norm/layer_11/mlp.out",
    "update_ratio/layer_03",
    "rms_t/layer_00/attn.q",
)


@pytest.fixture
def script(monkeypatch, tmp_path):
    """The script, in a folder of its own, where no key can be found."""
    specification = importlib.util.spec_from_file_location("wandb_dashboard", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.chdir(tmp_path)
    return module


def section(path):
    return json.loads(Path(path).read_text())["spec"]["section"]


def test_without_a_key_the_json_is_written(script, capsys):
    assert script.main(["--project", "mine", "--entity", "me", "--group", "depth_warmup"]) == 0
    assert "no wandb key: wrote wandb_workspace.json" in capsys.readouterr().out
    written = json.loads(Path("wandb_workspace.json").read_text())
    assert (written["entity"], written["project"], written["displayName"]) == ("me", "mine", "training stability")
    runs = section("wandb_workspace.json")["runSets"][0]
    assert [key["name"] for key in runs["grouping"]] == ["cell.value.norm", "cell.value.placement"]
    assert [(rule["key"]["name"], rule["value"]) for rule in runs["filters"]["filters"]] == [("group", "depth_warmup")]
    assert runs["runFeed"]["columnPinned"]["summary:verdict"] is True


def test_every_section_is_there_and_finds_what_the_program_logs(script):
    script.main(["--out", "view.json"])
    sections = {s["name"]: s["panels"] for s in section("view.json")["panelBankConfig"]["sections"]}
    assert list(sections) == ["Loss", "Gradient norms by layer", "Ratios", "Verdicts"]
    configs = [panel["config"] for panels in sections.values() for panel in panels]
    named = {metric for config in configs for metric in config.get("metrics") or []}
    assert {
        "train/loss",
        "val/loss",
        "val/loss_batch_stats",
        "grad_norm/total",
        "layer_ratio",
        "summary_metrics.val_loss",
    } <= named
    patterns = [config["metricRegex"] for config in configs if "metricRegex" in config]
    for path in LOGGED:
        assert path in named or any(re.search(pattern, path) for pattern in patterns), path
    (block,) = [pattern for pattern in patterns if re.search(pattern, "grad_norm/layer_00")]
    assert not re.search(block, "grad_norm/layer_00/mlp.out")


def test_with_a_key_it_is_saved_and_nothing_is_written(script, monkeypatch, tmp_path):
    import wandb_workspaces.workspaces as ws

    saved = []
    monkeypatch.setattr(ws.Workspace, "save", lambda self: saved.append((self.entity, self.project)))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert script.main(["--entity", "me"]) == 0
    assert saved == [("me", "normexp")]
    assert list(tmp_path.iterdir()) == []


def test_a_key_without_an_entity_is_a_mistake_in_one_line(script, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert script.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_key_in_netrc_counts(script, tmp_path):
    assert not script.has_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    assert script.has_key()
