"""A GPT whose activations Megatron offloads to the host, beside the same one that keeps them."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from padded_dispatch.megatron import PaddedOptions, install, uninstall
from tests.support import tiny
from tests.support.gpt import ddp_chunks, model_inputs

pytestmark = pytest.mark.gpu

# Transformer Engine offloads tensors of 256 Ki elements and more.
SEQ, HIDDEN, VOCAB, STEPS = 1024, 512, 128, 3
OFFLOADS = {"cpu_offloading": True, "cpu_offloading_num_layers": 2}


@pytest.fixture(autouse=True)
def megatron(cuda, monkeypatch) -> Iterator[None]:
    # Megatron wants it for graphs and overlap; so does a steady order of work here.
    monkeypatch.setitem(os.environ, "CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with tiny.one_process("cuda"):
        yield
        uninstall()


def train(experts: Any, settings: dict[str, Any]) -> tuple[list[Tensor], int]:
    """Return losses and gradients of a few steps, and the bytes that wait for backward."""
    install(PaddedOptions(experts=experts))
    torch.manual_seed(3)
    model_parallel_cuda_manual_seed(3)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=HIDDEN,
        num_attention_heads=8,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=256,
        moe_token_dispatcher_type="padded_alltoall",
        moe_expert_capacity_factor=1.0,
        moe_grouped_gemm=True,
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        attention_backend=AttnBackend.unfused,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
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
