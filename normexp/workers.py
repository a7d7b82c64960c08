"""The processes of a sweep, and how they end: with the command that began them, after some seconds to save.

What the launchers of one machine leave open: after a kill of the parent its workers would live on and begin further
cells, a signal to the parent would not reach them, and several processes would each take all cores.
"""

import ctypes
import functools
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

PATIENCE = 30.0  # seconds that workers get to end their step and save, while their parent waits
GRACE = 3.0  # seconds that they get once it is dead
WATCH = 0.5  # seconds between two looks at whether it is
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
PR_SET_PDEATHSIG = 1  # of prctl(2)

_in_cell = False  # whether a cell runs in this process


class Interrupted(KeyboardInterrupt):
    """A signal ends what runs: the cell, and the sweep that it belongs to."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@dataclass(frozen=True)
class Crew:
    """What every process of a sweep knows of it."""

    launcher: int  # the process that gave the command
    children: bool  # whether it has children that run the cells
    stop: Path  # exists once no further cell may begin

    def here(self) -> bool:
        """Whether this process is such a child."""
        return self.children and os.getpid() != self.launcher

    def orphaned(self) -> bool:
        return self.here() and os.getppid() != self.launcher


def begin(crew: Crew) -> bool:
    """To be called before a cell: whether it may begin."""
    global _in_cell
    _in_cell = True
    if crew.here():
        _end_with_parent(crew)
    _in_cell = not crew.stop.exists()
    return _in_cell


def end(crew: Crew, received: int | None) -> None:
    """To be called after it. An orphan exits; the launcher's own process ends the sweep if the cell was interrupted."""
    global _in_cell
    _in_cell = False
    if crew.orphaned():
        os._exit(128 + signal.SIGTERM)
    if crew.here() and not gc.get_freeze_count():
        gc.collect()
        gc.freeze()  # what the imports made: joblib has the garbage collected after each cell, which went through it
    if received is not None and os.getpid() == crew.launcher:
        raise Interrupted(received)


def _end_with_parent(crew: Crew) -> None:
    signal.signal(signal.SIGTERM, functools.partial(_terminate, crew))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent passes it on as SIGTERM
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if crew.orphaned():  # before the line above could tell
        os._exit(128 + signal.SIGTERM)
    _watch_parent(crew)


@functools.lru_cache(maxsize=1)
def _watch_parent(crew: Crew) -> None:
    """From a thread: an orphan has a few seconds to save, and then ends wherever it is."""

    def watch() -> None:
        while not crew.orphaned():
            time.sleep(WATCH)
        if sys.platform != "linux":
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _terminate(crew: Crew, number: int, frame: FrameType | None) -> None:
    """While a cell trains, the trainer's own handler is there instead, and saves a checkpoint."""
    if _in_cell:
        raise Interrupted(number)
    if crew.orphaned():
        os._exit(128 + number)


@contextmanager
def forwarding(crew: Crew, busy: Callable[[set[int]], bool]) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM to this process end the cells and then raise Interrupted. `busy`: whether any of these
    processes is still in a cell. A second signal does not wait for them."""

    def stop(number: int, frame: FrameType | None) -> None:
        if crew.children and not crew.stop.exists():
            crew.stop.touch()
            workers = {child.pid for child in multiprocessing.active_children() if child.pid is not None}
            for worker in workers:
                os.kill(worker, signal.SIGTERM)
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline and busy(workers):
                time.sleep(0.05)
        raise Interrupted(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        crew.stop.unlink(missing_ok=True)


def dismiss() -> None:
    """Ends the idle workers of joblib: those of another sweep need another directory and other threads."""
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor(reuse=True).shutdown(wait=True, kill_workers=True)


def fitting(threads: int) -> int:
    """How many processes of so many threads each the cores of this machine hold."""
    return max(1, _cores() // threads)


def _cores() -> int:
    try:
        from joblib import cpu_count  # knows what a container may use of its machine
    except ImportError:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(cpu_count())


@contextmanager
def thread_limit(threads: int) -> Iterator[None]:
    """Processes begun inside have as many threads for their arithmetic, whatever the environment says."""
    before: Mapping[str, str | None] = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, str(threads)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
