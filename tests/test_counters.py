"""Counters add up, in place, exactly, and start again at zero; figures of what they counted."""

import dataclasses
import math

import numpy as np
import torch

from padded_dispatch.config import DispatchConfig
from padded_dispatch.counters import Counters, Snapshot
from padded_dispatch.experts.plain import store_offsets
from padded_dispatch.experts.store import Room
from padded_dispatch.routing import select


def test_a_store_is_counted_where_its_rows_are_kept():
    config = DispatchConfig(num_experts=6, top_k=2, num_ranks=3, capacity_pool="store")
    counters = Counters(config, "cpu", rank=1)
    asked_TE = torch.tensor([[1, 0, 0, 1, 0, 0], [1, 0, 0, 0, 1, 0], [0, 0, 0, 1, 1, 0]]).bool()
    probs_TE = torch.where(asked_TE, 0.5, torch.nan)
    selection = select(asked_TE, probs_TE, capacity=3)
    counters.observe(asked_TE, probs_TE, selection)
    count_SL = torch.tensor([[4, 0], [2, 1]], dtype=torch.int32)
    top = torch.zeros(3, dtype=torch.int32)
    # 7 rows need 7, then 14; at most 5 are two of each expert. In the last pass none came.
    for first, passes in ((True, 1), (False, 1), (False, 0)):
        room = Room(limit=5, max_rows=5, share=7, top=top, first=first)
        store_offsets(passes * count_SL, room, **counters.of_receiver)
    assert counters.demand_E.tolist() == [2, 0, 0, 2, 2, 0]
    assert counters.kept_E.tolist() == [0, 0, 8, 2, 0, 0]
    assert (counters.lost_tokens.item(), counters.no_room.item()) == (0, 4)
    assert (counters.num_positions.item(), counters.num_slots.item()) == (3, 0)
    assert (counters.max_need.item(), counters.num_again.item()) == (14, 5)


def test_cells_for_all_tokens_count_what_they_need():
    counters = Counters(DispatchConfig(num_experts=2, top_k=1), "cpu")
    asked_TE = torch.tensor([[1, 0], [1, 0], [0, 1]]).bool()
    probs_TE = torch.full((3, 2), 0.5)
    counters.observe(asked_TE, probs_TE, select(asked_TE, probs_TE, capacity=3))
    assert counters.max_need.item() == 2
    assert counters.kept_E.tolist() == counters.demand_E.tolist() == [2, 1]
    assert counters.num_slots.item() == 6


# Figures: two layers, four experts on two ranks, the second layer without any pass.
T, K, E = 6, 2, 4


def snapshot() -> Snapshot:
    """Two passes of 6 tokens, 5 of which ask for two experts each; C = 3."""
    counters = Counters(DispatchConfig(num_experts=E, top_k=K), "cpu")
    asked_TE = torch.zeros(T, E, dtype=torch.bool)
    asked_TE[:5, 0] = True
    asked_TE[:4, 1] = True
    asked_TE[4, 3] = True
    probs_TE = torch.full((T, E), 0.5)
    for _ in range(2):
        selection = select(asked_TE, probs_TE, capacity=3)
        counters.observe(asked_TE, probs_TE, selection)
    counters.num_again += 5
    totals_W = counters.totals.numpy()
    totals_YW = np.stack([totals_W, np.zeros_like(totals_W)])
    return Snapshot(
        layers_Y=np.array([3, 5]),
        top_k=K,
        totals_YW=totals_YW,
        max_need_Y=np.array([5, 0]),
        num_ranks=2,
    )


def test_figures_are_of_all_layers_and_of_each_also_of_one_that_never_ran():
    seen = snapshot()
    assert (seen.dropped_share[0], seen.needed_factor[0]) == (6 / 20, 5 * E / (T * K))
    assert math.isnan(seen.dropped_share[1]) and math.isnan(seen.needed_factor[1])
    # Through the capacity that follows from it, nothing is dropped.
    assert math.ceil(T * K / E * float(seen.needed_factor[0])) == 5
    assert seen.figures() == {
        "dropped": 0.3,
        "lost_tokens": 2,
        "fill": 14 / 24,
        "expert_overload": 2.0,
        "rank_overload": 1.8,
        "needed_factor": 5 * 4 / 12,
    }
    layers = seen.figures_of_layers()
    assert layers.keys() == seen.figures().keys()
    for name in ("dropped", "fill", "expert_overload", "rank_overload"):
        assert layers[name] == [seen.figures()[name], 0], name
    seen.counts["demand_E"][:] = 0  # Passes of padding alone are in balance.
    assert seen.figures()["expert_overload"] == seen.figures()["rank_overload"] == 1.0


def test_figures_of_a_store():
    of_store = dataclasses.replace(snapshot(), share_rows_Y=np.array([8, 8]))
    assert of_store.needed_factor.tolist() == [5 / 8, 0]
    figures = of_store.figures()
    assert figures["needed_factor"] == 5 / 8
    known = snapshot().figures().keys() - {"lost_tokens", "fill"} | {"recomputed"}
    assert figures["recomputed"] == 5 / 20
    of_store.counts["no_room"][:] = 4, 0  # 14 rows are kept.
    assert of_store.dropped_share[0] == 4 / 18 and math.isnan(of_store.dropped_share[1])
    assert figures.keys() == known == of_store.figures_of_layers().keys()
