"""Fork the workers of tests from one process that has imported what they need.

A spawned worker first imports torch and Megatron, which takes a core five seconds, and a pool
restarts after each worker that died. Whole commands, in `test_cli` and the jobs of `test_launch`,
spawn their workers as users' commands do. A forked worker has the environment and the output files
of the session's start. With a GPU nothing is forked: CUDA does not survive a fork.
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
    """A replacement of `multiprocessing` in `launch`."""

    def get_context(self, method: str) -> BaseContext:
        return multiprocessing.get_context("forkserver")


def fork_workers() -> None:
    """Start the server process, which imports in parallel, and fork all workers from it."""
    multiprocessing.set_forkserver_preload(["tests.support.preloaded"])
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Workers inherit it; see `launch`.
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths)):
        forkserver.ensure_running()
    signal.signal(signal.SIGINT, handler)
    launch.multiprocessing = _Forks()
