"""Passes that are recomputed, asked for in part, or given too many experts, on one GPU."""

import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from padded_dispatch import Activation, DispatchConfig, ExpertWeights, PaddedDispatcher
from padded_dispatch.experts import Sums
from tests.gpu.test_static import D, E, F, K, T, routing
from tests.support.whole_layers import SAVES, selective

pytestmark = pytest.mark.gpu

CONFIG = DispatchConfig(num_experts=E, top_k=K, capacity_factor=1.25, capacity_pool="store")


class Layer:
    """Experts with biases, and the leaves whose gradients `found` returns."""

    def __init__(self, device: torch.device, *, sums: bool = False) -> None:
        generator = torch.Generator(device).manual_seed(7)

        def leaf(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=generator, device=device) * shape[-1] ** -0.5
            return drawn.bfloat16().requires_grad_()

        shapes = {"fc1_LGD": (E, 2 * F, D), "fc2_LDF": (E, D, F)}
        shapes |= {"fc1_bias_LG": (E, 2 * F), "fc2_bias_LD": (E, D)}
        leaves: dict[str, Any] = {name: leaf(*shape) for name, shape in shapes.items()}
        self.sums = (
            {name: ones_for(leaves[name]) for name in ("fc1_LGD", "fc2_LDF")} if sums else {}
        )
        more: dict[str, Any] = {f"{name[:3]}_sums": one for name, one in self.sums.items()}
        self.weights = ExpertWeights(**leaves, **more)
        tokens_TD, probs_TE, self.map_TE = routing(1, device)
        self.inputs = tokens_TD.requires_grad_(), probs_TE.bfloat16().requires_grad_()
        self.leaves = {"tokens": self.inputs[0], "probs": self.inputs[1], **leaves}
        self.grad_TD = torch.randn(T, D, generator=generator, device=device).bfloat16()
        self.dispatcher = PaddedDispatcher(CONFIG)

    def run(self, tokens_TD: Tensor, probs_TE: Tensor) -> Tensor:
        given = self.map_TE, self.weights, Activation()
        return self.dispatcher.run(tokens_TD, probs_TE, *given)

    def found(self, out_TD: Tensor) -> dict[str, Tensor]:
        out_TD.backward(self.grad_TD)
        grads = {name: leaf.grad for name, leaf in self.leaves.items()}
        return {"out": out_TD.detach()} | {name: g for name, g in grads.items() if g is not None}


def ones_for(weight_LOI: Tensor) -> Sums:
    ones = torch.ones_like(weight_LOI, dtype=torch.float32)
    zeroed = torch.tensor([1, 0], dtype=torch.int32, device=weight_LOI.device)
    return Sums(sums_LOI=ones, spare_LOI=torch.empty_like(weight_LOI), zeroed=zeroed)


def different(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert len(expected) == 7 and found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


@pytest.mark.parametrize("saves", SAVES)
def test_selective_recompute_has_the_same_bits(cuda, saves):
    plain, layer = Layer(cuda), Layer(cuda)
    how: dict[str, Any] = {"use_reentrant": False, "context_fn": selective(saves)}
    found = layer.found(checkpoint(layer.run, *layer.inputs, **how))
    assert different(found, plain.found(plain.run(*plain.inputs))) == []


def test_a_recomputed_pass_has_the_gradients_of_its_own_routing(cuda):
    """All tokens choose otherwise in the second pass."""
    plain, layer = Layer(cuda), Layer(cuda)
    plain.map_TE = other_TE = layer.map_TE.flip(1)
    expected = plain.found(plain.run(*plain.inputs))

    def run(*inputs: Tensor) -> Tensor:
        out_TD = layer.run(*inputs)
        layer.map_TE = other_TE
        return out_TD

    found = layer.found(checkpoint(run, *layer.inputs, use_reentrant=False))
    assert different(found, expected) == ["out"]


def test_a_partial_backward_changes_no_sums(cuda):
    """Also with `zeroed` set, with which a gradient would be stored over the sums."""
    layer = Layer(cuda, sums=True)
    (found,) = torch.autograd.grad(layer.run(*layer.inputs), layer.inputs[0], layer.grad_TD)
    assert found.any()
    for sums in layer.sums.values():
        assert (sums.sums_LOI == 1).all() and sums.zeroed.tolist() == [1, 0]
    layer.run(*layer.inputs).backward(layer.grad_TD)
    for sums in layer.sums.values():
        assert (sums.sums_LOI != 1).any() and sums.zeroed[0] == 0


def replay_with_too_many() -> None:
    """Capture a pass, and replay it with a token of K + 1 experts: the program ends."""
    torch.cuda.set_stream(torch.cuda.Stream())
    layer = Layer(torch.device("cuda"))
    run = partial(layer.run, *layer.inputs)
    with torch.no_grad():
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        torch.cuda.synchronize()
        sys.stdout.write("replayed")
        layer.map_TE[5] = torch.arange(E, device="cuda") <= K
        graph.replay()
        torch.cuda.synchronize()
    sys.stdout.write("not noticed")


def test_a_token_with_more_than_k_experts_ends_a_replay(cuda):
    """In a process of its own: a failed assertion ends the device for a process."""
    program = "from tests.gpu.test_passes import *; replay_with_too_many()"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode != 0 and ran.stdout == "replayed"
    assert "a token has more experts than top_k (moe_router_topk): raise it" in ran.stderr
