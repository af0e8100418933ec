"""The model: Megatron-Core's GPT, wrapped for data parallelism, and its optimizer.

There is one chunk per (virtual) pipeline stage. On GPUs it runs in bf16 with Transformer Engine's
layers and grouped experts, and Megatron's distributed optimizer; on CPUs in fp32 with Megatron's
local layers, one expert after the other, and PyTorch's AdamW. From 0.19 on it is a HybridModel:
attention and experts are layers of their own, so Megatron counts twice as many.
"""

import dataclasses
import functools
import math
from typing import Any

import torch
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
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import Tensor

from padded_dispatch.config import FIT
from padded_dispatch.megatron.compat import HYBRID_MODEL, found, iteration_graph, layer_graphs
from padded_dispatch.megatron.installer import install, uninstall
from padded_dispatch.train.settings import VOCABULARY, Settings

# Steps before a capture, in which libraries choose their algorithms, and Adam allocates its state.
EAGER_STEPS = 3
_WARM_UP = 20  # steps
_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.1
_MAX_GRAD_NORM = 1.0


def transformer_config(settings: Settings) -> TransformerConfig:
    """Return Megatron's config of the run; install the padded dispatcher if the run uses it.

    Raises:
        ValueError: Megatron or the padded dispatcher does not support the settings.
    """
    model, recipe, layout = settings.model, settings.recipe, settings.layout
    dispatch = settings.dispatch
    stock: Any = dispatch.dispatcher.removesuffix("-drop-pad")
    on_gpu = layout.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    if dispatch.dispatcher == "padded_alltoall":
        options = dispatch.padded
        if options.eval_factor is None:  # Evaluation is eager, also with an iteration graph.
            options = dataclasses.replace(options, eval_factor=FIT)
        install(options)
    else:  # An earlier contender may have installed it.
        uninstall()
    return TransformerConfig(
        **_num_layers(settings),
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        num_query_groups=model.num_kv_groups,
        kv_channels=model.head_size,
        qk_layernorm=model.qk_layernorm,
        ffn_hidden_size=model.ffn_size,
        num_moe_experts=model.num_experts,
        moe_router_topk=model.top_k,
        moe_ffn_hidden_size=model.ffn_size,
        moe_token_dispatcher_type=stock,
        moe_expert_capacity_factor=dispatch.capacity_factor,
        moe_pad_expert_input_to_capacity=dispatch.dispatcher == "alltoall-drop-pad",
        moe_router_dtype="fp32",
        normalization="RMSNorm",
        gated_linear_unit=True,
        bf16=on_gpu,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        moe_grouped_gemm=on_gpu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.tp > 1,
        finalize_model_grads_func=finalize_model_grads,
        deterministic_mode=recipe.deterministic,
        **graph_fields(settings),
        **_activation(settings),
        **_balancing(settings),
        **fusions(settings),
        **fp8_fields(settings),
    )


def build_chunks(settings: Settings, config: TransformerConfig) -> list[Any]:
    """Return this rank's chunks of the model in DDP, one per (virtual) pipeline stage."""
    on_gpu = settings.layout.device == "cuda"
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=on_gpu
    )
    build: Any = functools.partial(GPTModel, config, spec := _layer_spec(settings))
    if HYBRID_MODEL is not None:
        stack, pattern = hybrid_stack(spec), layer_pattern(settings)
        build = functools.partial(HYBRID_MODEL, config, stack, hybrid_layer_pattern=pattern)
    chunks = []
    for stage in range(settings.layout.vpp or 1):
        vp_stage = stage if settings.layout.vpp else None
        where = {"ignore_virtual": False, "vp_stage": vp_stage}
        model = build(
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


def moe_layers(chunks: list[Any]) -> list[Any]:
    """Return this rank's MoE layers, in order."""
    return [m for chunk in chunks for m in chunk.modules() if isinstance(m, MoELayer)]


def release(chunks: list[Any]) -> None:
    """Drop the tensors of the last pass, which Megatron's dispatchers keep.

    Through their autograd graph, DDP's hooks and the model reference each other outside the view
    of Python's garbage collector.
    """
    for layer in moe_layers(chunks):
        kept = vars(layer.token_dispatcher)
        kept.update({name: None for name, value in kept.items() if isinstance(value, Tensor)})


def graph_fields(settings: Settings) -> dict[str, Any]:
    """Return the fields of Megatron's config for `--graph`."""
    match settings.output.graph:
        case "none":
            return {}
        case "partial":
            fields = layer_graphs("attn", "moe_router", "moe_preprocess")
        case "layer":
            fields = layer_graphs("attn", "moe")
        case "full-iteration":
            fields = iteration_graph()
    return {"cuda_graph_warmup_steps": EAGER_STEPS, **fields}


def _layer_spec(settings: Settings) -> Any:
    model = settings.model
    options = {"num_experts": model.num_experts, "qk_layernorm": model.qk_layernorm}
    if settings.layout.device == "cuda":
        return get_gpt_layer_with_transformer_engine_spec(moe_grouped_gemm=True, **options)
    return get_gpt_layer_local_spec(normalization="RMSNorm", **options)


def _num_layers(settings: Settings) -> dict[str, Any]:
    if HYBRID_MODEL is None:
        return {"num_layers": settings.recipe.num_layers}
    return {"num_layers": 2 * settings.recipe.num_layers, "is_hybrid_model": True}


def layer_pattern(settings: Settings) -> str:
    """Return the pattern of a HybridModel, with a bar between (virtual) pipeline stages."""
    stages = settings.layout.pp * (settings.layout.vpp or 1)
    return "|".join(["*E" * (settings.recipe.num_layers // stages)] * stages)


def hybrid_stack(layer: Any) -> Any:
    """Return the spec of a hybrid stack of the two halves of a GPT layer, whose spec is given."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.transformer.transformer_layer import MoETransformerLayer

    def without(*names: str) -> Any:
        absent = {name: getattr(TransformerLayerSubmodules(), name) for name in names}
        return dataclasses.replace(layer.submodules, **absent)

    attention = without("pre_mlp_layernorm", "mlp", "mlp_bda")
    experts = without("input_layernorm", "self_attention", "self_attn_bda")
    submodules = HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=experts),
    )
    return ModuleSpec(module=HybridStack, submodules=submodules)


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


def fusions(settings: Settings) -> dict[str, Any]:
    """Return the fields of Megatron's fused kernels, which production sets, for all contenders.

    Kernels that are not installed, or do not work with the settings, are off. CPUs have none.
    """
    if settings.layout.device == "cpu":
        return {}
    gpt_oss, captured = settings.model.gpt_oss, settings.output.graph in ("layer", "full-iteration")
    return {
        "moe_router_fusion": True,
        "moe_permute_fusion": settings.dispatch.dispatcher.startswith("alltoall"),
        # The output layer needs Apex for it.
        "gradient_accumulation_fusion": bool(
            found("tensor_parallel.layers._grad_accum_fusion_available")
        ),
        # Megatron's fused quick-GEGLU creates a CUDA tensor from a number in every call (0.16.1 to
        # 0.20, `weighted_bias_quick_geglu_impl`), which a capture forbids.
        "bias_activation_fusion": not (gpt_oss and captured),
        # The constructor of TEGroupedMLP raises if it is set with biases (0.16.1 to 0.20).
        "bias_dropout_fusion": not gpt_oss,
    }


def fp8_fields(settings: Settings) -> dict[str, Any]:
    """Return the fields of Megatron's config for `--fp8`."""
    recipe = settings.recipe.fp8
    if recipe == "none":
        return {}
    # The formats that Megatron's documentation recommends.
    return {"fp8": "e4m3" if recipe == "blockwise" else "hybrid", "fp8_recipe": recipe}


def learning_rate(peak: float, step: int, num_steps: int) -> float:
    """Return the rate of step 1, 2, ...: a linear rise over 20 steps, a cosine down to a tenth.

    Example: peak 1.0 and 40 steps give 0.05, 1.0, 0.55, 0.1 at steps 1, 20, 30 and 40.
    """
    if step < _WARM_UP:
        return peak * step / _WARM_UP
    left = 1 - (step - _WARM_UP) / max(1, num_steps - _WARM_UP)
    return peak * (0.55 - 0.45 * math.cos(math.pi * left))


def build_optimizer(settings: Settings, chunks: list[Any]) -> Any:
    """Return Adam over the gradients that Megatron's DDP keeps in `main_grad`.

    On GPUs it is Megatron's distributed optimizer: it clips gradients to norm 1, and its state is
    sharded over data parallel ranks, an expert's over the ranks that hold this expert. On CPUs it
    is PyTorch's, which clips nothing: that would need the norm over all ranks.
    """
    lr = settings.recipe.lr
    if settings.layout.device == "cuda":
        config = OptimizerConfig(
            optimizer="adam",
            lr=lr,
            weight_decay=_WEIGHT_DECAY,
            adam_beta1=_BETAS[0],
            adam_beta2=_BETAS[1],
            clip_grad=_MAX_GRAD_NORM,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        )
        return get_megatron_optimizer(config, chunks)
    params: list[Any] = [p for chunk in chunks for p in chunk.parameters()]
    adam = torch.optim.AdamW(params, lr=lr, betas=_BETAS, weight_decay=_WEIGHT_DECAY, foreach=True)

    def take_main_grads(*_: object) -> None:
        for param in params:
            param.grad = param.main_grad

    adam.register_step_pre_hook(take_main_grads)
    return adam
