"""The grid, the busiest rank, options and their costs, and held-out steps."""

import dataclasses

import numpy as np
import pytest

from padded_dispatch.config import DispatchConfig
from padded_dispatch.trace import Trace
from padded_dispatch.tune.cost import LayerSizes, cost
from padded_dispatch.tune.recommend import Target
from padded_dispatch.tune.replay import replay
from padded_dispatch.tune.study import (
    HeldOut,
    Layer,
    Question,
    busiest_rows,
    grid,
    largest_need,
    study,
)
from padded_dispatch.tune.synthetic import TraceSizes, synthetic_trace
from padded_dispatch.tune.time_model import shipped

QUESTION = Question(
    target=Target(drop=0.001, steps_share=0.9), eval_target=Target(drop=0.0, steps_share=0.9)
)
SIZES = TraceSizes(num_steps=60, num_layers=2, num_ranks=2, num_tokens=37, num_experts=6, top_k=2)


@pytest.fixture(scope="module")
def trace():
    return synthetic_trace("zipf", SIZES, seed=3)


def test_the_grid_ends_where_nothing_is_dropped(trace):
    need = largest_need(trace)
    found = replay(trace, grid(need))
    assert need == found.needed_factor.max()
    assert list(found.factors) == sorted(set(found.factors))
    assert found.dropped[-1].sum() == 0
    assert found.dropped[-2].sum() > 0
    assert grid(1.0) == (0.5, 0.75, 0.9, 1.0)
    assert grid(2.301)[-4:] == (2.0, 2.1, 2.21, 2.31)
    ratios = np.diff(grid(30.0)[3:]) / grid(30.0)[3:-1]
    assert ratios.max() < 0.101


def test_busiest_rows_by_hand():
    # Two ranks with two experts each. Pass 0: rank 0 sends 3 rows to rank 0's experts and 1 to
    # rank 1's, rank 1 sends 0 and 4: 3 against 5. Pass 1: 4 + 2 against 0 + 2.
    rows = [[0, 1, 1, 2], [2, 3, 3, 2], [0, 0, 1, 1], [0, 1, 2, 3]]
    trace = Trace(
        num_experts=4,
        top_k=1,
        num_ranks=2,
        steps=np.zeros(4, np.int64),
        layers=np.ones(4, np.int32),
        ranks=np.array([0, 1, 0, 1], np.int32),
        ids_NTK=np.array(rows, np.int16)[:, :, None],
        probs_NTK=None,
    )
    found = replay(trace, [4.0, 1.0], policy="position")
    # At factor 1, C = 1: three and four slots filled in pass 0 become 2 + 0 against 1 + 2.
    assert busiest_rows(trace, found).tolist() == [(3 + 4) / 2, (5 + 6) / 2]
    half = trace.where(trace.ranks == 0)  # the other source is taken to be like this one
    assert busiest_rows(half, replay(half, [4.0], policy="position")).tolist() == [(6 + 8) / 2]


def test_options(trace):
    found = study(trace, QUESTION, name="zipf")
    assert [option.factor for option in found.options] == sorted(found.replay.factors)
    first, last = found.options[0], found.options[-1]
    assert (last.dropped, last.lost, last.worst_layer) == (0.0, 0.0, 0.0)
    assert first.factor == 0.5
    assert first.dropped == found.replay.dropped[0].sum() / (60 * 2 * 2 * 37 * 2)
    assert first.worst_layer >= first.dropped > first.balanced_drop > last.balanced_drop
    slots = 6 * first.capacity
    assert first.fill == pytest.approx(found.replay.kept[0].mean() / slots, rel=1e-12)
    assert first.cost is None
    assert first.padded_ms is None
    assert found.option(1.0).capacity == 13
    assert found.training.overall.factor in [option.factor for option in found.options]


def test_costs_are_those_of_the_config(trace):
    layer = Layer(
        sizes=LayerSizes(num_tokens=37, hidden_size=64, ffn_size=48), time_model=shipped()
    )
    question = dataclasses.replace(QUESTION, alignment=16, factors=(8.0,))
    (option,) = study(trace, question, name="zipf", layer=layer).options
    config = DispatchConfig(num_experts=6, top_k=2, num_ranks=2, capacity_factor=8.0, alignment=16)
    assert option.capacity == config.capacity(37) == 40
    found = replay(trace, [8.0], alignment=16)
    assert option.cost == cost(config, layer.sizes, busiest_rows=busiest_rows(trace, found).item())
    ms = shipped().layer_ms(option.cost, num_local_experts=3, packed=True)
    assert option.packed_ms == ms
    assert option.padded_ms == shipped().layer_ms(option.cost, num_local_experts=3, packed=False)


def test_evaluation_has_its_own_trace_and_target(trace):
    alone = study(trace, QUESTION, name="zipf")
    assert alone.evaluation.overall.factor >= alone.training.overall.factor
    assert alone.evaluation.target.drop == 0.0
    even = synthetic_trace("balanced", SIZES, seed=4)
    with_even = study(trace, QUESTION, name="zipf", eval_trace=even)
    assert with_even.evaluation.overall.factor < alone.evaluation.overall.factor
    assert with_even.training == alone.training


def test_steps_that_are_held_out_are_checked_and_not_seen(trace):
    question = dataclasses.replace(QUESTION, hold_out=0.25)
    found = study(trace, question, name="zipf")
    seen, unseen = trace.where(trace.steps < 45), trace.where(trace.steps >= 45)
    assert found.training == study(seen, QUESTION, name="zipf").training
    factor = found.training.overall.factor
    later = replay(unseen, [factor]).by_layer_and_step()
    kept = later.dropped[0].sum(0) <= 0.001 * later.demand.sum(0)
    assert found.held_out == HeldOut(factor=factor, num_steps=15, kept=int(kept.sum()))
    assert "the last 15 steps, which the recommendation has not seen" in found.held_out_sentence()
    assert study(trace, QUESTION, name="zipf").held_out is None


def test_the_last_factor_of_a_schedule_is_the_one_to_check():
    sizes = dataclasses.replace(SIZES, num_steps=200)
    falling = synthetic_trace("drift", sizes, strength=2.0, seed=3)
    falling = dataclasses.replace(falling, steps=199 - falling.steps)
    found = study(falling, dataclasses.replace(QUESTION, hold_out=0.25), name="falling")
    phases = found.training.overall.phases
    assert len(phases) > 1
    assert found.held_out is not None
    assert found.held_out.factor == phases[-1].factor < found.training.overall.factor


def test_hold_out_leaves_steps_to_see(trace):
    with pytest.raises(ValueError, match=r"hold_out must be a share from 0 to below 1, got 1\.0"):
        dataclasses.replace(QUESTION, hold_out=1.0)
    one_step = trace.where(trace.steps == 0)
    with pytest.raises(
        ValueError, match=r"hold_out must leave at least one of 1 steps .*, got 0\.5"
    ):
        study(one_step, dataclasses.replace(QUESTION, hold_out=0.5), name="short")


def test_experts_that_are_split():
    """Two expert-parallel ranks, each expert split over two: four sources, and six experts."""
    sizes = dataclasses.replace(SIZES, num_ranks=6)
    trace = synthetic_trace("zipf", sizes, seed=3)
    trace = dataclasses.replace(trace.where(trace.ranks < 4), num_ranks=4)
    layer = Layer(
        sizes=LayerSizes(num_tokens=37, hidden_size=64, ffn_size=48), time_model=shipped()
    )
    question = dataclasses.replace(QUESTION, alignment=16, factors=(6.0,), etp=2)
    found = study(trace, question, name="split", layer=layer)
    config = DispatchConfig(
        num_experts=6, top_k=2, num_ranks=2, etp_size=2, capacity_factor=6.0, alignment=16
    )
    (option,) = found.options
    assert (found.num_ranks, option.capacity) == (2, config.capacity(37))
    busiest = busiest_rows(trace, replay(trace, [6.0], alignment=16), etp=2)
    assert option.cost == cost(config, layer.sizes, busiest_rows=busiest.item())
    received = found.replay.demand_by_expert.reshape(-1, 4, 2, 3).sum((1, 3))  # per pass and rank
    assert busiest.item() == received.max(1).mean()
    with pytest.raises(ValueError, match=r"etp must split 4 sources .* of 6 experts, got 1; give"):
        study(trace, dataclasses.replace(question, etp=1), name="whole")
    with pytest.raises(ValueError, match=r"etp must split 4 sources .*, got 3"):
        study(trace, dataclasses.replace(question, etp=3), name="thirds")
