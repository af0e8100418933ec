"""Run pytest many times, each in a process forked from one that has imported what tests import.

    python -P tests/support/fork_tests.py MODULE ...

A line of standard input has, separated by spaces, the most examples of each test of `hypothesis`,
and the arguments of pytest. Two lines answer it: the number of the process,
which leads a process group of its own, and its exit code. The code under test and its tests are
imported anew in each run, from the current folder. Examples that fail are not shrunk, for only the
exit code counts.
"""

import gc
import importlib
import multiprocessing
import multiprocessing.util
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import Phase, settings

_spawn_python = multiprocessing.util.spawnv_passfds
# Where hypothesis keeps what `@settings` says about a test.
_SETTINGS = "_hypothesis_internal_use_settings"


class _Examples:
    """A plugin; `conftest.py` has loaded its own profile by the time that it is asked."""

    def __init__(self, most: int) -> None:
        self._most = most

    def pytest_configure(self, config: pytest.Config) -> None:
        changes: dict[str, Any] = dict(
            max_examples=self._most, phases=(Phase.explicit, Phase.generate)
        )
        settings.register_profile("forked", settings(), **changes)
        settings.load_profile("forked")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            test = getattr(item, "obj", None)
            if own := getattr(test, _SETTINGS, None):
                fewer = settings(own, max_examples=min(own.max_examples, self._most))
                setattr(test, _SETTINGS, fewer)


def _fork_python(path: bytes, args: Sequence[str], pass_fds: Sequence[int]) -> int:
    """Replace `multiprocessing.util.spawnv_passfds`: its servers need no imports of their own.

    Other processes are started as ever: they import the main module of their parent.
    """
    if "--multiprocessing-fork" in args:
        return _spawn_python(path, args, pass_fds)
    if process := os.fork():
        return process
    try:
        kept = sorted({0, 1, 2, *pass_fds})
        for first, after in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(first + 1, after)
        exec(args[list(args).index("-c") + 1], {})
    finally:
        os._exit(0)


def _run(most_examples: str, *arguments: str) -> None:
    with open(os.devnull, "r+") as null:
        for stream in range(3):
            os.dup2(null.fileno(), stream)
    code = 1
    try:
        code = pytest.main(list(arguments), plugins=[_Examples(int(most_examples))])
    finally:
        os._exit(code)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron-Core warns about missing optional packages.
        for name in sys.argv[1:]:
            importlib.import_module(name)
    multiprocessing.util.spawnv_passfds = _fork_python
    # Most runs need no workers. Those of the others import the package themselves.
    multiprocessing.set_forkserver_preload = lambda modules: None
    gc.freeze()
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            _run(*line.split())
        os.setpgid(process, process)
        sys.stdout.write(f"{process}\n")
        sys.stdout.flush()
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()
