"""Acceptance: against the reference, and its promises to receivers, sources and experts."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch.library import opcheck

from padded_dispatch import reference
from padded_dispatch.config import DispatchConfig
from padded_dispatch.ops.acceptance import Receivers, accept, accept_in_torch
from tests.support.acceptance_cases import AcceptanceCase, acceptance_cases
from tests.support.routing_cases import assert_same


def accepted(case: AcceptanceCase, *, keep: bool = True) -> np.ndarray:
    """Return what the code accepts; without the rows that are kept in any case if not `keep`."""
    kept_SE = case.kept_SE if keep else None
    return accept_in_torch(
        torch.from_numpy(case.demand_SE),
        case.num_rows,
        case.num_ranks,
        None if kept_SE is None else torch.from_numpy(kept_SE),
    ).numpy()


def of_receivers(case: AcceptanceCase, rows_SE: np.ndarray) -> np.ndarray:
    """Return [R, S, L] of a table [S, E]."""
    return np.stack(np.split(rows_SE, case.num_ranks, axis=1))


def base(case: AcceptanceCase) -> np.ndarray:
    """Return the rows of each cell that are accepted before any is shared."""
    if case.kept_SE is not None:
        return case.kept_SE
    num_sources, num_experts = case.demand_SE.shape
    own = case.num_rows // (num_sources * num_experts // case.num_ranks)
    return np.minimum(case.demand_SE, own)


def test_the_example_of_the_docstring():
    demand_SE = torch.tensor([[5, 1], [0, 6]], dtype=torch.int32)
    found = accept_in_torch(demand_SE, 8, 1).tolist()
    assert found in ([[3, 1], [0, 4]], [[4, 1], [0, 3]])
    kept_SE = torch.tensor([[4, 0], [0, 3]], dtype=torch.int32)
    assert accept_in_torch(demand_SE, 7, 1, kept_SE).tolist() == kept_SE.tolist()


@given(case=acceptance_cases())
def test_acceptance_is_the_reference(case: AcceptanceCase):
    sizes = dict(num_ranks=case.num_ranks, num_rows=case.num_rows)
    expected_SE = reference.accept(case.demand_SE, **sizes, kept_SE=case.kept_SE)
    assert_same(torch.from_numpy(accepted(case)), expected_SE)


@given(case=acceptance_cases())
def test_no_cell_gets_less_than_its_share_or_more_than_it_asked_for(case: AcceptanceCase):
    found_SE = accepted(case)
    assert (found_SE >= base(case)).all()
    assert (found_SE <= case.demand_SE).all()


@given(case=acceptance_cases())
def test_a_receiver_never_has_a_free_slot_while_it_drops(case: AcceptanceCase):
    found_RSL = of_receivers(case, accepted(case))
    demand_R = of_receivers(case, case.demand_SE).sum((1, 2))
    assert (found_RSL.sum((1, 2)) == np.minimum(demand_R, case.num_rows)).all()


@given(case=acceptance_cases())
def test_sources_and_cells_are_within_one_row_of_their_share(case: AcceptanceCase):
    """Compare whole numbers: |more * X - excess * F| < X for a cell, and for a source."""
    base_RSL = of_receivers(case, base(case)).astype(int)
    excess_RSL = of_receivers(case, case.demand_SE) - base_RSL
    more_RSL = of_receivers(case, accepted(case)) - base_RSL
    for excess_SL, more_SL in zip(excess_RSL, more_RSL, strict=True):
        whole, free = excess_SL.sum(), more_SL.sum()
        if whole > 0:
            assert (abs(more_SL * whole - excess_SL * free) < whole).all()
            assert (abs(more_SL.sum(1) * whole - excess_SL.sum(1) * free) < whole).all()


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_1000_random_demands_are_shared_fairly(num_ranks):
    """Each source's dropped rows are within a row per receiver of its share, and favour is noise.

    A cell's rounding error is a - p, with a Bernoulli variable around the fraction p of its share:
    its mean is 0 and its variance p(1 - p), at most 1/4; errors of other demands are independent.
    The error of a source or expert over all demands is a sum of errors of a receiver's cells, each
    cell's within one row, so the error of a source at a receiver is again a - p with its own p.
    That of an expert is a sum over S sources, whose variance is at most S * S / 4. Six standard
    deviations are exceeded by chance once in 5e8; the demands are the same in every run.
    """
    num_demands, num_sources, num_experts = 1000, 4, 8
    generator = np.random.default_rng(0)
    num_rows, num_local = 64, num_experts // num_ranks
    own = num_rows // (num_sources * num_local)
    source_error_S, expert_error_E = np.zeros(num_sources), np.zeros(num_experts)
    for _ in range(num_demands):
        demand_SE = generator.geometric(1 / (1 + 1.5 * own), (num_sources, num_experts)) - 1
        found_SE = accept_in_torch(torch.tensor(demand_SE).int(), num_rows, num_ranks).numpy()
        for r in range(num_ranks):
            of_rank = slice(r * num_local, (r + 1) * num_local)
            asked_SL, found_SL = demand_SE[:, of_rank], found_SE[:, of_rank]
            excess_SL = np.maximum(asked_SL - own, 0)
            dropped_SL = asked_SL - found_SL
            if not dropped_SL.any():
                continue
            error_SL = dropped_SL - excess_SL * (dropped_SL.sum() / excess_SL.sum())
            assert (abs(error_SL.sum(1)) < 1).all()
            source_error_S += error_SL.sum(1)
            expert_error_E[of_rank] += error_SL.sum(0)
    assert abs(source_error_S).max() < 6 * (num_demands * num_ranks / 4) ** 0.5
    assert abs(expert_error_E).max() < 6 * (num_demands * num_sources**2 / 4) ** 0.5


def test_the_hash_spreads_over_all_offsets():
    """Rounding goes up in a share p of the receivers and demands, but for noise: see above."""
    num_demands, num_ranks = 500, 4
    # X = 3 and F = 1 at every receiver: each of three cells is the lucky one a third of the time.
    lucky_S = np.zeros(3)
    for number in range(num_demands):
        demand_SE = torch.full((3, 2 * num_ranks), 0, dtype=torch.int32)
        demand_SE[:, ::2] = 1 + number
        kept_SE = demand_SE.clone()
        kept_SE[:, ::2] -= 1
        num_rows = 3 * number + 1
        found_SE = accept_in_torch(demand_SE, num_rows, num_ranks, kept_SE)
        lucky_S += (found_SE - kept_SE).sum(1).numpy()
    trials = num_demands * num_ranks
    assert lucky_S.sum() == trials
    assert abs(lucky_S - trials / 3).max() < 6 * (trials * 2 / 9) ** 0.5


@given(
    demand_SE=arrays(np.int32, (2, 4), elements=st.integers(0, 9)), num_rows=st.sampled_from([1, 8])
)
def test_every_rank_computes_the_same_from_its_own_view(demand_SE: np.ndarray, num_rows: int):
    config = DispatchConfig(
        num_experts=4, top_k=2, num_ranks=2, capacity_pool="receiver", capacity_factor=0.5
    )
    sizes = config.sizes(4)
    views = []
    for source in range(2):

        def all_demands(demand_E: torch.Tensor, source: int = source) -> torch.Tensor:
            assert_same(demand_E, demand_SE[source])
            return torch.from_numpy(demand_SE)

        receivers = Receivers(all_demands=all_demands, source=source, num_ranks=2)
        views.append(receivers.accepted(torch.from_numpy(demand_SE[source]), sizes))
    assert torch.equal(*views)
    assert_same(views[0], reference.accept(demand_SE, num_ranks=2, num_rows=sizes.num_rows))


def test_it_is_a_sound_custom_op():
    demand_SE = torch.tensor([[5, 1, 0, 7], [0, 6, 2, 2]], dtype=torch.int32)
    opcheck(accept, (demand_SE, 8, 2))
    opcheck(accept, (demand_SE, 8, 2, demand_SE.clamp(max=1)))


def test_sums_are_exact_where_products_pass_32_bits():
    demand_SE = torch.tensor([[2**28, 2**28 - 3], [2**27 + 1, 5]], dtype=torch.int32)
    num_rows = 2**29 + 1
    found_SE = accept_in_torch(demand_SE, num_rows, 1)
    assert found_SE.sum() == num_rows
    expected_SE = reference.accept(demand_SE.numpy(), num_ranks=1, num_rows=num_rows)
    assert_same(found_SE, expected_SE)
