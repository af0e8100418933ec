"""Tests that wait for other processes run beside the others, in a thread, from the first one on.

While workers of a pool talk to each other, or a command imports, one of two cores has nothing to
do. A test marked `ahead` runs ahead of its turn, which comes last and only looks its outcome up.

It shares this process with whatever test runs at the same time: it may neither change the process,
nor print, nor look at what tests change, as `os.environ`. Of fixtures it can have `tmp_path` and
pools, which are not those of the others; autouse fixtures do not reach it. One that is to be
skipped does not run.
"""

import inspect
import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from padded_dispatch.utils.launch import WorkerPool

ENVIRONMENT = dict(os.environ)  # Of commands, whatever the others set.


class Ahead:
    """A plugin of pytest."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._pools = {"pool2": WorkerPool(2), "pool4": WorkerPool(4)}
        self._outcomes: dict[pytest.Item, Future[bool]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Last come those that ran before."""
        items.sort(key=_is_marked)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Begin. Pools start here, since `launch` sets signals, as the main thread alone can."""
        tests = [item for item in session.items if _is_marked(item)]
        # A worker of pytest-xdist hears later which of them are its own.
        if session.config.option.collectonly or hasattr(session.config, "workerinput"):
            return
        for name, pool in self._pools.items():
            if any(name in _wanted(test) for test in tests):
                pool.run(dist.get_rank)
        self._outcomes = {test: self._thread.submit(self._run, test) for test in tests}

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Raise what it raised, if it ran."""
        outcome = self._outcomes.get(pyfuncitem)
        return None if outcome is None else outcome.result() or None

    def pytest_sessionfinish(self) -> None:
        """Wait for the one that runs."""
        self._thread.shutdown(cancel_futures=True)
        for pool in self._pools.values():
            pool.close()

    def _run(self, test: pytest.Function) -> bool:
        pools = {name: pool for name, pool in self._pools.items() if name in _wanted(test)}
        if any(pool._workers is None for pool in pools.values()):
            return False  # An earlier one broke it: those that follow run when their turn comes.
        parameters = test.callspec.params if hasattr(test, "callspec") else {}
        with tempfile.TemporaryDirectory() as folder:
            known: dict[str, Any] = {"tmp_path": Path(folder), **pools, **parameters}
            test.obj(**{name: known[name] for name in _wanted(test)})
        return True


def _is_marked(item: pytest.Item) -> bool:
    skipped = any(mark.args[0] for mark in item.iter_markers("skipif"))
    return item.get_closest_marker("ahead") is not None and not skipped


def _wanted(test: Any) -> list[str]:
    return list(inspect.signature(test.obj).parameters)
