"""Run many ranks as threads of this process, over torch's threaded process group.

Collectives are real: each thread passes its tensors, and rank 0 copies them. Everything else runs
as in a separate process, since torch keeps its world and its registry of groups per thread.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

from padded_dispatch.exchange import agreement


class ThreadedMirror:
    """A `Mirror` of threads, which gather in their own groups: sockets would be one per pair."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], limit_s: float) -> None:
        self.num_agreements = 0
        self._groups = groups
        own = torch.tensor([dist.get_rank()])
        self.ranks = [int(rank) for rank in self.gather(own, limit_s, "its creation")]

    def is_same(self, row: torch.Tensor, limit_s: float, where: str) -> bool:
        largest = torch.cat([row, ~row])  # ~row falls where row rises.
        for group in self._groups:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX
            group.allreduce([largest], options).wait()
        return torch.equal(largest[: len(row)], ~largest[len(row) :])

    def gather(self, row: torch.Tensor, limit_s: float, where: str) -> list[torch.Tensor]:
        rows = row[None]
        for group in self._groups:
            gathered = [torch.empty_like(rows) for _ in range(group.size())]
            group.allgather([gathered], [rows]).wait()
            rows = torch.cat(gathered)
        return list(rows)


def run_on_threads(num_ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `fn(*args)` on every rank of a default group and return the results by rank.

    Raises:
        RuntimeError: from the first error of a rank, after all other ranks have ended.
    """
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []
    store = dist.HashStore()

    def work(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
            results[rank] = fn(*args)
        except BaseException as error:  # Waiting ranks are woken and raise SystemExit.
            errors.append(error)
            ProcessLocalGroup.exception_handle(error)

    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    multi_threaded_pg._install_threaded_pg()
    isolate(True)
    try:
        with patch.object(agreement, "mirror_of", ThreadedMirror):
            threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        isolate(False)
        multi_threaded_pg._uninstall_threaded_pg()
        ProcessLocalGroup.reset()
    if errors:
        raise RuntimeError("a rank failed") from errors[0]
    return results
