"""The specification itself: worked by hand where small, and its gradients against differences."""

import numpy as np
import pytest

from tests.support import reference
from tests.support.pools import pools
from tests.support.routings import routing_map, thin_out


def bools(*rows: str) -> np.ndarray:
    return np.array([[letter == "x" for letter in row] for row in rows])


def test_select_keeps_the_most_probable_or_the_first():
    map_TE = bools("x", "x", ".", "x")
    probs_TE = np.array([[0.2], [0.5], [0.9], [0.5]])
    kept = {
        (policy, capacity): np.flatnonzero(
            reference.select(map_TE, probs_TE, sizes=pools(1, capacity), policy=policy).kept_TE
        ).tolist()
        for policy in ("probs", "position")
        for capacity in (1, 2, 4)
    }
    assert kept == {
        ("probs", 1): [1],
        ("probs", 2): [1, 3],
        ("probs", 4): [0, 1, 3],
        ("position", 1): [0],
        ("position", 2): [0, 1],
        ("position", 4): [0, 1, 3],
    }


def test_plan_of_pools_orders_rows_by_expert():
    # Two pools of two experts each, P = 3. The second pool has one slot too few for expert 3.
    plan = reference.plan(bools("xx..", ".x.x", "x.xx", "..x."), top_k=3, sizes=pools(4, 3, 2))
    assert plan.slot_of_TK.tolist() == [[0, 2, -1], [-1, 5, -1], [1, 3, -1], [4, -1, -1]]
    assert plan.expert_of_TK.tolist() == [[0, 1, -1], [-1, 3, -1], [0, 2, -1], [2, -1, -1]]
    assert plan.choice_of_slot_GP.tolist() == [[0, 6, 1], [7, 9, 4]]
    assert plan.kept_E.tolist() == [2, 1, 2, 1]
    assert plan.num_unplaced == 2


def test_plan_counts_what_has_no_slot():
    # Token 0 has three experts, one more than K. Expert 0 is asked for by three tokens, one more
    # than C; the lost row keeps its place among the choices of token 2.
    plan = reference.plan(bools("xxx", "x..", "x.x"), top_k=2, sizes=pools(3, 2))
    assert plan.slot_of_TK.tolist() == [[0, 2], [1, -1], [-1, 4]]
    assert plan.choice_of_slot_GP.tolist() == [[0, 2], [1, -1], [5, -1]]
    assert plan.kept_E.tolist() == [2, 1, 1]
    assert plan.num_unplaced == 2


# Two ranks with two shards each, so S = 4; E = 4, L = 2, K = 2, T = 3, C = 2 (M = 8).
RANKS, SHARDS, EXPERTS, TOP_K, TOKENS, CAPACITY, HIDDEN = 2, 2, 4, 2, 3, 2, 2
SOURCES = RANKS * SHARDS


def address(source: int, t: int) -> int:
    return 100 * (source + 1) + 10 * (t + 1)


TOKENS_STD = np.array(
    [[[address(s, t), address(s, t) + 1] for t in range(TOKENS)] for s in range(SOURCES)]
)
PROBS_STE = np.arange(1, SOURCES * TOKENS * EXPERTS + 1).reshape(SOURCES, TOKENS, EXPERTS)


@pytest.fixture
def plans() -> list[reference.Plan]:
    maps = [
        thin_out(routing_map(TOKENS, EXPERTS, TOP_K, seed=s), share=0.2) for s in range(SOURCES)
    ]
    kept = [
        reference.select(m, p, sizes=pools(EXPERTS, CAPACITY), policy="position").kept_TE
        for m, p in zip(maps, PROBS_STE, strict=True)
    ]
    kept[1] = bools("....", "....", "....")
    kept[2] = bools("x..x", "..x.", "x...")
    sizes = pools(EXPERTS, CAPACITY)
    return [reference.plan(kept_TE, top_k=TOP_K, sizes=sizes) for kept_TE in kept]


def test_dispatch_puts_each_row_into_its_source_s_block(plans):
    given = reference.dispatch(TOKENS_STD, PROBS_STE, plans, num_ranks=RANKS)
    assert given.rows_RLMD.shape == (RANKS, EXPERTS // RANKS, SOURCES * CAPACITY, HIDDEN)
    # Source 2 owns rows 4 and 5. Experts 0 and 1 are on rank 0, experts 2 and 3 on rank 1.
    block = given.rows_RLMD[:, :, 4:6, 0].reshape(EXPERTS, CAPACITY).tolist()
    assert block == [[310, 330], [0, 0], [320, 0], [310, 0]]
    probs = given.probs_RLM[:, :, 4:6].reshape(EXPERTS, CAPACITY).tolist()
    assert probs == [[25, 33], [0, 0], [31, 0], [28, 0]]
    assert given.kept_RSL[:, 2].flatten().tolist() == [2, 0, 1, 1]
    # Source 1 sent nothing.
    assert not given.rows_RLMD[:, :, 2:4].any()
    assert not given.kept_RSL[:, 1].any()
