"""Counting on a GPU against NumPy and against torch; without a GPU in Triton's interpreter."""

import numpy as np
import pytest
import torch

from padded_dispatch.config import DispatchConfig
from padded_dispatch.counters import Counters, count_in_torch
from padded_dispatch.kernels import SCALARS
from padded_dispatch.kernels.counters import count
from padded_dispatch.routing import kept_map_in_torch
from tests.support.device import DEVICE, here, ints

BOTH = pytest.mark.parametrize("run", [count, count_in_torch])
NEVER_COUNTED = [0] * (len(SCALARS) - 4)


def counters(num_experts: int) -> Counters:
    made = Counters(DispatchConfig(num_experts=num_experts, top_k=1), DEVICE)
    made.totals.copy_(torch.arange(len(made.totals)) * 1000)
    made.max_need.fill_(4)
    return made


@BOTH
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "capacity"),
    [(1, 1, 1, 1), (37, 5, 2, 9), (130, 128, 8, 7), (257, 96, 6, 300), (3, 4100, 3, 1)],
)
def test_counts_are_numpys(num_tokens, num_experts, top_k, capacity, run):
    generator = torch.Generator().manual_seed(num_tokens)
    probs_TE = torch.rand(num_tokens, num_experts, generator=generator)
    asked_TE = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
    asked_TE.scatter_(1, (probs_TE + probs_TE.roll(1, 0)).topk(top_k).indices, True)
    asked_TE[::4] = False  # padding tokens
    kept_TE, demand_E = kept_map_in_torch(asked_TE, probs_TE, capacity, "probs")

    asked, kept = asked_TE.numpy(), kept_TE.numpy()
    num_slots = num_experts * capacity
    added = [
        *(*asked.sum(0), *kept.sum(0)),
        (asked.any(1) & ~kept.any(1)).sum(),
        *(num_tokens, 1, num_slots),
        *NEVER_COUNTED,
    ]
    made = counters(num_experts)
    expected = made.totals.cpu().numpy() + np.array(added)
    maps = map(here, (asked_TE, kept_TE, demand_E))
    run(made.totals, made.max_need, *maps, num_slots)
    assert made.totals.tolist() == expected.tolist()
    assert made.max_need.item() == max(4, demand_E.max())


@BOTH
def test_count_examples(run):
    """What only receivers know is not counted."""
    asked_TE, kept_TE = here([[True, True], [True, False]]), here([[False, True], [True, False]])
    for given, added in (
        ((kept_TE, ints(2, 1), 2), [2, 1, 1, 1, 0, 2, 1, 2]),
        ((None, None, 0), [2, 1, 0, 0, 0, 2, 1, 0]),
    ):
        made = counters(2)
        expected = made.totals.cpu() + torch.tensor([*added, *NEVER_COUNTED])
        run(made.totals, made.max_need, asked_TE, *given)
        assert made.totals.tolist() == expected.tolist() and made.max_need.item() == 4
