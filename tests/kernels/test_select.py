"""Selection kernels against the plain torch that specifies them, bit by bit.

Without a GPU they run in Triton's interpreter, which shows their logic; with one, as they are.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from padded_dispatch.config import POLICIES
from padded_dispatch.kernels import select
from padded_dispatch.ops.select import choice_ranks_in_torch, kept_map_in_torch
from padded_dispatch.utils.routings import routing_map
from tests.support.device import equal, few, here
from tests.support.routing_cases import RoutingCase, routing_cases


def test_select_example():
    asked_TE = here([[True], [True], [False], [True]])
    probs_TE = here([[0.2], [0.5], [0.9], [0.5]])
    for capacity, policy, expected in (
        (2, "probs", [False, True, False, True]),
        (2, "position", [True, True, False, False]),
        (1, "probs", [False, True, False, False]),
        (1, "position", [True, False, False, False]),
    ):
        kept_TE, demand_E = select.kept_map(asked_TE, probs_TE, capacity, policy)
        assert kept_TE.flatten().tolist() == expected
        assert demand_E.tolist() == [3]


def test_choice_ranks_example():
    asked_TE = here([[True, False, True, True]])
    ranks_TE = select.choice_ranks(asked_TE, here([[0.2, 0.9, 0.4, 0.2]]))
    assert ranks_TE[asked_TE].tolist() == [1, 0, 2]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@few
@given(case=routing_cases(), draw=st.integers(-(2**63), 2**63 - 1), data=st.data())
def test_select(dtype: torch.dtype, policy, case: RoutingCase, draw: int, data: st.DataObject):
    # Negative, zero of either sign, and equal scores: quarters from -1/2 on.
    probs_TE = (torch.from_numpy(case.probs_TE) - 0.5).to(dtype)
    probs_TE = torch.where(probs_TE == 0, torch.copysign(probs_TE, torch.randn(())), probs_TE)
    asked_TE = torch.from_numpy(case.map_TE)
    probs_TE[~asked_TE] = torch.nan
    levels = arrays(np.uint8, case.map_TE.shape, elements=st.integers(0, 3))
    level_TE = data.draw(st.none() | levels | levels.map(lambda level_TE: level_TE[:, :1]))
    level_TE = None if level_TE is None else torch.from_numpy(level_TE)
    number = torch.tensor(draw)
    kept_TE, demand_E = select.kept_map(
        here(asked_TE),
        here(probs_TE),
        case.capacity,
        policy,
        None if level_TE is None else here(level_TE),
        here(number),
    )
    expected_TE, _ = kept_map_in_torch(asked_TE, probs_TE, case.capacity, policy, level_TE, number)
    equal((kept_TE, expected_TE), (demand_E, asked_TE.sum(0, dtype=torch.int32)))


@given(case=routing_cases())
def test_choice_ranks(case: RoutingCase):
    asked_TE, probs_TE = torch.from_numpy(case.map_TE), torch.from_numpy(case.probs_TE)
    probs_TE[~asked_TE] = torch.nan
    ranks_TE = select.choice_ranks(here(asked_TE), here(probs_TE))
    equal((ranks_TE[here(asked_TE)], choice_ranks_in_torch(asked_TE, probs_TE)[asked_TE]))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("skew", ["uniform", "same", "none"])
def test_select_of_many_tokens_in_odd_sizes(policy, skew):
    """More tokens than one warp of a program holds, more than one block of ranks, three warps."""
    map_TE = torch.from_numpy(routing_map(1027, 13, 3, skew=skew))
    probs_TE = torch.rand(1027, 13).mul(8).round()
    draw = torch.tensor(5)
    for level_TE in (None, (torch.arange(1027) % 3 == 0)[:, None].to(torch.uint8)):
        kept_TE, demand_E = select.kept_map(
            here(map_TE),
            here(probs_TE),
            100,
            policy,
            None if level_TE is None else here(level_TE),
            here(draw),
        )
        expected_TE, _ = kept_map_in_torch(map_TE, probs_TE, 100, policy, level_TE, draw)
        equal((kept_TE, expected_TE), (demand_E, map_TE.sum(0, dtype=torch.int32)))
