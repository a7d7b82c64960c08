"""What the user sees of a run: a bar while it trains, a closing table. rich is imported only here.

Without a terminal the bar is about ten plain lines, which a log file can hold.
"""

import io
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

REFRESH_SECONDS = 0.5  # a redraw takes 2 to 5 ms, a small step 40
NARROWEST = 40  # columns that the closing table needs; a narrower terminal wraps it
PLAIN_LINES = 10  # in a whole run
COLOURS = {
    "trained": "bold green",
    "unstable": "bold yellow",
    "collapsed": "bold red",
    "diverged": "bold red",
    "undecided": "bold cyan",
}
OTHER = ("failed", "interrupted", "unknown")  # what a run without a verdict may have become


class Progress:
    """The bar of one run from `first_step` (steps that are already done) to `total_steps`; a context manager."""

    def __init__(self, total_steps: int, run_id: str, first_step: int) -> None:
        self.total_steps, self.run_id, self.first_step = total_steps, run_id, first_step
        self._shown: dict[str, float] = {}
        self._started = self._drawn = time.perf_counter()
        self._line = _line_number(first_step, total_steps)
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        start = f" from step {self.first_step}" if self.first_step else ""
        if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            self._bar = _bar()
            self._bar.console.print(f"[bold]{self.run_id}[/bold]{start}", highlight=False)
            self._task = self._bar.add_task("", total=self.total_steps, completed=self.first_step, readings="")
            self._bar.start()
        else:
            with suppress(OSError):  # of a reader that has gone, as in `| head`
                print(f"{self.run_id}: {self.total_steps} steps{start}", flush=True)
        self._started = time.perf_counter()
        return self

    def update(
        self,
        step: int,
        *,
        loss: float | None,
        lr: float | None,
        grad_norm: float | None,
        tokens_per_second: float | None,
    ) -> None:
        """To be called at every step. A value that is None is shown as it was last known."""
        new = {"loss": loss, "lr": lr, "grad": grad_norm, "tok/s": tokens_per_second}
        self._shown |= {name: value for name, value in new.items() if value is not None}
        if self._bar is None:
            self._print_some(step)
        elif time.perf_counter() - self._drawn > REFRESH_SECONDS or step >= self.total_steps:
            self._draw(step)

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            with suppress(OSError):  # of a terminal that is gone
                self._bar.stop()

    def _draw(self, step: int) -> None:
        left = self._time_left(step)
        self._bar.update(self._task, completed=step, readings=f"{_readings(self._shown)}  {left}", refresh=True)
        self._drawn = time.perf_counter()

    def _print_some(self, step: int) -> None:
        line = _line_number(step, self.total_steps)
        if line > self._line:
            self._line = line
            width = len(str(self.total_steps))
            left = self._time_left(step)
            print(f"{self.run_id}  {step:>{width}}/{self.total_steps}  {_readings(self._shown)}  {left}", flush=True)

    def _time_left(self, step: int) -> str:
        seconds = time.perf_counter() - self._started
        if step >= self.total_steps:
            return f"{_duration(seconds)} taken"
        done = step - self.first_step
        return f"{_duration(seconds / done * (self.total_steps - step))} left" if done > 0 else ""


class SweepProgress:
    """The bar of a whole sweep, or a plain line for each run that has ended. `work`: of each run to be made, in any
    unit that the time of its training is proportional to."""

    def __init__(self, work: Mapping[str, float]) -> None:
        self.work = dict(work)
        self.done: set[str] = set()
        self.outcomes: Counter[str] = Counter()
        self._started = time.perf_counter()
        self._bar: Any = None
        self._task: Any = None

    def start(self) -> None:
        self._started = time.perf_counter()
        if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            self._bar = _bar()
            self._task = self._bar.add_task("", total=len(self.work), readings="")
            self._bar.start()
            self._bar.refresh()

    def ended(self, run_id: str, summary: Mapping[str, Any]) -> None:
        outcome = summary.get("verdict") or summary.get("status") or "unknown"
        self.done.add(run_id)
        self.outcomes[outcome] += 1
        reason = f": {summary['error']}" if summary.get("error") else ""
        if self._bar is None:
            count = f"{len(self.done):>{len(str(len(self.work)))}}/{len(self.work)}"
            print(f"{count}  {run_id}  {outcome}{reason}  ({self._readings()})", flush=True)
        elif reason:
            self._bar.console.print(f"{run_id}  {outcome}{reason}", style="red", highlight=False, markup=False)

    def draw(self) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=len(self.done), readings=self._readings(), refresh=True)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _readings(self) -> str:
        counts = (f"{self.outcomes[name]} {name}" for name in [*COLOURS, *OTHER] if self.outcomes[name])
        return "  ".join(filter(None, [", ".join(counts), self._time_left()]))

    def _time_left(self) -> str:
        seconds = time.perf_counter() - self._started
        done = sum(self.work[run_id] for run_id in self.done)
        left = sum(self.work.values()) - done
        if not left:
            return f"{_duration(seconds)} taken"
        return f"{_duration(seconds / done * left)} left" if done else f"{_duration(seconds)} so far"


def columns() -> int | None:
    """Of the terminal; None where standard output is none, and lines may be of any length."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def tell(line: str) -> None:
    """Beside what a command is asked for."""
    print(line, file=sys.stderr, flush=True)


def closing_table(summary: Mapping[str, Any], folder: Path, sync_command: str | None) -> None:
    """Prints how a run ended: verdict and reason, losses in nats per token, and where its files are.

    `sync_command` uploads what wandb has only on this machine; `wandb_url` in the summary is the page of a run online.
    """
    console = _console()
    console.print(_table(summary))
    # Outside of the table and never wrapped, so that they can be copied.
    for name, text in (("files", folder), ("upload", sync_command), ("wandb", summary.get("wandb_url"))):
        if text is not None:
            console.print(f"  {name:<7} {text}", soft_wrap=True, highlight=False, markup=False)


def _table(summary: Mapping[str, Any]) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    verdict = summary.get("verdict") or summary.get("status") or "unknown"
    title = Text(f" {summary.get('run_id', '')}", style="bold")
    table = Table(box=box.ROUNDED, show_header=False, title=title, title_justify="left")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("verdict", Text(verdict, style=COLOURS.get(verdict, "bold")))
    for name, text in _facts(summary):
        table.add_row(name, Text(text))
    return table


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The lines under the verdict; what is not known is left out."""
    reason = summary.get("reason") or summary.get("error")
    if summary.get("status") == "interrupted":
        reason = reason or "the same command goes on from here"
    running = "" if summary.get("val_loss_batch_stats") is None else "  by running statistics"
    early = "" if summary.get("val_step") in (None, summary.get("steps")) else f"  at step {summary['val_step']}"
    lines = [
        ("", reason),
        ("first bad step", _where(summary)),
        ("validation loss", _loss(summary, "val_loss", running + early)),
        ("", _loss(summary, "val_loss_batch_stats", "  by batch statistics" + early)),
        ("best", _loss(summary, "best_val_loss", "")),
        ("excess loss", _excess(summary)),
        ("unigram entropy H₁", _loss(summary, "unigram_entropy", "  where a collapsed run stays")),
        ("steps", _effort(summary)),
    ]
    return [(name, text) for name, text in lines if text]


def _where(summary: Mapping[str, Any]) -> str | None:
    step, layer = summary.get("first_bad_step"), summary.get("first_bad_layer")
    return None if step is None else f"{step}" + (f", in {layer}" if layer is not None else "")


def _loss(summary: Mapping[str, Any], name: str, note: str) -> str | None:
    value = summary.get(name)
    if value is None:
        return f"not finite{note}" if name in summary.get("nonfinite", ()) else None
    return f"{value:.3f}{note}"


def _excess(summary: Mapping[str, Any]) -> str | None:
    if summary.get("excess_loss") is None:
        return None
    return f"{summary['excess_loss']:.3f}  above the source's entropy rate {summary['entropy_rate']:.3f}"


def _effort(summary: Mapping[str, Any]) -> str | None:
    if summary.get("steps") is None or summary.get("seconds") is None:
        return None
    skipped = f", {summary['skipped_steps']} of them skipped" if summary.get("skipped_steps") else ""
    speed = f", {_count(summary['tokens_per_second'])} tok/s" if summary.get("tokens_per_second") else ""
    return f"{summary['steps']}{skipped}, in {_duration(summary['seconds'])}{speed}"


def _readings(shown: Mapping[str, float]) -> str:
    forms = {"loss": "loss {:.3f}", "lr": "lr {:.1e}", "grad": "grad {:.2g}"}
    texts = [form.format(shown[name]) for name, form in forms.items() if name in shown]
    return "  ".join([*texts, *([f"{_count(shown['tok/s'])} tok/s"] if "tok/s" in shown else [])])


def _count(number: float) -> str:
    return f"{number / 1e6:.2f}M" if number >= 1e6 else f"{number / 1e3:.1f}k" if number >= 1e3 else f"{number:.0f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def _line_number(step: int, total_steps: int) -> int:
    return step * PLAIN_LINES // total_steps


def _bar() -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as RichProgress

    # Without a thread of its own, which would take time from the training.
    columns = (
        BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
        MofNCompleteColumn(),
        TextColumn("{task.fields[readings]}"),
    )
    return RichProgress(*columns, console=_console(), auto_refresh=False, expand=True)


def _console() -> "Console":
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without H₁ is no reason to fail
    console = Console()
    console.width = max(console.width, NARROWEST)
    return console
