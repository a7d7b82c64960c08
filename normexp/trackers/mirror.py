"""The mirror of a run in wandb, or none. wandb is imported only here, and only when it is wanted."""

import logging
import math
import os
import queue
import shlex
import shutil
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from normexp.trackers.jsonl import Row

warn = logging.getLogger(__name__).warning
FINISH_TIMEOUT = 30.0  # seconds that the end of a run waits for uploads

# What wandb would do beyond rows and config costs start-up time or writes to the terminal.
SETTINGS = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "finish_timeout": FINISH_TIMEOUT,
    "finish_timeout_raises": True,
    "label_disable": True,
    "quiet": True,
    "save_code": False,
    "silent": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


class Null:
    """No mirror."""

    url: str | None = None

    def log(self, rows: Sequence[Row]) -> None:
        pass

    def finish(self, summary: Mapping[str, Any]) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.finish({"status": "failed" if any(raised) else "interrupted"})


class Wandb(Null):
    """A run of wandb, kept by a thread of its own: it opens the run, sends the rows, and closes it.

    So no call here waits for wandb but `finish`, and that one for a bounded time. Whatever goes wrong there becomes one
    warning. As a context manager it is finished in any case. Rows that were logged must not be changed afterwards.
    `url` is the page of a run that is online.
    """

    def __init__(
        self, mode: str, *, init_timeout: float, folder: Path, history: Iterable[Row], arguments: dict[str, Any]
    ) -> None:
        self._mode, self._init_timeout, self._folder, self._arguments = mode, init_timeout, folder, arguments
        self._history, self._last_step = history, -1
        self._rows: queue.SimpleQueue[Sequence[Row] | None] = queue.SimpleQueue()
        self._summary: Mapping[str, Any] = {}
        self._finished = False
        self._run: Any = None
        self._thread = threading.Thread(target=self._keep, name="wandb", daemon=True)
        self._thread.start()

    def log(self, rows: Sequence[Row]) -> None:
        if self._thread.is_alive():
            self._rows.put(rows)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Closes the run with `summary` as its summary; a second call does nothing."""
        if self._finished:
            return
        self._finished, self._summary = True, summary
        self._rows.put(None)
        self._thread.join(self._init_timeout + FINISH_TIMEOUT + 10)
        if self._thread.is_alive():
            warn("wandb does not answer; the run is left to it. All rows are in %s", self._folder / "metrics.jsonl")

    def _keep(self) -> None:
        try:
            self._run = self._open()
            self._send(self._history)
            for rows in iter(self._rows.get, None):
                self._send(rows)
            self._close()
        except Exception as error:
            warn("wandb: %s. All rows are in %s", _first_line(error), self._folder / "metrics.jsonl")
            self._abandon()

    def _send(self, rows: Iterable[Row]) -> None:
        for row in rows:
            step = row["step"]
            assert isinstance(step, int)
            if step > self._last_step:
                self._run.log(_mirrored(row), step=step, commit=True)
                self._last_step = step

    def _close(self) -> None:
        self._run.summary.update({name: value for name, value in self._summary.items() if value is not None})
        try:
            self._run.finish(exit_code=int(self._summary.get("status") != "finished"))
        except TimeoutError:
            command = _sync("--include-online", Path(self._run.dir).parent)
            warn("wandb: not all rows were uploaded within %.0f s; later: %s", FINISH_TIMEOUT, command)

    def _abandon(self) -> None:
        try:
            if self._run is not None:
                self._run.finish(exit_code=1)
        except Exception:  # it has been warned of
            logging.getLogger(__name__).debug("wandb: finish failed", exc_info=True)

    def _open(self) -> Any:
        wandb = _wandb()
        earlier = set(self._folder.glob("wandb/*run-*"))
        run = None if self._mode == "offline" else self._go_online(wandb)
        if run is None:
            for left in set(self._folder.glob("wandb/run-*")) - earlier:  # of the attempt
                shutil.rmtree(left, ignore_errors=True)
            run = self._init(wandb, "offline")  # to be synced whole: that writes the server's rows from the first on
        else:
            self._last_step = run.starting_step - 1
            self.url = run.url
        for stale in filter(_unsynced, earlier):  # its rows are sent again, to the run that is now open
            shutil.rmtree(stale, ignore_errors=True)
        for name in ("step", "tokens"):
            run.define_metric(name)
        run.define_metric("*", step_metric="step")
        return run

    def _go_online(self, wandb: Any) -> Any:
        try:
            if _has_key(wandb.setup().settings):
                return self._init(wandb, "online")
        except Exception as error:
            warn("wandb: cannot go online (%s); this run is logged offline", _first_line(error))
        else:
            if self._mode == "online":
                warn("wandb: no API key (`wandb login` stores one); this run is logged offline")
            return None
        if wandb.run is None:  # else somebody else's run would end too
            with suppress(Exception):
                wandb.teardown()  # its service holds the id of the failed run
        return None

    def _init(self, wandb: Any, mode: str) -> Any:
        known = wandb.Settings.model_fields
        return wandb.init(
            mode=mode,
            dir=str(self._folder),
            resume="allow" if mode == "online" else None,
            reinit="create_new",  # leaves a run alone that the surrounding program may have
            settings=wandb.Settings(
                init_timeout=self._init_timeout,
                **{name: value for name, value in SETTINGS.items() if name in known},
            ),
            **self._arguments,
        )


def _wandb() -> Any:
    # Its own telemetry delays the end of a process by more than 20 s where the network swallows packets.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    return wandb


def _mirrored(row: Row) -> dict[str, float]:
    """Numbers only; NaN for those that are not finite, of a live row or of one read back."""
    named = row.get("nonfinite")
    numbers = {path: value for path, value in row.items() if isinstance(value, int | float)}
    numbers |= {path: math.nan for path, value in numbers.items() if not math.isfinite(value)}
    return numbers | dict.fromkeys(named if isinstance(named, list) else [], math.nan)


def _has_key(settings: Any) -> bool:
    """Whether wandb will find a key by itself. Without one it would ask at the terminal."""
    try:
        from wandb.sdk.lib.wbauth import authenticate_session
    except ImportError:  # an older wandb
        return bool(settings.api_key or os.environ.get("WANDB_API_KEY"))
    host = settings.base_url
    return authenticate_session(host=host, source="normexp", prompt=False, update_session=False) is not None


def _unsynced(run: Path) -> bool:
    return run.name.startswith("offline-run-") and not any(run.glob("*.synced"))


def sync_command(folder: Path) -> str | None:
    """What uploads the run in `folder` as far as it lies only on this machine; None if there is nothing."""
    unsynced = sorted(filter(_unsynced, folder.glob("wandb/*run-*")))
    return _sync(*unsynced) if unsynced else None


def _sync(*arguments: Path | str) -> str:
    program = ["wandb"] if shutil.which("wandb") else [sys.executable, "-m", "wandb"]
    paths = [str(item.absolute()) if isinstance(item, Path) else item for item in arguments]
    return shlex.join([*program, "sync", *paths])


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
