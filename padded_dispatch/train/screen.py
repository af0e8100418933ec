"""The terminal of a run: lines that stay, a block that is redrawn, a clock while the user waits.

Anything but a terminal gets the lines alone. There are no colours, and the cursor stays visible: a
worker that is killed must not leave a terminal that has to be reset. This module is imported before
torch, to show something while torch is imported.
"""

import itertools
import math
import os
import shutil
import threading
import time
from collections.abc import Sequence
from typing import TextIO

_ERASE_LINE = "\r\x1b[K"
_BARS, _ASCII_BARS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"


class Screen:
    """Lines above a block of lines that is overwritten by the next one.

    Args:
        stream: where to write.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._block: tuple[str, ...] = ()
        self.is_live = is_live(stream)

    def line(self, text: str) -> None:
        """Write a line that stays, above the block if there is one."""
        block = self._block
        self._erase()
        self._stream.write(f"{text}\n")
        self._draw(block)

    def block(self, lines: Sequence[str]) -> None:
        """Replace the block, on a terminal only. Lines are cut to its width: none may wrap."""
        self._erase()
        self._draw(tuple(line[: width() - 1] for line in lines))

    def close(self) -> None:
        """Leave the block where it is."""
        self._block = ()

    def _erase(self) -> None:
        if self._block:
            self._stream.write(f"\r\x1b[{len(self._block)}A\x1b[J")
        self._block = ()

    def _draw(self, lines: tuple[str, ...]) -> None:
        """Write a block; what another process writes, such as an error, begins below it."""
        if self.is_live:
            self._stream.writelines(f"{line}\n" for line in lines)
            self._block = lines
        self._stream.flush()


class Waiting:
    """A line with a running clock, in place of silence; it disappears at `stop`.

    Args:
        text: what is going on.
        stream: where to write; nothing is written unless it is a terminal.
    """

    def __init__(self, text: str, stream: TextIO) -> None:
        self._text, self._stream = text, stream
        self._started = time.monotonic()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        if is_live(stream):
            self._write()
            self._thread = threading.Thread(target=self._tick, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Erase the line. A second call does nothing."""
        if self._thread is not None:
            self._done.set()
            self._thread.join()
            self._thread = None
            self._stream.write(_ERASE_LINE)
            self._stream.flush()

    def _tick(self) -> None:
        while not self._done.wait(1.0):
            self._write()

    def _write(self) -> None:
        seconds = int(time.monotonic() - self._started)
        text = f"{self._text} ... {seconds} s"[: width() - 1]
        self._stream.write(f"{_ERASE_LINE}{text}")
        self._stream.flush()


_waiting: Waiting | None = None


def wait_for(text: str, stream: TextIO) -> None:
    """Show what this process waits for, until `stop_waiting` or the next call."""
    global _waiting
    stop_waiting()
    _waiting = Waiting(text, stream)


def stop_waiting() -> None:
    """Erase the line of `wait_for`, if there is one."""
    global _waiting
    if _waiting is not None:
        _waiting.stop()
        _waiting = None


def is_live(stream: TextIO) -> bool:
    """Return whether the stream is a terminal on which lines can be overwritten."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def width() -> int:
    """Return the columns of the terminal; 80 where there is none."""
    return shutil.get_terminal_size().columns


def curve(values: Sequence[float], columns: int, *, ascii_only: bool = False) -> str:
    """Return the values as a row of bars, from the smallest to the largest value.

    With more values than columns, a bar is the mean of its neighbours; with fewer, a value takes
    several columns. A value that is not finite is an "x". There must be a column.

    Example: 1, 2, 3 in 3 columns give "▁▅█".
    """
    bars = _ASCII_BARS if ascii_only else _BARS
    edges = [number * len(values) / columns for number in range(columns + 1)]
    parts = [values[int(a) : max(math.ceil(b), int(a) + 1)] for a, b in itertools.pairwise(edges)]
    means = [sum(part) / len(part) for part in parts if part]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(bars) - 2) / (high - low) if high > low else 0.0
    return "".join(
        bars[1 + round((mean - low) * scale)] if math.isfinite(mean) else "x" for mean in means
    )


def bar(share: float, columns: int, *, ascii_only: bool = False) -> str:
    """Return a bar of which `share`, from 0 to 1, is filled.

    Example: 0.5 in 4 columns gives "██░░".
    """
    full, empty = "#." if ascii_only else "█░"
    filled = int(share * columns)
    return full * filled + empty * (columns - filled)


def needs_ascii(stream: TextIO) -> bool:
    """Return whether the stream's encoding lacks the characters of bars."""
    try:
        f"{_BARS}░".encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return True
    return False


def duration(seconds: float) -> str:
    """Return seconds as minutes and seconds, with hours where there are any.

    Example: 42 gives "0:42", 3723 gives "1:02:03".
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
