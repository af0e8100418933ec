"""Commands that tests start, and their worker processes, found in /proc."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ENVIRONMENT = dict(os.environ)  # as at the start: tests and conftest.py change it
PIPES: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def python(*words: str, **variables: str) -> str:
    """Run Python to its end, with more variables in the environment; return what it prints."""
    given: Any = {"env": ENVIRONMENT | variables, "timeout": 600, **PIPES}
    done = subprocess.run([sys.executable, *words], **given)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@contextmanager
def started(*words: str, **how: Any) -> Iterator[Any]:
    """Start Python in a session of its own, which ends with the block."""
    command = [sys.executable, *words]
    with subprocess.Popen(command, start_new_session=True, **PIPES, **how) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


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
