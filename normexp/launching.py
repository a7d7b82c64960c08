"""A sweep from its command to its table: plan, launch what is unfinished, watch, and try again what a death took along.

Every launcher runs the same task; how a cell ended is read from its run folder.
"""

import contextlib
import functools
import os
import shlex
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from normexp import commandline, progress, sweeps, workers
from normexp.runs import RunFolder

POLL_SECONDS = 1.0  # between two looks at the run folders, of some microseconds a cell

Task = Callable[[workers.Crew, Any], "str | None"]  # runs a cell; returns a fault that its run folder does not tell


@dataclass(frozen=True)
class Ended:
    exit_code: int
    folder: Path  # of the sweep


def run_sweep(command: commandline.Command, given: Sequence[str], task: Task) -> Ended:
    """All cells; then a table of how each ended. What is wrong with every cell, or with a name, creates nothing."""
    grid = commandline.compose_grid(command)
    planned = sweeps.plan(grid.cells, Planner())
    name = sweeps.folder_name(grid.name, command.overrides)
    folder = Path(os.path.normpath(grid.folder / Path(grid.results).expanduser())) / "sweeps" / name
    sweeps.write(folder, given, "running", planned)
    waiting = sweeps.unfinished(planned)
    launch = Launch(grid, folder, waiting, task)
    progress.tell(launch.opening(planned))
    status, interrupted = "failed", 0
    try:
        interrupted = launch.run() if waiting else 0
        status = "interrupted" if interrupted else "finished"
    finally:
        ended = [replace(cell, error=cell.error or launch.faults.get(cell.overrides)) for cell in planned]
        records = sweeps.write(folder, given, status, ended)
        with contextlib.suppress(OSError):  # of a reader that has gone, as in `| head`
            print(sweeps.table(records, progress.columns()), flush=True)
            print(f"\nruns    {folder.parent.parent / 'runs'}\nsweep   {folder}", flush=True)
            print(f"report  {shlex.join(['python', '-m', 'normexp.report', str(folder)])}", flush=True)
    return Ended(interrupted or int(any(record["status"] != "finished" for record in records)), folder)


class Planner:
    """A cell's config -> where its run will lie and what it takes."""

    def __init__(self) -> None:
        from normexp import cell  # torch takes a second to import

        self.sources = cell.Sources()

    def __call__(self, composed: Callable[[], commandline.Composed]) -> sweeps.Place:
        from normexp import cell, config

        own = composed()
        checked = config.load(own.values, own.choices, own.folder)
        folder = cell.run_folder(checked, self.sources(checked)).path
        train, model = checked.train, checked.model
        tokens = train.steps * train.grad_accum * train.batch_size * model.context
        return sweeps.Place(folder, train.threads, tokens * (1 + model.depth) * model.width)


class Launch:
    """The unfinished cells of a sweep, in the hands of a launcher."""

    def __init__(self, grid: commandline.Grid, folder: Path, cells: list[sweeps.Cell], task: Task) -> None:
        self.grid, self.folder, self.cells, self.watch = grid, folder, cells, Watch(cells)
        self.threads = max((cell.place.threads for cell in cells if cell.place), default=1)
        self.fits = workers.fitting(self.threads)
        self.processes = self.fits if grid.processes == -1 else grid.processes
        stop = folder / f".stop.{uuid.uuid4().hex}"
        self.crew = workers.Crew(os.getpid(), children=self.processes is not None, stop=stop)
        self.task = functools.partial(task, self.crew)
        self.faults: dict[tuple[str, ...], str] = {}

    def opening(self, planned: Sequence[sweeps.Cell]) -> str:
        """What there is to do, and how: one line."""
        refused = sum(cell.place is None for cell in planned)
        there = len(planned) - refused - len(self.cells)
        counts = [f"{there} finished already" if there else "", f"{refused} refused" if refused else ""]
        if self.cells:
            counts.append(f"{len(self.cells)} to run, {self._how()}")
        return f"{len(planned)} cells: {', '.join(filter(None, counts))}"

    def _how(self) -> str:
        if self.processes is not None:
            return f"{self.processes} at a time"
        if self.grid.missing:
            lacks = f"hydra/launcher={self.grid.launcher} needs {self.grid.missing}: pip install 'normexp[parallel]'"
            return f"one after the other, since {lacks}"
        if self.grid.launcher == "basic":
            hint = f" (hydra/launcher=local: {self.fits} at a time)" if self.fits > 1 else ""
            return f"one after the other{hint}"
        return f"by hydra/launcher={self.grid.launcher}"

    def run(self) -> int:
        """The exit code of an interruption, 0 without one."""
        try:
            with self.watch, workers.forwarding(self.crew, self._busy), workers.thread_limit(self.threads):
                self._run_all()
        except workers.Interrupted as error:
            return 128 + error.number
        finally:
            if self.crew.children:
                workers.dismiss()
        return 0

    def _busy(self, processes: set[int]) -> bool:
        return any(RunFolder(cell.folder).holder() in processes for cell in self.cells)

    def _run_all(self) -> None:
        """A death among the workers ends all of them. What ran then is tried again alone, which finds the culprit."""
        waiting = self.cells
        while waiting:
            try:
                self._launch(waiting)
                return
            except commandline.WorkerDied:
                left = [cell for cell in waiting if not self.watch.ended(cell)]
                suspects = [cell for cell in left if cell.summary().get("status") == "running"] or left
                progress.tell(f"a worker was killed; trying again, one at a time: {len(suspects)} cells")
            for cell in suspects:
                self._try_alone(cell)
            waiting = [cell for cell in left if cell not in suspects]

    def _try_alone(self, cell: sweeps.Cell) -> None:
        try:
            self._launch([cell])
        except commandline.WorkerDied:
            reason = "its process was killed twice, the second time while it ran alone; perhaps for want of memory"
            folder = RunFolder(cell.folder)
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.write_summary(folder.summary() | {"status": "failed", "error": reason})

    def _launch(self, cells: Sequence[sweeps.Cell]) -> None:
        overrides = [cell.overrides for cell in cells]
        told = commandline.launch_grid(self.grid, overrides, self.task, self.folder, self.processes)
        self.faults |= {own: fault for own, fault in zip(overrides, told, strict=True) if fault}


class Watch:
    """Looks at the run folders from a thread of its own, while entered, and shows what became of the cells so far."""

    def __init__(self, cells: Sequence[sweeps.Cell]) -> None:
        self.pending = list(cells)
        self.before = {cell.name: _stamp(cell) for cell in cells}
        self.view = progress.SweepProgress({cell.name: cell.place.work for cell in cells if cell.place})
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self.view.start()
        self._thread.start()

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self.view.stop()

    def _watch(self) -> None:
        over = False
        while not over:
            over = self._over.wait(POLL_SECONDS)
            with contextlib.suppress(OSError, SystemExit):  # of a terminal that is gone
                self._look()

    def _look(self) -> None:
        for cell in [cell for cell in self.pending if self.ended(cell)]:
            self.pending.remove(cell)
            self.view.ended(cell.name, cell.summary())
        self.view.draw()

    def ended(self, cell: sweeps.Cell) -> bool:
        """In this sweep, and not when the command was given before."""
        return _stamp(cell) != self.before[cell.name] and cell.summary().get("status") in sweeps.ENDED


def _stamp(cell: sweeps.Cell) -> int | None:
    """When the run folder last told something."""
    try:
        return (cell.folder / "summary.json").stat().st_mtime_ns
    except OSError:
        return None
