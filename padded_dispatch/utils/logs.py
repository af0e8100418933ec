"""Lines and tables of a command's output, from one rank; lines of the log that are written once."""

import functools
import logging
import os
import sys
from collections.abc import Sequence

_log = logging.getLogger("padded_dispatch")


@functools.cache
def log_once(line: str, level: int = logging.INFO) -> None:
    """Log a line, unless this process has logged it before."""
    _log.log(level, line)


def torchrun_ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks that torchrun has started; 0, 0 without.

    Schedulers set one of the two variables alone, or leave it empty.
    """
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    return (int(rank), int(size)) if rank and size else (0, 0)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as a table, the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for first, *others in lines:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        text.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(text)


def show(text: str) -> None:
    """Print a line; among workers, on rank 0 only."""
    if torchrun_ranks()[0] != 0:
        return
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:  # After `| head`, for example: go on without printing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
