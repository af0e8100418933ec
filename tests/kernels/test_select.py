"""Selection kernels against the plain torch that specifies them, bit by bit.

Without a GPU they run in Triton's interpreter, which shows their logic; with one, as they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from padded_dispatch.config import POLICIES
from padded_dispatch.kernels import select
from padded_dispatch.ops.select import choice_ranks_in_torch, kept_map_in_torch
from tests.support.device import equal, here, here_if_tensor
from tests.support.routing_cases import RoutingCase, cases_with_pools, routing_cases
from tests.support.routings import routing_map


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


@contextmanager
def small_programs() -> Iterator[None]:
    """Divide the smallest maps and lists among several programs, each of which takes steps."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("_TILE", 8), ("_BLOCK", 128), ("_SHORT", 4), ("_MAX_BLOCKS", 2)):
            patch.setattr(select, name, value)
        yield


def assert_is_torch(
    case: RoutingCase,
    policy: str,
    dtype: torch.dtype,
    data: st.DataObject,
    *,
    experts_per_pool: int = 1,
    limit_E: Tensor | None = None,
) -> None:
    """Compare the kernels with torch, on a case whose scores are also negative."""
    # Zeros of either sign, and equal scores: quarters from -1/2 on.
    probs_TE = (torch.from_numpy(case.probs_TE) - 0.5).to(dtype)
    probs_TE = torch.where(probs_TE == 0, torch.copysign(probs_TE, torch.randn(())), probs_TE)
    asked_TE = torch.from_numpy(case.map_TE)
    probs_TE[~asked_TE] = torch.nan
    levels = arrays(np.uint8, case.map_TE.shape, elements=st.integers(0, 3))
    level_TE = data.draw(st.none() | levels | levels.map(lambda level_TE: level_TE[:, :1]))
    arguments = (
        asked_TE,
        probs_TE,
        case.capacity,
        policy,
        None if level_TE is None else torch.from_numpy(level_TE),
        torch.tensor(data.draw(st.integers(-(2**63), 2**63 - 1))),
        experts_per_pool,
        limit_E,
    )
    kept_TE, demand_E = select.kept_map(*map(here_if_tensor, arguments))
    expected_TE, _ = kept_map_in_torch(*arguments)
    equal((kept_TE, expected_TE), (demand_E, asked_TE.sum(0, dtype=torch.int32)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=15)
@given(given_case=cases_with_pools(), data=st.data())
def test_select(dtype: torch.dtype, policy, given_case, data: st.DataObject):
    case, experts_per_pool = given_case
    assert_is_torch(case, policy, dtype, data, experts_per_pool=experts_per_pool)


@pytest.mark.parametrize("policy", ["probs", "priority"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@settings(max_examples=10)
@given(given_case=cases_with_pools(), data=st.data())
def test_select_by_scores_of_16_bits(dtype: torch.dtype, policy, given_case, data: st.DataObject):
    case, experts_per_pool = given_case
    assert_is_torch(case, policy, dtype, data, experts_per_pool=experts_per_pool)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=10)
@given(case=routing_cases(), data=st.data())
def test_select_by_limits(policy, case: RoutingCase, data: st.DataObject):
    """Test limits of zero, too: a receiver may accept nothing."""
    num_tokens, num_experts = case.map_TE.shape
    limits = arrays(np.int32, num_experts, elements=st.integers(0, num_tokens + 1))
    limit_E = torch.from_numpy(data.draw(limits))
    assert_is_torch(case, policy, torch.float32, data, limit_E=limit_E)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=10)
@given(given_case=cases_with_pools(), data=st.data())
def test_select_with_several_programs_for_everything(policy, given_case, data: st.DataObject):
    case, experts_per_pool = given_case
    dtype = torch.float64 if policy == "priority" else torch.float32
    with small_programs():
        assert_is_torch(case, policy, dtype, data, experts_per_pool=experts_per_pool)


def bits_that_differ(dtype: torch.dtype) -> Tensor:
    """Return values that differ in one bit each from the next, and those of either sign."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(40, 1, generator=generator, dtype=torch.float64).to(dtype)
    above = torch.nextafter(values, torch.full_like(values, torch.inf))
    return torch.cat([values, above, -values])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_bit_of_a_score_counts(dtype):
    """Neighbouring floats, so that all digits decide: each slot more keeps the next row."""
    probs_TE = bits_that_differ(dtype)
    asked_TE = torch.ones_like(probs_TE, dtype=torch.bool)
    for slots in (1, 7, 40, 41, 79, 119):
        kept_TE, _ = select.kept_map(here(asked_TE), here(probs_TE), slots, "probs")
        equal((kept_TE, kept_map_in_torch(asked_TE, probs_TE, slots, "probs")[0]))


@given(case=routing_cases())
def test_choice_ranks(case: RoutingCase):
    asked_TE, probs_TE = torch.from_numpy(case.map_TE), torch.from_numpy(case.probs_TE)
    probs_TE[~asked_TE] = torch.nan
    ranks_TE = select.choice_ranks(here(asked_TE), here(probs_TE))
    equal((ranks_TE[here(asked_TE)], choice_ranks_in_torch(asked_TE, probs_TE)[asked_TE]))


@pytest.mark.parametrize(
    ("num_experts", "experts_per_pool", "skew", "policy"),
    [
        *((13, 1, "uniform", policy) for policy in POLICIES),
        *((24, 12, "uniform", policy) for policy in POLICIES),
        *((24, 12, skew, "priority") for skew in ("same", "none")),
        (13, 1, "same", "probs"),
    ],
)
def test_select_of_many_tokens_in_odd_sizes(policy, skew, num_experts, experts_per_pool):
    """Several tiles and steps of tokens, lists of several blocks, in one part and in several."""
    map_TE = torch.from_numpy(routing_map(259, num_experts, 3, skew=skew))
    generator = torch.Generator().manual_seed(1)
    probs_TE = torch.rand(259, num_experts, generator=generator).mul(8).round()
    slots = 25 * experts_per_pool
    draw = torch.tensor(5)
    protected_T1 = (torch.arange(259) % 3 == 0)[:, None].to(torch.uint8)
    for level_TE, short in ((None, 2**20), (protected_T1, 250)):
        arguments = (map_TE, probs_TE, slots, policy, level_TE, draw, experts_per_pool)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (("_TILE", 1024), ("_BLOCK", 128), ("_SHORT", short)):
                patch.setattr(select, name, value)
            kept_TE, demand_E = select.kept_map(*map(here_if_tensor, arguments))
        expected_TE, _ = kept_map_in_torch(*arguments)
        equal((kept_TE, expected_TE), (demand_E, map_TE.sum(0, dtype=torch.int32)))


@pytest.mark.parametrize("num_tokens", [1, 4095, 4096, 131072])
@pytest.mark.parametrize("num_pools", [1, 2, 8, 32, 500, 512])
@pytest.mark.parametrize("experts_per_pool", [1, 3, 64, 512])
def test_tiles_cover_the_map(num_tokens: int, num_pools: int, experts_per_pool: int):
    tiles = select._tiles(num_tokens, num_pools, experts_per_pool)
    blocks, columns = tiles.grid
    assert blocks == tiles.num_blocks <= 256
    assert (blocks - 1) * tiles.tokens_per_block < num_tokens <= blocks * tiles.tokens_per_block
    assert (columns - 1) * tiles.block_g < num_pools <= columns * tiles.block_g
    assert tiles.tokens_per_block % tiles.block_t == 0
    assert tiles.block_x >= experts_per_pool
    assert tiles.block_t * tiles.block_g * tiles.block_x <= 4096
