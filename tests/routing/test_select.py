"""Selection: against the reference, and what must hold whatever the routing."""

import numpy as np
import pytest
import torch
from hypothesis import given
from torch.library import opcheck

from padded_dispatch.config import POLICIES as ALL_POLICIES
from padded_dispatch.config import DispatchConfig
from padded_dispatch.routing import select as module
from padded_dispatch.routing.select import Selection, select
from tests.support import reference
from tests.support.pools import pools
from tests.support.routing_cases import RoutingCase, assert_same, cases_with_pools, routing_cases

POLICIES = pytest.mark.parametrize("policy", ALL_POLICIES)


def cut(
    case: RoutingCase, policy, *, capacity: int | None = None, experts_per_pool: int = 1
) -> Selection:
    """`select` as the case says, on its own tensors."""
    map_TE, probs_TE, mask_T = case.tensors()
    sizes = case.sizes(capacity, experts_per_pool)
    return select(map_TE, probs_TE, sizes=sizes, policy=policy, mask_T=mask_T)


@POLICIES
@given(given_case=cases_with_pools())
def test_select_is_the_reference(policy, given_case: tuple[RoutingCase, int]):
    case, width = given_case
    selection = cut(case, policy, experts_per_pool=width)
    sizes = case.sizes(None, width)
    given = dict(sizes=sizes, policy=policy, mask_T=case.mask_T)
    expected = reference.select(case.map_TE, case.probs_TE, **given)
    for name in ("kept_TE", "probs_TE", "demand_E"):
        assert_same(getattr(selection, name), getattr(expected, name))


@POLICIES
@given(case=routing_cases())
def test_the_gradient_reaches_what_was_kept(policy, case: RoutingCase):
    map_TE, probs_TE, mask_T = case.tensors()
    probs_TE.requires_grad_()
    selection = select(map_TE, probs_TE, sizes=case.sizes(), policy=policy, mask_T=mask_T)
    grad_TE = np.arange(1.0, map_TE.numel() + 1).reshape(map_TE.shape)
    selection.probs_TE.backward(torch.from_numpy(grad_TE))
    assert probs_TE.grad is not None
    assert_same(probs_TE.grad, reference.select_backward(selection.kept_TE.numpy(), grad_TE))


def test_experts_of_a_pool_compete_for_its_slots():
    """Worked by hand: four experts in two pools of three slots."""
    probs_TE = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.3, 0.3, 0.2, 0.2]])
    map_TE = torch.ones(3, 4, dtype=torch.bool)
    kept = {
        policy: select(map_TE, probs_TE, sizes=pools(4, 3, 2), policy=policy).kept_TE.int().tolist()
        for policy in ("probs", "position")
    }
    assert kept == {
        # .4, .3 and .3 of the first pool; .4, .3, and the first of three .2 of the second one.
        "probs": [[1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 0]],
        "position": [[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]],
    }


def test_nothing_is_selected_where_nothing_can_be_dropped(monkeypatch):
    """One rank whose pool has a slot for every choice: the kept map is the asked one."""
    config = DispatchConfig(num_experts=4, top_k=2, capacity_factor=1.0, capacity_pool="rank")
    map_TE = torch.tensor([[True, True, False, False]] * 6)
    monkeypatch.setattr(module, "kept_map", None)
    selection = select(map_TE, torch.ones(6, 4), sizes=config.sizes(6))
    assert selection.kept_TE is map_TE
    assert selection.demand_E.tolist() == [6, 6, 0, 0]
    assert selection.demand_E.dtype == torch.int32
    assert torch.equal(selection.probs_TE, map_TE.float())


@POLICIES
def test_ties_keep_the_lowest_token_in_a_map_of_any_size(policy):
    # Where an unstable sort or top-k would show: thousands of equal probabilities.
    map_TE = torch.ones(4099, 3, dtype=torch.bool)
    selection = select(map_TE, torch.full((4099, 3), 0.125), sizes=pools(3, 1000), policy=policy)
    expected_T = torch.arange(4099) < 1000
    assert torch.equal(selection.kept_TE, expected_T[:, None].expand(-1, 3))


def test_an_unknown_policy_is_refused():
    arguments = torch.ones(2, 2, dtype=torch.bool), torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"^policy must be one of probs, position, got 'rand'$"):
        select(*arguments, sizes=pools(2, 1), policy="rand")  # pyright: ignore


def test_it_is_a_sound_custom_op():
    map_TE, probs_TE = torch.ones(7, 5, dtype=torch.bool), torch.rand(7, 5)
    opcheck(torch.ops.padded_dispatch.select, (map_TE, probs_TE, 2, "probs"))
    opcheck(torch.ops.padded_dispatch.select, (map_TE, probs_TE, 9, "position", 5))
