"""The specification of a replay: plain loops over one pass, sharing no code with it."""

import math
from bisect import bisect_right

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
    rows_of_store = sum(of_layer for _ in counts)
    kept = [0] * len(counts)
    for rank in range(num_ranks):
        base = 0
        for i, layer in enumerate(counts):
            later = sum(min(share, of_layer) for _ in counts[i + 1 :])
            room = min(rows_of_store - later - base, min(most, max(rows_of_store, 5 * share)))
            cells = [rows for source in layer for rows in source[rank * local : (rank + 1) * local]]
            rows = sum(cells)
            if rows > room:

                def under(level: int, cells=cells) -> int:
                    return sum(min(rows, level) for rows in cells)

                rows = under(bisect_right(range(max(cells) + 1), room, key=under) - 1)
            kept[i] += rows
            base += rows
    return kept
