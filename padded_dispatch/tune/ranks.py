"""Who comes first: the rank of every row among the rows that it competes with for slots.

One 64-bit key per row holds the group of rows it competes in, then what the policy looks at. A
stable sort of these keys leaves equal rows in the order of source, token, expert, which is how the
dispatcher breaks ties.
"""

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.config import Policy
from padded_dispatch.tune.trace import Trace

NEVER = np.iinfo(np.int32).max  # the rank of a choice that asks for nothing: no slot is for it
MAX_GROUPS = 2**16  # their numbers have 16 bits of the key, choices the next 16, scores the last 32


def competing_records(trace: Trace, num_ranks: int) -> NDArray[np.int64]:
    """Records whose rows meet: [U, R] indices into the trace's records, by rank.

    A unit is one pass of one layer on all ranks of an expert-parallel group.

    Raises:
        ValueError: names a unit that lacks some of its ranks.
    """
    groups_N, places_N = np.divmod(trace.ranks, num_ranks)
    passes_N = trace.passes()
    order_N = np.lexsort((places_N, groups_N, trace.layers, passes_N, trace.steps))
    units_4N = np.stack([trace.steps, passes_N, trace.layers, groups_N])[:, order_N]
    starts_U = np.flatnonzero(np.diff(units_4N, axis=1, prepend=-1).any(0))
    lengths_U = np.diff(starts_U, append=len(order_N))
    if (lengths_U != num_ranks).any():
        first = starts_U[lengths_U != num_ranks][0]
        step, number, layer, group = units_4N[:, first].tolist()
        raise ValueError(
            f"num_ranks={num_ranks} is not possible: step {step}, pass {number}, layer {layer} "
            f"lacks some of the ranks {group * num_ranks} to {(group + 1) * num_ranks - 1}; merge "
            "the traces of all ranks, or give the number of ranks that share experts"
        )
    return order_N.reshape(-1, num_ranks)


def row_ranks(
    ids_MK: NDArray[np.int16],
    probs_MK: NDArray[np.float32] | None,
    group_MK: NDArray[np.int64],
    *,
    policy: Policy,
    random: np.random.Generator,
) -> NDArray[np.int32]:
    """[M, K]: how many rows of its group come before each row; `NEVER` where there is no row.

    Args:
        ids_MK: of M tokens, -1 where there is no row.
        probs_MK: their probabilities; "position" and "random" do without.
        group_MK: below `MAX_GROUPS`, rows with the same number compete.
        policy: decides the order within a group, see `padded_dispatch.ops.select`.
        random: what the policy "random" draws from.

    Example: one token each for expert 0 with probabilities .2, .5, .9, .5 ranks 3, 1, 0, 2.
    """
    asks_MK = ids_MK >= 0
    if policy == "position":
        key_A = group_MK[asks_MK].astype(np.uint16)
    else:
        key_MK = group_MK.astype(np.uint64) << np.uint64(48)
        if policy == "random":
            key_MK |= random.integers(2**32, size=key_MK.shape, dtype=np.uint32)
        else:
            assert probs_MK is not None
            score_MK = np.where(asks_MK, probs_MK, np.float32(-np.inf))
            if policy == "priority":
                # First choices before second ones; among these, tokens by their best probability.
                by_prob_MK = np.argsort(-score_MK, axis=1, kind="stable")
                choice_MK = np.argsort(by_prob_MK, axis=1).astype(np.uint64)
                key_MK |= choice_MK << np.uint64(32)
                score_MK = np.broadcast_to(score_MK.max(1, keepdims=True), score_MK.shape)
            key_MK |= _descending(score_MK)
        key_A = key_MK[asks_MK]
    rank_MK = np.full(ids_MK.shape, NEVER, np.int32)
    rank_MK[asks_MK] = _ranks_in_group(key_A, group_MK[asks_MK])
    return rank_MK


def _ranks_in_group(key_A: NDArray, group_A: NDArray[np.int64]) -> NDArray[np.int32]:
    order_A = np.argsort(key_A, kind="stable")
    size_G = np.bincount(group_A)
    start_G = np.cumsum(size_G) - size_G
    rank_A = np.empty(len(key_A), np.int32)
    rank_A[order_A] = np.arange(len(key_A)) - np.repeat(start_G, size_G)
    return rank_A


def _descending(score: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Unsigned numbers that grow as `score` falls; both zeros give the same."""
    bits = (score + np.float32(0)).view(np.int32)
    # Floats compare as their bits do, where the sign is 0; in reverse where it is 1.
    ordered = np.where(bits < 0, ~bits, bits ^ np.int32(-(2**31))).view(np.uint32)
    return ~ordered
