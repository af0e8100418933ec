"""Passes of packed experts on GPUs: recomputed, and asked for only some of the gradients.

Every function returns what differs from a plain pass in the same routing, bit for bit.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from padded_dispatch import Activation, DispatchConfig, ExpertWeights, PaddedDispatcher
from padded_dispatch.experts import Sums
from tests.support.direct_parity import my_gpu
from tests.support.whole_layers import SAVES, selective

T, K, E, D, F = 257, 3, 16, 96, 72


def routing(seed: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, probabilities and a map; every third seed uses only K experts."""
    generator = torch.Generator().manual_seed(seed)
    tokens_TD = torch.randn(T, D, generator=generator, dtype=torch.float64)
    probs_TE = torch.randint(64, (T, E), generator=generator) / 64
    if seed % 3 == 0:
        probs_TE[:, :K] += 1
    map_TE = torch.zeros(T, E, dtype=torch.bool).scatter(1, probs_TE.topk(K).indices, True)
    return tokens_TD.to(device, torch.bfloat16), probs_TE.to(device), map_TE.to(device)


class Layer:
    """Experts with biases, and the leaves whose gradients `found` returns."""

    def __init__(self, device: torch.device, *, sums: bool = False) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if ranks > 1 else 0
        generator = torch.Generator(device).manual_seed(7 + rank)

        def leaf(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=generator, device=device) * shape[-1] ** -0.5
            return drawn.bfloat16().requires_grad_()

        local = E // ranks
        shapes = {"fc1_LGD": (local, 2 * F, D), "fc2_LDF": (local, D, F)}
        shapes |= {"fc1_bias_LG": (local, 2 * F), "fc2_bias_LD": (local, D)}
        leaves: dict[str, Any] = {name: leaf(*shape) for name, shape in shapes.items()}
        self.sums = (
            {name: ones_for(leaves[name]) for name in ("fc1_LGD", "fc2_LDF")} if sums else {}
        )
        more: dict[str, Any] = {f"{name[:3]}_sums": one for name, one in self.sums.items()}
        self.weights = ExpertWeights(**leaves, **more)
        tokens_TD, probs_TE, self.map_TE = routing(1 + 3 * rank, device)
        self.inputs = tokens_TD.requires_grad_(), probs_TE.bfloat16().requires_grad_()
        self.leaves = {"tokens": self.inputs[0], "probs": self.inputs[1], **leaves}
        self.grad_TD = torch.randn(T, D, generator=generator, device=device).bfloat16()
        sizes: dict[str, Any] = {"num_experts": E, "top_k": K, "num_ranks": ranks}
        config = DispatchConfig(capacity_factor=1.25, capacity_pool="store", **sizes)
        several: dict[str, Any] = {"group": dist.group.WORLD, "exchange": "direct"}
        self.dispatcher = PaddedDispatcher(config, **(several if ranks > 1 else {}))

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


def selective_differs(device: torch.device, saves: str) -> list[str]:
    """Recompute a pass of which `saves` (of `SAVES`) is kept."""
    plain, layer = Layer(device), Layer(device)
    how: dict[str, Any] = {"use_reentrant": False, "context_fn": selective(saves)}
    found = layer.found(checkpoint(layer.run, *layer.inputs, **how))
    return different(found, plain.found(plain.run(*plain.inputs)))


def flipped_differs(device: torch.device) -> list[str]:
    """Let all tokens choose otherwise in the second pass, whose gradients are expected."""
    plain, layer = Layer(device), Layer(device)
    plain.map_TE = other_TE = layer.map_TE.flip(1)
    expected = plain.found(plain.run(*plain.inputs))

    def run(*inputs: Tensor) -> Tensor:
        out_TD = layer.run(*inputs)
        layer.map_TE = other_TE
        return out_TD

    found = different(layer.found(checkpoint(run, *layer.inputs, use_reentrant=False)), expected)
    assert found[:1] == ["out"], "the first pass must have its own routing"
    return found[1:]


def partial_differs(device: torch.device) -> list[str]:
    """Ask for the tokens' gradient alone, also with `zeroed` set, then for all gradients."""
    layer = Layer(device, sums=True)
    (grad_TD,) = torch.autograd.grad(layer.run(*layer.inputs), layer.inputs[0], layer.grad_TD)
    found = [] if grad_TD.any() else ["tokens"]
    for name, sums in layer.sums.items():
        unchanged = (sums.sums_LOI == 1).all() and sums.zeroed.tolist() == [1, 0]
        found += [] if unchanged else [f"{name} that nobody asked for"]
    layer.run(*layer.inputs).backward(layer.grad_TD)
    for name, sums in layer.sums.items():
        stored = (sums.sums_LOI != 1).any() and sums.zeroed[0] == 0
        found += [] if stored else [name]
    return found


@dataclass(frozen=True, kw_only=True)
class AllPasses:
    """All of the above, on each rank of the default group, over direct writes."""

    saves: tuple[str, ...] = tuple(SAVES)


def passes_differ(case: AllPasses) -> list[str]:
    device = my_gpu()
    found = [f"{one}: {name}" for one in case.saves for name in selective_differs(device, one)]
    found += [f"flipped: {name}" for name in flipped_differs(device)]
    return found + [f"partial: {name}" for name in partial_differs(device)]
