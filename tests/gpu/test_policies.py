"""Policies and remedies in CUDA graphs: replays equal eager runs bit by bit, over 100 routings.

`tests.gpu.situations` does the same with Megatron's layer, on one GPU and on several.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from padded_dispatch.config import POLICIES, REMEDIES, DispatchConfig
from padded_dispatch.ops.overflow import select_with_remedy
from padded_dispatch.ops.plan import make_plan
from tests.support.pools import pools

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

T, K, E, C = 1027, 3, 13, 200
SIZES = pools(E, C)
NUM_ROUTINGS = 100
EVERY_POLICY = pytest.mark.parametrize("policy", POLICIES)
EVERY_REMEDY = pytest.mark.parametrize("remedy", REMEDIES)


def routing(seed: int) -> list[Tensor]:
    """Return a map, scores of all experts, and protected tokens.

    With every third seed, tokens ask for few experts, and the protected ones alone exceed C.
    """
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(T, E, generator=generator)
    if seed % 3 == 0:
        logits_TE[:, :K] += 3
    # Few different values, so that ties are frequent.
    scores_TE = (logits_TE.softmax(1) * 64).round() / 64
    map_TE = torch.zeros(T, E, dtype=torch.bool).scatter(1, logits_TE.topk(K).indices, True)
    share = 0.5 if seed % 3 == 0 else 0.1
    return [map_TE, scores_TE, torch.rand(T, generator=generator) < share]


def step(config: DispatchConfig, inputs: list[Tensor], draw: Tensor) -> dict[str, Tensor]:
    """Return selection, plan and gradients; then advance the draw."""
    map_TE, scores_TE, protected_T = inputs
    probs_TE = torch.where(map_TE, scores_TE, 0).requires_grad_()
    scores_TE = scores_TE.detach().requires_grad_()
    selection = select_with_remedy(
        config, SIZES, map_TE, probs_TE, scores_TE, protected_T=protected_T, draw=draw
    )
    plan = make_plan(selection.kept_TE, top_k=K, sizes=SIZES)
    weight_TE = torch.arange(1.0, 1 + T * E, device=map_TE.device).view(T, E)
    (selection.probs_TE * weight_TE).sum().backward()
    draw += 1
    assert probs_TE.grad is not None and selection.protected_dropped_E is not None
    found = {
        "kept_TE": selection.kept_TE,
        "demand_E": selection.demand_E,
        "protected_dropped_E": selection.protected_dropped_E,
        "slot_of_TK": plan.slot_of_TK,
        "choice_of_slot_GP": plan.choice_of_slot_GP,
        "unplaced_E": plan.unplaced_E,
        "probs_TE": selection.probs_TE.detach(),
        "grad of probs_TE": probs_TE.grad,
    }
    return found if scores_TE.grad is None else {**found, "grad of scores_TE": scores_TE.grad}


def captured(
    run: Callable[[], dict[str, Tensor]],
) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]:
    """Capture `run`; return the graph and the tensors that replays write."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found


def config_of(policy: Any, remedy: Any) -> DispatchConfig:
    return DispatchConfig(num_experts=E, top_k=K, policy=policy, remedy=remedy, reroute_rounds=2)


@EVERY_REMEDY
@EVERY_POLICY
def test_one_capture_serves_every_routing(policy, remedy):
    """Replay equals eager in every bit; kept rows and their slots are the same on a CPU."""
    config = config_of(policy, remedy)
    static = [tensor.cuda() for tensor in routing(1)]
    draw, eager_draw = (torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2))
    graph, replayed = captured(lambda: step(config, static, draw))
    draw.zero_()
    num_rerouted = num_protected_dropped = 0
    for seed in range(NUM_ROUTINGS):
        inputs = routing(seed)
        for tensor, value in zip(static, inputs, strict=True):
            tensor.copy_(value)
        graph.replay()
        eager = step(config, [tensor.cuda() for tensor in inputs], eager_draw)
        assert eager.keys() == replayed.keys()
        for name, value in eager.items():
            assert torch.equal(replayed[name], value), (seed, name)
        on_cpu = step(config, inputs, torch.tensor(seed))
        for name in ("kept_TE", "demand_E", "protected_dropped_E", "slot_of_TK"):
            assert torch.equal(on_cpu[name], eager[name].cpu()), (seed, name)
        assert not eager["unplaced_E"].any()
        num_rerouted += int((on_cpu["kept_TE"] & ~inputs[0]).sum())
        num_protected_dropped += int(on_cpu["protected_dropped_E"].sum())
    assert (num_rerouted > 0) == (remedy == "reroute")
    assert num_protected_dropped > 0


@EVERY_REMEDY
@EVERY_POLICY
def test_eager_reads_nothing_back(policy, remedy):
    config = config_of(policy, remedy)
    inputs = [tensor.cuda() for tensor in routing(0)]
    draw = torch.zeros((), dtype=torch.int64, device="cuda")
    step(config, inputs, draw)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(config, inputs, draw)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_random_differs_between_replays_and_repeats_with_the_draw():
    config = config_of("random", "none")
    static = [tensor.cuda() for tensor in routing(0)]
    draw = torch.zeros((), dtype=torch.int64, device="cuda")
    graph, replayed = captured(lambda: step(config, static, draw))

    def replays(start: int) -> list[Tensor]:
        draw.fill_(start)
        kept = []
        for _ in range(5):
            graph.replay()
            kept.append(replayed["kept_TE"].clone())
        return kept

    first, again, later = replays(0), replays(0), replays(2)
    for number, kept_TE in enumerate(first):
        assert torch.equal(kept_TE, again[number])
        assert all(not torch.equal(kept_TE, other) for other in first[:number])
    assert all(torch.equal(*pair) for pair in zip(first[2:], later[:3], strict=True))
