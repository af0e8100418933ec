"""A replay equals the specification and the dispatcher, record by record."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from padded_dispatch.config import DispatchConfig
from padded_dispatch.routing.select import select
from padded_dispatch.trace import Trace
from padded_dispatch.tune import replay as replay_module
from padded_dispatch.tune.replay import POOLS, grid, replay
from tests.support.traces import small_trace
from tests.tune.referee import asked_rows, kept_rows

FACTORS = [0.3, 0.7, 1.0, 1.25, 3.0]
POLICIES = ("probs", "position")


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """One step of one layer, in one or two groups of one to three ranks."""
    num_ranks = draw(st.integers(1, 3))
    num_records = num_ranks * draw(st.integers(1, 2))
    num_experts = num_ranks * draw(st.integers(1, 3))
    return small_trace(
        steps=[0] * num_records,
        layers=[1] * num_records,
        ranks=list(range(num_records)),
        num_tokens=draw(st.integers(1, 9)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        num_ranks=num_ranks,
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=60)
@given(trace=traces(), policy=st.sampled_from(POLICIES), pool=st.sampled_from(POOLS))
def test_every_record_is_what_the_specification_keeps(trace, policy, pool):
    found = replay(trace, FACTORS, policy=policy, pool=pool)
    for n in range(trace.num_records):
        asked = asked_rows(trace, n)
        experts = [e for _, e, _ in asked]
        assert found.demand_by_expert[n].tolist() == count(trace, experts)
        assert found.num_tokens[n] == len({t for t, _, _ in asked})
        for f, factor in enumerate(FACTORS):
            kept = kept_rows(trace, n, factor, pool=pool, policy=policy)
            assert found.kept_by_expert[f, n].tolist() == count(trace, [e for _, e, _ in kept])
            assert found.dropped[f, n] == len(asked) - len(kept)
            lost = {t for t, _, _ in asked} - {t for t, _, _ in kept}
            assert found.lost_tokens[f, n] == len(lost)


def count(trace: Trace, experts: list[int]) -> list[int]:
    return [experts.count(e) for e in range(trace.num_experts)]


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_what_the_dispatcher_selects(pool, policy):
    trace = small_trace(steps=[0, 0], layers=[1, 1], ranks=[0, 1], num_tokens=40, seed=3)
    found = replay(trace, FACTORS, policy=policy, pool=pool)
    for f, factor in enumerate(FACTORS):
        config = DispatchConfig(
            num_experts=6, top_k=3, num_ranks=2, capacity_factor=factor, capacity_pool=pool
        )
        sizes = config.sizes(40)
        slots = sizes.num_pools * sizes.pool_slots
        assert (found.capacities[f], found.slots[f]) == (sizes.pool_slots, slots)
        for n in range(2):
            map_TE, probs_TE = torch.zeros(40, 6, dtype=torch.bool), torch.zeros(40, 6)
            for t, e, prob in asked_rows(trace, n):
                map_TE[t, e], probs_TE[t, e] = True, prob
            kept_TE = select(map_TE, probs_TE, sizes=sizes, policy=policy).kept_TE
            assert found.kept_by_expert[f, n].tolist() == kept_TE.sum(0).tolist()
            lost_T = map_TE.any(1) & ~kept_TE.any(1)
            assert found.lost_tokens[f, n] == lost_T.sum()


@given(traces(), st.sampled_from(POOLS))
def test_the_needed_factor_is_that_of_the_largest_demand_and_drops_nothing(trace, pool):
    needed = replay(trace, [1.0], pool=pool).needed_factor
    num_pools = trace.num_experts if pool == "expert" else trace.num_ranks
    for n in range(trace.num_records):
        experts = [e * num_pools // trace.num_experts for _, e, _ in asked_rows(trace, n)]
        most = max((experts.count(p) for p in experts), default=0)
        assert needed[n] == most * num_pools / (trace.num_tokens * trace.top_k)
    factors = sorted({*needed.tolist()} - {0}) or [1.0]
    found = replay(trace, factors, pool=pool)
    for f, factor in enumerate(factors):
        assert (found.dropped[f][needed <= factor] == 0).all()
    assert replay(trace, pool=pool).dropped[-1].sum() == 0


def test_expert_tensor_parallel_ranks_share_experts():
    trace = small_trace(steps=[0] * 4, layers=[0] * 4, ranks=[0, 1, 2, 3], num_ranks=4, seed=1)
    found = replay(trace, FACTORS, pool="rank", etp=2)
    for f, factor in enumerate(FACTORS):
        for n in range(4):
            kept = kept_rows(trace, n, factor, pool="rank", policy="probs", etp=2)
            experts = [e for _, e, _ in kept]
            assert found.kept_by_expert[f, n].tolist() == count(trace, experts)
    # Two ranks of three experts: of 5 tokens with 3 experts each at most 15 rows ask for one.
    assert found.capacities.tolist() == [3, 6, 9, 12, 15]


def test_chunks_do_not_change_the_answer(monkeypatch):
    trace = small_trace(steps=[0] * 9, layers=[0] * 9, ranks=[*range(9)], num_ranks=1)
    whole = replay(trace, FACTORS)
    monkeypatch.setattr(replay_module, "_CHUNK_ROWS", 2 * 5 * 3)
    parts = replay(trace, FACTORS)
    np.testing.assert_array_equal(parts.kept_by_expert, whole.kept_by_expert)
    np.testing.assert_array_equal(parts.lost_tokens, whole.lost_tokens)


def test_by_layer_and_step():
    trace = small_trace(steps=[4, 4, 4, 9, 4], layers=[1, 1, 3, 1, 1], ranks=[0, 1, 0, 0, 0])
    found = replay(trace, FACTORS)
    table, demand = found.by_layer_and_step, found.demand.tolist()
    assert (table.layers.tolist(), table.steps.tolist()) == ([1, 3], [4, 9])
    assert table.demand.tolist() == [[demand[0] + demand[1] + demand[4], demand[3]], [demand[2], 0]]
    assert table.dropped.sum((1, 2)).tolist() == found.dropped.sum(1).tolist()
    assert table.dropped[0, 1].tolist() == [found.dropped[0, 2], 0]
    shares = found.dropped.sum(1) / sum(demand)
    assert found.dropped_share.tolist() == shares.tolist()


def test_without_probabilities_the_first_tokens_keep_their_slots():
    probs = small_trace(steps=[0], layers=[0], ranks=[0], num_ranks=1)
    trace = small_trace(steps=[0], layers=[0], ranks=[0], num_ranks=1, probs=False)
    found = replay(trace, FACTORS)
    by_position = replay(probs, FACTORS, policy="position")
    np.testing.assert_array_equal(found.lost_tokens, by_position.lost_tokens)
    assert replay(probs, FACTORS).dropped.tolist() == found.dropped.tolist()
    with pytest.raises(ValueError, match=r"policy must be position .*, got 'probs'"):
        replay(trace, FACTORS, policy="probs")


def test_grid():
    assert grid(1.234)[-3:] == (1.15, 1.2, 1.24)
    assert grid(2.1)[-3:] == (1.95, 2.0, 2.1)
    assert grid(5.0)[-3:] == (4.17, 4.59, 5.0)
    assert grid(0.0) == (0.01,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(factors=[]), "factors must hold at least one"),
        (dict(factors=[math.nan]), "capacity_factor must .*, got nan"),
        (dict(policy="best"), "policy must be probs or position, got 'best'"),
        (dict(pool="source"), "pool must be one of expert, rank, got 'source'"),
        (dict(etp=3), "etp must divide the 2 sources of the trace, got 3; give"),
    ],
)
def test_wrong_arguments(arguments, message):
    trace = small_trace(steps=[0, 0], layers=[0, 0], ranks=[0, 1])
    with pytest.raises(ValueError, match=message):
        replay(trace, **dict(factors=[1.0]) | arguments)
