"""The environment of commands that tests start, and their worker processes, found in /proc."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

ENVIRONMENT = dict(os.environ)  # as at the start: tests and conftest.py change it


def workers_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(c) for c in children if "spawn_main" in Path(f"/proc/{c}/cmdline").read_text()]


def lives(pid: int) -> bool:
    """Whether a process runs; one that waits to be asked for its exit code does not.

    Who asks for that of an orphan is up to the machine: the first process of a container may not.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def still_living(pids: Iterable[int]) -> list[int]:
    """Wait until processes have ended; return those that live after a minute."""
    deadline = time.monotonic() + 60
    while (left := [pid for pid in pids if lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
