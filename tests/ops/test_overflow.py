"""Remedies for dropped rows: against the reference, and their gradients."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from padded_dispatch import DispatchConfig, PaddedDispatcher, reference
from padded_dispatch.config import POLICIES as ALL_POLICIES
from padded_dispatch.ops.overflow import LEAST_KEPT, renormalize, reroute, select_with_remedy
from padded_dispatch.ops.select import Selection, select
from tests.support.pools import pools
from tests.support.routing_cases import RoutingCase, assert_same, routing_cases

POLICIES = pytest.mark.parametrize("policy", ALL_POLICIES)
DRAW = 11
SIZES = pools(5, 2)  # of the map in `routed`


def tensor(array: np.ndarray | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array.copy())


def both(case: RoutingCase, policy: str) -> tuple[Selection, reference.Selection]:
    """The same selection of a case without padding tokens, by the code and by the reference."""
    map_TE, probs_TE, _ = case.tensors()
    of_both = dict(sizes=case.sizes(), policy=policy)
    selection = select(
        map_TE, probs_TE, **of_both, protected_T=tensor(case.protected_T), draw=torch.tensor(DRAW)
    )
    by_loops = reference.select(
        case.map_TE, case.probs_TE, **of_both, protected_T=case.protected_T, draw=DRAW
    )
    return selection, by_loops


@st.composite
def with_choices(draw: st.DrawFn) -> tuple[RoutingCase, np.ndarray]:
    """A case and the values that its tokens choose experts by; -inf is never chosen."""
    case = draw(routing_cases())
    values = st.sampled_from([0.5, 0.25, 1.0, 0.0, -1.0, -np.inf])
    return case, draw(arrays(np.float64, case.map_TE.shape, elements=values))


def test_the_example_of_renormalize():
    map_TE, probs_TE = torch.ones(1, 3, dtype=torch.bool), torch.tensor([[0.4, 0.2, 0.2]])
    kept_TE = torch.tensor([[True, True, False]])
    selection = Selection(
        asked_TE=map_TE,
        kept_TE=kept_TE,
        probs_TE=torch.where(kept_TE, probs_TE, 0),
        demand_E=map_TE.sum(0),
    )
    scaled_TE = renormalize(selection, probs_TE).probs_TE
    assert [round(prob, 3) for prob in scaled_TE[0].tolist()] == [0.533, 0.267, 0.0]


def test_the_example_of_reroute():
    map_TE = torch.tensor([[True, False, False], [True, False, False]])
    scores_TE = torch.tensor([[0.6, 0.1, 0.1], [0.5, 0.3, 0.2]])
    selection = select(map_TE, scores_TE, sizes=pools(3, 1))
    found = reroute(selection, scores_TE, sizes=pools(3, 1), policy="probs")
    expected_TE = torch.tensor([[0.6, 0.0, 0.0], [0.0, 0.3, 0.0]])
    assert torch.equal(found.probs_TE, expected_TE)
    assert torch.equal(found.kept_TE, expected_TE > 0)


@POLICIES
@given(case=routing_cases())
def test_renormalize_is_the_reference(policy, case: RoutingCase):
    # Sums of quarters are exact in any order.
    selection, by_loops = both(case, policy)
    map_TE, probs_TE, _ = case.tensors()
    found = renormalize(selection, probs_TE)
    expected = reference.renormalize(by_loops, case.map_TE, case.probs_TE)
    assert_same(found.probs_TE, expected.probs_TE)
    assert torch.equal(found.kept_TE, selection.kept_TE)
    # Sums, at most 5, come back where anything was kept: every term is rounded twice, the sum of
    # five 4 times, each time by half an eps.
    asked_T = torch.where(map_TE, probs_TE, 0).sum(1)
    kept_T = selection.probs_TE.sum(1)
    expected_T = torch.where(kept_T > 0, asked_T, 0)
    assert (found.probs_TE.sum(1) - expected_T).abs().max() <= 15 * torch.finfo(torch.float64).eps


@POLICIES
@given(given_case=with_choices(), rounds=st.integers(1, 3))
def test_reroute_is_the_reference_and_keeps_its_promises(policy, given_case, rounds: int):
    case, choice_TE = given_case
    selection, by_loops = both(case, policy)
    arguments = dict(sizes=case.sizes(), policy=policy, rounds=rounds)
    map_TE, scores_TE, _ = case.tensors()
    found = reroute(
        selection,
        scores_TE,
        torch.from_numpy(choice_TE),
        **arguments,
        protected_T=tensor(case.protected_T),
        draw=torch.tensor(DRAW),
    )
    expected = reference.reroute(
        by_loops,
        case.map_TE,
        case.probs_TE,
        choice_TE,
        **arguments,
        protected_T=case.protected_T,
        draw=DRAW,
    )
    assert_same(found.kept_TE, expected.kept_TE)
    assert_same(found.probs_TE, expected.probs_TE)
    assert not (selection.kept_TE & ~found.kept_TE).any()
    assert (found.kept_TE.sum(0) <= case.capacity).all()
    assert (found.kept_TE.sum(1) <= map_TE.sum(1)).all()
    assert torch.equal(found.kept_TE & map_TE, selection.kept_TE)
    assert torch.equal(found.demand_E, map_TE.sum(0, dtype=torch.int32))


@given(case=routing_cases())
def test_enough_rounds_leave_no_dropped_row_beside_a_free_slot(case: RoutingCase):
    selection, _ = both(case, "probs")
    map_TE, scores_TE, _ = case.tensors()
    found = reroute(
        selection,
        scores_TE,
        sizes=case.sizes(),
        policy="probs",
        rounds=map_TE.numel(),
    )
    lost_T = found.kept_TE.sum(1) < map_TE.sum(1)
    free_TE = ~map_TE & ~found.kept_TE & (found.kept_TE.sum(0) < case.capacity)
    assert not (lost_T[:, None] & free_TE).any()


def routed(remedy: str) -> tuple[DispatchConfig, Tensor]:
    """9 tokens for two or three of 5 experts: C = 2 leaves some tokens without any row."""
    config = DispatchConfig(num_experts=5, top_k=3, remedy=remedy, reroute_rounds=2)  # pyright: ignore
    map_TE = torch.zeros(9, 5, dtype=torch.bool)
    map_TE[:, :2] = True
    map_TE[:3, 3] = True
    return config, map_TE


@pytest.mark.parametrize("remedy", ["none", "renormalize", "reroute"])
def test_gradients_are_those_of_the_function(remedy):
    """Of the router's logits: probabilities as a softmax of all experts, as many routers make."""
    config, map_TE = routed(remedy)
    logits_TE = torch.randn(
        9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True
    )

    def chosen(logits_TE: Tensor) -> Tensor:
        scores_TE = logits_TE.softmax(1)
        probs_TE = torch.where(map_TE, scores_TE, 0)
        return select_with_remedy(config, SIZES, map_TE, probs_TE, scores_TE).probs_TE

    kept_TE = chosen(logits_TE) > 0
    assert (~kept_TE).all(1).any()
    assert (kept_TE & ~map_TE).any() == (remedy == "reroute")
    assert torch.autograd.gradcheck(chosen, logits_TE)


def test_the_gradient_of_reroute_goes_to_scores_of_rerouted_and_probs_of_kept_rows():
    config, map_TE = routed("reroute")
    scores_TE = torch.rand(9, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
    probs_TE = torch.where(map_TE, scores_TE.detach(), 0).requires_grad_()
    selection = select_with_remedy(config, SIZES, map_TE, probs_TE, scores_TE)
    grad_TE = torch.arange(1.0, 46.0).view(9, 5)
    selection.probs_TE.backward(grad_TE)
    assert probs_TE.grad is not None and scores_TE.grad is not None
    kept_TE = selection.kept_TE
    assert torch.equal(probs_TE.grad, torch.where(kept_TE & map_TE, grad_TE, 0))
    assert torch.equal(scores_TE.grad, torch.where(kept_TE & ~map_TE, grad_TE, 0))


@pytest.mark.parametrize("kept", [0.0, LEAST_KEPT / 2, LEAST_KEPT])
def test_renormalize_of_next_to_nothing_is_finite(kept):
    """Test a token that keeps a row of almost no probability, in fp32, forward and backward."""
    map_TE = torch.ones(2, 2, dtype=torch.bool)
    probs_TE = torch.tensor([[1.0, 0.5], [0.5, kept]], requires_grad=True)
    selection = select(map_TE, probs_TE, sizes=pools(2, 1))
    # Token 0 keeps both rows; token 1 is made to keep the second one.
    kept_TE = torch.tensor([[True, False], [False, True]])
    selection = dataclasses.replace(
        selection, kept_TE=kept_TE, probs_TE=torch.where(kept_TE, probs_TE, 0)
    )
    found_TE = renormalize(selection, probs_TE).probs_TE
    assert found_TE.tolist() == [[1.5, 0.0], [0.0, 0.5 + kept if kept == LEAST_KEPT else kept]]
    found_TE.sum().backward()
    assert probs_TE.grad is not None
    # What is kept alone has the whole sum, whose gradient is 1; what is left as it is, its own.
    own = [1.0, 1.0] if kept == LEAST_KEPT else [0.0, 1.0]
    assert probs_TE.grad.tolist() == [[1.0, 1.0], own]


def test_renormalize_leaves_the_bits_of_tokens_that_lost_nothing():
    probs_TE = torch.rand(50, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
    map_TE = torch.ones(50, 7, dtype=torch.bool)
    selection = select(map_TE, probs_TE, sizes=pools(7, 40))
    found_TE = renormalize(selection, probs_TE).probs_TE
    whole_T = selection.kept_TE.all(1)
    assert 0 < whole_T.sum() < 50
    assert torch.equal(found_TE[whole_T], probs_TE[whole_T])


@pytest.mark.parametrize("remedy", ["none", "renormalize", "reroute"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_probabilities_keep_their_dtype(remedy, dtype):
    config, map_TE = routed(remedy)
    probs_TE = torch.rand(9, 5, dtype=torch.float32).to(dtype)
    selection = select_with_remedy(config, SIZES, map_TE, probs_TE, probs_TE.float())
    assert selection.probs_TE.dtype == dtype


@POLICIES
@pytest.mark.parametrize("remedy", ["renormalize", "reroute"])
def test_padding_tokens_change_nothing(policy, remedy):
    config, map_TE = routed(remedy)
    config = dataclasses.replace(config, policy=policy)
    scores_TE = torch.rand(9, 5, generator=torch.Generator().manual_seed(3))
    real = torch.arange(9) % 4 != 1
    draw = torch.tensor(DRAW)
    masked = select_with_remedy(
        config, SIZES, map_TE, scores_TE, scores_TE, mask_T=~real, draw=draw
    )
    assert not masked.kept_TE[~real].any() and not masked.probs_TE[~real].any()
    if policy != "random":  # A draw knows tokens by their index.
        alone = select_with_remedy(config, SIZES, map_TE[real], scores_TE[real], scores_TE[real])
        assert torch.equal(masked.kept_TE[real], alone.kept_TE)
        assert torch.equal(masked.probs_TE[real], alone.probs_TE)
        assert torch.equal(masked.demand_E, alone.demand_E)


@pytest.mark.parametrize("remedy", ["none", "renormalize", "reroute"])
def test_through_the_dispatcher(remedy):
    """Experts that do nothing: a token comes back times the sum of its probabilities."""
    config, map_TE = routed(remedy)
    config = dataclasses.replace(config, capacity_factor=0.3)  # C = 2
    scores_TE = torch.randint(1, 9, (9, 5), generator=torch.Generator().manual_seed(4)) / 8.0
    tokens_TD = torch.ones(9, 1)
    sent = PaddedDispatcher(config).dispatch(tokens_TD, scores_TE, map_TE, scores_TE=scores_TE)
    expected = select_with_remedy(config, SIZES, map_TE, scores_TE, scores_TE)
    assert torch.equal(sent.selection.probs_TE, expected.probs_TE)
    assert sent.plan.unplaced_E.tolist() == [0] * 5
    assert torch.equal(sent.plan.kept_E, expected.kept_TE.sum(0, dtype=torch.int32))


def test_reroute_without_scores_is_refused():
    config, map_TE = routed("reroute")
    with pytest.raises(ValueError, match="scores_TE must be given with remedy='reroute', got"):
        select_with_remedy(config, SIZES, map_TE, torch.rand(9, 5))
