"""Packed experts beside TEGroupedMLP, compiled and captured; parity is in test_gpu_foundation."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layer_parity import LayerCase, build_layer
from megatron.core import parallel_state
from torch import Tensor, nn

from padded_dispatch.megatron import PaddedOptions, install, uninstall
from padded_dispatch.megatron.experts import PackedExperts

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden": 128, "ffn": 72, "seq": 130}
PACKED = PaddedOptions(experts="packed")
DROPS = (("moe_expert_capacity_factor", 1.0),)


@pytest.fixture(autouse=True)
def one_gpu() -> Iterator[None]:
    assert torch.cuda.is_available(), "tests marked gpu were asked for, and there is no GPU"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    install()
    yield
    uninstall()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


class Layer(nn.Module):
    """A MoE layer that returns its output alone."""

    def __init__(self, options: PaddedOptions = PACKED, **changes: Any) -> None:
        super().__init__()
        case = LayerCase(
            name="", device="cuda", dtype=torch.bfloat16, options=options, **SIZES, **changes
        )
        self.moe = build_layer(case, "padded_alltoall")

    def forward(self, tokens: Tensor) -> Tensor:
        return self.moe(tokens)[0]


def tokens_of(seed: int) -> Tensor:
    """Every third draw goes to few experts: tokens that are nearly the same."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(SIZES["seq"], 3, SIZES["hidden"], generator=generator)
    if seed % 3 == 0:
        tokens = tokens[:1, :1] + tokens / 100
    return tokens.to("cuda", torch.bfloat16)


def results(layer: Layer, tokens: Tensor) -> dict[str, Tensor]:
    layer.zero_grad(set_to_none=True)
    tokens = tokens.clone().requires_grad_()
    output = layer(tokens)
    output.backward(torch.ones_like(output))
    gradients = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    return {"output": output.detach().clone(), "tokens": tokens.grad, **gradients}


def test_te_grouped_mlp_and_packed_experts_load_each_other():
    module, packed = Layer(PaddedOptions()).moe, Layer().moe
    assert type(packed.experts) is PackedExperts
    assert module.state_dict().keys() == packed.state_dict().keys()
    for source, target in ((packed, module), (module, packed)):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.normal_()
        target.load_state_dict(source.state_dict())
        theirs = source.state_dict()
        for name, value in target.state_dict().items():
            assert "_extra_state" in name or torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("ours", [(), DROPS], ids=["no dropping", "dropping"])
def test_replays_of_one_capture_equal_eager_bit_by_bit(ours):
    layer = Layer(ours=ours)
    seeds = range(7)
    eager = [results(layer, tokens_of(seed)) for seed in seeds]
    layer.zero_grad(set_to_none=True)
    sample = tokens_of(0).requires_grad_()
    torch.cuda.make_graphed_callables(layer, (sample,))
    for seed in seeds:
        replayed = results(layer, tokens_of(seed))
        for name, value in eager[seed].items():
            assert torch.equal(replayed[name], value), (seed, name)


def test_memory_full_of_nan_reaches_nothing():
    layer, tokens = Layer(ours=DROPS), tokens_of(0)
    clean = results(layer, tokens)
    torch.use_deterministic_algorithms(True, warn_only=True)  # Fills fresh memory with NaN.
    try:
        poisoned = results(layer, tokens)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in poisoned.items():
        assert value.isfinite().all(), name
        # What lies before the experts may take another algorithm now.
        if name == "output" or "experts" in name:
            assert torch.equal(value, clean[name]), name
