"""The acceptance kernel against the plain torch that specifies it, bit by bit."""

import pytest
import torch
from hypothesis import given

from padded_dispatch.kernels.acceptance import accept
from padded_dispatch.ops.acceptance import accept_in_torch
from tests.support.acceptance_cases import AcceptanceCase, acceptance_cases
from tests.support.device import equal, few, here


def test_accept_example():
    demand_SE = here([[5, 1], [0, 6]]).int()
    assert accept(demand_SE, 8, 1).tolist() in ([[3, 1], [0, 4]], [[4, 1], [0, 3]])


@few
@given(case=acceptance_cases())
def test_accept(case: AcceptanceCase):
    demand_SE = torch.from_numpy(case.demand_SE)
    kept_SE = None if case.kept_SE is None else torch.from_numpy(case.kept_SE)
    found_SE = accept(
        here(demand_SE),
        case.num_rows,
        case.num_ranks,
        None if kept_SE is None else here(kept_SE),
    )
    equal((found_SE, accept_in_torch(demand_SE, case.num_rows, case.num_ranks, kept_SE)))


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_accept_of_many_cells_and_rows(num_ranks):
    """More cells than a warp has lanes, a number that is no power of two, products past 32 bits."""
    generator = torch.Generator().manual_seed(num_ranks)
    demand_SE = torch.randint(0, 2**21, (16, 24), generator=generator).int()
    for num_rows in (1, int(demand_SE.sum()) // num_ranks // 2, 2**31 - 1):
        found_SE = accept(here(demand_SE), num_rows, num_ranks)
        equal((found_SE, accept_in_torch(demand_SE, num_rows, num_ranks)))
