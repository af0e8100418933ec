"""Kill the process if the GPU has not reached a recorded event by its deadline.

NCCL has no timeout for work inside a CUDA graph. If one rank fails, its peers wait for ever, in a
replay or in the next call that synchronizes. The watchdog is a thread that holds a deadline for
each recorded event and queries the event once, at its deadline. CUDA forbids such a query while a
graph is captured, so entering `watch` drops all events recorded before.
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
class _Deadline:
    what: str
    due: float
    done: torch.cuda.Event | None


class Watchdog:
    """A thread that ends the process if a call or the GPU's work exceeds the time limit.

    It writes the rank, what exceeded the limit, and the stacks of all threads to stderr; the exit
    code is `EXIT_CODE`.

    Args:
        seconds: the time limit.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadlines: deque[_Deadline] = deque()
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Require that the block, `what` in errors, ends within the limit: such as a capture."""
        self._replace([self._deadline(what, None)])
        try:
            yield
        finally:
            self._replace([])

    def beat(self, what: str) -> None:
        """Require that a GPU finishes, within the limit, all work launched until now: `what`."""
        if not torch.cuda.is_available():
            return
        done = torch.cuda.Event()
        done.record()
        with self._changed:
            self._deadlines.append(self._deadline(what, done))
            self._changed.notify()

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _deadline(self, what: str, done: torch.cuda.Event | None) -> _Deadline:
        return _Deadline(what=what, due=time.monotonic() + self._seconds, done=done)

    def _replace(self, deadlines: list[_Deadline]) -> None:
        with self._changed:
            self._deadlines = deque(deadlines)
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._stopped:
                if not self._deadlines:
                    self._changed.wait()
                    continue
                first = self._deadlines[0]
                left = first.due - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                elif first.done is not None and first.done.query():
                    self._deadlines.popleft()
                else:
                    self._end(first.what)

    def _end(self, what: str) -> None:
        rank = os.environ.get("RANK", "0")
        os.write(_STDERR, f"rank {rank}: {what} did not finish in {self._seconds:g} s\n".encode())
        faulthandler.dump_traceback(_STDERR, all_threads=True)
        os._exit(EXIT_CODE)
