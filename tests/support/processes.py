"""The environment of commands that tests start, and their worker processes, found in /proc."""

import os
import time
from collections.abc import Iterable

ENVIRONMENT = dict(os.environ)  # as at the start: tests and conftest.py change it


def workers_of(pid: int) -> list[int]:
    """Return the workers that the process `pid` has started, in no order."""
    return [child for child in children_of(pid) if "spawn_main" in command_of(child)]


def children_of(pid: int) -> list[int]:
    """Return the processes that the process `pid` has started and that have not ended."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def command_of(pid: int) -> str:
    """Return the command line of a process; its words end with zero bytes."""
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read()


def lives(pid: int) -> bool:
    """Whether a process runs; one that waits to be asked for its exit code does not.

    Who asks for that of an orphan is up to the machine: the first process of a container may not.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def living_after(pids: Iterable[int], limit_s: float) -> list[int]:
    """Wait until processes have ended; return those that live after the time limit."""
    deadline = time.monotonic() + limit_s
    while (left := [pid for pid in pids if lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
