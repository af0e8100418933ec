"""Selection: against the reference, and what must hold whatever the routing."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from padded_dispatch import reference
from padded_dispatch.config import POLICIES as ALL_POLICIES
from padded_dispatch.ops.select import (
    Selection,
    choice_ranks_in_torch,
    kept_map_in_torch,
    random_scores,
    select,
)
from tests.support.pools import pools
from tests.support.routing_cases import RoutingCase, assert_same, routing_cases

POLICIES = pytest.mark.parametrize("policy", ALL_POLICIES)
DRAWS = st.integers(-(2**63), 2**63 - 1)
DRAW = torch.tensor(7)


def cut(case: RoutingCase, policy, *, capacity: int | None = None, draw: int = 0) -> Selection:
    """`select` as the case says, on its own tensors."""
    map_TE, probs_TE, mask_T = case.tensors()
    return select(
        map_TE,
        probs_TE,
        sizes=case.sizes(capacity),
        policy=policy,
        mask_T=mask_T,
        protected_T=None if case.protected_T is None else torch.from_numpy(case.protected_T),
        draw=torch.tensor(draw),
    )


def asked(case: RoutingCase) -> Tensor:
    map_TE, _, mask_T = case.tensors()
    return map_TE if mask_T is None else map_TE & ~mask_T[:, None]


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
@given(case=routing_cases(), draw=DRAWS)
def test_select_is_the_reference(policy, case: RoutingCase, draw: int):
    selection = cut(case, policy, draw=draw)
    expected = reference.select(
        case.map_TE,
        case.probs_TE,
        sizes=case.sizes(),
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
@given(case=routing_cases())
def test_more_capacity_never_drops_more_and_enough_drops_nothing(policy, case: RoutingCase):
    kept_TE = cut(case, policy).kept_TE
    assert not (kept_TE & ~cut(case, policy, capacity=case.capacity + 1).kept_TE).any()
    asked_TE = asked(case)
    assert torch.equal(cut(case, policy, capacity=asked_TE.shape[0]).kept_TE, asked_TE)
    assert torch.equal(kept_TE.sum(0), asked_TE.sum(0).clamp(max=case.capacity))


@POLICIES
@given(case=routing_cases().filter(lambda case: case.protected_T is not None))
def test_protected_tokens_are_dropped_only_where_they_alone_exceed_capacity(policy, case):
    selection = cut(case, policy)
    protected_TE = asked(case) & torch.from_numpy(case.protected_T)[:, None]
    beyond_E = (protected_TE.sum(0) - case.capacity).clamp(min=0)
    assert torch.equal((protected_TE & ~selection.kept_TE).sum(0), beyond_E)
    assert torch.equal(selection.protected_dropped_E, beyond_E.int())


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
    opcheck(ops.choice_ranks, (map_TE, probs_TE))
