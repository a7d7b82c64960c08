"""Builds a wandb workspace for normexp's runs: losses, gradient norms by layer, ratios, verdicts.

    python scripts/wandb_dashboard.py --project normexp --entity me --group depth_warmup

Without a wandb key it writes the JSON that it would save. Needs the extra `dashboard` (wandb-workspaces).
"""

from __future__ import annotations

import argparse
import json
import netrc
import os
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

MATRICES = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.in", "mlp.out")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Builds a wandb workspace for normexp's runs.")
    parser.add_argument("--project", default="normexp")
    parser.add_argument("--entity", default="", help="wandb user or team; needed to save")
    parser.add_argument("--group", default="", help="show one group (a sweep) only")
    parser.add_argument("--name", default="training stability")
    parser.add_argument("--out", type=Path, default=Path("wandb_workspace.json"), help="the JSON, without a key")
    given = parser.parse_args(arguments)
    try:
        workspace = build(given.entity, given.project, given.name, given.group)
    except ModuleNotFoundError as missing:
        print(f"{missing.name} is not installed: pip install 'normexp[dashboard]'", file=sys.stderr)
        return 2
    if not has_key():
        given.out.write_text(json.dumps(as_json(workspace), indent=1) + "\n", encoding="utf-8")
        print(f"no wandb key: wrote {given.out} instead of saving it")
    elif not given.entity:
        print("--entity is missing: the wandb user or team that owns the project", file=sys.stderr)
        return 2
    else:
        workspace.save()
    return 0


def has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        return False


def build(entity: str, project: str, name: str, group: str) -> Any:
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces import expr

    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[ws.Section(name=title, panels=panels, is_open=True) for title, panels in sections().items()],
        settings=ws.WorkspaceSettings(max_runs=100),
        runset_settings=ws.RunsetSettings(
            groupby=[expr.Config("cell.norm"), expr.Config("cell.placement")],
            filters=expr.And(expr.Metric("Group") == group) if group else "",
            pinned_columns=["summary:verdict", "summary:val_loss", "summary:first_bad_step", "summary:first_bad_layer"],
        ),
    )


def sections() -> dict[str, list[Any]]:
    import wandb_workspaces.reports.v2 as wr

    def lines(title: str, unit: str, *y: str, log: bool = False, x: str = "Step") -> Any:
        return wr.LinePlot(title=title, x=x, y=list(y), title_y=unit, log_y=log)

    def layers(title: str, unit: str, regex: str) -> Any:
        return wr.LinePlot(title=title, metric_regex=regex, title_y=unit, log_y=True)

    nats = "nats per token"
    return {
        "Loss": [
            lines("training loss", nats, "train/loss"),
            lines("validation loss", nats, "val/loss"),
            lines("validation loss with batch statistics (BatchNorm)", nats, "val/loss_batch_stats"),
            lines("training loss over tokens", nats, "train/loss", x="tokens"),
        ],
        "Gradient norms by layer": [
            lines("total", "norm", "grad_norm/total", log=True),
            lines("embedding and head", "norm", "grad_norm/embed", "grad_norm/head", log=True),
            layers("blocks", "norm", r"grad_norm/layer_\d+$"),
            *(layers(f"{name} of each block", "norm", rf"grad_norm/layer_\d+/{re.escape(name)}$") for name in MATRICES),
        ],
        "Ratios": [
            lines("first over last block's gradient", "ratio", "layer_ratio", log=True),
            layers("update over weight", "ratio", r"update_ratio/layer_\d+$"),
            layers("RMS_t (Adam)", "ratio", r"rms_t/layer_\d+/.+"),
        ],
        "Verdicts": [
            wr.BarPlot(title="final validation loss (nats per token)", metrics=[wr.SummaryMetric("val_loss")]),
            wr.BarPlot(title="spike score of the loss", metrics=[wr.SummaryMetric("loss_spike_score")]),
            wr.BarPlot(title="first bad step", metrics=[wr.SummaryMetric("first_bad_step")]),
            wr.RunComparer(diff_only="split"),
        ],
    }


def as_json(workspace: Any) -> dict[str, Any]:
    """The view as it is sent to wandb."""
    view = workspace._to_model()
    spec = view.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {"entity": view.entity, "project": view.project, "displayName": view.display_name, "spec": spec}


if __name__ == "__main__":
    sys.exit(main())
