"""Shapes are static: the host reads nothing back, and one capture serves all routings."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from padded_dispatch import NO_DROP, Activation, DispatchConfig, ExpertWeights, PaddedDispatcher
from padded_dispatch.experts.store import Store
from tests.support.passes import D, E, F, K, routing

pytestmark = pytest.mark.gpu

LAYERS = 3  # Those of a store overflow one after the other at factor 0.5.

Step = Callable[[Tensor, Tensor, Tensor], list[Tensor]]


def padded_cells(config: DispatchConfig, device: torch.device) -> Step:
    """Return a step of one layer: dispatch, experts that square, combine."""
    dispatcher = PaddedDispatcher(config)

    def step(tokens_TD: Tensor, probs_TE: Tensor, map_TE: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in (tokens_TD, probs_TE)]
        sent = dispatcher.dispatch(*leaves, map_TE)
        rows_ND = sent.expert_input.rows_ND.float().square() * sent.expert_input.probs_N[:, None]
        out_TD = dispatcher.combine(rows_ND.bfloat16(), sent)
        grads = torch.autograd.grad(out_TD.float().square().sum(), leaves)
        demand_E = sent.selection.demand_E  # Where nothing can be dropped, nobody counts it.
        return [out_TD.detach(), *grads, *([] if demand_E is None else [demand_E])]

    return step


def packed(config: DispatchConfig, device: torch.device) -> Step:
    """Return a step of layers that share a store, each with a residual."""
    store, generator = Store(), torch.Generator(device).manual_seed(5)
    dispatchers = [PaddedDispatcher(config, store=store) for _ in range(LAYERS)]

    def weight(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device=device) * shape[-1] ** -0.5
        return drawn.bfloat16().requires_grad_()

    weights = [
        ExpertWeights(fc1_LGD=weight(E, 2 * F, D), fc2_LDF=weight(E, D, F)) for _ in dispatchers
    ]
    parameters = [w for one in weights for w in (one.fc1_LGD, one.fc2_LDF)]

    def step(tokens_TD: Tensor, probs_TE: Tensor, map_TE: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in (tokens_TD, probs_TE)]
        out_TD = leaves[0]
        for dispatcher, of_layer in zip(dispatchers, weights, strict=True):
            routed = out_TD, leaves[1], map_TE
            out_TD = out_TD + dispatcher.run(*routed, of_layer, Activation())
        grads = torch.autograd.grad(out_TD.float().square().sum(), [*leaves, *parameters])
        return [out_TD.detach(), *grads]

    return step


KINDS = {
    "padded cells": (padded_cells, "cells"),
    "packed cells": (packed, "cells"),
    "store": (packed, "store"),
}
EACH = pytest.mark.parametrize("kind", KINDS)
POLICIES = pytest.mark.parametrize("policy", ["probs", "position"])
FACTORS = pytest.mark.parametrize("factor", [NO_DROP, 0.5, 1.25])


def step_of(kind: str, device: torch.device, factor: float = 1.0, policy: str = "probs") -> Step:
    make, pool = KINDS[kind]
    sizes = {"num_experts": E, "top_k": K, "capacity_factor": factor}
    return make(DispatchConfig(**sizes, capacity_pool=pool, policy=policy), device)


@contextmanager
def waiting_raises() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@EACH
@FACTORS
@POLICIES
def test_eager_reads_nothing_back(cuda, policy, factor, kind):
    step, inputs = step_of(kind, cuda, factor, policy), routing(1, cuda)
    step(*inputs)
    with waiting_raises():
        step(*inputs)


@EACH
@FACTORS
@POLICIES
def test_one_capture_serves_every_routing(cuda, policy, factor, kind):
    """Replay equals eager bit by bit, with eager passes between replays."""
    step = step_of(kind, cuda, factor, policy)
    static = [tensor.clone() for tensor in routing(1, cuda)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step(*static)
    for seed in range(20):
        inputs = routing(seed, cuda)
        for tensor, value in zip(static, inputs, strict=True):
            tensor.copy_(value)
        graph.replay()
        for number, (got, want) in enumerate(zip(replayed, step(*inputs), strict=True)):
            assert torch.equal(got, want), (seed, number)


@EACH
def test_deterministic_mode_raises_nothing_and_changes_nothing(cuda, kind):
    step, inputs = step_of(kind, cuda), routing(3, cuda)
    first = step(*inputs)
    torch.use_deterministic_algorithms(True)
    try:
        again = step(*inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
