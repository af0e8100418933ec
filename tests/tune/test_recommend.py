"""Recommendations on traces whose need is known step by step: T = 20, two experts, top-1."""

import numpy as np
import pytest

from padded_dispatch.memory import LayerMemory
from padded_dispatch.tune.demand import Demand, demand_of
from padded_dispatch.tune.recommend import percent, recommend, study
from padded_dispatch.tune.replay import POOLS, balanced_drop, replay
from tests.support.traces import of_run, synthetic_trace
from tests.tune import test_replay

T = 20
FACTORS = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0]  # C = 10 ... 20


def demand(*needs) -> Demand:
    """Return layers whose demand for expert 0 makes step s need the factor `needs[layer][s]`."""
    first = np.array(needs).T[:, :, None] * 10  # [steps, layers, sources]
    counts = np.stack([first, T - first], axis=-1).round()
    return test_replay.demand(counts, num_tokens=T, top_k=1)


def advise(*needs, factors=FACTORS, drop=0.0):
    return recommend(replay(demand(*needs), factors), drop)


def test_percent():
    shares = {0.001: "0.1 %", 0.123456: "12.35 %", 0.99999: "99.99 %", 1e-7: "< 0.0001 %", 0: "0 %"}
    assert {share: percent(share) for share in shares} == shares


def test_the_smallest_factor_that_leaves_enough_rows_room():
    needs = np.tile([1.2, 1.3], 300)  # At 1.2 each second step has a row too many, of 20.
    for drop, factor in ((0.0, 1.3), (0.0249, 1.3), (0.025, 1.2)):
        assert advise(needs, drop=drop).overall.factor == factor
    found = advise(needs, drop=0.025)
    advice = found.overall
    assert (advice.room, found.num_steps, found.halves) == (12, 600, (1.2, 1.2))
    assert (advice.dropped, advice.worst, found.replay.retried[found.index]) == (0.025, 1 / 20, 0.5)
    assert found.warnings() == []
    assert found.sentence() == (
        "Set the capacity factor to 1.2: 12 slots for each source rank and expert. 2.5 % of the "
        "rows of the 600 steps traced would be dropped, at most 5 % in one step."
    )
    assert "of the rows of the step traced would" in advise(needs[:1]).sentence()
    assert advise(needs, factors=[1.0, 1.2]).overall.dropped == 0.025  # None is enough.


def test_every_layer_has_its_own_factor_and_all_together_share_a_budget():
    quiet, loud = np.full(40, 1.0), np.full(40, 1.4)
    found = advise(quiet, loud, drop=0.05)
    assert {layer: advice.factor for layer, advice in found.layers.items()} == {1: 1.0, 2: 1.3}
    assert found.overall.factor == 1.2  # two rows of the forty that both layers ask for


def test_halves_that_differ_are_a_warning():
    found = advise(np.concatenate([np.tile([1.9, 2.0], 50), np.tile([1.2, 1.3], 50)]))
    assert (found.overall.factor, found.halves) == (2.0, (2.0, 1.3))
    (warning,) = found.warnings()
    assert warning.startswith(
        "The router is still settling: the steps before 100 need 2, the others 1.3. If the steps "
    )
    assert advise(np.tile([1.2, 1.3], 100)).warnings() == []
    near, far = np.full(10, 1.0), np.full(10, 1.1)
    found = advise(np.concatenate([near, far]))
    found.replay.room[1] *= 2  # Rooms alone do not tell.
    assert found.warnings() == []  # Just a tenth.
    assert len(advise(np.concatenate([near, far + 0.1])).warnings()) == 1
    found = advise(np.concatenate([near, np.full(10, 2.0)]), factors=[1.0, 1.05, 2.0])
    assert len(found.warnings()) == 1
    found.replay.room[-1] = found.replay.room[0]  # As in a store that has its least size.
    assert found.warnings() == []
    assert advise([1.4]).halves == (1.4, 1.4)
    assert advise([1.4, 1.2, 1.2]).halves == (1.4, 1.2)


def test_a_step_that_asks_for_no_row_does_not_count():
    asked = demand(np.full(50, 1.2))
    asked.counts[3, 0, 0] = 1, 0
    asked.counts[7] = 0
    found = recommend(replay(asked, FACTORS))
    assert (found.num_steps, found.overall.worst) == (49, 0.0)
    asked = demand(np.full(9, 1.2), np.full(9, 1.2))
    asked.counts[:, 0] = 0  # A layer without rows gets no advice.
    assert recommend(replay(asked, FACTORS)).layers.keys() == {2}
    asked.counts[:] = 0
    for pool in POOLS:
        with pytest.raises(ValueError, match="trace must ask for at least one expert, got padding"):
            recommend(replay(asked, pool=pool))


def test_missing_ranks_are_a_warning():
    sizes = dict(num_steps=30, num_layers=1, num_ranks=4, num_tokens=16, num_experts=8)
    trace = synthetic_trace("balanced", **sizes)

    def warnings(part):
        return recommend(replay(demand_of(part), [1.0, 2.0])).warnings()

    assert warnings(trace) == []
    half = trace.where(trace.ranks % 2 == 0)
    assert warnings(half) == [
        "Traces of 2 of 4 ranks are missing (1, 3), so rows are not counted, and a store needs "
        "more than this; give the traces of all ranks."
    ]
    needs = [replay(demand_of(part), pool="store").needed.mean() for part in (half, trace)]
    assert needs[0] == pytest.approx(0.5, rel=0.1) and needs[1] == pytest.approx(1, rel=0.1)
    (warning,) = warnings(trace.where((trace.ranks != 3) | (trace.steps < 29)))
    assert warning.startswith("1 of 30 steps lack some of their 4 ranks or 1 layers, so ")
    groups = of_run(trace, num_ranks=2)  # Two: a step lacks ranks of one of them.
    assert warnings(groups) == []
    (warning,) = warnings(groups.where((groups.ranks != 3) | (groups.steps < 29)))
    assert warning.startswith("1 of 60 steps lack some of their 2 ranks or 1 layers, so ")
    (warning,) = warnings(groups.where(groups.ranks != 3))
    assert warning.startswith("Traces of 1 of 4 ranks are missing (3), so ")
    trace = synthetic_trace("balanced", **(sizes | {"num_layers": 2}))
    (warning,) = warnings(trace.where((trace.layers != 2) | (trace.steps < 28)))
    assert warning.startswith("2 of 30 steps lack some of their 4 ranks or 2 layers, so ")


def test_of_factors_with_the_least_store_the_largest_is_the_advice():
    """The stores of four layers have five shares up to 1.25; for more layers 0.5 is too little."""
    trace = synthetic_trace("balanced", num_ranks=8, num_steps=4, num_layers=4)
    replayed = replay(demand_of(trace), [0.5, 1.0, 1.25, 1.3], pool="store")
    assert replayed.room.tolist() == [640, 640, 640, 668]
    found = recommend(replayed)
    assert (found.overall.factor, found.halves) == (1.25, (1.25, 1.25))


def studied(kind, *, ranks=2, etp=1, **given):
    sizes = {"num_experts": 16 + 2 - ranks, "etp_size": etp}
    return study(demand_of(of_run(synthetic_trace(kind), **sizes)), name="x", **given)


def test_a_study_takes_the_pool_of_the_run_else_the_smaller_factor():
    found = studied("lognormal")
    expert, store = found.answers
    assert (expert.replay.pool, store.replay.pool) == ("cells", "store")
    assert store.overall.factor < expert.overall.factor
    assert found.chosen is store and found.pool == "store"
    rows = f": a store of {store.overall.room:,} rows. "
    assert rows in found.chosen.sentence()
    # The smallest factor at which recomputing costs half a percent of a step.
    assert store.overall.dropped <= 0.005 / 0.15 < store.replay.dropped_share[store.index - 1]
    assert {advice.factor for advice in store.layers.values()} == {store.overall.factor}
    trace = synthetic_trace("lognormal")
    for pool in POOLS:
        known = demand_of(of_run(trace, capacity_pool=pool))
        assert study(known, name="x").pool == pool
    assert study(known, name="x", pools=("cells",)).pool == "cells"
    with pytest.raises(ValueError, match="num_experts must be a multiple of num_ranks=2, got 17"):
        studied("uniform", ranks=1)
    assert studied("uniform", ranks=1, etp=2).chosen.num_steps == 40


@pytest.mark.parametrize(("ranks", "etp"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("pool", POOLS)
def test_effects_and_costs_of_each_factor(pool, ranks, etp):
    replay = studied("lognormal", ranks=ranks, etp=etp, pools=(pool,)).chosen.replay
    sizes = dict(num_tokens=64, hidden_size=64, fc1_width=96 // etp, direct=etp == 1)
    for i, config in enumerate(replay.configs):
        shares = replay.dropped[i].sum(1) / replay.asked.sum(1)
        assert replay.layer_shares[i].tolist() == shares.tolist()
        assert replay.kept_bytes[i] == LayerMemory(config=config, **sizes).kept(2)
        if pool == "cells":
            balanced = dict(num_tokens=64, top_k=2, num_experts=16, capacity=config.capacity(64))
            assert replay.balanced[i] == balanced_drop(**balanced)
    assert replay.retried[0] == 1.0 and replay.dropped_share[-1] == 0
