"""Entry point: `python -m normexp.train norm=rms placement=pre`. What it takes: --help."""

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normexp import commandline, sweeps
from normexp.fields import UserError
from normexp.runs import RunFolder

# torch takes a second to import, so what needs it is imported where it is used: --help does not.

LAUNCHERS: set[int] = set()  # this process, while it launches the cells of a sweep


class Interrupted(KeyboardInterrupt):
    """A signal ended a cell; the sweep it belongs to ends with it."""

    def __init__(self, signal: int) -> None:
        super().__init__()
        self.exit_code = 128 + signal


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, whatever the verdict; 1 a fault, 2 the user's mistake, 130 or 143 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return commandline.exit_code(lambda: _run(given))


def _run(given: list[str]) -> int:
    command = commandline.parse(given)
    if command.multirun:
        return run_sweep(command, given)
    ended: list[RunFolder] = []
    commandline.launch(command, lambda cfg: ended.append(run_cell(cfg)))
    return max((128 + folder.summary().get("signal", -128) for folder in ended), default=0)


def run_cell(cfg: Any) -> RunFolder:
    from normexp import cell, config, progress, trackers

    composed = commandline.read(cfg)
    checked = config.load(composed.values, composed.choices, composed.folder)
    folder = cell.run(checked, checked.tracker.group or composed.sweep, tell)
    with contextlib.suppress(OSError, SystemExit):  # of a reader that has gone, as in `| head`
        progress.closing_table(folder.summary(), folder.path, trackers.sync_command(folder.path))
    return folder


def try_cell(cfg: Any) -> None:
    """A cell of a sweep: whatever becomes of it, the others run. Its run folder tells what did."""
    try:
        signal = run_cell(cfg).summary().get("signal")
    except UserError as error:
        tell(f"error: {error}")
        return
    except KeyboardInterrupt:
        signal = 2
    except BaseException:
        traceback.print_exc()
        return
    if signal is not None and os.getpid() in LAUNCHERS:
        raise Interrupted(signal)


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_sweep(command: commandline.Command, given: list[str]) -> int:
    """All cells; then a table of how each ended. What is wrong with every cell, or with a name, creates nothing."""
    grid = commandline.compose_grid(command)
    planned = sweeps.plan(grid.cells, Planner())
    name = sweeps.folder_name(grid.name, command.overrides)
    folder = Path(os.path.normpath(grid.folder / Path(grid.results).expanduser())) / "sweeps" / name
    sweeps.write(folder, given, "running", planned)
    LAUNCHERS.add(os.getpid())
    interrupted = 0
    try:
        commandline.launch_grid(command, try_cell, folder)
    except KeyboardInterrupt as error:
        interrupted = getattr(error, "exit_code", 130)
    finally:
        LAUNCHERS.discard(os.getpid())
    records = sweeps.write(folder, given, "interrupted" if interrupted else "finished", planned)
    print(sweeps.table(records))
    print(f"the sweep: {folder}")
    return interrupted or int(any(record["status"] != "finished" for record in records))


class Planner:
    """A cell's config, as its task would receive it -> the run folder that it will have. Opens each corpus once."""

    def __init__(self) -> None:
        self.sources: dict[str, Any] = {}

    def __call__(self, cfg: Any) -> Path:
        from normexp import cell, config

        composed = commandline.read(cfg)
        checked = config.load(composed.values, composed.choices, composed.folder)
        corpus = str(checked.resolved["data"])
        if corpus not in self.sources:
            self.sources[corpus] = cell.open_source(checked)
        return cell.run_folder(checked, self.sources[corpus]).path


if __name__ == "__main__":
    from normexp.train import main as main_by_name  # so that launchers can send the cells' function to other processes

    sys.exit(main_by_name())
