"""Workers of tests are forked from one process that has imported what they need.

A spawned worker imports torch and Megatron first, five seconds of a core, and a pool whose worker
died starts anew. Whole commands, in `test_cli` and the jobs of `test_launch`, spawn their workers
as users' do. A forked worker has the environment of the session's begin, and its output goes where
this process's went then. With a GPU nothing is forked: a process that has looked for one cannot
pass it on.
"""

import multiprocessing
import os
import signal
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from unittest.mock import patch

from padded_dispatch.utils import launch


class _Forks:
    """In the place of `multiprocessing` in `launch`."""

    def get_context(self, method: str) -> BaseContext:
        return multiprocessing.get_context("forkserver")


def fork_workers() -> None:
    """Start the process, which imports beside this one, and let all workers come from it."""
    multiprocessing.set_forkserver_preload(["tests.support.preloaded"])
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Workers inherit it, as launch wants.
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths)):
        forkserver.ensure_running()
    signal.signal(signal.SIGINT, handler)
    launch.multiprocessing = _Forks()
