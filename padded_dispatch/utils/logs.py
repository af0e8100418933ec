"""Lines of a command's output, and lines of the package's log that a process writes once."""

import functools
import logging
import os
import sys

_log = logging.getLogger("padded_dispatch")


@functools.cache
def log_once(line: str, level: int = logging.INFO) -> None:
    """Log a line, unless this process has logged it before."""
    _log.log(level, line)


def show(text: str) -> None:
    """Print a line; among workers, on rank 0 only."""
    if os.environ.get("RANK", "0") != "0":
        return
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:  # After `| head`, for example: go on without printing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
