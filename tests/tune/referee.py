"""The specification of a replay: plain loops over the rows of one record, sharing no code with it.

Megatron's capacity, rows in the order of the policy, and a slot for each row while its pool has
one.
"""

import math

from padded_dispatch.trace import Trace


def capacity(trace: Trace, factor: float) -> int:
    """Return Megatron's slots per (source, expert)."""
    rows = trace.num_tokens * trace.top_k
    return max(1, min(trace.num_tokens, math.ceil((rows / trace.num_experts) * factor)))


def asked_rows(trace: Trace, n: int) -> list[tuple[int, int, float]]:
    """Return (token, expert, probability) of each row of record `n`, by token, then expert."""
    probs = trace.probs_NTK
    return [
        (t, e, 0.0 if probs is None else float(probs[n, t, k]))
        for t, ids in enumerate(trace.ids_NTK[n].tolist())
        for k, e in enumerate(ids)
        if e >= 0
    ]


def kept_rows(
    trace: Trace, n: int, factor: float, *, pool: str, policy: str, etp: int = 1
) -> list[tuple[int, int, float]]:
    """Return the rows of record `n` that keep a slot."""
    slots, experts_per_pool = capacity(trace, factor), 1
    if pool == "rank":
        experts_per_pool = trace.num_experts // (trace.num_ranks // etp)
        slots *= experts_per_pool
    rows = asked_rows(trace, n)
    if policy == "probs":
        rows.sort(key=lambda row: -row[2])  # stable
    left, kept = {}, []
    for t, e, prob in rows:
        pool_number = e // experts_per_pool
        left.setdefault(pool_number, slots)
        if left[pool_number] > 0:
            left[pool_number] -= 1
            kept.append((t, e, prob))
    return kept
