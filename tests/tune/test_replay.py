"""A replay equals the specification, pass by pass, and what was counted in a real run."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from padded_dispatch.tune.demand import Demand, demand_of
from padded_dispatch.tune.recommend import percent, recommend
from padded_dispatch.tune.replay import POOLS, Replay, grid, replay
from tests.support.reference import Store
from tests.support.traces import small_trace, traced_run

Counts = list[list[list[int]]]  # of a pass: [layer][source][expert]


def kept_in_stores(
    counts: Counts, factor: float, *, num_tokens: int, top_k: int, num_ranks: int
) -> list[int]:
    """Return the rows of each layer that find room, in a store of all layers on each rank."""
    num_sources, num_experts = len(counts[0]), len(counts[0][0])
    local = num_experts // num_ranks
    share = num_sources // num_ranks * num_tokens * top_k
    most = num_sources * num_tokens * min(top_k, local)
    of_layer = min(math.ceil(share * factor), most)
    stays = np.zeros(len(counts), int)
    for rank in range(num_ranks):
        store = Store(max(of_layer * len(counts), min(most, 5 * share)))
        for number, layer in enumerate(counts):
            count_SL = np.array(layer)[:, rank * local : (rank + 1) * local]
            level = store.keep(count_SL)
            stays[number] += np.minimum(count_SL, level).sum() - store.again_Y[-1]
    return stays.tolist()


FACTORS = [0.3, 0.7, 1.0, 1.25, 3.0]
RECORD = Path(__file__).parents[2] / "notebooks" / "results" / "routing_counts.npz"


def demand(counts: Any, *, steps: list[int] | None = None, **given: int) -> Demand:
    array = np.array(counts, np.int32)
    _, _, num_ranks, num_experts = array.shape
    return Demand(
        run=traced_run(num_ranks=num_ranks, num_experts=num_experts, **given),
        steps=np.arange(len(array)) if steps is None else np.array(steps),
        layers=np.arange(1, array.shape[1] + 1, dtype=np.int32),
        counts=array,
    )


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    """Passes of a few layers.

    Sources, also of padding alone, ask for any experts, so that ranks get from no row to all.
    """
    num_ranks, etp = draw(st.sampled_from([1, 2, 3, 8])), draw(st.integers(1, 2))
    num_experts = num_ranks * draw(st.integers(1, 3))
    top_k, num_tokens = draw(st.integers(1, num_experts)), draw(st.integers(1, 9))
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 4)), num_ranks * etp, num_tokens
    random = np.random.default_rng(draw(st.integers(0, 99)))
    popular = draw(st.sampled_from([0.0, 1.0, 9.0])) * np.arange(num_experts)
    scores = random.gumbel(size=(*shape, num_experts)) + popular
    chosen = scores >= np.sort(scores)[..., -top_k, None]
    chosen &= random.random((*shape, 1)) < draw(st.sampled_from([0.0, 0.8, 1.0]))
    sizes = {"num_tokens": num_tokens, "top_k": top_k, "etp_size": etp}
    return demand(chosen.sum(3).tolist(), **sizes)


def kept(found: Replay, f: int) -> list[list[int]]:
    """Return the rows by step and layer; a step has one pass."""
    return (found.asked - found.dropped[f]).T.tolist()


@settings(max_examples=100)
@given(demands(), st.sampled_from(FACTORS))
def test_every_pass_is_what_the_specification_keeps(asked, factor):
    run = asked.run
    slots = math.ceil(run.num_tokens * run.top_k / run.num_experts * factor)
    slots = max(1, min(run.num_tokens, slots))
    found = replay(asked, [factor])
    assert found.room.tolist() == [slots]
    passes = asked.counts.tolist()
    assert kept(found, 0) == [
        [sum(min(rows, slots) for source in layer for rows in source) for layer in counts]
        for counts in passes
    ]
    found = replay(asked, [factor], pool="store")
    sizes = {"num_tokens": run.num_tokens, "top_k": run.top_k}
    given = {"num_ranks": run.num_ranks // run.etp_size, **sizes}
    assert kept(found, 0) == [kept_in_stores(counts, factor, **given) for counts in passes]


@given(demands(), st.sampled_from(POOLS))
def test_the_needed_factor_drops_nothing_and_a_smaller_one_something(asked, pool):
    assert replay(asked, pool=pool).dropped[-1].sum() == 0
    needed = replay(asked, [1.0], pool=pool).needed
    factors = sorted({*needed.tolist()} - {0.0}) or [1.0]
    found = replay(asked, [x for need in factors for x in (need, need * 0.7)], pool=pool)
    drops = found.dropped.sum(1) > 0
    for factor, steps in zip(found.factors, drops, strict=True):
        assert not steps[needed <= factor].any()
        # A row and a slot of rounding: ceil(share * factor) in each layer. A store has more.
        rows = found.configs[0].share(asked.run.num_tokens) if pool == "store" else asked.mean_rows
        lacks = needed * rows > factor * rows + 1
        if pool == "store":
            least = found.configs[0].least_store_rows(asked.run.num_tokens)
            lacks &= needed * len(asked.layers) * rows > least
        assert steps[lacks].all()


def test_a_store_by_hand():
    """Two ranks of an expert each, 10 tokens, two layers; all rows are the first rank's."""
    passes = [[(6, 1), (7, 5)], [(2, 8), (8, 2)], [(9, 9), (1, 1)]]
    counts = [[[[rows, 0] for rows in layer] for layer in layers] for layers in passes]
    asked = demand(counts, num_tokens=10, top_k=1)
    found = replay(asked, [1.3, 0.5, 1.0], pool="store")
    assert found.room.tolist() == [20, 20, 26]  # At least a layer of both ranks' tokens.
    assert kept(found, 0) == kept(found, 1) == kept(found, 2) == [[7, 12], [10, 10], [18, 2]]
    assert found.needed.tolist() == [0.95, 1.0, 1.0]
    assert found.needed_alone.tolist() == [1.8, 1.2]
    alone = replay(asked, [1.0], pool="store", store_layers=1)
    assert (kept(alone, 0), alone.room[0]) == ([[7, 12], [10, 10], [18, 2]], 20)
    assert alone.needed.tolist() == [1.2, 1.0, 1.8]
    busy = demand([[[[9, 0], [8, 0]], [[7, 0], [9, 0]], [[2, 0], [1, 0]]]], num_tokens=10, top_k=1)
    found = replay(busy, [0.1, 1.0, 1.1], pool="store")
    assert found.room.tolist() == [20, 30, 33]
    assert [kept(found, f) for f in range(3)] == [[[17, 3, 0]], [[17, 13, 0]], [[17, 16, 0]]]
    # Eight ranks: 960 rows for the first one of each layer, in stores of three layers and of two.
    uneven = demand([[[[120, *[19] * 7]] * 8] * 5], num_tokens=128, top_k=2)
    found = replay(uneven, [2.0], pool="store", store_layers=3)
    others = 7 * 152
    assert found.lost.tolist() == [0]
    alone = replay(demand([[[[16, *[0] * 7]] * 8]], num_tokens=16, top_k=1), [1.25], pool="store")
    assert (alone.room.tolist(), alone.lost.tolist()) == ([80], [48])
    assert kept(found, 0) == [[960 + others, 576 + others, others, 960 + others, 64 + others]]


def test_the_former_name_of_cells_is_cells():
    """It would be taken for a store, which has other room."""
    asked = demand([[[[3, 1], [0, 4]]]], num_tokens=4, top_k=1)
    former: Any = "expert"
    for factor in (0.5, 1.0):
        found, named = (replay(asked, [factor], pool=pool) for pool in (former, "cells"))
        assert (found.pool, found.dropped.tolist()) == ("cells", named.dropped.tolist())
        assert found.dropped.tolist() != replay(asked, [factor], pool="store").dropped.tolist()


def test_the_record_of_a_real_router():
    """Of 12 layers over 80 steps, by loops in plain Python."""
    record = np.load(RECORD)
    sizes = {"num_tokens": int(record["num_tokens"]), "top_k": int(record["top_k"])}
    asked = demand(record["counts"].astype(np.int32), steps=record["steps"], **sizes)
    rows = int(asked.counts.sum())
    assert rows == 80 * 12 * 8 * 4096 * 8
    found = replay(asked, [1.25, 1.5, 2.0], pool="store")
    for f, factor in enumerate(found.factors):
        passes = [
            kept_in_stores(counts, factor, num_ranks=8, **sizes) for counts in asked.counts.tolist()
        ]
        assert kept(found, f) == passes
    assert (100 * found.dropped_share).round(1).tolist() == [0.9, 0.1, 0.0]
    assert found.dropped[2].sum() == 0
    assert (found.needed.max(), found.needed_alone.max()) == pytest.approx((1.70, 4.23), abs=0.005)
    few = replay(asked, [1.25], pool="store", store_layers=3)
    assert few.needed.max() == pytest.approx(2.65, abs=0.005)
    cells = replay(asked, [1.25, 1.5, 2.0])
    assert cells.room.tolist() == [320, 384, 512]
    assert (100 * cells.dropped_share).round().tolist() == [75, 71, 63]


def test_a_trace_is_counted_by_pass_layer_and_source():
    """The fifth record is the second micro-batch of its step; ranks 2 and 3 are another group."""
    trace = small_trace(
        steps=[4, 4, 4, 9, 4, 4], layers=[1, 1, 3, 1, 1, 1], ranks=[0, 1, 0, 0, 0, 3], num_ranks=2
    )
    found = demand_of(trace)
    assert (found.layers.tolist(), found.steps.tolist()) == ([1, 3], [4, 4, 4, 9])
    places = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (3, 0, 0), (2, 0, 0), (1, 0, 1)]
    for ids_TK, place in zip(trace.ids_NTK, places, strict=True):
        counted = [int((ids_TK == e).sum()) for e in range(6)]
        assert found.counts[place].tolist() == counted
    assert found.counts.sum() == (trace.ids_NTK >= 0).sum()
    rows = found.counts.sum((2, 3))
    by_step = replay(found, [1.0])
    assert by_step.steps.tolist() == [4, 9]
    assert by_step.asked.T.tolist() == [rows[:3].sum(0).tolist(), rows[3].tolist()]


def test_rows_of_one_layer_beyond_the_whole_store_are_lost():
    """Eight ranks with a store of five shares; all 72 rows of a layer go to the experts of one.

    Of each source 5 rows fit into the 45; of sources with 2 or 9 rows, 2 and 6.
    """
    counts = np.zeros((1, 1, 8, 8), np.int32)
    counts[0, 0, :, 3] = 9
    asked = demand(counts, num_tokens=9, top_k=1)
    found = replay(asked, [1.0, 8.0], pool="store")
    assert (found.room.tolist(), found.lost.tolist()) == ([45, 72], [32, 0])
    assert kept(found, 0) == [[40]]
    counts[0, 0, :, 3] = 9, 9, 9, 9, 2, 9, 9, 2
    other = replay(demand(counts, num_tokens=9, top_k=1), [1.0], pool="store")
    assert (kept(other, 0), other.lost.tolist()) == ([[6 * 6 + 2 * 2]], [58 - 40])
    words = f"({percent(32 / 72)} dropped, for want of room for a layer)"
    assert words in recommend(replay(asked, [1.0], pool="store")).sentence()


def test_grid():
    assert grid(1.04) == (0.5, 0.75, 0.9, 1.0, 1.04)
    assert grid(1.234)[-3:] == (1.15, 1.2, 1.24)
    assert grid(2.1)[-3:] == (1.95, 2.0, 2.1)
    assert grid(5.0)[-3:] == (4.17, 4.59, 5.0)
    assert [grid(need)[-1] for need in (0.0, 1.1, 2.3, 1.1000001)] == [0.01, 1.1, 2.3, 1.11]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(factors=[math.nan]), "capacity_factor must .*, got nan"),
        (dict(pool="rank"), "capacity_pool must be one of store, cells, got 'rank'"),
        (dict(store_layers=0), "store_layers must be from 1 to the trace's 1 layers, got 0"),
    ],
)
def test_wrong_arguments(arguments, message):
    trace = small_trace(steps=[0, 0], layers=[0, 0], ranks=[0, 1])
    with pytest.raises(ValueError, match=message):
        replay(demand_of(trace), **dict(factors=[1.0]) | arguments)
