"""Selection kernels against the plain torch that specifies them, bit by bit."""

import pytest
import torch
from hypothesis import given, settings

from padded_dispatch.config import POLICIES
from padded_dispatch.kernels import select
from padded_dispatch.routing import kept_map_in_torch
from tests.support.device import equal, here_if_tensor
from tests.support.routings import LARGE, RoutingCase, large_map, routing_cases, routing_map

# Divides the smallest maps among several programs, and the scores of an expert among steps.
SMALL = {"_TILE": 8, "_BLOCK": 32}


def assert_is_torch(*arguments: object, **sizes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(select, name, value)
        found = select.kept_map(*map(here_if_tensor, arguments))
    equal(*zip(found, kept_map_in_torch(*arguments), strict=True))


@pytest.mark.parametrize("sizes", [{}, SMALL], ids=["one step", "several"])
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        ("position", torch.float32),
        *(("probs", dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)),
    ],
)
@settings(max_examples=8)
@given(case=routing_cases())
def test_select(policy, dtype: torch.dtype, sizes: dict[str, int], case: RoutingCase):
    # Zeros of either sign, and equal scores: quarters from -1/2 on.
    probs_TE = (torch.from_numpy(case.probs_TE) - 0.5).to(dtype)
    probs_TE[1::2] = torch.where(probs_TE[1::2] == 0, -0.0, probs_TE[1::2])
    asked_TE = torch.from_numpy(case.map_TE)
    probs_TE[~asked_TE] = torch.nan
    assert_is_torch(asked_TE, probs_TE, case.capacity, policy, **sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_bit_of_a_score_counts(dtype):
    """Neighbouring floats, so that all digits decide: each slot more keeps the next row."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(40, 1, generator=generator, dtype=torch.float64).to(dtype)
    above = torch.nextafter(values, torch.full_like(values, torch.inf))
    probs_TE = torch.cat([values, above, -values])
    asked_TE = torch.ones_like(probs_TE, dtype=torch.bool)
    for slots in (1, 7, 40, 41, 79, 119):
        assert_is_torch(asked_TE, probs_TE, slots, "probs")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("skew", ["uniform", "same", "none"])
def test_select_of_many_tokens_in_odd_sizes(skew, policy):
    """Several tiles, and several steps of tokens; all to the same, or to none."""
    map_TE = torch.from_numpy(routing_map(259, 37, 3, skew=skew))
    generator = torch.Generator().manual_seed(1)
    probs_TE = torch.rand(259, 37, generator=generator).mul(8).round() - 4
    probs_TE[::2] *= -1  # Zeros of either sign are equal.
    assert_is_torch(map_TE, probs_TE, 10, policy, _TILE=1024, _BLOCK=128)
    assert_is_torch(map_TE[:9].t(), probs_TE[:9].t(), 1, policy)  # Not contiguous.


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("num_tokens", "num_experts"), LARGE)
def test_selection_of_any_size(cuda, policy, dtype, num_tokens, num_experts):
    """With an expert that all tokens ask for."""
    map_TE, probs_TE = large_map(num_tokens, num_experts)
    arguments = map_TE, probs_TE.to(dtype), num_tokens * 8 // num_experts, policy
    found, expected = select.kept_map(*arguments), kept_map_in_torch(*arguments)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert (found[0] != map_TE).any()


def test_more_rows_than_slots_never_stay():
    """Not even those whose probabilities are NaN, in any of its forms."""
    bits = torch.tensor([[-1], [2**31 - 1], [-(2**22)], [0]], dtype=torch.int32)
    asked_TE = torch.ones(4, 1, dtype=torch.bool)
    arguments = map(here_if_tensor, (asked_TE, bits.view(torch.float32), 2, "probs"))
    kept_TE, demand_E = select.kept_map(*arguments)
    assert (kept_TE.sum(), demand_E.tolist()) == (2, [4])
