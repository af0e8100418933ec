"""The specification of a replay: plain loops over one pass, sharing no code with it."""

import math

import numpy as np

from tests.support.reference import Store

Counts = list[list[list[int]]]  # of a pass: [layer][source][expert]


def capacity(factor: float, *, num_tokens: int, top_k: int, num_experts: int) -> int:
    """Return Megatron's slots per (source, expert)."""
    return max(1, min(num_tokens, math.ceil((num_tokens * top_k / num_experts) * factor)))


def kept_in_cells(counts: Counts, slots: int) -> list[int]:
    """Return the rows of each layer that keep a slot."""
    return [sum(min(rows, slots) for source in layer for rows in source) for layer in counts]


def kept_in_stores(
    counts: Counts, factor: float, *, num_tokens: int, top_k: int, num_ranks: int
) -> list[int]:
    """Return the rows of each layer that find room, in a store of all layers on each rank."""
    num_sources, num_experts = len(counts[0]), len(counts[0][0])
    local = num_experts // num_ranks
    share = num_sources // num_ranks * num_tokens * top_k
    most = num_sources * num_tokens * min(top_k, local)
    of_layer = min(math.ceil(share * factor), most)
    most = min(most, max(of_layer * len(counts), 5 * share))
    kept = np.zeros(len(counts), int)
    for rank in range(num_ranks):
        store = Store(*([one] * len(counts) for one in (of_layer, share, most)))
        for layer in counts:
            store.keep(np.array(layer)[:, rank * local : (rank + 1) * local])
        kept += store.kept_Y
    return kept.tolist()
