"""A pool for functions that need no process of their own."""

from collections.abc import Callable
from typing import Any, Self

from padded_dispatch.launch import WorkerError


class InlinePool:
    """A `WorkerPool` whose one worker is this process."""

    def __init__(self, num_workers: int, *, backend: str) -> None:
        assert num_workers == 1
        self.num_workers = num_workers

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
        try:
            return [fn(*args)]
        except Exception as error:
            raise WorkerError({0: error}) from error

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass
