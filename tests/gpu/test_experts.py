"""Packed experts beside TEGroupedMLP: checkpoints and captures.

Rows of `tests.gpu.table` check that both compute the same, by the parity rule.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from padded_dispatch.megatron import PaddedOptions, install, uninstall
from padded_dispatch.megatron.experts import StackedExperts
from tests.megatron.test_stacked_linear import written
from tests.support import tiny
from tests.support.layer_parity import LayerCase, build_layer

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden": 128, "ffn": 72, "seq": 130}
MODULE = PaddedOptions(experts="module")
PACKED = PaddedOptions(experts="packed")
DROPS = (("moe_expert_capacity_factor", 1.0),)
RECOMPUTE = (("recompute_granularity", "selective"), ("recompute_modules", ["moe_act"]))
KINDS: dict[str, dict[str, Any]] = {"swiglu": {}, "gpt-oss": {"bias": True, "gpt_oss": True}}
EACH = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def megatron(cuda) -> Iterator[None]:
    with tiny.one_process("cuda"):
        install()
        yield
        uninstall()


class Layer(nn.Module):
    """A MoE layer that returns only its output."""

    def __init__(self, options: PaddedOptions = PACKED, **changes: Any) -> None:
        super().__init__()
        case = LayerCase(device="cuda", dtype=torch.bfloat16, options=options, **SIZES, **changes)
        self.moe = build_layer(case, "padded_alltoall")
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "bias" in name:  # They start as zeros.
                    parameter.normal_(generator=torch.Generator("cuda").manual_seed(1))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.moe(tokens)[0]


def tokens_of(seed: int) -> Tensor:
    """Return random tokens; for every third seed nearly equal ones, which choose few experts."""
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


@EACH
def test_te_grouped_mlp_and_packed_experts_load_each_other(kind):
    module, packed = Layer(MODULE, **KINDS[kind]).moe, Layer(**KINDS[kind]).moe
    assert type(packed.experts) is StackedExperts
    assert module.state_dict().keys() == packed.state_dict().keys()
    for source, target in ((packed, module), (module, packed)):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.normal_()
        target.load_state_dict(source.state_dict())
        theirs = source.state_dict()
        for name, value in target.state_dict().items():
            assert "_extra_state" in name or torch.equal(value, theirs[name]), name


@EACH
@pytest.mark.parametrize("one_by_one", [False, True], ids=["one axis", "one by one"])
def test_distributed_checkpoints_hold_the_same(kind, one_by_one):
    module, packed = Layer(MODULE, **KINDS[kind]).moe, Layer(**KINDS[kind]).moe
    module.load_state_dict(packed.state_dict())
    ours, theirs = (
        written(
            moe.sharded_state_dict("mlp.", ((0, 1, 3),), {"singleton_local_shards": one_by_one})
        )
        for moe in (packed, module)
    )
    assert ours.keys() == theirs.keys()
    for where, value in theirs.items():
        assert "_extra_state" in where[0] or torch.equal(ours[where], value), where


@EACH
@pytest.mark.parametrize(
    "ours", [(), DROPS, RECOMPUTE], ids=["no dropping", "dropping", "recompute"]
)
def test_replays_of_one_capture_equal_eager_bit_by_bit(kind, ours):
    layer = Layer(ours=ours, **KINDS[kind])
    seeds = range(7)
    eager = [results(layer, tokens_of(seed)) for seed in seeds]
    layer.zero_grad(set_to_none=True)
    sample = tokens_of(0).requires_grad_()
    torch.cuda.make_graphed_callables(layer, (sample,))
    for seed in seeds:
        replayed = results(layer, tokens_of(seed))
        for name, value in eager[seed].items():
            assert torch.equal(replayed[name], value), (seed, name)


@EACH
def test_the_activation_computed_again_changes_no_bit(kind):
    kept, again = (Layer(ours=ours, **KINDS[kind]) for ours in ((), RECOMPUTE))
    again.load_state_dict(kept.state_dict())
    expected, found = results(kept, tokens_of(1)), results(again, tokens_of(1))
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@EACH
def test_memory_full_of_nan_reaches_nothing(kind):
    layer, tokens = Layer(ours=DROPS, **KINDS[kind]), tokens_of(0)
    clean = results(layer, tokens)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills fresh memory with NaN
    try:
        poisoned = results(layer, tokens)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in poisoned.items():
        assert value.isfinite().all(), name
        # Layers before the experts may use another algorithm now.
        if name == "output" or "experts" in name:
            assert torch.equal(value, clean[name]), name
