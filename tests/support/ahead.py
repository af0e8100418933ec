"""Run tests marked `ahead` in a thread from the beginning on, during the other tests.

Such a test waits for other processes most of the time. While workers of a pool exchange data, or a
command imports, one of two cores would be idle. A marked test runs early, in the thread; its turn
comes last and only looks up the outcome.

It shares this process with the test that runs at the same time. So it must neither change the
process, nor print, nor read what other tests change, such as `os.environ`. The fixtures it can use
are `tmp_path` and the pools, which are separate from those of other tests; autouse fixtures do not
apply to it. A test that is skipped does not run early either.
"""

import inspect
import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.pool import WorkerPool

ENVIRONMENT = dict(os.environ)  # for commands that tests start, unaffected by other tests


class Ahead:
    """The pytest plugin."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._pools = {"pool2": WorkerPool(2), "pool4": WorkerPool(4)}
        self._outcomes: dict[pytest.Item, Future[bool]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put the marked tests last."""
        items.sort(key=_is_marked)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Start the pools, which needs the main thread (`launch` sets signals), and the thread."""
        tests = [item for item in session.items if _is_marked(item)]
        # A worker of pytest-xdist does not have its list of tests yet.
        if session.config.option.collectonly or hasattr(session.config, "workerinput"):
            return
        for name, pool in self._pools.items():
            if any(name in _wanted(test) for test in tests):
                pool.run(dist.get_rank)
        self._outcomes = {test: self._thread.submit(self._run, test) for test in tests}

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Raise what the test raised in the thread, if it ran there."""
        outcome = self._outcomes.get(pyfuncitem)
        return None if outcome is None else outcome.result() or None

    def pytest_sessionfinish(self) -> None:
        """Wait for the test that runs in the thread."""
        self._thread.shutdown(cancel_futures=True)
        for pool in self._pools.values():
            pool.close()

    def _run(self, test: pytest.Function) -> bool:
        pools = {name: pool for name, pool in self._pools.items() if name in _wanted(test)}
        if not all(pool.is_running for pool in pools.values()):
            return False  # An earlier test ended the workers: this one runs when its turn comes.
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
