"""Megatron-Core in this process, on the CPU, as the only rank: for tests of a single layer."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import package_info, parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from padded_dispatch.megatron import padded_spec
from padded_dispatch.megatron.cpu import megatron_on_cpu

INSTALLED = (package_info.MAJOR, package_info.MINOR)


@contextmanager
def one_rank() -> Iterator[None]:
    """A gloo world of one with Megatron's groups, and the CPU in place of a GPU."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with megatron_on_cpu():
            parallel_state.initialize_model_parallel()
            model_parallel_cuda_manual_seed(1)
            yield
            parallel_state.destroy_model_parallel()
    finally:
        dist.destroy_process_group()


def make_config(**changes: Any) -> TransformerConfig:
    """Four experts of two layers' width, top-2; `changes` go through Megatron's own checks."""
    settings = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 16,
        "ffn_hidden_size": 16,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "hidden_dropout": 0.0,
        **changes,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(**settings)


def build_layer(config: TransformerConfig, *, padded: bool = False, seed: int = 0) -> Any:
    """The MoE layer of Megatron's local spec, or `PaddedMoELayer` in its place."""
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
    if padded:
        spec = padded_spec(spec)
    if isinstance(spec, ModuleSpec):
        layer = spec.module(config=config, submodules=spec.submodules)
    else:
        layer = spec(config=config)
    layer.set_layer_number(1)
    return layer
