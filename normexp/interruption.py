"""Signals that end a run between two steps, not within one."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)


@contextmanager
def interruption() -> Iterator[list[int]]:
    """Inside, SIGINT, SIGTERM and SIGUSR2 end nothing: their numbers are collected in the list. A second SIGINT raises
    KeyboardInterrupt. In another thread than the main one, which alone may handle signals, the list stays empty."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
