"""Worker processes that stay alive between calls, to run functions on every rank of a group."""

from collections.abc import Callable
from typing import Any, Self

import torch.distributed as dist

from padded_dispatch.utils.launch import WorkerError, Workers

_START_S = 120.0  # imports and rendezvous, on a busy laptop


class WorkerPool:
    """Worker processes with a default process group; they start with the first `run`.

    Args:
        num_workers: processes, the ranks of the default group.
        backend: backend of the default group. The functions choose their device themselves.

    Example:
        >>> with WorkerPool(2) as pool:
        ...     pool.run(torch.distributed.get_rank)
        [0, 1]
    """

    def __init__(self, num_workers: int, *, backend: str = "gloo") -> None:
        self.num_workers = num_workers
        self.backend = backend
        self._workers: Workers | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """Call `fn(*args)` on every worker and return the results by rank.

        Args:
            fn: a function at the top level of a module; it, `args` and the result are pickled.
            *args: its arguments.
            timeout_s: seconds after which a worker without an answer has failed.

        Raises:
            WorkerError: a worker raised, died or did not answer. Unless all of them raised, some
                may be stuck in a collective: all are ended, and the next `run` starts new ones.
        """
        if self._workers is None:
            self._workers = self._start()
        all_idle = False
        try:
            results = self._workers.run(fn, args, timeout_s)
            all_idle = True
        except WorkerError as failure:
            all_idle = len(failure.errors) == self.num_workers and not any(
                isinstance(error, ChildProcessError | TimeoutError)
                for error in failure.errors.values()
            )
            raise
        finally:
            if not all_idle:
                self.close()
        return results

    @property
    def is_running(self) -> bool:
        """True while there are workers."""
        return self._workers is not None

    def close(self) -> None:
        """End the workers; a later `run` starts new ones."""
        if self._workers is not None:
            self._workers.stop()
            self._workers = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _start(self) -> Workers:
        workers = Workers(self.num_workers)
        try:
            workers.run(dist.init_process_group, (self.backend,), _START_S)
        except BaseException:
            workers.stop()
            raise
        return workers
