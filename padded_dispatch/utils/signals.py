"""Signals that end a job, and how to keep them out of a block of code."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STDERR = 2


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a job: not SIGHUP if it is ignored, as `nohup` does."""
    ends = signal.SIGINT, signal.SIGTERM
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return ends if ignored else (*ends, signal.SIGHUP)


def write_line(number: int, what: str) -> None:
    """Write the name of a signal and what follows to stderr, also inside a signal handler."""
    # sys.stderr raises if a signal interrupts one of its own writes.
    os.write(_STDERR, f"{signal.Signals(number).name}: {what}\n".encode())


@contextmanager
def held_back() -> Iterator[None]:
    """Let the first signal that ends a job wait for the end of the block."""
    arrived: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    handlers = {number: signal.signal(number, hold) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in arrived[:1]:
            signal.raise_signal(number)
