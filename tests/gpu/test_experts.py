"""Experts on one GPU: checkpoints, recompute, unused memory, activations offloaded to the host.

`tests.gpu.table` checks that all kinds compute the same, and captures.
"""

import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor, nn

from padded_dispatch.megatron import PaddedOptions, install, uninstall
from padded_dispatch.megatron.experts import StackedExperts
from tests.megatron.test_stacked_linear import written
from tests.support import tiny
from tests.support.gpt import ddp_chunks, model_inputs
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
    # Megatron wants it for graphs and overlap; so does a steady order of work in offloading.
    # What Megatron itself sets for an attention backend must not reach workers that start later.
    with patch.dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1"), tiny.one_process("cuda"):
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


# Transformer Engine offloads tensors of 256 Ki elements and more.
SEQ, HIDDEN, VOCAB, STEPS = 1024, 512, 128, 3
OFFLOADS = {"cpu_offloading": True, "cpu_offloading_num_layers": 2}


def train(experts: Any, settings: dict[str, Any]) -> tuple[list[Tensor], int]:
    """Return losses and gradients of a few steps, and the bytes that wait for backward."""
    install(PaddedOptions(experts=experts))
    torch.manual_seed(3)
    model_parallel_cuda_manual_seed(3)
    config = tiny.config(
        num_layers=4,
        hidden_size=HIDDEN,
        num_attention_heads=8,
        num_moe_experts=8,
        moe_ffn_hidden_size=256,
        moe_expert_capacity_factor=1.0,
        moe_grouped_gemm=True,
        normalization="RMSNorm",
        attention_backend=AttnBackend.unfused,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        **settings,
    )
    [chunk] = ddp_chunks(config, DistributedDataParallelConfig(), vocab=VOCAB, seq=SEQ)
    found, waiting = [], 0
    for step in range(STEPS):
        chunk.zero_grad_buffer()
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(VOCAB, (1, SEQ + 1), generator=generator).cuda()
        before = torch.cuda.memory_allocated()
        loss = chunk(**model_inputs(ids)).float().mean()
        torch.cuda.synchronize()
        waiting = torch.cuda.memory_allocated() - before
        loss.backward()
        found += [loss.detach(), *(one.main_grad.clone() for one in chunk.module.parameters())]
    return found, waiting


@pytest.mark.parametrize("experts", ["module", "packed"])
def test_offloaded_activations_come_back(experts):
    kept, bytes_kept = train(experts, {})
    offloaded, bytes_left = train(experts, OFFLOADS)
    assert all(torch.equal(one, other) for one, other in zip(kept, offloaded, strict=True))
    assert bytes_left < 0.8 * bytes_kept


def test_d21_router_bias_narrower_than_its_logits():
    """Stock 0.19.0 with Transformer Engine 2.20.2 reads the bias as fp32, beyond its end.

    Its result depends on the memory behind the bias, so only ours is asserted.
    """
    settings = {"bf16": True, "params_dtype": torch.bfloat16, "moe_router_dtype": "fp32"}
    settings |= {"dispatcher": "alltoall", "add_bias_linear": True}
    router = tiny.padded_layer(**settings).cuda().router
    memory = torch.full((4 * tiny.NUM_EXPERTS,), 7.0, dtype=torch.bfloat16, device="cuda")
    router.bias.data = memory[: tiny.NUM_EXPERTS]
    router.bias.data.normal_()
    x = torch.randn(64, 1, tiny.HIDDEN, dtype=torch.bfloat16, device="cuda")
    logits = router.gating(x)
    assert logits.dtype == torch.float32
    exact = x.double() @ router.weight.double().T + router.bias.double()
    plain = x.float() @ router.weight.float().T + router.bias.float()
    allowed = 2 * (plain - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
    assert (logits - exact).abs().max() <= allowed
    logits.sum().backward()
    assert router.bias.grad.tolist() == [64.0] * tiny.NUM_EXPERTS
