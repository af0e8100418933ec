"""A replay equals the reference, record by record, and a larger factor never drops more."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from padded_dispatch.ops.overflow import select_with_remedy

from padded_dispatch.config import CAPACITY_POOLS, POLICIES, DispatchConfig
from padded_dispatch.ops.counters import mass_units
from padded_dispatch.tune import replay as replay_module
from padded_dispatch.tune.replay import POOLS, _places, has_all_sources, largest_need, replay
from padded_dispatch.tune.trace import Trace
from tests.support import reference
from tests.support.pools import pools
from tests.support.traces import small_trace

FACTORS = [0.3, 0.7, 1.0, 1.25, 3.0]
EXACT = [policy for policy in POLICIES if policy != "random"]  # The others' draws are their own.


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Two layers, two steps of two micro-batches, one or two groups of one to three ranks."""
    num_ranks = draw(st.integers(1, 3))
    num_records = [num_ranks * draw(st.integers(1, 2))]
    for _ in range(3):
        num_records.append(num_records[-1] * 2)
    all_ranks, per_pass, per_step, size = num_records
    n = np.arange(size)
    num_experts = num_ranks * draw(st.integers(1, 3))
    return small_trace(
        steps=(n // per_step).tolist(),
        layers=(n % per_pass // all_ranks).tolist(),
        ranks=(n % all_ranks).tolist(),
        num_tokens=draw(st.integers(1, 9)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        num_ranks=num_ranks,
        seed=draw(st.integers(0, 99)),
    )


def dense(trace: Trace, n: int) -> tuple[np.ndarray, np.ndarray]:
    """One record as the router gives it: map and probabilities, [T, E]."""
    map_TE = np.zeros((trace.num_tokens, trace.num_experts), bool)
    probs_TE = np.zeros(map_TE.shape, np.float32)
    for t, ids_K in enumerate(trace.ids_NTK[n]):
        for k, e in enumerate(ids_K):
            if e >= 0:
                map_TE[t, e] = True
                probs_TE[t, e] = trace.probs_NTK[n, t, k]
    return map_TE, probs_TE


@settings(max_examples=80)  # One example is up to 48 records at five factors.
@given(
    trace=traces(),
    policy=st.sampled_from(EXACT),
    pool=st.sampled_from(CAPACITY_POOLS),
    min_capacity=st.integers(1, 3),
    alignment=st.integers(1, 4),
)
def test_every_record_is_what_reference_and_dispatcher_do(
    trace, policy, pool, min_capacity, alignment
):
    slots = dict(min_capacity=min_capacity, alignment=alignment)
    found = replay(trace, FACTORS, policy=policy, pool=pool, **slots)
    for f, factor in enumerate(FACTORS):
        config = DispatchConfig(
            num_experts=trace.num_experts,
            top_k=trace.top_k,
            capacity_factor=factor,
            capacity_pool=pool,
            policy=policy,
            num_ranks=trace.num_ranks,
            **slots,
        )
        sizes = config.sizes(trace.num_tokens)
        assert found.capacities[f] == (sizes.num_rows if pool == "receiver" else sizes.pool_slots)
        for records in units(trace):
            demand_SE = found.demand_by_expert[records]
            accepted_SE = None
            if pool == "receiver" and sizes.may_drop and trace.num_ranks > 1:
                accepted_SE = reference.accept(
                    demand_SE, num_ranks=trace.num_ranks, num_rows=sizes.num_rows
                )
            for source, n in enumerate(records):
                map_TE, probs_TE = dense(trace, n)
                limit_E = None if accepted_SE is None else accepted_SE[source]
                expected = reference.select(
                    map_TE, probs_TE, sizes=sizes, policy=policy, limit_E=limit_E
                )
                kept_TE = expected.kept_TE
                assert found.demand_by_expert[n].tolist() == expected.demand_E.tolist()
                assert found.kept_by_expert[f, n].tolist() == kept_TE.sum(0).tolist()
                asked_T, kept_T = map_TE.any(1), kept_TE.any(1)
                assert found.num_tokens[n] == asked_T.sum()
                assert found.lost_tokens[f, n] == (asked_T & ~kept_T).sum()

                tensors = torch.from_numpy(map_TE), torch.from_numpy(probs_TE)
                table_SE = torch.from_numpy(demand_SE)
                ours = select_with_remedy(
                    config,
                    sizes,
                    *tensors,
                    all_demands=lambda _: table_SE,  # noqa: B023 - called in this turn
                    source=source,
                )
                assert ours.kept_TE.numpy().tolist() == kept_TE.tolist()
                assert found.asked_mass[n] == mass_units(tensors[1]).sum().item()
                assert found.kept_mass[f, n] == mass_units(ours.probs_TE).sum().item()


@given(traces(), st.sampled_from(EXACT))
def test_pooled_is_one_source_with_all_tokens(trace, policy):
    found = replay(trace, FACTORS, policy=policy, pool="all-sources")
    for records in units(trace):
        maps, probs = zip(*(dense(trace, n) for n in records), strict=True)
        map_ME, probs_ME = np.concatenate(maps), np.concatenate(probs)
        for f, capacity in enumerate(found.capacities.tolist()):
            balance = len(map_ME) * trace.top_k / trace.num_experts * FACTORS[f]
            assert capacity == max(1, min(len(map_ME), math.ceil(balance)))
            kept_ME = reference.select(
                map_ME, probs_ME, sizes=pools(trace.num_experts, capacity), policy=policy
            ).kept_TE
            kept_RE = kept_ME.reshape(trace.num_ranks, -1, trace.num_experts).sum(1)
            assert found.kept_by_expert[f, records].tolist() == kept_RE.tolist()
            assert found.slots[f] * trace.num_ranks == capacity * trace.num_experts


@given(traces())
def test_a_rank_has_one_budget_for_all_its_experts(trace):
    found = replay(trace, FACTORS, policy="position", pool="hybrid-ep", alignment=2)
    num_local_experts = trace.num_experts // trace.num_ranks
    for f, factor in enumerate(FACTORS):
        budget = int(trace.num_tokens * trace.top_k * factor)
        budget += -budget % 2
        assert found.capacities[f] == budget == found.slots[f]
        for records in units(trace):
            left_R = [budget] * trace.num_ranks
            kept_RE = np.zeros((trace.num_ranks, trace.num_experts), int)
            for source, n in enumerate(records):
                for e in trace.ids_NTK[n].flatten().tolist():
                    if e >= 0 and left_R[e // num_local_experts] > 0:
                        left_R[e // num_local_experts] -= 1
                        kept_RE[source, e] += 1
            assert found.kept_by_expert[f, records].tolist() == kept_RE.tolist()


def least(trace: Trace, pool: str) -> float:
    """Return the factor of one slot."""
    cells = {"expert": 1, "all-sources": trace.num_ranks}.get(pool)
    if cells is None:
        cells = trace.num_experts // trace.num_ranks
        cells *= 1 if pool == "rank" else trace.num_ranks
    return trace.num_experts / (trace.num_tokens * trace.top_k * cells)


def units(trace: Trace) -> list[list[int]]:
    """Records of one micro-batch of one layer in one group, by rank."""
    found: dict[tuple[int, ...], list[int]] = {}
    for n, number in enumerate(trace.microbatches().tolist()):
        group = int(trace.ranks[n]) // trace.num_ranks
        key = int(trace.steps[n]), number, int(trace.layers[n]), group
        found.setdefault(key, []).append(n)
    return [sorted(records, key=lambda n: trace.ranks[n]) for records in found.values()]


@given(traces(), st.sampled_from(POLICIES), st.sampled_from(POOLS))
def test_a_larger_factor_never_drops_more(trace, policy, pool):
    found = replay(trace, FACTORS, policy=policy, pool=pool)
    for kept in (found.kept_by_expert, found.kept_mass, -found.lost_tokens):
        assert (np.diff(kept, axis=0) >= 0).all()


@given(traces(), st.sampled_from(POLICIES), st.sampled_from(POOLS))
def test_the_needed_factor_is_that_of_the_largest_demand_and_drops_nothing(trace, policy, pool):
    needed = replay(trace, [1.0], pool=pool).needed_factor
    rows, num_experts, num_ranks = (
        trace.num_tokens * trace.top_k,
        trace.num_experts,
        trace.num_ranks,
    )
    demand_by_expert = replay(trace, [1.0]).demand_by_expert
    expected = np.empty(trace.num_records)
    for records in units(trace):
        demand_SE = demand_by_expert[records]
        demand_SR = demand_SE.reshape(num_ranks, num_ranks, -1).sum(2)
        expected[records] = {
            "expert": demand_SE.max(1) * num_experts / rows,
            "rank": demand_SR.max(1) * num_ranks / rows,
            "receiver": demand_SR.sum(0).max() / rows,
            "all-sources": demand_SE.sum(0).max() * num_experts / (rows * num_ranks),
            "hybrid-ep": demand_SR.sum(0).max() / rows,
        }[pool]
    np.testing.assert_allclose(
        largest_need(trace, pool=pool), max(needed.max(), least(trace, pool))
    )
    # Both round a few times; one slot is at least 1 / (T * K), which is above 2**-7 here.
    np.testing.assert_allclose(needed, expected, rtol=2**-50)
    factors = sorted({*needed.tolist()} - {0})
    found = replay(trace, factors or [1.0], policy=policy, pool=pool)
    for f, factor in enumerate(factors):
        assert (found.dropped[f][needed <= factor] == 0).all()


def test_random_keeps_as_many_and_draws_by_seed():
    trace = small_trace(steps=[0] * 40, layers=list(range(40)), ranks=[0] * 40, num_tokens=50)
    by_probs = replay(trace, FACTORS, policy="probs")
    drawn = [replay(trace, FACTORS, policy="random", seed=seed) for seed in (0, 0, 1)]
    for found in drawn:
        np.testing.assert_array_equal(found.kept_by_expert, by_probs.kept_by_expert)
    np.testing.assert_array_equal(drawn[0].kept_mass, drawn[1].kept_mass)
    assert (drawn[0].kept_mass != drawn[2].kept_mass).any()
    assert (drawn[0].kept_mass <= by_probs.kept_mass).all()


def test_any_number_of_records_at_a_time_gives_the_same(monkeypatch):
    trace = small_trace(steps=[0, 0, 1, 1], layers=[0] * 4, ranks=[0, 1, 0, 1], num_tokens=7)
    at_once = [replay(trace, FACTORS, pool=pool) for pool in POOLS]
    monkeypatch.setattr(replay_module, "_CHUNK_ROWS", 1)
    for whole, pool in zip(at_once, POOLS, strict=True):
        found = replay(trace, FACTORS, pool=pool)
        np.testing.assert_array_equal(found.kept_by_expert, whole.kept_by_expert)
        np.testing.assert_array_equal(found.kept_mass, whole.kept_mass)
        np.testing.assert_array_equal(found.needed_factor, whole.needed_factor)


def by_hand(**changes) -> Trace:
    """Four tokens, two experts, one each; expert 1 gets three of the four."""
    values = dict(
        num_experts=2,
        top_k=1,
        num_ranks=1,
        steps=np.array([5]),
        layers=np.array([2], np.int32),
        ranks=np.array([0], np.int32),
        ids_NTK=np.array([[[1], [0], [1], [1]]], np.int16),
        probs_NTK=np.array([[[0.5], [1.0], [0.25], [0.75]]], np.float32),
    )
    return Trace(**(values | changes))


def test_by_hand():
    found = replay(by_hand(), [1.0, 1.5])
    assert found.capacities.tolist() == [2, 3]
    assert found.demand_by_expert.tolist() == [[1, 3]]
    assert found.kept_by_expert.tolist() == [[[1, 2]], [[1, 3]]]
    assert found.dropped.tolist() == [[1], [0]]
    assert found.slots.tolist() == [4, 6]
    assert found.asked_mass.tolist() == [2.5 * 2**32]
    assert found.kept_mass.tolist() == [[2.25 * 2**32], [2.5 * 2**32]]
    assert found.lost_tokens.tolist() == [[1], [0]]
    assert found.needed_factor.tolist() == [1.5]
    assert replay(by_hand(), [1.0], policy="position").kept_mass.tolist() == [[1.75 * 2**32]]


def test_padding_asks_for_nothing():
    padding = by_hand(
        ids_NTK=np.full((1, 4, 1), -1, np.int16), probs_NTK=np.zeros((1, 4, 1), np.float32)
    )
    for pool in POOLS:
        found = replay(padding, [1.0], pool=pool)
        assert found.demand.tolist() == [0]
        assert found.dropped.tolist() == [[0]]
        assert found.asked_mass.tolist() == [0]
        assert found.lost_tokens.tolist() == [[0]]
        assert found.needed_factor.tolist() == [0]


def test_factors_ascend_in_any_order():
    trace = small_trace(steps=[0, 1], layers=[0, 0], ranks=[0, 0], num_tokens=9)
    found, expected = replay(trace, FACTORS[::-1]), replay(trace, FACTORS)
    assert found.factors.tolist() == FACTORS
    np.testing.assert_array_equal(found.capacities, expected.capacities)
    np.testing.assert_array_equal(found.kept_by_expert, expected.kept_by_expert)


def test_rows_per_layer_and_step():
    steps, layers = [4, 4, 4, 9, 4], [1, 1, 3, 1, 1]
    trace = small_trace(steps=steps, layers=layers, ranks=[0, 1, 0, 0, 0])
    found = replay(trace, FACTORS)
    table = found.by_layer_and_step()
    assert (table.layers.tolist(), table.steps.tolist()) == ([1, 3], [4, 9])
    demand = found.demand.tolist()
    assert table.demand.tolist() == [
        [demand[0] + demand[1] + demand[4], demand[3]],
        [demand[2], 0],
    ]
    assert table.dropped.sum((1, 2)).tolist() == found.dropped.sum(1).tolist()
    assert table.dropped[0, 1].tolist() == [found.dropped[0, 2], 0]


def test_without_probabilities():
    trace = by_hand(probs_NTK=None)
    found = replay(trace, [1.0], policy="position")
    assert found.kept_by_expert.tolist() == [[[1, 2]]]
    assert found.asked_mass is None and found.kept_mass is None
    for policy in ("probs", "priority"):
        with pytest.raises(
            ValueError, match=rf"policy must .* without probabilities, got '{policy}'; set"
        ):
            replay(trace, [1.0], policy=policy)


def test_another_number_of_ranks():
    trace = small_trace(
        steps=[0] * 4, layers=[0] * 4, ranks=[0, 1, 2, 3], num_ranks=4, num_experts=8
    )
    in_halves = dataclasses.replace(trace, num_ranks=2)
    halves = replay(in_halves, [1.0], pool="all-sources")
    first = replay(in_halves.where(trace.ranks < 2), [1.0], pool="all-sources")
    np.testing.assert_array_equal(halves.kept_by_expert[:, :2], first.kept_by_expert)
    # 4 or 2 sources of 5 tokens with 3 of 8 experts each.
    assert replay(trace, [1.0], pool="all-sources").capacities.tolist() == [math.ceil(60 / 8)]
    assert halves.capacities.tolist() == [math.ceil(30 / 8)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(factors=[]), "factors must hold at least one"),
        (dict(factors=[0.0]), "capacity_factor must .*, got 0.0"),
        (dict(factors=[math.nan]), "capacity_factor must .*, got nan"),
        (dict(policy="best"), "policy must be one of probs, position.*, got 'best'"),
        (dict(pool="source"), "pool must be one of expert, rank, .*, got 'source'"),
        (dict(etp=3), "etp must divide the 2 sources of the trace, got 3"),
        (dict(pool="hybrid-ep", min_capacity=2), "min_capacity must be 1 .*, got 2; leave it out"),
        (
            dict(num_ranks=4, pool="hybrid-ep"),
            "num_experts must be a multiple of num_ranks=4, got 6",
        ),
        (
            dict(pool="all-sources", num_ranks=3),
            r"step 0, micro-batch 0, layer 0 must .* 0 to 2 \(num_ranks=3\), got only .*; merge",
        ),
    ],
)
def test_wrong_arguments(arguments, message):
    arguments = dict(factors=[1.0], num_ranks=2) | arguments
    num_ranks = arguments.pop("num_ranks")
    trace = small_trace(steps=[0, 0], layers=[0, 0], ranks=[0, 1], num_ranks=num_ranks)
    with pytest.raises(ValueError, match=message):
        replay(trace, **arguments)


def test_the_largest_need_of_a_wrong_number_of_sources():
    trace = small_trace(steps=[0, 0], layers=[0, 0], ranks=[0, 1])
    with pytest.raises(ValueError, match="etp must divide the 2 sources of the trace, got 3"):
        largest_need(trace, etp=3)


def test_traces_that_lack_a_source():
    ranks = dict(steps=[0] * 4, layers=[0] * 4)
    assert has_all_sources(small_trace(ranks=[0, 1, 2, 3], **ranks))
    assert not has_all_sources(small_trace(ranks=[0, 1, 2, 2], **ranks))


def test_places_in_a_group():
    def places(groups, probs):
        given = np.array(groups)[:, None], np.float32(probs)[:, None]
        ids_MK, random = np.zeros((len(groups), 1), np.int16), np.random.default_rng(0)
        found = _places(ids_MK, given[1], given[0], policy="probs", random=random)
        return found[:, 0].tolist()

    assert places([0] * 4, [0.2, 0.5, 0.9, 0.5]) == [3, 1, 0, 2]
    half = replay_module._MAX_GROUPS // 2  # the number of a group with its highest bit alone
    assert places([0, half, half, 2 * half - 1], [0.2, 0.5, 0.9, 0.7]) == [0, 1, 0, 0]


def test_more_sources_than_experts():
    """Two expert-parallel ranks, each expert split over four: eight sources of six experts."""
    trace = small_trace(steps=[0] * 8, layers=[0] * 8, ranks=list(range(8)), num_ranks=8)
    found = replay(trace, [0.5, 1.0], alignment=16)
    expected = [
        DispatchConfig(
            num_experts=6, top_k=3, num_ranks=2, etp_size=4, capacity_factor=factor, alignment=16
        ).capacity(5)
        for factor in (0.5, 1.0)
    ]
    assert found.capacities.tolist() == expected == [2, 4]
