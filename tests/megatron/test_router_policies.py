"""Policies and remedies in Megatron's router: selection, draws, gradients, checkpoints."""

from typing import Any, cast

import pytest
import torch
from megatron.core import dist_checkpointing
from torch import Tensor

from padded_dispatch.config import POLICIES, REMEDIES
from padded_dispatch.megatron import install, protect
from padded_dispatch.megatron.graphs.capture import LayerGraphs
from padded_dispatch.megatron.options import PaddedOptions
from padded_dispatch.ops.overflow import select_with_remedy
from tests.megatron.graphs.test_capture import (
    BATCH,
    MICROBATCHES,
    SEQUENCE,
    Training,
    differences,
    graphs,
)
from tests.support import tiny
from tests.support.pools import pools

pytestmark = pytest.mark.usefixtures("one_process")

T = 24


def layer(options: PaddedOptions, **overrides: Any) -> Any:
    settings = {"moe_expert_capacity_factor": 0.75, "moe_router_pre_softmax": True}
    return tiny.padded_layer(options, **(settings | overrides))


def router(*, overrides: dict[str, Any] | None = None, **options: Any) -> Any:
    return layer(PaddedOptions(**options), **(overrides or {})).router


def logits(seed: int = 0) -> Tensor:
    """[T, 1, E]; experts 0 and 1 are popular, and 2 and 3 have free slots."""
    noise = torch.randn(T, 1, tiny.NUM_EXPERTS, generator=torch.Generator().manual_seed(seed))
    return noise + torch.tensor([2.0, 1.0, 0.0, 0.0])


def kept(route: Any, seed: int = 0) -> Tensor:
    return route.routing(logits(seed))[1]


@pytest.mark.parametrize("remedy", REMEDIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_router_returns_the_selection_of_its_map(policy, remedy):
    route = router(policy=policy, remedy=remedy, reroute_rounds=2, seed=3)
    probs_TE, kept_TE = route.routing(logits())
    scores_TE = logits().flatten(0, 1).softmax(1)
    map_TE = torch.zeros(T, tiny.NUM_EXPERTS, dtype=torch.bool)
    map_TE.scatter_(1, scores_TE.topk(tiny.TOP_K).indices, True)
    # The draw of seed 3 and layer 1 (high bits), of which none was made before (low bits).
    draw = torch.tensor((3 * 1_000_003 + 1) << 32)
    config = route.selector.configs.now
    assert (config.policy, config.remedy, config.reroute_rounds) == (policy, remedy, 2)
    expected = select_with_remedy(
        config,
        pools(tiny.NUM_EXPERTS, 9),
        map_TE,
        torch.where(map_TE, scores_TE, 0),
        scores_TE,
        draw=draw,
    )
    assert torch.equal(kept_TE, expected.kept_TE)
    assert (kept_TE & ~map_TE).any() == (remedy == "reroute")
    # The router's softmax may run another kernel than ours.
    torch.testing.assert_close(probs_TE, expected.probs_TE)
    counters = route.selector.observers[0]
    assert torch.equal(counters.demand_E, map_TE.sum(0))


@pytest.mark.parametrize("remedy", REMEDIES)
def test_gradients_reach_the_logits(remedy):
    """Before top-k the softmax is over all experts: every row's probability is its score."""
    route = router(remedy=remedy)
    given = logits().requires_grad_()
    probs_TE, kept_TE = route.routing(given)
    weight_TE = torch.arange(1.0, 1 + T * tiny.NUM_EXPERTS).view(T, -1)
    (probs_TE * weight_TE).sum().backward()
    by_hand = logits().requires_grad_()
    scores_TE = by_hand.flatten(0, 1).softmax(1)
    kept_scores_TE = torch.where(kept_TE, scores_TE, 0)
    if remedy == "renormalize":
        asked_T = scores_TE.topk(tiny.TOP_K).values.sum(1, keepdim=True)
        sum_T = kept_scores_TE.sum(1, keepdim=True)
        kept_scores_TE = kept_scores_TE / torch.where(sum_T > 0, sum_T, 1) * asked_T
    (kept_scores_TE * weight_TE).sum().backward()
    assert given.grad is not None and by_hand.grad is not None
    assert given.grad.abs().sum() > 0
    torch.testing.assert_close(given.grad, by_hand.grad)


def test_recompute_sees_the_draw_of_the_pass_that_it_repeats():
    route = router(policy="random")
    with torch.no_grad():
        first_TE = kept(route)
    again_TE = kept(route)
    next_TE = kept(route)
    assert torch.equal(first_TE, again_TE)
    assert not torch.equal(again_TE, next_TE)
    assert route.num_draws.tolist() == [2]


def test_evaluation_does_not_disturb_training():
    undisturbed, disturbed = router(policy="random"), router(policy="random")
    expected = [kept(undisturbed, seed) for seed in range(3)]
    for seed, expected_TE in enumerate(expected):
        disturbed.eval()
        with torch.no_grad():
            kept(disturbed, seed=9)
        kept(disturbed, seed=9)  # with gradients, as some evaluations run
        disturbed.train()
        assert torch.equal(kept(disturbed, seed), expected_TE)


def test_draws_depend_on_seed_layer_and_count_only():
    def draws(seed: int, layer_number: int) -> list[Tensor]:
        route = router(policy="random", seed=seed)
        route.set_layer_number(layer_number)
        return [kept(route) for _ in range(3)]

    def same(one: list[Tensor], other: list[Tensor]) -> list[bool]:
        return [torch.equal(*pair) for pair in zip(one, other, strict=True)]

    assert same(draws(1, 1), draws(1, 1)) == [True] * 3
    assert same(draws(1, 1), draws(2, 1)) == [False] * 3
    assert same(draws(1, 1), draws(1, 2)) == [False] * 3


def test_a_draw_by_its_definition():
    """Seed and layer in 31 bits above, the draws so far below."""
    route = router(policy="random", seed=5000)
    route.set_layer_number(3)
    above = (5000 * 1_000_003 + 3) % 2**31
    found = []
    for _ in range(2):
        found.append(int(route._draw()))
        kept(route)
    assert found == [above * 2**32, above * 2**32 + 1]


def test_a_resumed_run_continues_with_the_next_draw():
    running = router(policy="random")
    for seed in range(2):
        kept(running, seed)
    state = {name: value.clone() for name, value in running.state_dict().items()}
    expected = [kept(running, seed) for seed in range(2, 5)]
    resumed = router(policy="random")
    resumed.load_state_dict(state)
    for seed, expected_TE in enumerate(expected, start=2):
        assert torch.equal(kept(resumed, seed), expected_TE)


def test_megatron_s_distributed_checkpoints_hold_draws(tmp_path):
    running, resumed = router(policy="random"), router(policy="random")
    kept(running)
    dist_checkpointing.save(running.sharded_state_dict("router."), str(tmp_path))
    sharded = resumed.sharded_state_dict("router.")
    state = cast(dict[str, Any], dist_checkpointing.load(sharded, str(tmp_path)))
    resumed.load_state_dict({name.removeprefix("router."): value for name, value in state.items()})
    assert torch.equal(kept(resumed), kept(running))
    assert resumed.num_draws.tolist() == [2]


def test_only_policy_random_writes_draws_to_checkpoints():
    other, random = router(policy="priority"), router(policy="random")
    assert random.state_dict().keys() - other.state_dict().keys() == {"num_draws"}
    kept(random)
    random.load_state_dict(other.state_dict())
    assert random.num_draws.tolist() == [1]
    other.load_state_dict(random.state_dict())
    assert torch.equal(other.weight, random.weight)


@pytest.mark.parametrize("remedy", REMEDIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_recompute_changes_no_bit(policy, remedy):
    options = PaddedOptions(policy=policy, remedy=remedy)
    hidden = torch.randn(T, 1, tiny.HIDDEN, generator=torch.Generator().manual_seed(1))
    results = []
    for recompute in ({}, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}):
        moe = layer(options, **recompute)
        outputs = []
        for _ in range(2):
            given = hidden.clone().requires_grad_()
            output, _ = moe(given)
            output.square().sum().backward()
            outputs += [output.detach(), given.grad]
        results.append([*outputs, *(param.grad for param in moe.parameters())])
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize(
    ("policy", "remedy"),
    [("random", "none"), ("random", "reroute"), ("priority", "renormalize")],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_a_loop_with_graphs_equals_one_without(policy, remedy, recompute):
    """Compare losses, gradients and counts of three steps; the capture's own passes do not draw."""
    with graphs():
        install(PaddedOptions(policy=policy, remedy=remedy))
        settings: dict[str, Any] = {"moe_expert_capacity_factor": 0.75}
        eager = Training(None, **settings)
        graphed = Training(("moe",), **settings, **(RECOMPUTED if recompute else {}))
        made = LayerGraphs([graphed.model], seq_length=SEQUENCE, micro_batch=BATCH)
        report = made.capture()
        assert report is not None and report.unreproducible == ()
        steps = [graphed.step(0), graphed.step(1)]
        made.delete()
        steps.append(graphed.step(2))
        assert differences([eager.step(number) for number in range(3)], steps) == []
        if policy == "random":
            draws = [layer.router.num_draws.item() for layer in graphed.moe_layers]
            assert draws == [3 * MICROBATCHES] * 2


RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def test_random_is_refused_where_recompute_comes_late():
    staged = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    router(policy="random", overrides=RECOMPUTED)
    router(policy="random", overrides=staged)
    router(policy="position", overrides=staged | RECOMPUTED)
    message = "policy must .* pipeline_model_parallel_size=2 .* recomputed, got 'random'; .*'moe'"
    with pytest.raises(ValueError, match=message):
        router(policy="random", overrides=staged | RECOMPUTED)


def test_reroute_is_refused_where_the_next_best_expert_is_unknown():
    # Megatron raises for sinkhorn with a factor, but does not see a layer's own factor.
    sinkhorn = {
        "moe_router_load_balancing_type": "sinkhorn",
        "moe_expert_capacity_factor": None,
    }
    router(remedy="renormalize", layer_factors={1: 0.5}, overrides=sinkhorn)
    with pytest.raises(ValueError, match=r"type must .* remedy='reroute', got 'sinkhorn'"):
        router(remedy="reroute", layer_factors={1: 0.5}, overrides=sinkhorn)


def test_protected_tokens_come_first_in_training_only():
    route = router(policy="probs", eval_factor=0.75)
    scores_TE = logits().flatten(0, 1).softmax(1)
    map_TE = torch.zeros(T, tiny.NUM_EXPERTS, dtype=torch.bool)
    map_TE.scatter_(1, scores_TE.topk(tiny.TOP_K).indices, True)
    protected_T = torch.arange(T) >= T - 6  # Fewer than C = 9: all their rows are kept.
    unprotected_TE = kept(route)
    assert (map_TE & ~unprotected_TE)[protected_T].any()
    protect([route], protected_T[:, None])
    protected_TE = kept(route)
    assert torch.equal(protected_TE[protected_T], map_TE[protected_T])
    assert torch.equal(protected_TE.sum(0), unprotected_TE.sum(0))
    route.eval()
    assert torch.equal(kept(route), unprotected_TE)
    route.train()
    protect([route], torch.zeros(T, 1, dtype=torch.bool))
    assert torch.equal(kept(route), unprotected_TE)
    assert route.selector.observers[0].protected_dropped.item() == 0
    protect([route], torch.ones(T, 1, dtype=torch.bool))
    kept(route)
    expected = (map_TE.sum(0) - 9).clamp(min=0).sum()
    assert route.selector.observers[0].protected_dropped == expected > 0


def test_a_mask_of_other_tokens_is_refused():
    route = router()
    protect([route], torch.ones(T - 1, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"keep.* must be 24, .* got 23; call protect"):
        kept(route)
    protect([route], torch.ones(T, 1, dtype=torch.bool))
    kept(route)


def test_protection_reaches_replays():
    masks = [torch.arange(SEQUENCE)[:, None] % 4 == number for number in range(2)]
    masks = [mask.expand(SEQUENCE, BATCH) for mask in masks]
    settings: dict[str, Any] = {"moe_expert_capacity_factor": 0.75}

    def steps(training: Training) -> list[dict[str, Tensor]]:
        found = []
        for number, mask in enumerate(masks):
            protect([training.model], mask)
            found.append(training.step(number))
        return found

    with graphs():
        graphed = Training(("moe",), **settings)
        protect([graphed.model], torch.zeros(SEQUENCE, BATCH, dtype=torch.bool))
        made = LayerGraphs([graphed.model], seq_length=SEQUENCE, micro_batch=BATCH)
        made.capture()
        assert differences(steps(Training(None, **settings)), steps(graphed)) == []
        with pytest.raises(ValueError, match=r"call protect\(\) before the capture"):
            protect([graphed.model], torch.zeros(SEQUENCE, 1, dtype=torch.bool))
        made.delete()
        unprotected = Training(("moe",), **settings)
        made = LayerGraphs([unprotected.model], seq_length=SEQUENCE, micro_batch=BATCH)
        made.capture()
        with pytest.raises(ValueError, match=r"call protect\(\) before the capture"):
            protect([unprotected.model], masks[0])
        made.delete()


def test_padding_tokens_are_not_rerouted():
    route = router(remedy="reroute")
    padding_mask = torch.arange(T)[:, None] % 3 == 0
    _, kept_TE = route.routing(logits(), padding_mask)
    assert not kept_TE[padding_mask.flatten()].any()
