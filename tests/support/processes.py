"""The environment of commands that tests start, and their worker processes, found in /proc."""

import os

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
