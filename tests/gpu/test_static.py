"""Shapes are static: the host reads nothing back, and one capture serves all routings."""

import pytest
import torch

from padded_dispatch import NO_DROP, DispatchConfig, PaddedDispatcher

pytestmark = pytest.mark.gpu

T, K, E, D = 257, 3, 16, 96


def routing(seed: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return tokens, probabilities and a map; every third seed uses only K experts."""
    generator = torch.Generator().manual_seed(seed)
    tokens_TD = torch.randn(T, D, generator=generator, dtype=torch.float64)
    probs_TE = torch.rand(T, E, generator=generator)
    if seed % 3 == 0:
        probs_TE[:, :K] += 1
    map_TE = torch.zeros(T, E, dtype=torch.bool).scatter(1, probs_TE.topk(K).indices, True)
    return tokens_TD.to(device, torch.bfloat16), probs_TE.to(device), map_TE.to(device)


def step(dispatcher: PaddedDispatcher, tokens_TD, probs_TE, map_TE) -> tuple[torch.Tensor, ...]:
    """Run dispatch, experts that square, combine; return output, gradients and demand."""
    tokens_TD, probs_TE = tokens_TD.detach().requires_grad_(), probs_TE.detach().requires_grad_()
    sent = dispatcher.dispatch(tokens_TD, probs_TE, map_TE)
    rows_ND = sent.expert_input.rows_ND.float().square() * sent.expert_input.probs_N[:, None]
    out_TD = dispatcher.combine(rows_ND.bfloat16(), sent)
    out_TD.float().square().sum().backward()
    assert tokens_TD.grad is not None and probs_TE.grad is not None
    return out_TD.detach(), tokens_TD.grad, probs_TE.grad, sent.selection.demand_E


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [NO_DROP, 0.5, 1.25])
def test_eager_reads_nothing_back(cuda, policy, factor, packed):
    config = DispatchConfig(num_experts=E, top_k=K, capacity_factor=factor, policy=policy)
    dispatcher = PaddedDispatcher(config, packed=packed)
    inputs = routing(1, cuda)
    step(dispatcher, *inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(dispatcher, *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [NO_DROP, 0.5, 1.25])
def test_one_capture_serves_every_routing(cuda, policy, factor, packed):
    """Replay equals eager bit by bit, and rows move on a GPU as on a CPU."""
    config = DispatchConfig(num_experts=E, top_k=K, capacity_factor=factor, policy=policy)
    dispatcher = PaddedDispatcher(config, packed=packed)
    static = [tensor.clone() for tensor in routing(1, cuda)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(dispatcher, *static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step(dispatcher, *static)
    for seed in range(20):
        inputs = routing(seed, cuda)
        for tensor, value in zip(static, inputs, strict=True):
            tensor.copy_(value)
        graph.replay()
        expected = step(dispatcher, *inputs)
        for got, want in zip(replayed, expected, strict=True):
            assert torch.equal(got, want), seed
        on_cpu = dispatcher.dispatch(*(tensor.cpu() for tensor in inputs))
        on_gpu = dispatcher.dispatch(*inputs)
        here, there = on_gpu.expert_input, on_cpu.expert_input
        real = slice(int(there.kept_SL.sum()) if packed else None)
        assert torch.equal(here.rows_ND[real].cpu(), there.rows_ND[real]), seed
        assert torch.equal(here.probs_N[real].cpu(), there.probs_N[real]), seed
        assert torch.equal(on_gpu.plan.slot_of_TK.cpu(), on_cpu.plan.slot_of_TK), seed


def test_deterministic_mode_raises_nothing_and_changes_nothing(cuda):
    dispatcher = PaddedDispatcher(DispatchConfig(num_experts=E, top_k=K, capacity_factor=1.0))
    inputs = routing(3, cuda)
    first = step(dispatcher, *inputs)
    torch.use_deterministic_algorithms(True)
    try:
        again = step(dispatcher, *inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
