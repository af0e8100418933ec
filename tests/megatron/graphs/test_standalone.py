"""CUDA graphs of a standalone MoE layer, over the stand-in for CUDA graphs."""

import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor, nn

from padded_dispatch.megatron.compat import training_stream
from padded_dispatch.megatron.graphs import GraphedMoELayer
from tests.megatron.graphs.test_capture import graphs, unreachable
from tests.support import parity, tiny
from tests.support.graph_protocol import GraphedLayer
from tests.support.layer_parity import LayerCase, build_layer
from tests.support.pool import WorkerPool

SEQUENCE, BATCH = 5, 3


class _Callable:
    """The module that PyTorch returns, whose training passes are replays."""

    def __init__(self, graphed: GraphedLayer) -> None:
        self._graphed = graphed

    def __call__(self, tokens: Tensor) -> Tensor:
        return self._graphed(tokens)[0]


class _Tuple(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor) -> tuple[Tensor]:
        return (self.module(tokens),)


def make_graphed_callables(module: nn.Module, args: tuple[Tensor, ...]) -> _Callable:
    graphed = GraphedLayer(_Tuple(module), args, {})
    graphed.warm_up()
    graphed.capture_forward()
    graphed.capture_backward()
    return _Callable(graphed)


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    with (
        tiny.one_process(),
        graphs(),
        patch.object(torch.cuda, "make_graphed_callables", make_graphed_callables),
    ):
        yield


def standalone(dispatcher: str = "padded_alltoall", **settings: Any) -> GraphedMoELayer:
    values = {"moe_expert_capacity_factor": 1.0, **settings}
    layer = tiny.layer(tiny.config(dispatcher, **values))
    return GraphedMoELayer(layer, seq_length=SEQUENCE, micro_batch=BATCH)


def step(graphed: Any, seed: int) -> list[Tensor]:
    """Output and all gradients for random tokens."""
    draw = torch.Generator().manual_seed(seed)
    tokens, grad = torch.randn(2, SEQUENCE, BATCH, tiny.HIDDEN, generator=draw)
    tokens.requires_grad_()
    graphed.zero_grad()
    (output,) = graphed(tokens)
    output.backward(grad)
    gradients = [parameter.grad for parameter in graphed.parameters()]
    return [output.detach(), tokens.grad, *(g.clone() for g in gradients)]


def test_replays_equal_eager_runs(megatron):
    eager, graphed = standalone(), standalone()
    report = graphed.capture()
    assert report.unreproducible == ()
    # The output, and the gradients of the input and of every parameter.
    assert report.num_tensors == 2 + len(list(graphed.parameters()))
    for seed in range(5):
        wanted = step(eager, seed)
        with patch.object(graphed.mlp.router, "forward", unreachable):
            found = step(graphed, seed)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    graphed.delete()
    with patch.object(GraphedLayer, "replay_forward", unreachable):
        step(graphed, 0)


def test_capture_restores_counters_and_gradients(megatron):
    graphed = standalone()
    step(graphed, 0)
    before = [tensor.clone() for tensor in graphed.mlp.token_dispatcher.counters.tensors()]
    graphed.capture()
    after = graphed.mlp.token_dispatcher.counters.tensors()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert any(tensor.any() for tensor in before)
    assert all(parameter.grad is None for parameter in graphed.parameters())


def test_evaluation_is_eager_and_takes_any_shape(megatron):
    graphed = standalone()
    graphed.capture()
    graphed.eval()
    with patch.object(GraphedLayer, "replay_forward", unreachable):
        (output,) = graphed(torch.ones(2, 1, tiny.HIDDEN))
    assert output.shape == (2, 1, tiny.HIDDEN)


def test_a_change_raises_before_the_replay(megatron):
    graphed = standalone()
    graphed.capture()
    with pytest.raises(ValueError, match=r"tokens.shape must stay \(5, 3, 16\), got \(4, 3, 16\)"):
        graphed(torch.ones(4, BATCH, tiny.HIDDEN))
    graphed.config.moe_aux_loss_coeff = 0.5
    with pytest.raises(ValueError, match=r"moe_aux_loss_coeff in layer 1 must .*got 0\.5"):
        graphed(torch.ones(SEQUENCE, BATCH, tiny.HIDDEN))


def test_a_wrong_replay_fails_the_self_test(megatron):
    original = GraphedLayer.replay_forward

    def replay(graphed: GraphedLayer, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (output,) = original(graphed, given)
        return (output + 1,)

    with (
        patch.object(GraphedLayer, "replay_forward", replay),
        pytest.raises(RuntimeError, match="layer 1: its output differs from eager"),
    ):
        standalone().capture()


def test_layers_that_cannot_be_captured_are_rejected_by_name(megatron):
    dispatcher = r"moe_token_dispatcher_type must be 'padded_alltoall' .*, got 'allgather'; set it"
    with pytest.raises(ValueError, match=dispatcher):
        standalone("allgather", moe_expert_capacity_factor=None)
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    granularity = r"recompute_granularity must be None .*, got 'selective'; leave it out"
    with pytest.raises(ValueError, match=granularity):
        standalone(**recompute)
    layer = tiny.layer(tiny.config())
    for name in ("fp8", "fp4", "quant_recipe"):
        quantizes = rf"{name} must be unset for a standalone .*, got 'some'; leave it out"
        with patch.object(layer.config, name, "some"), pytest.raises(ValueError, match=quantizes):
            GraphedMoELayer(layer, seq_length=SEQUENCE, micro_batch=BATCH)


def differing_on_gpus(num_ranks: int) -> list[str]:
    """Return the names of tensors in which replays and eager runs differ, over 20 batches."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_stream(training_stream())
    with parity.megatron("cuda", expert_model_parallel_size=num_ranks):
        sizes = {"num_experts": 16, "top_k": 4, "hidden": 256, "ffn": 192}
        case = LayerCase(
            name="standalone", device="cuda", dtype=torch.bfloat16, ep=num_ranks, **sizes
        )
        layer = build_layer(case, "padded_alltoall")
        model_parallel_cuda_manual_seed(1, te_rng_tracker=True, force_reset_rng=True)
        graphed = GraphedMoELayer(layer, seq_length=64, micro_batch=2)
        report = graphed.capture()
        found = list(report.unreproducible)
        for seed in range(20):
            draw = torch.Generator("cuda").manual_seed(seed)
            tokens = torch.randn(64, 2, 256, generator=draw, device="cuda").bfloat16()
            runs = []
            for run in (graphed, lambda given: layer(given)[:1]):
                given = tokens.clone().requires_grad_()
                graphed.zero_grad()
                (output,) = run(given)
                output.square().sum().backward()
                gradients = {n: p.grad for n, p in layer.named_parameters()}
                runs.append({"output": output, "tokens": given.grad, **gradients})
            found += [name for name in runs[0] if not torch.equal(runs[0][name], runs[1][name])]
        graphed.delete()
    return found


@pytest.mark.gpu
def test_replays_equal_eager_runs_on_a_gpu(monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    with WorkerPool(1, backend="nccl") as pool:
        assert pool.run(differing_on_gpus, 1) == [[]]


@pytest.mark.multi_gpu
def test_replays_equal_eager_runs_on_two_gpus(monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    with WorkerPool(2, backend="nccl") as pool:
        assert pool.run(differing_on_gpus, 2) == [[], []]
