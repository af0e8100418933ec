"""Run a job of one worker in this process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from padded_dispatch.megatron import uninstall


@contextmanager
def only_worker() -> Iterator[None]:
    """Make this process the one worker of a job of torchrun, with one thread.

    `start_workers` then starts none. On exit, also after an error, all state of the job is removed.
    """
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # any free port
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with patch.dict(os.environ, ranks | rendezvous):
            yield
    finally:
        torch.set_num_threads(threads)
        uninstall()
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
