"""Ends a process whose device does not come to an end.

NCCL has no timeout for work inside a CUDA graph: when one rank falls out, its peers wait for ever,
in a replay or in whatever synchronises next. The watchdog is a thread that knows until when the
device must have come where, and looks once, when the time is up. Looking is asking a CUDA event,
which must not happen while a graph is captured: entering `watch` forgets the beats before it.
"""

import faulthandler
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

EXIT_CODE = 70  # EX_SOFTWARE
_STDERR = 2


@dataclass(frozen=True, kw_only=True)
class _Promise:
    what: str
    deadline: float
    done: torch.cuda.Event | None


class Watchdog:
    """Ends the process when something takes too long: which rank, what, and all stacks on stderr.

    Args:
        seconds: that anything may take.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._promises: deque[_Promise] = deque()
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Let the block end within the time: for work that the host waits for, such as a capture.

        Args:
            what: it is, for people.
        """
        self._replace([self._promise(what, None)])
        try:
            yield
        finally:
            self._replace([])

    def beat(self, what: str) -> None:
        """Let the device finish within the time what it has been given until now."""
        done = None
        if torch.cuda.is_available():
            done = torch.cuda.Event()
            done.record()
            with self._changed:
                self._promises.append(self._promise(what, done))
                self._changed.notify()

    def stop(self) -> None:
        """Watch no longer."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _promise(self, what: str, done: torch.cuda.Event | None) -> _Promise:
        return _Promise(what=what, deadline=time.monotonic() + self._seconds, done=done)

    def _replace(self, promises: list[_Promise]) -> None:
        with self._changed:
            self._promises = deque(promises)
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._stopped:
                if not self._promises:
                    self._changed.wait()
                    continue
                first = self._promises[0]
                left = first.deadline - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                elif first.done is not None and first.done.query():
                    self._promises.popleft()
                else:
                    self._end(first.what)

    def _end(self, what: str) -> None:
        rank = os.environ.get("RANK", "0")
        os.write(_STDERR, f"rank {rank}: {what} did not finish in {self._seconds:g} s\n".encode())
        faulthandler.dump_traceback(_STDERR, all_threads=True)
        os._exit(EXIT_CODE)
