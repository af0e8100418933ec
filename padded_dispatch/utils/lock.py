"""One job per folder.

A job holds an exclusive `flock` on FOLDER/job.lock, which the kernel releases when the job's
process ends, however it ends: no stale lock blocks, and of two jobs that start at the same moment
one gets it. The file says which job that is. It stays behind, empty.

On a shared file system a lock may hold between the processes of one host only. A job therefore
touches the file every few seconds as well, and a job on another host that finds it fresh stops. The
file system's clock is used, since hosts' clocks differ. Not caught: jobs on two hosts that start
within the same moment, on a shared file system whose locks hold on one host only.
"""

import fcntl
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from padded_dispatch.config import require

NAME = "job.lock"
_TOUCH_S = 10.0
_FRESH_S = 60.0


@contextmanager
def only_job(option: str, folder: Path) -> Iterator[None]:
    """Hold `folder`, which is created, for this job until the block ends.

    Args:
        option: the option that gave the folder, for the error.
        folder: a folder that one job at a time may write to.

    Raises:
        ValueError: another job holds it; the error names that job.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _require_free(option, folder, file)
        _write(file, json.dumps(_this_job()))
        ended = threading.Event()
        toucher = threading.Thread(target=_touch, args=(file, ended), daemon=True)
        toucher.start()
        try:
            yield
        finally:
            ended.set()
            toucher.join()
            with suppress(OSError):
                os.truncate(file, 0)
    finally:
        os.close(file)


def _require_free(option: str, folder: Path, file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = False
    except BlockingIOError:
        held = True
    except OSError:  # A file system without locks: the file's age decides alone.
        held = False
    job = _read(file)
    # A job of this machine that does not hold the lock is dead. Another machine's may live.
    elsewhere = bool(job) and job.get("machine") != _machine()
    age_s = _age_s(folder, file) if elsewhere else 0.0
    fix = "wait for its end, or choose another folder"
    if elsewhere and not held:
        fix += f"; if it is dead, start again in {_FRESH_S - age_s:.0f} s"
    require(
        not held and (not elsewhere or age_s >= _FRESH_S),
        option,
        str(folder),
        f"be used by one job at a time; {_words(job)} is using it",
        fix,
    )


def _words(job: dict[str, Any]) -> str:
    if not job:
        return "another job"
    return f"process {job.get('pid')} on {job.get('host')} ({job.get('command')})"


def _this_job() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "machine": _machine(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _machine() -> str:
    """Return a word that the processes of one running kernel share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _read(file: int) -> dict[str, Any]:
    """Return the job that wrote the lock file; nothing if it ended, or died while writing."""
    try:
        job = json.loads(os.pread(file, 65536, 0))
    except ValueError:
        return {}
    return job if isinstance(job, dict) else {}


def _write(file: int, text: str) -> None:
    os.truncate(file, 0)
    os.pwrite(file, text.encode(), 0)


def _age_s(folder: Path, file: int) -> float:
    """Return the seconds since the lock file was touched, by the file system's clock."""
    probe = folder / f"{NAME}.{socket.gethostname()}.{os.getpid()}"
    probe.touch()
    try:
        return probe.stat().st_mtime - os.fstat(file).st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _touch(file: int, ended: threading.Event) -> None:
    while not ended.wait(_TOUCH_S):
        with suppress(OSError):
            os.utime(file)
