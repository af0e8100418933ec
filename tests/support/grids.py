"""Grids of ranks that are threads, and fresh memory filled with NaN."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


def grid(num_ranks: int, etp_size: int) -> tuple[Any, Any, int]:
    """Return this rank's two groups, and i; rank r of the i-th expert-parallel group is i * R + r.

    One rank alone needs no default group.
    """
    if num_ranks * etp_size == 1:
        return None, None, 0
    i, r = divmod(dist.get_rank(), num_ranks)
    rows = [[j * num_ranks + q for q in range(num_ranks)] for j in range(etp_size)]
    # All ranks must create all groups, in the same order.
    groups = [dist.new_group(row) for row in rows]
    etp_groups = [dist.new_group(list(column)) for column in zip(*rows, strict=True)]
    return groups[i] if num_ranks > 1 else None, etp_groups[r] if etp_size > 1 else None, i


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Use deterministic algorithms and fill fresh memory with NaN (or the largest integer)."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
