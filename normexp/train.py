"""Entry point: `python -m normexp.train norm=rms placement=pre`. What it takes: --help."""

import contextlib
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normexp import commandline, launching, progress, workers
from normexp.fields import UserError
from normexp.runs import RunFolder

# torch takes a second to import, so what needs it is imported where it is used: --help does not.


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 done, whatever the verdict; 1 a fault, 2 the user's mistake, 130 or 143 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return commandline.exit_code(lambda: _run(given))


def sweep(given: list[str]) -> tuple[int, Path | None]:
    """The exit code of a sweep and its folder, for a report; None where a mistake or a signal left none to report."""
    ended: list[launching.Ended] = []

    def run() -> int:
        command = commandline.parse(given)
        if not command.multirun:  # --help and its like
            return _run(given)
        ended.append(launching.run_sweep(command, given, try_cell))
        return ended[0].exit_code

    code = commandline.exit_code(run)
    return code, ended[0].folder if code in (0, 1) and ended else None


def _run(given: list[str]) -> int:
    command = commandline.parse(given)
    if command.multirun:
        return launching.run_sweep(command, given, try_cell).exit_code
    ended: list[RunFolder] = []
    commandline.launch(command, lambda cfg: ended.append(_run_one(cfg)))
    return max((128 + folder.summary().get("signal", -128) for folder in ended), default=0)


def _run_one(cfg: Any) -> RunFolder:
    from normexp import trackers

    folder = run_cell(cfg, None, bar=True)
    with contextlib.suppress(OSError, SystemExit):  # of a reader that has gone, as in `| head`
        progress.closing_table(folder.summary(), folder.path, trackers.sync_command(folder.path))
    return folder


def run_cell(cfg: Any, crew: workers.Crew | None, bar: bool) -> RunFolder:
    from normexp import cell, config

    composed = commandline.read(cfg)
    checked = config.load(composed.values, composed.choices, composed.folder)
    source = _sources(crew)(checked) if crew else cell.open_source(checked)
    return cell.run(checked, source, checked.tracker.group or composed.sweep, progress.tell, bar)


@functools.lru_cache(maxsize=1)
def _sources(crew: workers.Crew) -> Any:
    """The corpora that this process has opened for the sweep."""
    from normexp import cell

    return cell.Sources()


def try_cell(crew: workers.Crew, cfg: Any) -> str | None:
    """A cell of a sweep: whatever becomes of it, the others run. Its run folder tells what did; a fault that came
    before there was one is returned."""
    signal = fault = None
    try:
        if workers.begin(crew):
            signal = run_cell(cfg, crew, bar=False).summary().get("signal")
    except UserError as error:
        fault = str(error)
    except KeyboardInterrupt as error:
        signal = getattr(error, "number", 2)
    except BaseException as error:
        fault = f"{type(error).__name__}: {error}"
    workers.end(crew, signal)
    return fault


if __name__ == "__main__":
    from normexp.train import main as main_by_name  # so that launchers can send the cells' function to other processes

    sys.exit(main_by_name())
