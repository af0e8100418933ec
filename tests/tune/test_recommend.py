"""Recommendations on traces whose need is known step by step: T = 20, two experts, top-1."""

import numpy as np
import pytest

from padded_dispatch.trace import Trace
from padded_dispatch.tune.quantile import has_drifted
from padded_dispatch.tune.recommend import (
    Phase,
    Target,
    recommend,
    smallest_sufficient,
)
from padded_dispatch.tune.replay import replay
from padded_dispatch.tune.study import grid, largest_need
from padded_dispatch.tune.synthetic import KINDS, TraceSizes, synthetic_trace
from tests.tune.processes import KINDS as KINDS_OF_NEED
from tests.tune.promises import try_kind

T = 20
FACTORS = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0]  # C = 10 ... 20
FEW_KINDS = [
    "independent: normal",
    "independent: Pareto tail 1",
    "AR 0.5",
    "AR 0.99",
    "sine, 3 traces long",
    "drift, 5 deviations a trace",
    "growing width",
    "regimes of a trace",
    "clusters of 200, one in 3 traces",
    "one jump up within a trace",
]
DEMAND_OF = {round(c / 10, 1): c for c in range(10, 21)}


def trace_of(*needs, steps=None):
    """Return layers whose demand for expert 0 makes step s need the factor `needs[layer][s]`."""
    records = [
        (s, layer, DEMAND_OF[need])
        for layer, of_layer in enumerate(needs, start=1)
        for s, need in enumerate(of_layer)
    ]
    numbers = np.array(records)
    ids_NTK = (np.arange(T) >= numbers[:, 2, None]).astype(np.int16)[:, :, None]
    return Trace(
        num_experts=2,
        top_k=1,
        num_ranks=1,
        steps=numbers[:, 0].astype(np.int64) if steps is None else steps,
        layers=numbers[:, 1].astype(np.int32),
        ranks=np.zeros(len(numbers), np.int32),
        ids_NTK=ids_NTK,
        probs_NTK=None,
    )


def advise(*needs, factors=FACTORS, **target):
    found = replay(trace_of(*needs), factors, policy="position")
    return recommend(found, Target(**({"drop": 0.0} | target)))


def mixed(num_steps, high, every):
    """Mostly 1.2; `high` at every so many steps."""
    needs = np.full(num_steps, 1.2)
    needs[every // 2 :: every] = high
    return needs


def test_the_first_factor_from_which_on_all_are_enough():
    demand = np.array([10, 10, 10])
    dropped = np.array([[4, 0, 2], [1, 3, 2], [0, 0, 2]])
    assert smallest_sufficient(demand, dropped, 0.1).tolist() == [1, 2, 3]
    assert smallest_sufficient(demand, dropped, 0.0).tolist() == [2, 2, 3]


def test_a_promise_that_can_be_given():
    found = advise(mixed(1000, 1.3, 20), steps_share=0.9)
    advice = found.overall
    # 5 % of the steps need 1.3, so 90 % do with 1.2, also at the upper bound.
    assert (advice.factor, advice.capacity, advice.promised) == (1.2, 12, True)
    assert (advice.steps_over, advice.num_steps) == (50, 1000)
    assert advice.dropped == 50 / 20_000
    assert advice.worst == 1 / 20
    assert found.sentence() == (
        "Set the capacity factor to 1.2 (12 slots per source rank and expert): no row dropped in "
        "90 % of steps, with 95 % confidence, as long as routing stays as in the 1,000 steps seen. "
        "Changes that no trace shows are covered for the next 20 steps only; a need higher by a "
        "tenth would drop 10.25 % of the rows."
    )


def test_few_steps_cover_none_after_them():
    assert advise(np.full(49, 1.2), steps_share=0.9).overall.steps_covered == 0
    assert advise(np.full(50, 1.2), steps_share=0.9).overall.steps_covered == 1


def test_a_step_that_asks_for_one_row_counts():
    trace = trace_of(np.full(50, 1.2))
    trace.ids_NTK[3, 1:] = -1
    trace.ids_NTK[7] = -1
    found = recommend(replay(trace, FACTORS, policy="position"), Target(drop=0.0))
    assert found.overall.num_steps == 49


def test_chance_is_allowed_for():
    # 9 % of 300 steps need 1.3. The true share may well be above 10 %.
    found = advise(mixed(300, 1.3, 11), steps_share=0.9)
    assert (found.overall.likely, found.overall.factor) == (1.2, 1.3)
    assert found.overall.promised
    assert "more steps may show that 1.2 is enough" in found.sentence()


def test_a_target_that_allows_drops():
    needs = np.tile([1.2, 1.3], 300)
    assert advise(needs).overall.factor == 1.3
    assert advise(needs, drop=0.05).overall.factor == 1.2  # one row of 20
    assert advise(needs, drop=0.0499).overall.factor == 1.3


def test_every_layer_has_its_own_factor_and_all_together_share_a_budget():
    quiet, loud = np.full(400, 1.0), np.full(400, 1.4)
    found = advise(quiet, loud, drop=0.05)
    assert {layer: advice.factor for layer, advice in found.layers.items()} == {1: 1.0, 2: 1.3}
    assert found.overall.factor == 1.2  # two rows of the forty that both layers ask for


def test_too_few_steps_are_a_caveat():
    found = advise(np.tile([1.2, 1.3], 100))
    advice = found.overall
    assert advice.factor == 1.3
    (caveat,) = advice.caveats
    assert caveat == (
        "200 steps, worth 200 independent ones, promise no more than 98.51 % of steps; about 299 "
        "would do"
    )
    assert found.sentence() == (
        "Set the capacity factor to 1.3 (13 slots per source rank and expert), without a promise: "
        f"no row dropped in 200 of the 200 steps seen, but {caveat}."
    )


def test_independent_bursts_are_promised():
    """Heavy spikes need no caveat of their own: the bound assumes no distribution."""
    needs = np.random.default_rng(0).choice([1.2, 2.0], 2000, p=[0.98, 0.02])
    advice = advise(needs, steps_share=0.9).overall
    assert (advice.factor, advice.promised) == (1.2, True)
    assert advice.steps_over == (needs == 2.0).sum()
    assert advice.worst == 8 / 20
    advice = advise(needs).overall
    assert (advice.factor, advice.promised) == (2.0, True)


def test_bursts_that_come_together_are_a_caveat():
    needs = np.full(2000, 1.2)
    needs[1500:1540] = 2.0
    (caveat,) = advise(needs).overall.caveats
    assert caveat.startswith("2000 steps, worth 51 independent ones, promise no more than 94.3 %")


def test_a_slow_change_is_a_caveat():
    needs = np.random.default_rng(0).choice([1.2, 1.3], 2000)
    needs[500:1500] = np.random.default_rng(1).choice([1.2, 1.3], 1000, p=[0.7, 0.3])
    (caveat,) = advise(needs).overall.caveats
    assert caveat.startswith("the need changes slowly over the trace, more than by chance")


def test_an_end_that_needs_more_is_a_caveat(monkeypatch):
    monkeypatch.setattr("padded_dispatch.tune.recommend.changes_slowly", lambda *_: False)
    needs = np.random.default_rng(0).choice([1.2, 1.3], 1000)
    needs[[-41, -32, -20, -11, -2]] = 1.6
    (caveat,) = advise(needs).overall.caveats
    assert caveat.startswith("the last tenth of the steps needs more than the steps before it")


def test_a_need_that_grows_has_its_price():
    """A need higher by a tenth drops at 1.3 what is dropped at 1.3 / 1.1, or the next lower one."""
    needs = np.random.default_rng(0).choice([1.2, 1.3], 1000)
    found = advise(needs)
    assert found.overall.factor == 1.3
    at_1_1 = (1 * (needs == 1.2) + 2 * (needs == 1.3)).sum() / (T * 1000)
    assert found.overall.dropped_if_more == at_1_1
    assert advise(needs, factors=[1.2, 1.3]).overall.dropped_if_more is None
    assert "by a tenth" not in advise(needs, factors=[1.2, 1.3]).sentence()


def test_the_steps_covered_are_those_of_training():
    needs = np.random.default_rng(0).choice([1.2, 1.3], 1000)
    found = replay(trace_of(needs, steps=10 * np.arange(1000)), FACTORS, policy="position")
    assert recommend(found, Target(drop=0.0)).overall.steps_covered == 200  # every tenth is traced


def test_drift_gives_a_schedule():
    needs = np.concatenate([np.tile([1.9, 2.0], 100), np.tile([1.2, 1.3], 300)])
    found = advise(needs, steps_share=0.9)
    advice = found.overall
    assert advice.phases == (
        Phase(first_step=0, factor=2.0),
        Phase(first_step=200, factor=1.3),
    )
    assert advice.factor == 2.0  # without a schedule
    (caveat,) = advice.caveats
    assert caveat.startswith("the need changes over the trace: the median step of its first half")


@pytest.mark.parametrize("rises", [True, False])
@pytest.mark.parametrize(("first", "every"), [(1, 1), (10, 10), (0, 1)])
def test_no_step_of_a_schedule_gets_too_little(first, every, rises):
    """Steps are numbered as by `train --trace`, with gaps, or as by Megatron, from 0."""
    low, high = np.tile([1.2, 1.3], 100), np.tile([1.9, 2.0], 100)
    needs = np.concatenate([low, high] if rises else [high, low])
    steps = first + every * np.arange(400)
    found = replay(trace_of(needs, steps=steps), FACTORS, policy="position")
    phases = recommend(found, Target(drop=0.0, steps_share=0.9)).overall.phases
    assert phases == (
        (Phase(first_step=0, factor=1.3), Phase(first_step=steps[199], factor=2.0))  # before a gap
        if rises
        else (Phase(first_step=0, factor=2.0), Phase(first_step=steps[200], factor=1.3))  # after it
    )
    for label, need in zip(steps, needs, strict=True):
        done_before = label - min(first, 1)
        assert [p.factor for p in phases if p.first_step <= done_before][-1] >= need


def test_a_change_without_effect_on_the_factor_gives_no_schedule():
    """Independent steps; the middle shifts within the grid's step, the tail stays."""
    seen = 0
    for seed in range(10):
        random = np.random.default_rng(seed)
        often = np.where(np.arange(2000) < 1000, 0.55, 0.65)
        needs = np.where(random.random(2000) < often, 1.3, 1.2)
        needs[random.random(2000) < 0.03] = 1.4
        seen += has_drifted(needs)
        advice = advise(needs).overall
        assert (advice.factor, advice.phases) == (1.4, ())
    assert seen > 5


def test_missing_ranks_are_a_caveat():
    sizes = TraceSizes(
        num_steps=300, num_layers=1, num_ranks=4, num_tokens=16, num_experts=8, top_k=2
    )
    trace = synthetic_trace("balanced", sizes)

    def caveats(part):
        return recommend(replay(part, [1.0, 2.0]), Target()).overall.caveats

    assert caveats(trace) == ()
    (caveat,) = caveats(trace.where(trace.ranks % 2 == 0))
    assert caveat == (
        "traces of 2 of 4 ranks are missing (1, 3), so their demand is unknown; give the traces of "
        "all ranks"
    )
    (caveat,) = caveats(trace.where((trace.ranks != 3) | (trace.steps < 290)))
    assert caveat.startswith("10 of 300 steps of a layer lack some of their 4 ranks, so ")


def test_order_of_factors_does_not_matter():
    needs = mixed(400, 1.3, 7)
    assert advise(needs, factors=FACTORS[::-1]) == advise(needs)


def test_a_grid_that_ends_too_low():
    with pytest.raises(
        ValueError, match=r"factors must suffice in every step, got 'at most 1\.2'; add 1\.5"
    ):
        advise(mixed(50, 1.5, 10), factors=[1.0, 1.2])


def test_a_trace_of_padding():
    empty = trace_of([1.2])
    empty.ids_NTK[:] = -1
    with pytest.raises(
        ValueError, match="trace must ask for at least one expert, got padding only"
    ):
        recommend(replay(empty, [1.0], policy="position"), Target())


@pytest.mark.parametrize("kind", KINDS)
def test_the_promise_holds_on_unseen_steps(kind):
    """Recommend from 600 steps, check on the next 300; each case without a promise has a caveat.

    By chance this trace of "topics" gets none. So did 4 of 88 settled traces, 8 of each kind.
    """
    sizes = TraceSizes(
        num_steps=900, num_layers=1, num_ranks=2, num_tokens=48, num_experts=8, top_k=2
    )
    trace = synthetic_trace(kind, sizes, seed=1)
    seen, unseen = trace.where(trace.steps < 600), trace.where(trace.steps >= 600)
    target = Target(drop=0.001, steps_share=0.95)
    advice = recommend(replay(seen, grid(largest_need(seen))), target).overall
    later = replay(unseen, [advice.factor]).by_layer_and_step()
    kept = later.dropped[0].sum(0) <= 0.001 * later.demand.sum(0)
    assert kept.mean() >= 0.95
    assert advice.promised == (kind not in ("drift", "topics"))
    assert all(caveat.startswith("the need changes ") for caveat in advice.caveats)


def test_steps_after_a_change_may_break_the_target():
    """Routing becomes less even, and the trace holds only its start: hence the caveat."""
    sizes = TraceSizes(
        num_steps=900, num_layers=1, num_ranks=2, num_tokens=48, num_experts=8, top_k=2
    )
    trace = synthetic_trace("drift", sizes, strength=3.0, seed=1)
    seen, unseen = trace.where(trace.steps < 300), trace.where(trace.steps >= 600)
    advice = recommend(replay(seen, grid(largest_need(seen))), Target(steps_share=0.9)).overall
    later = replay(unseen, [advice.factor]).by_layer_and_step()
    kept = later.dropped[0].sum(0) <= 0.001 * later.demand.sum(0)
    assert kept.mean() < 0.9
    assert not advice.promised


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_few_promises_break(kind):
    """A quick version of `tests.tune.promises`: 60 runs, so 5 % are 3."""
    row = try_kind(kind, KINDS_OF_NEED[kind], num_steps=500, num_runs=60)
    assert row["broken_next"] <= 3
    if row["group"] == "independent":
        assert row["promised"] >= 50
    if row["group"] == "slow":
        assert row["promised"] <= 6


def test_without_the_tests_on_the_trace_promises_break(monkeypatch):
    """The program counts broken promises where there are some."""
    monkeypatch.setattr("padded_dispatch.tune.recommend.changes_slowly", lambda *_: False)
    monkeypatch.setattr("padded_dispatch.tune.recommend.end_differs", lambda *_: False)
    monkeypatch.setattr("padded_dispatch.tune.recommend.has_drifted", lambda *_: False)
    kind = "growing width"
    row = try_kind(kind, KINDS_OF_NEED[kind], num_steps=500, num_runs=60)
    assert row["promised"] > 40
    assert row["broken_later"] > 40
