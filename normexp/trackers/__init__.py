"""Where the rows of a run go: `metrics.jsonl`, which is the truth, and wandb, which mirrors it."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from normexp.fields import PositiveFloat, UserError
from normexp.trackers.jsonl import Jsonl, Row
from normexp.trackers.mirror import Null, Wandb, sync_command

__all__ = ["Jsonl", "Null", "Row", "TrackerConfig", "Wandb", "environment_mode", "open_tracker", "sync_command"]

MODES = ("online", "offline", "disabled")


@dataclass(frozen=True)
class TrackerConfig:
    mode: Literal["auto", "online", "offline", "disabled"]  # auto: WANDB_MODE, else online with a key, else offline
    project: str
    group: str | None
    tags: tuple[str, ...]
    init_timeout: PositiveFloat  # seconds until a run that cannot go online goes on offline

    def __post_init__(self) -> None:
        if not 1 <= len(self.project) <= 128 or set(self.project) & set("/\\#?%:"):
            raise UserError(f"tracker.project={self.project}: must be 1 to 128 characters, none of them / \\ # ? % :")
        for tag in self.tags:
            if not 1 <= len(tag) <= 64:
                raise UserError(f"tracker.tags={tag}: a tag must be 1 to 64 characters long")
        if self.mode == "auto":
            environment_mode()


def environment_mode() -> str | None:
    mode = os.environ.get("WANDB_MODE") or None
    if mode not in (None, *MODES):
        raise UserError(f"WANDB_MODE={mode}: must be one of {', '.join(MODES)}")
    return mode


def open_tracker(
    config: TrackerConfig,
    *,
    folder: Path,
    run_id: str,
    name: str,
    group: str | None,
    tags: Iterable[str],
    resolved: Mapping[str, Any],
    history: Iterable[Row],
) -> Wandb | Null:
    """The mirror of the run in `folder`. `history`: rows of an earlier start, sent where wandb has not got them."""
    mode = environment_mode() or "auto" if config.mode == "auto" else config.mode
    if mode == "disabled":
        return Null()
    identity = {"id": run_id, "name": name, "group": group, "tags": list(tags), "config": dict(resolved)}
    return Wandb(
        mode,
        init_timeout=config.init_timeout,
        folder=folder,
        history=history,
        arguments={"project": config.project, **identity},
    )
