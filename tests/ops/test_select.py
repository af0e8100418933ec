"""Selection: against the reference, and what must hold whatever the routing."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from padded_dispatch.ops.acceptance import Receivers
from torch import Tensor
from torch.library import opcheck

from padded_dispatch.config import POLICIES as ALL_POLICIES
from padded_dispatch.config import DispatchConfig
from padded_dispatch.ops import select as module
from padded_dispatch.ops.select import (
    Selection,
    choice_ranks_in_torch,
    kept_map_in_torch,
    random_scores,
    select,
)
from tests.support import reference
from tests.support.pools import pools
from tests.support.routing_cases import RoutingCase, assert_same, cases_with_pools, routing_cases

POLICIES = pytest.mark.parametrize("policy", ALL_POLICIES)
DRAWS = st.integers(-(2**63), 2**63 - 1)
DRAW = torch.tensor(7)


def cut(
    case: RoutingCase,
    policy,
    *,
    capacity: int | None = None,
    experts_per_pool: int = 1,
    draw: int = 0,
) -> Selection:
    """`select` as the case says, on its own tensors."""
    map_TE, probs_TE, mask_T = case.tensors()
    return select(
        map_TE,
        probs_TE,
        sizes=case.sizes(capacity, experts_per_pool),
        policy=policy,
        mask_T=mask_T,
        protected_T=None if case.protected_T is None else torch.from_numpy(case.protected_T),
        draw=torch.tensor(draw),
    )


def asked(case: RoutingCase) -> Tensor:
    map_TE, _, mask_T = case.tensors()
    return map_TE if mask_T is None else map_TE & ~mask_T[:, None]


def of_pools(rows_TE: Tensor, experts_per_pool: int) -> Tensor:
    """Count the rows of each pool."""
    return rows_TE.view(len(rows_TE), -1, experts_per_pool).sum((0, 2))


@pytest.mark.parametrize(
    ("policy", "capacity", "kept"),
    [("probs", 2, [1, 3]), ("position", 2, [0, 1]), ("probs", 1, [1]), ("position", 1, [0])],
)
def test_the_example_of_the_docstring(policy, capacity, kept):
    asked_TE = torch.tensor([[True], [True], [False], [True]])
    probs_TE = torch.tensor([[0.2], [0.5], [0.9], [0.5]])
    kept_TE, demand_E = kept_map_in_torch(asked_TE, probs_TE, capacity, policy)
    assert demand_E.tolist() == [3]
    assert kept_TE[:, 0].nonzero().flatten().tolist() == kept


def test_the_example_of_choice_ranks():
    asked_TE = torch.tensor([[True, False, True, True]])
    ranks_TE = choice_ranks_in_torch(asked_TE, torch.tensor([[0.2, 0.9, 0.4, 0.2]]))
    assert ranks_TE[asked_TE].tolist() == [1, 0, 2]


def test_equal_choices_are_ranked_by_expert_in_a_map_of_any_width():
    # Where an unstable sort would show: hundreds of equal probabilities, half of them asked for.
    asked_TE = (torch.arange(600) % 2 == 0).expand(2, -1)
    ranks_TE = choice_ranks_in_torch(asked_TE, torch.full((2, 600), 0.5))
    assert torch.equal(ranks_TE[:, ::2], torch.arange(300).int().expand(2, -1))


def test_priority_serves_first_choices_first_and_sure_tokens_before_others():
    """Worked by hand: expert 0 is the first choice of tokens 1 and 2, the second of 0 and 3."""
    probs_TE = torch.tensor([[0.4, 0.6], [0.7, 0.3], [0.5, 0.5], [0.1, 0.9]])
    map_TE = torch.ones(4, 2, dtype=torch.bool)

    def kept(expert: int, capacity: int) -> list[int]:
        chosen = select(map_TE, probs_TE, sizes=pools(2, capacity), policy="priority")
        return chosen.kept_TE[:, expert].nonzero().flatten().tolist()

    # Token 2's equal choices go by expert id: expert 0 is its first.
    assert [kept(0, capacity) for capacity in (1, 2, 3)] == [[1], [1, 2], [1, 2, 3]]
    assert [kept(1, capacity) for capacity in (1, 2, 3)] == [[3], [0, 3], [0, 1, 3]]


@POLICIES
@given(given_case=cases_with_pools(), draw=DRAWS)
def test_select_is_the_reference(policy, given_case: tuple[RoutingCase, int], draw: int):
    case, experts_per_pool = given_case
    selection = cut(case, policy, experts_per_pool=experts_per_pool, draw=draw)
    expected = reference.select(
        case.map_TE,
        case.probs_TE,
        sizes=case.sizes(None, experts_per_pool),
        policy=policy,
        mask_T=case.mask_T,
        protected_T=case.protected_T,
        draw=draw,
    )
    assert_same(selection.kept_TE, expected.kept_TE)
    assert_same(selection.probs_TE, expected.probs_TE)
    assert_same(selection.demand_E, expected.demand_E)
    if case.protected_T is None:
        assert selection.protected_dropped_E is None
    else:
        assert selection.protected_dropped_E is not None
        assert_same(selection.protected_dropped_E, expected.protected_dropped_E)


@POLICIES
@given(case=routing_cases())
def test_the_gradient_reaches_what_was_kept(policy, case: RoutingCase):
    map_TE, probs_TE, mask_T = case.tensors()
    probs_TE.requires_grad_()
    selection = select(
        map_TE, probs_TE, sizes=case.sizes(), policy=policy, mask_T=mask_T, draw=DRAW
    )
    grad_TE = np.arange(1.0, map_TE.numel() + 1).reshape(map_TE.shape)
    selection.probs_TE.backward(torch.from_numpy(grad_TE))
    assert probs_TE.grad is not None
    assert_same(probs_TE.grad, reference.select_backward(selection.kept_TE.numpy(), grad_TE))


@POLICIES
@given(given_case=cases_with_pools())
def test_more_slots_never_drop_more_and_a_pool_is_full_where_it_drops(policy, given_case):
    case, width = given_case
    kept_TE = cut(case, policy, experts_per_pool=width).kept_TE
    more_TE = cut(case, policy, capacity=case.capacity + 1, experts_per_pool=width).kept_TE
    assert not (kept_TE & ~more_TE).any()
    asked_TE = asked(case)
    enough = asked_TE.shape[0] * width
    all_TE = cut(case, policy, capacity=enough, experts_per_pool=width).kept_TE
    assert torch.equal(all_TE, asked_TE)
    demand_G = of_pools(asked_TE, width)
    assert torch.equal(of_pools(kept_TE, width), demand_G.clamp(max=case.capacity))


@POLICIES
@given(given_case=cases_with_pools().filter(lambda given: given[0].protected_T is not None))
def test_protected_tokens_are_dropped_only_where_they_alone_exceed_the_slots(policy, given_case):
    case, width = given_case
    selection = cut(case, policy, experts_per_pool=width)
    protected_TE = asked(case) & torch.from_numpy(case.protected_T)[:, None]
    dropped_TE = protected_TE & ~selection.kept_TE
    beyond_G = (of_pools(protected_TE, width) - case.capacity).clamp(min=0)
    assert torch.equal(of_pools(dropped_TE, width), beyond_G)
    assert torch.equal(selection.protected_dropped_E, dropped_TE.sum(0).int())


@POLICIES
@given(case=routing_cases(), data=st.data())
def test_each_expert_can_have_a_limit_of_its_own(policy, case: RoutingCase, data: st.DataObject):
    """A limit of as many rows as another number of slots keeps the same rows."""
    num_tokens, num_experts = case.map_TE.shape
    limit_E = data.draw(arrays(np.int32, num_experts, elements=st.integers(0, num_tokens + 1)))
    asked_TE, probs_TE = torch.from_numpy(case.map_TE), torch.from_numpy(case.probs_TE)
    limits = torch.from_numpy(limit_E)
    kept_TE, demand_E = kept_map_in_torch(asked_TE, probs_TE, 1, policy, draw=DRAW, limit_E=limits)
    assert_same(demand_E, case.map_TE.sum(0, dtype=np.int32))
    for e, limit in enumerate(limit_E.tolist()):
        expected_TE, _ = kept_map_in_torch(asked_TE, probs_TE, limit, policy, draw=DRAW)
        assert torch.equal(kept_TE[:, e], expected_TE[:, e])
    by_loops = reference.select(
        case.map_TE, case.probs_TE, sizes=case.sizes(), policy=policy, draw=7, limit_E=limit_E
    )
    assert_same(kept_TE, by_loops.kept_TE)


def test_experts_of_a_pool_compete_for_its_slots():
    """Worked by hand: four experts in two pools of three slots."""
    probs_TE = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.3, 0.3, 0.2, 0.2]])
    map_TE = torch.ones(3, 4, dtype=torch.bool)
    kept = {
        policy: select(map_TE, probs_TE, sizes=pools(4, 3, 2), policy=policy).kept_TE.int().tolist()
        for policy in ("probs", "position", "priority")
    }
    assert kept == {
        # .4, .3 and .3 of the first pool; .4, .3, and the first of three .2 of the second one.
        "probs": [[1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 0]],
        "position": [[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]],
        # Choices of each token, in order: 0 1 2 3, 3 2 1 0, 0 1 2 3.
        "priority": [[1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 0]],
    }


def test_a_source_keeps_what_receivers_accept():
    """Two sources, two receivers of two experts each; C = 1, so a receiver has four slots."""
    config = DispatchConfig(
        num_experts=4, top_k=2, capacity_factor=0.3, num_ranks=2, capacity_pool="receiver"
    )
    map_TE = torch.tensor([[1, 0, 1, 0], [1, 0, 0, 1], [1, 0, 1, 0]], dtype=torch.bool)
    probs_TE = torch.tensor([[0.1, 0, 0.2, 0], [0.3, 0, 0, 0.4], [0.5, 0, 0.6, 0]])
    mine_E, other_E = torch.tensor([3, 0, 2, 1]), torch.tensor([1, 2, 0, 0])
    seen = []

    def all_demands(demand_E: Tensor) -> Tensor:
        seen.append(demand_E)
        return torch.stack([other_E.int(), demand_E])

    receivers = Receivers(all_demands=all_demands, source=1, num_ranks=2)
    sizes = config.sizes(3)
    selection = select(map_TE, probs_TE, sizes=sizes, receivers=receivers)
    assert [demand_E.tolist() for demand_E in seen] == [mine_E.tolist()]
    assert sizes.num_rows == 4 and selection.kept_SE is not None
    # Cells keep one row each; the first receiver has one more slot for three more rows.
    first, second = selection.kept_SE.tolist()
    assert sum(first[:2] + second[:2]) == 4 and second[0] in (1, 2)
    assert second[2:] == [2, 1]
    best = [2, 1][: second[0]]
    assert selection.kept_TE[:, 0].nonzero().flatten().tolist() == sorted(best)
    assert torch.equal(selection.kept_TE[:, 1:], map_TE[:, 1:])
    assert selection.demand_E.tolist() == mine_E.tolist()


def test_nothing_is_selected_where_nothing_can_be_dropped(monkeypatch):
    """One rank whose pool has a slot for every choice: the kept map is the asked one."""
    config = DispatchConfig(num_experts=4, top_k=2, capacity_factor=1.0, capacity_pool="rank")
    map_TE = torch.tensor([[True, True, False, False]] * 6)
    monkeypatch.setattr(module, "kept_map", None)
    selection = select(map_TE, torch.ones(6, 4), sizes=config.sizes(6))
    assert selection.kept_TE is selection.asked_TE is map_TE
    assert selection.demand_E.tolist() == [6, 6, 0, 0]
    assert selection.demand_E.dtype == torch.int32
    assert torch.equal(selection.probs_TE, map_TE.float())


@POLICIES
@given(case=routing_cases())
def test_probabilities_outside_the_map_are_not_read(policy, case: RoutingCase):
    map_TE, probs_TE, _ = case.tensors()
    clean = select(map_TE, probs_TE, sizes=case.sizes(), policy=policy, draw=DRAW)
    probs_TE[~map_TE] = torch.nan
    poisoned = select(map_TE, probs_TE, sizes=case.sizes(), policy=policy, draw=DRAW)
    assert torch.equal(clean.kept_TE, poisoned.kept_TE)
    assert torch.equal(clean.probs_TE, poisoned.probs_TE)


@pytest.mark.parametrize("policy", ["probs", "position", "priority"])
def test_ties_keep_the_lowest_token_in_a_map_of_any_size(policy):
    # Where an unstable sort or top-k would show: thousands of equal probabilities.
    map_TE = torch.ones(4099, 3, dtype=torch.bool)
    selection = select(map_TE, torch.full((4099, 3), 0.125), sizes=pools(3, 1000), policy=policy)
    expected_T = torch.arange(4099) < 1000
    assert torch.equal(selection.kept_TE, expected_T[:, None].expand(-1, 3))


def test_draws_are_uniform_and_independent():
    """Every token is kept in C of T draws, two tokens together in C(C-1) of T(T-1), but for noise.

    Over N draws a share p has the variance p(1 - p) / N. Six standard deviations are exceeded by
    chance once in 5e8; the numbers are the same in every run.
    """
    num_tokens, capacity, num_draws = 10, 4, 4000
    map_TE = torch.ones(num_tokens, 2, dtype=torch.bool)
    kept_NTE = torch.stack(
        [
            kept_map_in_torch(map_TE, map_TE.float(), capacity, "random", draw=torch.tensor(draw))[
                0
            ]
            for draw in range(num_draws)
        ]
    ).double()
    alone = capacity / num_tokens
    share_TE = kept_NTE.mean(0)
    together_TT = torch.einsum("nt,nu->tu", kept_NTE[..., 0], kept_NTE[..., 0]) / num_draws
    pair = alone * (capacity - 1) / (num_tokens - 1)
    across_TT = torch.einsum("nt,nu->tu", kept_NTE[..., 0], kept_NTE[..., 1]) / num_draws
    upper = torch.ones(num_tokens, num_tokens).triu(1).bool()
    for shares, expected in (
        (share_TE, alone),
        (together_TT[upper], pair),
        (across_TT, alone**2),
    ):
        deviation = (expected * (1 - expected) / num_draws) ** 0.5
        assert (shares - expected).abs().max() < 6 * deviation


def test_random_scores_of_one_expert_are_never_equal():
    scores_TE = random_scores(torch.tensor(-5), 5000, 3)
    assert all(scores_TE[:, e].unique().numel() == 5000 for e in range(3))
    assert scores_TE.min() >= 0 and scores_TE.max() < 2**32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_probabilities_keep_their_dtype(dtype):
    selection = select(
        torch.tensor([[True]]), torch.tensor([[0.3]], dtype=dtype), sizes=pools(1, 1)
    )
    assert selection.probs_TE.dtype == dtype
    assert selection.probs_TE.item() == torch.tensor(0.3, dtype=dtype).item()


def test_wrong_arguments_are_refused():
    arguments = torch.ones(2, 2, dtype=torch.bool), torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"^policy must be one of probs, .*, got 'rand'$"):
        select(*arguments, sizes=pools(2, 1), policy="rand")  # pyright: ignore
    with pytest.raises(ValueError, match=r"^draw must be .* policy='random', got None; pass one"):
        select(*arguments, sizes=pools(2, 1), policy="random")


def test_all_are_sound_custom_ops():
    # All asked for, since opcheck compares every element, also of unspecified ranks.
    map_TE, probs_TE = torch.ones(7, 5, dtype=torch.bool), torch.rand(7, 5)
    level_T1 = map_TE[:, :1].to(torch.uint8)
    ops = torch.ops.padded_dispatch
    opcheck(ops.select, (map_TE, probs_TE, 2, "random", level_T1, torch.tensor(3)))
    opcheck(ops.select, (map_TE, probs_TE, 9, "priority", None, None, 5))
    limit_E = torch.arange(5, dtype=torch.int32)
    opcheck(ops.select, (map_TE, probs_TE, 2, "probs", None, None, 1, limit_E))
    opcheck(ops.choice_ranks, (map_TE, probs_TE))
