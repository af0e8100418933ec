"""Configs, layers and process groups of the smallest Megatron model with a MoE layer."""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
from megatron.core.quantization.quant_config import RecipeConfig
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from padded_dispatch.megatron import PaddedOptions, padded_spec, uninstall
from padded_dispatch.megatron.compat import forget_moe_state
from padded_dispatch.megatron.cpu import megatron_on_cpu
from padded_dispatch.train.arguments import read, resolve
from padded_dispatch.train.settings import Settings
from tests.support.pool import end_groups, shared_groups

NUM_EXPERTS, TOP_K, HIDDEN = 4, 2, 16
EXPERT_BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
OPTIONS = {field.name for field in dataclasses.fields(PaddedOptions)}
RECOMPUTE: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def gpt_oss(clamp: float) -> dict[str, Any]:
    """Return fields of GPT-OSS's activation, with another clamp than 7."""
    fields = {"activation_func": quick_gelu, "activation_func_clamp_value": clamp}
    return fields | {"glu_linear_offset": 1.0}


def tokens(length: int, batch: int = 1, *, seed: int = 0, width: int = HIDDEN) -> Tensor:
    """Draw tokens [S, B, D], other ones on each rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(100 * rank + seed)
    return torch.randn(length, batch, width, generator=generator)


def config(
    dispatcher: str = "padded_alltoall", *, later: dict[str, Any] | None = None, **given: Any
) -> TransformerConfig:
    """Return a config for the CPU: 4 experts, top-2, D = 16.

    `given`: its fields and, by their names, padded options. `later`: fields that Megatron would
    refuse, or that some versions lack.
    """
    values = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "num_moe_experts": NUM_EXPERTS,
        "moe_router_topk": TOP_K,
        "moe_ffn_hidden_size": 24,
        "moe_token_dispatcher_type": dispatcher,
        "moe_grouped_gemm": False,
        "moe_aux_loss_coeff": 0.0,
        "moe_router_load_balancing_type": "none",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    options = {name: given.pop(name) for name in OPTIONS & given.keys()}
    made: Any = TransformerConfig(**(values | given))
    for name, value in (later or {}).items():
        setattr(made, name, value)
    if options:
        made.padded_dispatch = PaddedOptions(**options)
    return made


def own_recipe(name: str, value: str) -> dict[str, Any]:
    """Return a quant_recipe that trains all modules in one recipe and evaluates them in bf16."""
    params = {"training_recipe": {f"{name}_quantization_recipe": value}, "evaluation_recipe": {}}
    return {"quant_recipe": RecipeConfig.from_config_dict({"configs": {"all": params}})}


def layer_spec() -> Any:
    return get_gpt_layer_local_spec(num_experts=NUM_EXPERTS, moe_grouped_gemm=False)


def layer(config: TransformerConfig, number: int = 1, *, padded: bool = False) -> Any:
    """Build a MoE layer in training mode, with the same weights on every call.

    `padded`: by `padded_spec`, which needs no `install`.
    """
    torch.manual_seed(5)
    spec = padded_spec(layer_spec()) if padded else layer_spec()
    built = build(spec.submodules.mlp, config)
    built.set_layer_number(number)
    return built.train()


def build(spec: Any, config: TransformerConfig) -> Any:
    """Build what a spec names; from 0.18 on, that of a MoE layer is a partial."""
    return spec(config=config) if callable(spec) else build_module(spec, config=config)


def padded_layer(number: int = 1, **given: Any) -> Any:
    """Build a MoE layer with the padded dispatcher, by default with Megatron's experts."""
    return layer(config(**{"experts": "module"} | given), number, padded=True)


def ask_for(layer: Any, *experts: int) -> None:
    """Make every token with a positive first element ask for these experts, the first most."""
    with torch.no_grad():
        layer.router.weight.zero_()
        for rank, expert in enumerate(experts):
            layer.router.weight[expert, 0] = 2.0 - rank


def results(layer: Any, tokens: Tensor, **given: Any) -> dict[str, Tensor]:
    """Return the output, and the gradients of the tokens and of every parameter."""
    layer.zero_grad()
    tokens = tokens.clone().requires_grad_()
    output, bias = layer(tokens, **given)
    assert bias is None
    output.backward(output.detach().cos())
    gradients = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    return {"output": output.detach(), "tokens": tokens.grad, **gradients}


@contextmanager
def model_parallel(**sizes: Any) -> Iterator[None]:
    """Set Megatron's groups of these sizes up; those of gloo are shared."""
    with shared_groups():
        parallel_state.initialize_model_parallel(**sizes)
    try:
        yield
    finally:
        with shared_groups():
            parallel_state.destroy_model_parallel()


@contextmanager
def default_group() -> Iterator[None]:
    """Make a default group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        end_groups()


@contextmanager
def one_process(device: str = "cpu") -> Iterator[None]:
    """Set up Megatron in this process alone: gloo, and parallel state of size 1."""
    with megatron_on_cpu() if device == "cpu" else nullcontext(), default_group():
        try:
            with model_parallel():
                yield
        finally:
            forget_moe_state()


@contextmanager
def only_worker() -> Iterator[None]:
    """Make this process the one worker of a job of torchrun, with one thread.

    `start_workers` then starts none. On exit, also after an error, all state of the job is removed.
    """
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # any free port
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with patch.dict(os.environ, ranks | rendezvous):
            yield
    finally:
        torch.set_num_threads(threads)
        uninstall()
        unset_num_microbatches_calculator()
        parallel_state.destroy_model_parallel()
        end_groups()


def parse(flags: list[str]) -> Settings:
    return resolve(read(flags))
