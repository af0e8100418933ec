"""Selection and plan in CUDA graphs: replays equal eager runs bit by bit, over 100 routings.

`tests.gpu.table` does the same with Megatron's layer, on one GPU and on several.
"""

import pytest
import torch
from torch import Tensor

from padded_dispatch.config import POLICIES
from padded_dispatch.kernels import plan as plan_kernels
from padded_dispatch.kernels.select import kept_map
from padded_dispatch.routing.plan import choice_probs, make_plan, plan_in_torch
from padded_dispatch.routing.select import kept_map_in_torch, select

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

T, K, E, C = 1027, 3, 13, 200
EVERY_POLICY = pytest.mark.parametrize("policy", POLICIES)


def routing(seed: int) -> list[Tensor]:
    """Return a map and probabilities; with every third seed, tokens ask for few experts."""
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(T, E, generator=generator)
    if seed % 3 == 0:
        logits_TE[:, :K] += 3
    map_TE = torch.zeros(T, E, dtype=torch.bool).scatter(1, logits_TE.topk(K).indices, True)
    # Few different values, so that ties are frequent.
    return [map_TE, (logits_TE.softmax(1) * 64).round() / 64]


def step(policy, inputs: list[Tensor]) -> dict[str, Tensor]:
    """Return selection, plan and gradients."""
    map_TE, probs_TE = inputs
    probs_TE = torch.where(map_TE, probs_TE, torch.nan).requires_grad_()
    selection = select(map_TE, probs_TE, capacity=C, policy=policy)
    plan = make_plan(selection.kept_TE, top_k=K)
    prob_TK = choice_probs(selection.probs_TE, plan.expert_TK)
    weight_TK = torch.arange(1.0, 1 + T * K, device=map_TE.device).view(T, K)
    prob_TK.backward(weight_TK)
    assert probs_TE.grad is not None
    return {
        "kept_TE": selection.kept_TE,
        "demand_E": selection.demand_E,
        **vars(plan),
        "prob_TK": prob_TK.detach(),
        "grad of probs_TE": probs_TE.grad,
    }


@EVERY_POLICY
def test_one_capture_serves_every_routing(policy):
    """Replay equals eager in every bit, and both a CPU."""
    static = [tensor.cuda() for tensor in routing(1)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(policy, static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step(policy, static)
    for seed in range(100):
        inputs = routing(seed)
        for tensor, value in zip(static, inputs, strict=True):
            tensor.copy_(value)
        graph.replay()
        eager = step(policy, [tensor.cuda() for tensor in inputs])
        for name, value in eager.items():
            assert torch.equal(replayed[name], value), (seed, name)
        on_cpu = step(policy, inputs)
        for name, value in eager.items():
            assert torch.equal(on_cpu[name], value.cpu()), (seed, name)
        assert not eager["unplaced_E"].any()


@EVERY_POLICY
def test_eager_reads_nothing_back(policy):
    inputs = [tensor.cuda() for tensor in routing(0)]
    step(policy, inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(policy, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


SIZES = pytest.mark.parametrize(
    ("num_tokens", "num_experts"), [(4096, 128), (33000, 128), (131072, 512)]
)


def large(num_tokens: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return a map of eight experts for each token, one of which all tokens have, and scores."""
    generator = torch.Generator("cuda").manual_seed(0)
    probs_TE = torch.rand(num_tokens, num_experts, device="cuda", generator=generator)
    probs_TE[:, 3] += 1
    map_TE = torch.zeros_like(probs_TE, dtype=torch.bool)
    return map_TE.scatter_(1, probs_TE.topk(8).indices, True), probs_TE


@SIZES
@EVERY_POLICY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_selection_of_any_size_is_torchs(policy, dtype, num_tokens, num_experts):
    """With a hot expert."""
    map_TE, probs_TE = large(num_tokens, num_experts)
    arguments = map_TE, probs_TE.to(dtype), num_tokens * 8 // num_experts, policy
    found, expected = kept_map(*arguments), kept_map_in_torch(*arguments)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert (found[0] != map_TE).any()


@SIZES
@pytest.mark.parametrize("top_k", [8, 5])
def test_plan_of_any_size_is_torchs(num_tokens, num_experts, top_k):
    map_TE, probs_TE = large(num_tokens, num_experts)
    expected = plan_in_torch(map_TE.cpu(), top_k)
    for found, of_cpu in zip(plan_kernels.plan(map_TE, top_k), expected, strict=True):
        assert torch.equal(found.cpu(), of_cpu)
    expert_TK = expected[0].cuda()
    weight_TK = torch.rand(num_tokens, top_k, device="cuda")
    grads = []
    for device in ("cuda", "cpu"):
        leaf_TE = probs_TE.detach().to(device).requires_grad_()
        choice_probs(leaf_TE, expert_TK.to(device)).backward(weight_TK.to(device))
        grads.append(leaf_TE.grad)
    assert torch.equal(grads[0].cpu(), grads[1])
