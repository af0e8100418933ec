"""One MoE layer of Megatron-Core with a case's dispatcher, routed by logits from outside.

The router's own weight is zero, and the logits of the batch are added to the router's logits. So
the routing is the requested one, everything in the router still runs and has a gradient, and fresh
routings fit into a graph's static inputs.
"""

import functools
import os
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from padded_dispatch.bench.cases import CONTENDERS, OPTIONS, STOCK, STOCK_SWITCHES, Case

_SEED = 1234


class RoutedLayer(nn.Module):
    """A MoELayer of Megatron's that takes its routing as an argument."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.logits: Tensor | None = None
        router = layer.router
        with torch.no_grad():
            router.weight.zero_()
        gating = router.gating
        router.gating = lambda tokens: gating(tokens) + self.logits

    def forward(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Return the layer's output [T, 1, D] for tokens [T, 1, D] and logits [T, 1, E]."""
        self.logits = logits
        with get_fp8_context(self.layer.config):  # Megatron's transformer block does this.
            output = self.layer(tokens)[0]
        self.logits = None
        return output


def megatron_flags(case: Case, *, on_gpu: bool) -> dict[str, Any]:
    """Return the fields of TransformerConfig that a row lists.

    Fusions that production sets are on for stock and ours, on GPUs, where they exist.
    """
    contender = CONTENDERS[case.contender]
    ours = contender.name == "ours"
    return {
        "moe_token_dispatcher_type": "padded_alltoall" if ours else "alltoall",
        "moe_expert_capacity_factor": case.capacity_factor,
        "moe_pad_expert_input_to_capacity": contender.name == "stock-drop-pad",
        "moe_permute_fusion": on_gpu and not ours,
        "moe_router_fusion": on_gpu,
        "moe_grouped_gemm": on_gpu,
        "gradient_accumulation_fusion": case.main_grad != "none",
        **STOCK.get(contender.variant or "", {}),
        **({"fp8": "hybrid", "fp8_recipe": "tensorwise"} if contender.fp8 else {}),
    }


def build(case: Case, flags: dict[str, Any], device: torch.device) -> RoutedLayer:
    """Build the layer of `case`: bf16 with TEGroupedMLP on GPUs, fp32 with SequentialMLP on CPUs.

    Megatron's groups must exist and `padded_alltoall` must be installed. Weights are the same on
    every call. `flags`: from `megatron_flags`.
    """
    on_gpu = device.type == "cuda"
    shape = case.shape
    config: Any = TransformerConfig(
        num_layers=1,
        hidden_size=shape.hidden_size,
        num_attention_heads=1,
        ffn_hidden_size=shape.ffn_size,
        moe_ffn_hidden_size=shape.ffn_size,
        num_moe_experts=shape.num_experts,
        moe_router_topk=shape.top_k,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-3,
        expert_model_parallel_size=case.ep,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        bias_activation_fusion=on_gpu,
        bf16=on_gpu,
        params_dtype=torch.bfloat16 if on_gpu else torch.float32,
        **flags,
    )
    contender = CONTENDERS[case.contender]
    if contender.variant in OPTIONS:
        config.padded_dispatch = OPTIONS[contender.variant]
    if contender.variant in STOCK:
        os.environ.update(STOCK_SWITCHES)  # They change nothing for the other contenders.
    spec = get_moe_module_spec(
        use_te=on_gpu, num_experts=shape.num_experts, moe_grouped_gemm=on_gpu
    )
    # A ModuleSpec in Megatron-Core 0.16 and 0.17, a partial in 0.18 and later.
    make = spec if isinstance(spec, functools.partial) else functools.partial(build_module, spec)
    torch.manual_seed(_SEED)
    model_parallel_cuda_manual_seed(_SEED)
    layer: Any = make(config=config, layer_number=1)
    layer.to(device)
    layer.set_layer_number(1)
    if contender.keeps_counts:
        # No graph can wait for the host, which copies them for an exchange between ranks.
        layer.token_dispatcher._maybe_dtoh_and_synchronize = lambda point, counts=None: counts
    return RoutedLayer(layer)
