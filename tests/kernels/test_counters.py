"""Counting on a GPU against NumPy and against torch; without a GPU in Triton's interpreter."""

import numpy as np
import pytest
import torch

from padded_dispatch.config import DispatchConfig
from padded_dispatch.kernels.counters import count
from padded_dispatch.ops.counters import SCALARS, Counters, count_in_torch
from padded_dispatch.ops.select import kept_map_in_torch
from tests.support.device import DEVICE


def counters(num_experts: int) -> Counters:
    """Not at zero."""
    made = Counters(DispatchConfig(num_experts=num_experts, top_k=1), DEVICE)
    made.totals.copy_(torch.arange(len(made.totals)) * 1000)
    made.max_demand.fill_(4)
    return made


def test_example():
    made = counters(2)
    asked_TE = torch.tensor([[1, 1], [1, 0]], dtype=torch.bool, device=DEVICE)
    kept_TE = torch.tensor([[0, 1], [1, 0]], dtype=torch.bool, device=DEVICE)
    probs_TE = torch.tensor([[0.25, 0.75], [0.5, 0.0]], device=DEVICE)
    demand_E = torch.tensor([2, 1], dtype=torch.int32, device=DEVICE)
    for run in (count, count_in_torch):
        made.reset()
        run(made.totals, made.max_demand, asked_TE, kept_TE, probs_TE, demand_E, demand_E, 1, 2)
        expected = [2, 1, 1, 1, 6 * 2**30, 2**30, 2, 0, 2, 1, 2, *[0] * (len(SCALARS) - 7)]
        assert made.totals.tolist() == expected
        assert made.max_demand.item() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "capacity", "experts_per_pool"),
    [
        (1, 1, 1, 1, 1),
        (37, 5, 2, 9, 5),
        (130, 128, 8, 7, 16),
        (257, 96, 6, 300, 1),
        (257, 96, 6, 300, 12),
        (70, 3, 3, 1, 1),
    ],
)
def test_counts_are_numpys(num_tokens, num_experts, top_k, capacity, experts_per_pool, dtype):
    generator = torch.Generator().manual_seed(num_tokens)
    probs_TE = torch.rand(num_tokens, num_experts, generator=generator).to(dtype)
    asked_TE = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
    asked_TE.scatter_(1, (probs_TE.float() + probs_TE.float().roll(1, 0)).topk(top_k).indices, True)
    asked_TE[::4] = False  # padding tokens
    probs_TE[~asked_TE] = torch.nan  # never read
    kept_TE, _ = kept_map_in_torch(asked_TE, torch.where(asked_TE, probs_TE, 0), capacity, "probs")
    demand_E = asked_TE.sum(0, dtype=torch.int32)
    pooled_E = demand_E + torch.arange(num_experts, dtype=torch.int32)  # As if of two sources.

    asked, kept = asked_TE.numpy(), kept_TE.numpy()
    mass = np.rint(probs_TE.double().numpy()[asked] * 2**32).astype(np.int64)
    dropped = np.rint(probs_TE.double().numpy()[asked & ~kept] * 2**32).astype(np.int64)
    expected = counters(num_experts).totals.cpu().numpy()
    expected[:num_experts] += asked.sum(0)
    expected[num_experts : 2 * num_experts] += kept.sum(0)
    expected[2 * num_experts :] += [
        *(mass.sum(), dropped.sum()),
        asked.any(1).sum(),
        (asked.any(1) & ~kept.any(1)).sum(),
        *(num_tokens, 1, num_experts * capacity),
        *[0] * (len(SCALARS) - 7),
    ]
    made = counters(num_experts)
    tensors = [tensor.to(DEVICE) for tensor in (asked_TE, kept_TE, probs_TE, demand_E, pooled_E)]
    count(made.totals, made.max_demand, *tensors, experts_per_pool, num_experts * capacity)
    assert made.totals.tolist() == expected.tolist()
    assert made.max_demand.item() == max(4, pooled_E.view(-1, experts_per_pool).sum(1).max())
    again = counters(num_experts)
    count_in_torch(
        again.totals, again.max_demand, *tensors, experts_per_pool, num_experts * capacity
    )
    assert torch.equal(again.totals, made.totals)
    assert torch.equal(again.max_demand, made.max_demand)


def test_halves_are_rounded_to_even():
    made = counters(1)
    made.reset()
    probs_TE = torch.tensor([[0.5], [1.5], [2.5], [3.0], [2.0**31]], device=DEVICE) * 2.0**-32
    every_TE = torch.ones(5, 1, dtype=torch.bool, device=DEVICE)
    demand_E = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    count(made.totals, made.max_demand, every_TE, every_TE, probs_TE, demand_E, demand_E, 1, 5)
    assert made.asked_mass.item() == 0 + 2 + 2 + 3 + 2**31
    assert made.dropped_mass.item() == 0
