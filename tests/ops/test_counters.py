"""Counters add up, in place, exactly, and start again at zero."""

import numpy as np
import pytest
import torch

from padded_dispatch.config import DispatchConfig
from padded_dispatch.ops.counters import Counters, mass_units
from padded_dispatch.ops.overflow import reroute
from padded_dispatch.ops.select import select
from tests.support.pools import pools

CONFIG = DispatchConfig(num_experts=3, top_k=2)


def test_counts_add_up_and_reset():
    counters = Counters(CONFIG, "cpu")
    before = [tensor.data_ptr() for tensor in counters.tensors()]
    asked_TE = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
    probs_TE = torch.tensor([[0.5, 0.25, 9.0], [0.75, 9.0, 9.0], [1.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    for capacity in (2, 1):
        sizes = pools(3, capacity)
        selection = select(asked_TE, probs_TE, sizes=sizes)
        counters.observe(asked_TE, probs_TE, selection, sizes)
        counters.add_unplaced(torch.tensor([capacity, 0, 0], dtype=torch.int32))
    assert counters.demand_E.tolist() == [6, 2, 0]
    assert counters.kept_E.tolist() == [3, 2, 0]
    assert counters.asked_mass.item() == 2 * 10 * 2**30
    assert counters.dropped_mass.item() == 2 * 2**30 + 5 * 2**30  # token 0, then 0 and 1
    assert (counters.num_tokens.item(), counters.lost_tokens.item()) == (6, 1)
    assert (counters.num_positions.item(), counters.num_passes.item()) == (8, 2)
    assert (counters.num_slots.item(), counters.num_unplaced.item()) == (9, 3)
    assert counters.max_demand.item() == 3
    assert {tensor.dtype for tensor in counters.tensors()} == {torch.int64}
    counters.reset()
    assert not counters.demand_E.any() and not counters.totals.any()
    assert counters.max_demand.item() == 0
    # A captured graph adds to the memory that it saw.
    assert [tensor.data_ptr() for tensor in counters.tensors()] == before


def test_rerouted_rows_and_protected_ones_that_were_dropped_are_counted():
    counters = Counters(CONFIG, "cpu")
    asked_TE = torch.tensor([[1, 0, 0], [1, 0, 0], [1, 0, 0]], dtype=torch.bool)
    scores_TE = torch.tensor([[0.5, 0.2, 0.1], [0.6, 0.3, 0.2], [0.4, 0.1, 0.2]])
    protected_T = torch.tensor([True, False, True])
    # Keeps token 0.
    selection = select(asked_TE, scores_TE, sizes=pools(3, 1), protected_T=protected_T)
    found = reroute(selection, scores_TE, sizes=pools(3, 1), policy="probs")
    for _ in range(2):
        counters.observe(asked_TE, scores_TE, found, pools(3, 1))
    assert counters.demand_E.tolist() == [6, 0, 0]
    assert counters.kept_E.tolist() == [2, 2, 2]
    assert (counters.rerouted.item(), counters.protected_dropped.item()) == (4, 2)
    assert counters.lost_tokens.item() == 0


def test_a_pass_without_received_rows_is_idle():
    counters = Counters(CONFIG, "cpu")
    for received in ([0, 0], [0, 2], [0, 0]):
        counters.add_received(torch.tensor(received, dtype=torch.int32))
    assert counters.idle_passes.item() == 2


@pytest.mark.parametrize(
    ("capacity_pool", "max_demand", "num_slots"), [("expert", 3, 6 * 5), ("rank", 4, 2 * 5)]
)
def test_demand_and_slots_are_of_pools(capacity_pool, max_demand, num_slots):
    config = DispatchConfig(num_experts=6, top_k=2, num_ranks=2, capacity_pool=capacity_pool)
    counters = Counters(config, "cpu")
    asked_TE = torch.tensor(
        [[1, 0, 0, 1, 0, 0], [1, 0, 0, 0, 1, 0], [0, 0, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0]]
    ).bool()
    selection = select(asked_TE, asked_TE.float(), sizes=pools(6, 4))
    counters.observe(asked_TE, asked_TE.float(), selection, config.sizes_that_fit(4, 5))
    assert counters.max_demand.item() == max_demand
    assert counters.num_slots.item() == num_slots


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_mass_is_rounded_half_to_even(dtype):
    halves = torch.tensor([0.5, 1.5, 2.5, 3.0, 2.0**31]).double() * 2.0**-32
    expected = [0, 2, 2, 3, 2**31]
    if dtype == torch.float16:  # which has no such small numbers
        halves, expected = torch.tensor([0.5, 2.0**-24]), [2**31, 2**8]
    assert mass_units(halves.to(dtype)).tolist() == expected


def test_mass_of_any_probability_is_numpys():
    probs = torch.rand(1001, generator=torch.Generator().manual_seed(3))
    expected = np.rint(probs.double().numpy() * 2**32).astype(np.int64)
    assert mass_units(probs).tolist() == expected.tolist()
