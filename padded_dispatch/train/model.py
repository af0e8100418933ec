"""The model: Megatron-Core's GPT, wrapped for data parallelism, one chunk per pipeline stage.

On GPUs it runs in bf16 with Transformer Engine's layers and grouped experts, on CPUs in fp32 with
Megatron's local layers and one expert after the other.

`RouterSkew` (`--router-skew`) makes routers start with preferences, and records how fast training
removes them. It adds a constant to each expert's logit, so that popularity is lognormal. It counts
demand from the same scores, ahead of Megatron's own count: a stock router that drops first would
count only what it kept.

Letters: T tokens of a pass, K experts per token, E experts.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from padded_dispatch.config import FIT
from padded_dispatch.megatron.installer import install, uninstall
from padded_dispatch.megatron.options import PaddedOptions
from padded_dispatch.train.graphs import graph_fields
from padded_dispatch.train.settings import VOCABULARY, Settings


def transformer_config(settings: Settings) -> TransformerConfig:
    """Return Megatron's config of the run; install the padded dispatcher if the run uses it.

    Raises:
        ValueError: Megatron or the padded dispatcher does not support the settings.
    """
    model, recipe, layout = settings.model, settings.recipe, settings.layout
    if settings.dispatch.dispatcher == "padded_alltoall":
        install(_options(settings))
    else:  # A contender before may have installed it.
        uninstall()
    return TransformerConfig(
        num_layers=recipe.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        num_query_groups=model.num_kv_groups,
        kv_channels=model.head_size,
        qk_layernorm=model.qk_layernorm,
        ffn_hidden_size=model.ffn_size,
        num_moe_experts=model.num_experts,
        moe_router_topk=model.top_k,
        moe_ffn_hidden_size=model.ffn_size,
        moe_shared_expert_intermediate_size=model.shared_ffn_size,
        moe_router_dtype="fp32",
        normalization="RMSNorm",
        gated_linear_unit=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.sequence_parallel,
        finalize_model_grads_func=finalize_model_grads,
        deterministic_mode=recipe.deterministic,
        **graph_fields(settings),
        **_activation(settings),
        **_balancing(settings),
        **_dispatcher(settings),
        **_precision(settings),
    )


def build_chunks(settings: Settings, config: TransformerConfig) -> list[Any]:
    """Return this rank's chunks of the model in DDP, one per (virtual) pipeline stage."""
    on_gpu = settings.layout.device == "cuda"
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=on_gpu
    )
    chunks = []
    for stage in range(settings.layout.vpp or 1):
        vp_stage = stage if settings.layout.vpp else None
        where = {"ignore_virtual": False, "vp_stage": vp_stage}
        model = GPTModel(
            config,
            _layer_spec(settings),
            vocab_size=VOCABULARY,
            max_sequence_length=settings.recipe.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        model = Float16Module(config, model.cuda()) if on_gpu else model
        # Later chunks have no bucket to overlap with; Megatron's training loop does the same.
        ddp = DistributedDataParallel(config, ddp_config, model, disable_bucketing=stage > 0)
        ddp.broadcast_params()
        chunks.append(ddp)
    return chunks


def unwrapped(chunks: list[Any]) -> list[GPTModel]:
    """Return the models inside DDP and, on GPUs, Float16Module."""
    return [m for chunk in chunks for m in chunk.modules() if isinstance(m, GPTModel)]


def moe_layers(chunks: list[Any]) -> list[Any]:
    """Return this rank's MoE layers, in order."""
    return [m for chunk in chunks for m in chunk.modules() if isinstance(m, MoELayer)]


def release(chunks: list[Any]) -> None:
    """Drop the references that would keep a trained model in memory.

    Megatron's dispatchers keep the tensors of the last pass, and with them its autograd graph.
    Through the graph's nodes, DDP's hooks and the model reference each other outside the view of
    Python's garbage collector.
    """
    for layer in moe_layers(chunks):
        kept = vars(layer.token_dispatcher)
        kept.update({name: None for name, value in kept.items() if isinstance(value, Tensor)})


def _layer_spec(settings: Settings) -> Any:
    options = {
        "num_experts": settings.model.num_experts,
        "qk_layernorm": settings.model.qk_layernorm,
    }
    if settings.layout.device == "cuda":
        return get_gpt_layer_with_transformer_engine_spec(moe_grouped_gemm=True, **options)
    return get_gpt_layer_local_spec(normalization="RMSNorm", **options)


def _options(settings: Settings) -> PaddedOptions:
    """Return the dispatcher's options; evaluation is eager here, also beside an iteration graph."""
    options = settings.dispatch.padded
    if options.eval_factor is None:
        options = dataclasses.replace(options, eval_factor=FIT)
    return options


def _activation(settings: Settings) -> dict[str, Any]:
    if settings.model.gpt_oss:
        return {
            "activation_func": quick_gelu,
            "activation_func_clamp_value": 7.0,
            "glu_linear_offset": 1.0,
            "add_bias_linear": True,
            "add_qkv_bias": True,
        }
    return {"activation_func": F.silu, "add_bias_linear": False}


def _balancing(settings: Settings) -> dict[str, Any]:
    if settings.recipe.balancing == "expert-bias":
        return {
            "moe_router_load_balancing_type": "none",
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        }
    return {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_router_force_load_balancing": settings.recipe.balancing == "forced",
    }


def _dispatcher(settings: Settings) -> dict[str, Any]:
    dispatch = settings.dispatch
    stock = dispatch.dispatcher.removesuffix("-drop-pad")
    return {
        "moe_token_dispatcher_type": stock,
        "moe_expert_capacity_factor": dispatch.capacity_factor,
        "moe_token_drop_policy": dispatch.drop_policy,
        "moe_pad_expert_input_to_capacity": dispatch.dispatcher == "alltoall-drop-pad",
        "moe_shared_expert_overlap": dispatch.shared_overlap,
        "moe_permute_fusion": settings.layout.device == "cuda" and stock == "alltoall",
    }


def _precision(settings: Settings) -> dict[str, Any]:
    if settings.layout.device == "cuda":
        return {
            "bf16": True,
            "params_dtype": torch.bfloat16,
            "pipeline_dtype": torch.bfloat16,
            "moe_grouped_gemm": True,
            # Megatron's fused quick-GEGLU creates a CUDA tensor from a number in every call (0.16.1
            # to 0.19.0, `weighted_bias_quick_geglu_impl`), which a capture forbids.
            "bias_activation_fusion": not settings.model.gpt_oss,
            # TEGroupedMLP raises if it comes with bias (0.16.1 to 0.19.0).
            "bias_dropout_fusion": not settings.model.gpt_oss,
        }
    return {"pipeline_dtype": torch.float32}


class RouterSkew:
    """Skewed routers of a model, and the demand for experts in every step.

    Args:
        layers: this rank's MoE layers.
        num_layers: layers of the whole model.
        sigma: standard deviation of the constants added to the logits.
        seed: equal seeds give equal popularities.
    """

    def __init__(self, layers: list[Any], num_layers: int, sigma: float, seed: int) -> None:
        self._num_layers = num_layers
        self._routers = [_SkewedRouter(layer.router, sigma, seed) for layer in layers]
        self._demand: list[list[Tensor]] = []
        self._bias: list[list[Tensor]] = []

    def after_step(self) -> None:
        """Record a step. Call it after every step."""
        self._demand.append([router.take_demand() for router in self._routers])
        self._bias.append([router.bias_range() for router in self._routers])

    def counts(self) -> tuple[Tensor, ...]:
        """Return the tensors that passes count in."""
        return tuple(router.demand_E for router in self._routers)

    def figures(self) -> dict[str, list[float]]:
        """Return one number per step, over all ranks. All ranks must call it.

        `overload`: demand for the busiest expert over the mean. `bias_range`: largest minus
        smallest bias of the experts, 0 without bias. Both are means over the layers.
        """
        steps, num_experts = len(self._demand), len(self._demand[0][0])
        device = self._demand[0][0].device
        demand = torch.zeros(steps, self._num_layers, num_experts, device=device)
        bias = torch.zeros(steps, self._num_layers, device=device)
        for index, router in enumerate(self._routers):
            demand[:, router.number - 1] = torch.stack([d[index] for d in self._demand]).float()
            bias[:, router.number - 1] = torch.stack([b[index] for b in self._bias])
        dist.all_reduce(demand)
        dist.all_reduce(bias, dist.ReduceOp.MAX)
        overload = demand.amax(2) / demand.mean(2)
        return {"overload": overload.mean(1).tolist(), "bias_range": bias.mean(1).tolist()}


class _SkewedRouter:
    """A wrapper of one router's `gating`."""

    def __init__(self, router: Any, sigma: float, seed: int) -> None:
        self._router = router
        self.number: int = router.layer_number
        device, num_experts = router.weight.device, len(router.weight)
        generator = torch.Generator().manual_seed(seed + self.number)
        popularity_E = sigma * torch.randn(num_experts, generator=generator)
        self._popularity_E = popularity_E.to(device)
        self.demand_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self._gating = router.gating
        router.gating = self.gating

    def gating(self, input: Tensor) -> Tensor:
        """Return logits [..., E] plus the popularity."""
        logits = self._gating(input)
        logits = logits + self._popularity_E.to(logits.dtype)
        # Recomputation runs this twice, first without gradients.
        if self._router.training and torch.is_grad_enabled():
            self._count(logits.detach().flatten(0, -2))
        return logits

    def _count(self, logits_TE: Tensor) -> None:
        """Add the choices that Megatron makes: by sigmoid plus bias, or in the logits' order."""
        config, bias_E = self._router.config, self._router.expert_bias
        scores_TE = logits_TE
        if config.moe_router_score_function == "sigmoid":
            scores_TE = logits_TE.float().sigmoid()
        if bias_E is not None:
            scores_TE = scores_TE + bias_E
        chosen_TK = scores_TE.topk(config.moe_router_topk, dim=1).indices
        map_TE = torch.zeros_like(scores_TE, dtype=torch.int64).scatter(1, chosen_TK, 1)
        self.demand_E += map_TE.sum(0)

    def take_demand(self) -> Tensor:
        """Return the demand since the last call, int64 [E]."""
        taken_E = self.demand_E.clone()
        self.demand_E.zero_()
        return taken_E

    def bias_range(self) -> Tensor:
        """Return the largest minus the smallest bias of the experts, 0 without bias."""
        bias_E = self._router.expert_bias
        return self._popularity_E.new_zeros(()) if bias_E is None else bias_E.max() - bias_E.min()
