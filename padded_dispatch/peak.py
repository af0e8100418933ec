"""The most device memory that this process has held since `torch.cuda.reset_peak_memory_stats()`.

Memory that peers store to comes from the driver, and torch's allocator does not count it. It stays
for as long as a layer does, so what is held now is added to torch's peak.
"""

import torch

from padded_dispatch.exchange.symmetric_memory import held_bytes


def allocated_gib() -> float:
    """By tensors, those of the direct exchange included."""
    return (torch.cuda.max_memory_allocated() + held_bytes()) / 2**30


def reserved_gib() -> float:
    """By the caching allocator, graph pools included, and by the direct exchange."""
    return (torch.cuda.max_memory_reserved() + held_bytes()) / 2**30
