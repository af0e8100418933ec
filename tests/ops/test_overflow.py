"""Remedies for dropped rows: against the reference, and their gradients."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from padded_dispatch import DispatchConfig, PaddedDispatcher
from padded_dispatch.config import POLICIES as ALL_POLICIES
from padded_dispatch.config import REMEDIES
from padded_dispatch.ops import overflow
from padded_dispatch.ops.overflow import renormalize, reroute, select_with_remedy
from padded_dispatch.ops.select import Selection, kept_map, select
from tests.support import reference
from tests.support.pools import pools
from tests.support.routing_cases import RoutingCase, assert_same, cases_with_pools, routing_cases

POLICIES = pytest.mark.parametrize("policy", ALL_POLICIES)
DRAW = 11
CHOICES = st.sampled_from([0.5, 0.25, 1.0, 0.0, -1.0, -np.inf])
SIZES = pools(5, 2)  # of the map in `routed`


def tensor(array: np.ndarray | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array.copy())


def both(
    case: RoutingCase, policy: str, experts_per_pool: int = 1
) -> tuple[Selection, reference.Selection]:
    """The same selection of a case without padding tokens, by the code and by the reference."""
    map_TE, probs_TE, _ = case.tensors()
    of_both = dict(sizes=case.sizes(None, experts_per_pool), policy=policy)
    selection = select(
        map_TE, probs_TE, **of_both, protected_T=tensor(case.protected_T), draw=torch.tensor(DRAW)
    )
    by_loops = reference.select(
        case.map_TE, case.probs_TE, **of_both, protected_T=case.protected_T, draw=DRAW
    )
    return selection, by_loops


@st.composite
def with_choices(draw: st.DrawFn) -> tuple[RoutingCase, int, np.ndarray]:
    """A case, experts per pool, and what tokens choose experts by; -inf is never chosen."""
    case, experts_per_pool = draw(cases_with_pools())
    return case, experts_per_pool, draw(arrays(np.float64, case.map_TE.shape, elements=CHOICES))


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
    assert found.rerouted_E is not None
    assert (found.rerouted_E.tolist(), found.rerouted_E.dtype) == ([0, 1, 0], torch.int32)


def test_rows_without_a_place_try_once_unless_more_is_asked_for():
    map_TE = torch.tensor([[True, False, False]] * 3)
    scores_TE = torch.tensor([[0.9, 0.1, 0.1], [0.5, 0.3, 0.2], [0.4, 0.35, 0.1]])
    selection = select(map_TE, scores_TE, sizes=pools(3, 1))
    kept = [
        reroute(selection, scores_TE, sizes=pools(3, 1), policy="probs", **rounds).kept_TE.int()
        for rounds in ({}, {"rounds": 1}, {"rounds": 2})
    ]
    # Both propose expert 1, and token 2 scores higher there.
    once, twice = [[1, 0, 0], [0, 0, 0], [0, 1, 0]], [[1, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert [kept_TE.tolist() for kept_TE in kept] == [once, once, twice]


def test_a_source_without_a_number_is_the_first():
    config = DispatchConfig(
        num_experts=1, top_k=1, capacity_factor=0.5, capacity_pool="receiver", etp_size=2
    )
    map_TE = torch.ones(4, 1, dtype=torch.bool)

    def all_demands(demand_E: Tensor) -> Tensor:
        return torch.stack([demand_E, torch.zeros_like(demand_E)])

    found = select_with_remedy(
        config, config.sizes(4), map_TE, torch.ones(4, 1), all_demands=all_demands
    )
    assert found.kept_SE is not None and found.kept_SE.tolist() == [[4], [0]]
    assert torch.equal(found.kept_TE, map_TE)


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
    case, experts_per_pool, choice_TE = given_case
    selection, by_loops = both(case, policy, experts_per_pool)
    sizes = case.sizes(None, experts_per_pool)
    arguments = dict(sizes=sizes, policy=policy, rounds=rounds)
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
    rows_G = found.kept_TE.view(len(map_TE), sizes.num_pools, -1).sum((0, 2))
    assert (rows_G <= case.capacity).all()
    assert (found.kept_TE.sum(1) <= map_TE.sum(1)).all()
    assert torch.equal(found.kept_TE & map_TE, selection.kept_TE)
    assert torch.equal(found.demand_E, map_TE.sum(0, dtype=torch.int32))


@given(given_case=cases_with_pools())
def test_enough_rounds_leave_no_dropped_row_beside_a_free_slot(given_case):
    case, experts_per_pool = given_case
    selection, _ = both(case, "probs", experts_per_pool)
    map_TE, scores_TE, _ = case.tensors()
    found = reroute(
        selection,
        scores_TE,
        sizes=case.sizes(None, experts_per_pool),
        policy="probs",
        rounds=map_TE.numel(),
    )
    lost_T = found.kept_TE.sum(1) < map_TE.sum(1)
    rows_G = found.kept_TE.view(len(map_TE), -1, experts_per_pool).sum((0, 2))
    has_room_E = (rows_G < case.capacity).repeat_interleave(experts_per_pool)
    free_TE = ~map_TE & ~found.kept_TE & has_room_E
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


LEAST = {
    torch.float16: 2.0**-7,
    torch.bfloat16: 2.0**-63,
    torch.float32: 2.0**-63,
    torch.float64: 2.0**-511,
}


def with_little_kept(kept: float, dtype: torch.dtype) -> tuple[Selection, Tensor]:
    """Return a selection in which token 0 lost a row, and token 1 kept one of probability `kept`.

    Token 2 lost nothing.
    """
    probs_TE = torch.tensor([[1.0, 0.5], [0.5, kept], [0.25, kept]], dtype=dtype)
    probs_TE.requires_grad_()
    kept_TE = torch.tensor([[True, False], [False, True], [True, True]])
    asked_TE = torch.ones(3, 2, dtype=torch.bool)
    selection = Selection(
        asked_TE=asked_TE,
        kept_TE=kept_TE,
        probs_TE=torch.where(kept_TE, probs_TE, 0),
        demand_E=asked_TE.sum(0, dtype=torch.int32),
    )
    return selection, probs_TE


@pytest.mark.parametrize("dtype", LEAST)
@pytest.mark.parametrize("share", [0.0, 0.5, 1 - 2**-7, 1.0])
def test_renormalize_of_next_to_nothing_is_finite(dtype, share):
    """Forward and backward; the bound is the same in the reference."""
    kept = share * LEAST[dtype]
    selection, probs_TE = with_little_kept(kept, dtype)
    found = renormalize(selection, probs_TE)
    scaled = share == 1
    expected = [[1.5, 0.0], [0.0, probs_TE[1].sum().item() if scaled else kept], [0.25, kept]]
    assert found.probs_TE.tolist() == expected
    found.probs_TE.sum().backward()
    assert probs_TE.grad is not None
    # What is kept alone has the whole sum, whose gradient is 1; what is left as it is, its own.
    assert probs_TE.grad.tolist() == [[1.0, 1.0], [1.0, 1.0] if scaled else [0.0, 1.0], [1.0, 1.0]]
    if dtype != torch.bfloat16:  # NumPy has none.
        by_loops = reference.Selection(
            kept_TE=selection.kept_TE.numpy(),
            probs_TE=selection.probs_TE.detach().numpy(),
            demand_E=selection.demand_E.numpy(),
            protected_dropped_E=np.zeros(2, dtype=np.int32),
        )
        found_by_loops = reference.renormalize(
            by_loops, selection.asked_TE.numpy(), probs_TE.detach().numpy()
        )
        assert found_by_loops.probs_TE.tolist() == expected
        assert found_by_loops.probs_TE.dtype == probs_TE.detach().numpy().dtype


@pytest.mark.parametrize("dtype", LEAST)
def test_the_largest_gradient_of_renormalize_is_finite(dtype):
    """Of two kept rows, one alone has a gradient: as large as one over their sum."""
    least = LEAST[dtype]
    probs_TE = torch.tensor([[1.0, least / 2, least / 2]], dtype=dtype, requires_grad=True)
    kept_TE = torch.tensor([[False, True, True]])
    selection = Selection(
        asked_TE=torch.ones(1, 3, dtype=torch.bool),
        kept_TE=kept_TE,
        probs_TE=torch.where(kept_TE, probs_TE, 0),
        demand_E=torch.ones(3, dtype=torch.int32),
    )
    renormalize(selection, probs_TE).probs_TE[0, 1].backward()
    assert probs_TE.grad is not None
    # d (p1 * (1 + p1 + p2) / (p1 + p2)): half of one over the sum, and the part through the sum.
    half = (1 / least + 1) / 2
    expected = torch.tensor([[0.5, half + 0.5, -half + 0.5]], dtype=torch.float64).to(dtype)
    assert torch.equal(probs_TE.grad, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_renormalize_computes_in_fp32_and_rounds_once(dtype):
    """Sums and quotients of narrow numbers, forward and backward, are those of fp32."""
    generator = torch.Generator().manual_seed(5)
    narrow_TE = torch.rand(200, 8, generator=generator).to(dtype)
    kept_TE = torch.rand(200, 8, generator=generator) < 0.7
    grad_TE = torch.rand(200, 8, generator=generator).to(dtype)
    results = []
    for probs_TE in (narrow_TE.clone(), narrow_TE.float()):
        probs_TE.requires_grad_()
        selection = Selection(
            asked_TE=torch.ones(200, 8, dtype=torch.bool),
            kept_TE=kept_TE,
            probs_TE=torch.where(kept_TE, probs_TE, 0),
            demand_E=torch.full((8,), 200, dtype=torch.int32),
        )
        found_TE = renormalize(selection, probs_TE).probs_TE
        found_TE.backward(grad_TE.to(probs_TE.dtype))
        assert probs_TE.grad is not None
        results.append((found_TE.detach(), probs_TE.grad))
    (found_TE, found_grad_TE), (wide_TE, wide_grad_TE) = results
    assert torch.equal(found_TE, wide_TE.to(dtype))
    # The parts through the kept and through the asked sum are rounded, then added.
    eps = torch.finfo(dtype).eps
    error_TE = (found_grad_TE.float() - wide_grad_TE).abs()
    assert (error_TE <= 1.5 * eps * wide_grad_TE.abs().clamp(min=1)).all()


def test_renormalize_leaves_the_bits_of_tokens_that_lost_nothing():
    probs_TE = torch.rand(50, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
    map_TE = torch.ones(50, 7, dtype=torch.bool)
    selection = select(map_TE, probs_TE, sizes=pools(7, 40))
    found_TE = renormalize(selection, probs_TE).probs_TE
    whole_T = selection.kept_TE.all(1)
    assert 0 < whole_T.sum() < 50
    assert torch.equal(found_TE[whole_T], probs_TE[whole_T])


@pytest.mark.parametrize("remedy", ["none", "renormalize", "reroute"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
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


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What several sources ask of the receivers whose slots they share, and the config."""

    config: DispatchConfig
    map_STE: np.ndarray
    scores_STE: np.ndarray
    choice_STE: np.ndarray
    mask_ST: np.ndarray
    protected_ST: np.ndarray


@st.composite
def shared_receivers(draw: st.DrawFn) -> Shared:
    """Draw one or two receivers, also with expert tensor parallelism, up to four sources."""
    num_ranks, etp_size = draw(st.sampled_from([(1, 2), (2, 1), (2, 2), (3, 1)]))
    num_experts = num_ranks * draw(st.integers(1, 3))
    config = DispatchConfig(
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        capacity_factor=draw(st.sampled_from([0.3, 0.7, 1.0])),
        capacity_pool="receiver",
        reroute_rounds=draw(st.integers(1, 3)),
        num_ranks=num_ranks,
        etp_size=etp_size,
    )
    shape = config.num_sources, draw(st.integers(1, 5))
    order_STE = draw(arrays(np.int8, (*shape, num_experts))).argsort(-1, kind="stable")
    map_STE = order_STE.argsort(-1, kind="stable") < config.top_k
    scores = st.sampled_from([0.5, 0.25, 1.0, 0.0])
    return Shared(
        config=config,
        map_STE=map_STE & draw(arrays(bool, map_STE.shape)),
        scores_STE=draw(arrays(np.float64, map_STE.shape, elements=scores)),
        choice_STE=draw(arrays(np.float64, map_STE.shape, elements=CHOICES)),
        mask_ST=draw(arrays(bool, shape)),
        protected_ST=draw(arrays(bool, shape)),
    )


def on_all_sources(shared: Shared, config: DispatchConfig) -> list[Selection]:
    """Select on every source, with the demands of all of them in each exchange.

    The sources run one after the other. A source's n-th exchange needs the n-th demands of the
    later ones, so all run again until their demands no longer change.
    """
    demands: dict[int, list[Tensor]] = {}

    def of_source(source: int) -> Selection:
        exchanges = iter(range(config.reroute_rounds + 1))
        mine = demands.setdefault(source, [])

        def all_demands(demand_E: Tensor) -> Tensor:
            number = next(exchanges)
            mine[number:] = [demand_E]
            nothing_E = torch.zeros_like(demand_E)
            return torch.stack(
                [
                    demands[s][number] if number < len(demands.get(s, [])) else nothing_E
                    for s in range(config.num_sources)
                ]
            )

        return select_with_remedy(
            config,
            config.sizes(shared.map_STE.shape[1]),
            torch.from_numpy(shared.map_STE[source]),
            torch.from_numpy(shared.scores_STE[source]),
            torch.from_numpy(shared.scores_STE[source]),
            torch.from_numpy(shared.choice_STE[source]),
            mask_T=torch.from_numpy(shared.mask_ST[source]),
            protected_T=torch.from_numpy(shared.protected_ST[source]),
            draw=torch.tensor(DRAW),
            all_demands=all_demands,
            source=source,
        )

    for _ in range(config.reroute_rounds + 1):
        for source in range(config.num_sources):
            of_source(source)
    return [of_source(source) for source in range(config.num_sources)]


def reference_of_all(shared: Shared, config: DispatchConfig) -> list[reference.Selection]:
    """Select on every source by the reference."""
    sizes = config.sizes(shared.map_STE.shape[1])
    asked_STE = shared.map_STE & ~shared.mask_ST[..., None]
    limit_SE = demand_SE = asked_STE.sum(1, dtype=np.int32)
    receivers = dict(num_ranks=config.num_ranks, num_rows=sizes.num_rows)
    if sizes.may_drop:
        limit_SE = reference.accept(demand_SE, **receivers)
    selections = [
        reference.select(
            asked_TE,
            scores_TE,
            sizes=sizes,
            policy=config.policy,
            protected_T=protected_T,
            draw=DRAW,
            limit_E=limit_E,
        )
        for asked_TE, scores_TE, protected_T, limit_E in zip(
            asked_STE, shared.scores_STE, shared.protected_ST, limit_SE, strict=True
        )
    ]
    if config.remedy == "renormalize":
        return [
            reference.renormalize(*of_source)
            for of_source in zip(selections, asked_STE, shared.scores_STE, strict=True)
        ]
    if config.remedy == "none" or not sizes.may_drop:
        return selections
    return reference.reroute_to_receivers(
        selections,
        asked_STE,
        shared.scores_STE,
        shared.choice_STE,
        **receivers,
        policy=config.policy,
        rounds=config.reroute_rounds,
        protected_ST=shared.protected_ST,
        draw=DRAW,
    )


@POLICIES
@pytest.mark.parametrize("remedy", REMEDIES)
@settings(max_examples=30)
@given(shared=shared_receivers())
def test_sources_that_share_receivers_are_the_reference(policy, remedy, shared: Shared):
    config = dataclasses.replace(shared.config, policy=policy, remedy=remedy)
    found = on_all_sources(shared, config)
    sizes = config.sizes(shared.map_STE.shape[1])
    expected = reference_of_all(shared, config)
    for selection, by_reference in zip(found, expected, strict=True):
        assert_same(selection.kept_TE, by_reference.kept_TE)
        assert_same(selection.probs_TE, by_reference.probs_TE)
        assert_same(selection.demand_E, by_reference.demand_E)
    # Every rank has the same table, and it says what each source kept.
    kept_SE = torch.stack([selection.kept_TE.sum(0, dtype=torch.int32) for selection in found])
    for selection in found:
        assert selection.kept_SE is not None and torch.equal(selection.kept_SE, kept_SE)
    kept_R = kept_SE.view(config.num_sources, config.num_ranks, -1).sum((0, 2))
    assert (kept_R <= sizes.num_rows).all()
    if remedy == "none":
        demand_SE = torch.stack([selection.demand_E for selection in found])
        demand_R = demand_SE.view(config.num_sources, config.num_ranks, -1).sum((0, 2))
        assert torch.equal(kept_R, demand_R.clamp(max=sizes.num_rows))


@given(shared=shared_receivers(), policy=st.sampled_from(ALL_POLICIES))
def test_sharing_never_keeps_less_of_a_cell_than_slots_of_its_own(shared: Shared, policy):
    config = dataclasses.replace(shared.config, policy=policy)
    num_tokens = shared.map_STE.shape[1]
    for selection in on_all_sources(shared, config):
        own_E = selection.demand_E.clamp(max=config.capacity(num_tokens))
        assert (selection.kept_TE.sum(0) >= own_E).all()


def test_receiver_is_rank_where_there_is_one_source():
    map_TE = torch.ones(9, 4, dtype=torch.bool)
    probs_TE = torch.rand(9, 4, generator=torch.Generator().manual_seed(6))
    found = []
    for pool in ("rank", "receiver"):
        config = DispatchConfig(num_experts=4, top_k=2, capacity_factor=0.5, capacity_pool=pool)
        found.append(select_with_remedy(config, config.sizes(9), map_TE, probs_TE))
    assert torch.equal(found[0].kept_TE, found[1].kept_TE)
    assert found[0].kept_TE.sum() == 12  # C = 3
    assert found[0].kept_SE is found[1].kept_SE is None


def rerouted(kept, scores, choice=None, *, capacity=2, rounds=1, protected=None) -> list[list[int]]:
    """Return the kept map of tokens that all asked for expert 0 alone, under policy "probs"."""
    kept_TE, scores_TE = torch.tensor(kept, dtype=torch.bool), torch.tensor(scores)
    asked_TE = torch.zeros_like(kept_TE)
    asked_TE[:, 0] = True
    selection = Selection(
        asked_TE=asked_TE | kept_TE,
        kept_TE=kept_TE,
        probs_TE=torch.where(kept_TE, scores_TE, 0),
        demand_E=(asked_TE | kept_TE).sum(0, dtype=torch.int32),
    )
    found = reroute(
        selection,
        scores_TE,
        None if choice is None else torch.tensor(choice),
        sizes=pools(kept_TE.shape[1], capacity),
        policy="probs",
        rounds=rounds,
        protected_T=None if protected is None else torch.tensor(protected),
    )
    return found.kept_TE.int().tolist()


# Token 0 keeps a row of expert 1 by a small score; tokens 1 and 2 lost theirs, and propose.
ONE_KEPT = [[0, 1], [0, 0], [0, 0]]
SCORES = [[0.9, 0.1], [0.9, 0.5], [0.9, 0.6]]


@pytest.mark.parametrize("protected", [None, [False, True, True]])
def test_a_kept_row_is_not_evicted_by_better_or_protected_ones(protected):
    found = rerouted(ONE_KEPT, SCORES, protected=protected)
    assert found == [[0, 1], [0, 0], [0, 1]]


def test_protected_tokens_are_rerouted_first():
    found = rerouted(ONE_KEPT, SCORES, protected=[False, True, False])
    assert found == [[0, 1], [0, 1], [0, 0]]


def test_an_expert_of_minus_infinity_is_not_chosen_though_it_alone_is_free():
    assert rerouted([[0, 0]], [[0.9, 0.5]], [[1.0, -torch.inf]], rounds=3) == [[0, 0]]
    assert rerouted([[0, 0]], [[0.9, 0.5]], [[1.0, -1e30]]) == [[0, 1]]


def test_a_row_that_found_a_place_does_not_try_again():
    # In each round the token would take one more of experts 1 to 3.
    assert rerouted([[0, 0, 0, 0]], [[0.9, 0.1, 0.3, 0.2]], rounds=3) == [[0, 0, 1, 0]]


@POLICIES
def test_rerouting_after_selection_follows_protection(policy):
    config, map_TE = routed("reroute")
    config = dataclasses.replace(config, policy=policy)
    scores_TE = torch.rand(9, 5, generator=torch.Generator().manual_seed(6))
    protected_T, draw = torch.arange(9) >= 5, torch.tensor(DRAW)
    of_tokens = dict(protected_T=protected_T, draw=draw)
    routed_TE = map_TE, scores_TE, scores_TE, 1 - scores_TE
    found = select_with_remedy(config, SIZES, *routed_TE, **of_tokens)
    selection = select(map_TE, scores_TE, sizes=SIZES, policy=policy, **of_tokens)
    arguments = dict(sizes=SIZES, policy=policy, rounds=2, **of_tokens)

    def kept(**changed) -> Tensor:
        return reroute(selection, scores_TE, 1 - scores_TE, **(arguments | changed)).kept_TE

    assert torch.equal(found.kept_TE, kept())
    assert not torch.equal(found.kept_TE, kept(protected_T=None))


def test_levels_of_rows_are_those_that_kernels_take(monkeypatch):
    """At most 3: they have two bits."""
    levels = []

    def kept_map_seen(*arguments):
        levels.append(arguments[4])
        return kept_map(*arguments)

    monkeypatch.setattr(overflow, "kept_map", kept_map_seen)
    assert rerouted(ONE_KEPT, SCORES, protected=[True, True, False]) == [[0, 1], [0, 1], [0, 0]]
    assert [level_TE.tolist() for level_TE in levels] == [[[1, 3], [1, 1], [0, 0]]]
