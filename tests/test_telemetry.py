"""Figures from counts: two layers, four experts on two ranks, the second layer without any pass."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from padded_dispatch.config import DispatchConfig
from padded_dispatch.ops.counters import Counters
from padded_dispatch.ops.select import select
from padded_dispatch.telemetry import Snapshot, snapshot_of
from tests.support.pools import pools

T, K, E = 6, 2, 4


def counted() -> Counters:
    """Two passes of 6 tokens, 5 of which ask for two experts each; C = 3."""
    config = DispatchConfig(num_experts=E, top_k=K)
    counters = Counters(config, "cpu")
    asked_TE = torch.zeros(T, E, dtype=torch.bool)
    asked_TE[:5, 0] = True
    asked_TE[:4, 1] = True
    asked_TE[4, 3] = True
    probs_TE = torch.full((T, E), 0.5)
    for _ in range(2):
        selection = select(asked_TE, probs_TE, sizes=pools(E, 3))
        counters.observe(asked_TE, probs_TE, selection, pools(E, 3))
    counters.add_unplaced(torch.tensor([0, 7, 0, 0]))
    return counters


def snapshot() -> Snapshot:
    counters = counted()
    return snapshot_of(
        np.stack([counters.totals.numpy(), np.zeros_like(counters.totals.numpy())]),
        np.array([int(counters.max_demand), 0]),
        np.array([[0, 2], [0, 0]]),
        layers=(3, 5),
        top_k=K,
    )


def test_counts_are_those_of_the_counters():
    seen = snapshot()
    assert seen.layers_Y.tolist() == [3, 5]
    assert seen.demand_YE.tolist() == [[10, 8, 0, 2], [0] * 4]
    assert seen.kept_YE.tolist() == [[6, 6, 0, 2], [0] * 4]
    assert seen.dropped.tolist() == [6, 0]
    assert seen.asked_mass_Y.tolist() == [20 * 2**31, 0]
    assert seen.dropped_mass_Y.tolist() == [6 * 2**31, 0]
    assert (seen.num_tokens_Y[0], seen.lost_tokens_Y[0]) == (10, 2)  # token 3 keeps neither
    assert (seen.num_positions_Y[0], seen.num_passes_Y[0]) == (2 * T, 2)
    assert (seen.num_slots_Y[0], seen.num_unplaced_Y[0]) == (2 * E * 3, 7)
    assert seen.max_demand_Y.tolist() == [5, 0]


def test_rates_of_a_layer_and_of_one_that_never_ran():
    seen = snapshot()
    for values, expected in (
        (seen.dropped_share, 6 / 20),
        (seen.dropped_mass_share, 6 / 20),
        (seen.fill, 14 / 24),
        (seen.expert_overload, 10 / 5),
        (seen.rank_overload, 18 / 10),
        (seen.needed_factor, 5 * E / (T * K)),
    ):
        assert values[0] == expected and math.isnan(values[1])


def test_the_needed_factor_drops_nothing():
    """Through the capacity that follows from it."""
    factor = float(snapshot().needed_factor[0])
    assert math.ceil(T * K / E * factor) == 5


@pytest.mark.parametrize(("cells_per_pool", "factor"), [(1, 5 / 3), (2, 5 / 6), (4, 5 / 12)])
def test_the_needed_factor_is_of_a_pools_balanced_demand(cells_per_pool, factor):
    """A cell's balanced demand is T * K / E = 3 rows, a pool's as many times its cells."""
    seen = dataclasses.replace(snapshot(), cells_per_pool=cells_per_pool)
    assert seen.needed_factor[0] == pytest.approx(factor)


def test_demand_and_dropped_rows_per_expert_and_per_rank():
    seen = snapshot()
    assert seen.dropped_of_experts[0].tolist() == [4, 2, 0, 0]
    assert seen.demand_of_ranks[0].tolist() == [18, 2]
    assert seen.dropped_of_ranks[0].tolist() == [6, 0]


def test_figures_are_of_all_layers_and_of_each():
    seen = snapshot()
    assert seen.figures() == {
        "dropped": 0.3,
        "dropped_mass": 0.3,
        "lost_tokens": 2,
        "fill": 14 / 24,
        "expert_overload": 2.0,
        "rank_overload": 1.8,
        "needed_factor": 5 * 4 / 12,
        "idle_passes": 2,
        "unplaced": 7,
        "rerouted": 0,
        "protected_dropped": 0,
    }
    layers = seen.figures_of_layers()
    assert layers["layer"] == [3, 5]
    assert layers["dropped"] == [0.3, 0.0]
    assert layers["idle_passes"] == [2, 0]
    assert layers.keys() - {"layer"} == seen.figures().keys()


def test_nothing_counted_has_no_figures():
    totals_YW = np.zeros((1, len(counted().totals)), dtype=np.int64)
    none = np.zeros(1, dtype=np.int64)
    empty = snapshot_of(totals_YW, none, none[:, None], layers=(1,), top_k=K)
    assert empty.figures() == {}


def test_figures_of_perfect_balance_and_of_no_demand():
    counters = Counters(DispatchConfig(num_experts=E, top_k=K), "cpu")
    for num_asked in (T, 0):
        counters.reset()
        asked_TE = torch.arange(T)[:, None].expand(T, E) < num_asked
        selection = select(asked_TE, asked_TE.float(), sizes=pools(E, T))
        counters.observe(asked_TE, asked_TE.float(), selection, pools(E, T))
        seen = snapshot_of(
            counters.totals.numpy()[None],
            counters.max_demand.numpy()[None],
            np.zeros((1, 2), dtype=np.int64),
            layers=(1,),
            top_k=E,
        )
        figures = seen.figures()
        # Overloads are at least 1, also where nothing was asked for.
        assert (figures["expert_overload"], figures["rank_overload"]) == (1.0, 1.0)
        assert figures["needed_factor"] == (1.0 if num_asked else 0.0)
        assert seen.cells_per_pool == 1
