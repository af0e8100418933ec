"""Selection kernels against the plain torch that specifies them, bit by bit.

Without a GPU they run in Triton's interpreter, which shows their logic; with one, as they are.
"""

import pytest
import torch
from hypothesis import given, settings

from padded_dispatch.config import POLICIES
from padded_dispatch.kernels import select
from padded_dispatch.routing.select import kept_map_in_torch
from tests.support.device import equal, here_if_tensor
from tests.support.routing_cases import RoutingCase, routing_cases
from tests.support.routings import routing_map

# Divides the smallest maps and lists among several programs, each of which takes steps.
SMALL = {"_TILE": 8, "_BLOCK": 128, "_SHORT": 4, "_MAX_BLOCKS": 2}


def assert_is_torch(*arguments: object, **sizes: int) -> None:
    """Compare the kernels, with these sizes of programs, with torch."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(select, name, value)
        found = select.kept_map(*map(here_if_tensor, arguments))
    equal(*zip(found, kept_map_in_torch(*arguments), strict=True))


@pytest.mark.parametrize("sizes", [{}, SMALL], ids=["one program", "several"])
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
    probs_TE = torch.where(probs_TE == 0, torch.copysign(probs_TE, torch.randn(())), probs_TE)
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


@pytest.mark.parametrize("short", [2**20, 250], ids=["one part", "several parts"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("skew", ["uniform", "same", "none"])
def test_select_of_many_tokens_in_odd_sizes(skew, policy, short):
    """Several tiles and steps of tokens, lists of several blocks; all to the same, or to none."""
    map_TE = torch.from_numpy(routing_map(259, 37, 3, skew=skew))
    generator = torch.Generator().manual_seed(1)
    probs_TE = torch.rand(259, 37, generator=generator).mul(8).round()
    sizes = {"_TILE": 1024, "_BLOCK": 128, "_SHORT": short}
    assert_is_torch(map_TE, probs_TE, 20, policy, **sizes)


@pytest.mark.parametrize("num_tokens", [1, 4095, 4096, 131072])
@pytest.mark.parametrize("num_experts", [1, 2, 8, 33, 500, 512])
def test_tiles_cover_the_map(num_tokens: int, num_experts: int):
    (blocks, columns), tokens_per_block, tile = select._tiles(num_tokens, num_experts)
    assert blocks <= 256
    assert (blocks - 1) * tokens_per_block < num_tokens <= blocks * tokens_per_block
    assert (columns - 1) * tile["BLOCK_E"] < num_experts <= columns * tile["BLOCK_E"]
    assert tokens_per_block % tile["BLOCK_T"] == 0
    assert tile["BLOCK_T"] * tile["BLOCK_E"] <= 4096
