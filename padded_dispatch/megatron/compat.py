"""The differences between Megatron-Core 0.16.1, 0.17, 0.18, 0.19 and 0.20, and nothing else."""

import pkgutil
import re
import sys
from typing import Any

import torch
from megatron.core.transformer.cuda_graphs import is_graph_capturing, is_graph_warmup
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from padded_dispatch.utils.phases import is_capturing

_FIELDS = TransformerConfig.__dataclass_fields__
_IS_18 = "cuda_graph_modules" in _FIELDS
_IS_19 = "activation_offload_fraction" in _FIELDS


def found(name: str) -> Any:
    """Return the object `megatron.core.<name>`, or None if this version lacks it."""
    try:
        return pkgutil.resolve_name(f"megatron.core.{name}")
    except (ImportError, AttributeError):
        return None


# True if fused SwiGLU applies `activation_func_clamp_value`.
FUSED_SWIGLU_CLAMPS = found("fusions.fused_bias_swiglu.clamped_swiglu") is not None

# The model of attention and MoE layers, each a layer of its own; 0.19 calls GPTModel deprecated.
HYBRID_MODEL = found("models.hybrid.hybrid_model.HybridModel") if _IS_19 else None

# The modules with the training loops of Megatron-LM and Megatron-Bridge, which a script imports.
MEGATRON_LM = "megatron.training.training"
BRIDGE = "megatron.bridge.training.train"

# Besides the MoE metrics, what Megatron logs: each helper has a dict of tensors, `tracker`.
_LOGGED = (
    "transformer.multi_token_prediction.MTPLossLoggingHelper",
    "transformer.experimental_attention_variant.dsa.DSAIndexerLossLoggingHelper",
)


def layer_graphs(*scopes: str) -> dict[str, Any]:
    """Return config fields that let Transformer Engine capture `scopes`, parts of every layer.

    Without scopes, whole layers are captured. The field of the scopes is `cuda_graph_scope` in 0.16
    and 0.17, `cuda_graph_modules` from 0.18 on.
    """
    name = "cuda_graph_modules" if _IS_18 else "cuda_graph_scope"
    return {"cuda_graph_impl": "transformer_engine", name: list(scopes)}


def graph_scopes(config: TransformerConfig) -> set[str]:
    """Return names of the parts of a layer that a config captures; empty means whole layers."""
    scopes = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", ())
    return {getattr(scope, "name", scope) for scope in scopes or ()}


def captures_moe(config: TransformerConfig) -> bool:
    """Return whether a config asks for graphs of scope `moe`, before Megatron parses it.

    `TransformerConfig.__post_init__` parses the scopes. Until then they are one string or enum
    member, a list of these, or a string with commas, and the deprecated fields
    `external_cuda_graph` and `enable_cuda_graph` may ask for graphs.
    """
    scopes = [getattr(config, name, None) for name in ("cuda_graph_modules", "cuda_graph_scope")]
    asked = config.cuda_graph_impl != "none" or config.external_cuda_graph
    return (asked or config.enable_cuda_graph) and re.search(r"\bmoe\b", str(scopes)) is not None


def captures(config: TransformerConfig, *parts: str) -> bool:
    """Return whether training captures one of these `parts` of layers, maybe in a larger graph."""
    if config.cuda_graph_impl == "none":
        return False
    scopes = graph_scopes(config)
    return not scopes or captures_iteration(config) or not scopes.isdisjoint(parts)


def iteration_graph() -> dict[str, Any]:
    """Return config fields for one graph of all passes of a step; before 0.18 it is a scope."""
    if _IS_18:
        return {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}
    return {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}


def capturing() -> bool:
    """Return whether the current stream captures a CUDA graph, or Megatron captures or warms up."""
    return is_capturing() or is_graph_capturing() or is_graph_warmup()


def captures_iteration(config: TransformerConfig) -> bool:
    """Return whether a config asks for one graph of all passes of a step."""
    impl = config.cuda_graph_impl
    scoped = impl == "local" and "full_iteration" in graph_scopes(config)
    return scoped or impl == "full_iteration"


def training_stream() -> torch.cuda.Stream:
    """Return a stream to build the model and train on, so that both kinds of graph can be captured.

    From 0.18 on `FullCudaGraphWrapper` captures on the stream of `get_shared_capture_stream`. Work
    on another stream would join that capture, but a graph does not reuse memory across streams.
    """
    shared = found("full_cuda_graph.get_shared_capture_stream")
    return torch.cuda.Stream() if shared is None else shared()


def _moe_metrics() -> dict[str, Any]:
    """Return Megatron's MoE metrics by name: dicts, from 0.18 on entries of a tracker."""
    tracker = getattr(moe_utils, "get_moe_metrics_tracker", None)
    return moe_utils.get_moe_layer_wise_logging_tracker() if tracker is None else tracker().metrics


def logged_tensors() -> dict[str, Tensor]:
    """Return the sums that Megatron adds to in forward passes until its next report, by name.

    They are values of each layer: MoE metrics such as auxiliary losses, and the losses of
    multi-token prediction and of sparse attention's indexer, where this version has them; and sums
    of the lengths of packed sequences.
    """
    logged = {
        f"moe {name}": entry["values"] if isinstance(entry, dict) else entry.values
        for name, entry in _moe_metrics().items()
    }
    for helper in _LOGGED:
        for name, value in getattr(found(helper), "tracker", {}).items():
            if isinstance(value, Tensor):
                logged[f"{helper} {name}"] = value
    # Megatron-LM's sums for its count of operations, from 0.19 on, with packed sequences.
    name = "_seqlen_stats_in_iteration"
    if (value := getattr(sys.modules.get(MEGATRON_LM), name, None)) is not None:
        logged[name] = value
    return logged


def put_logged_back(kept: dict[str, Tensor]) -> None:
    """Set each of `logged_tensors` to its copy in `kept`, or to 0 if it is new since the copies."""
    for name, tensor in logged_tensors().items():
        tensor.copy_(kept.get(name, torch.zeros_like(tensor)))


def forget_moe_state() -> None:
    """Clear the state that MoE layers of earlier models left in Megatron's globals.

    These are the routers' metrics, in arrays whose length is the first model's number of layers,
    and the scale of auxiliary losses. A backward pass without a schedule creates that scale as a
    scalar, which schedules cannot set in place.
    """
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    _moe_metrics().clear()


def mark_experts(experts: torch.nn.Module, config: TransformerConfig) -> None:
    """Let DDP sum the gradients of experts over the ranks that hold the same ones, as 0.19 does.

    Up to 0.18 experts have this mark with expert parallelism alone. Without it DDP sums over the
    data-parallel ranks of attention. If tensor parallelism of experts has another size, copies of
    an expert then drift apart, or gradients of different parts of it are added.
    """
    if config.expert_tensor_parallel_size != config.tensor_model_parallel_size:
        for parameter in experts.parameters():
            vars(parameter)["allreduce"] = False


def number_in_model(router: Any) -> int:
    """Return a router's layer number in the model, from 1.

    Layers for multi-token prediction follow the others here; from 0.17 on Megatron numbers them
    from 1 again. In hybrid stacks of 0.18 and 0.19 only `layer_name` distinguishes them.
    """
    later = getattr(router, "is_mtp_layer", False) or "mtp" in router.layer_name.split(".")
    return router.layer_number + (router.config.num_layers if later else 0)


class SharedExpertOverlap:
    """`SharedExpertMLP`'s overlap protocol in an order that all versions accept.

    In 0.16 and 0.17 the dispatcher runs fc1 in `dispatch_postprocess` and fc2 in
    `combine_postprocess`. From 0.18 on it runs them right after the all-to-alls, waits for the
    current stream before each, and `SharedExpertMLP` enforces the order with a state machine. The
    order of 0.18 works in all versions.

    With `moe_preprocess` in a CUDA graph, a capture ends after `start`, and a pass with a replay
    continues there. In stock from 0.18 on the state machine stays in the state of the capture's
    end, so the next pass raises. Here `start` and `fc1` set the state that they need.
    """

    def __init__(self, shared_experts: Any) -> None:
        self._shared = shared_experts
        self.output: Any = shared_experts.get_output
        self.cudagraph_attrs = ["shared_experts.cached_fc1_input"]
        if shared_experts.use_shared_expert_gate:
            self.cudagraph_attrs.append("shared_experts.gate_score")

    def start(self, tokens: Tensor) -> None:
        """Start the shared experts on the layer's input, [S, B, D]."""
        self._enter("IDLE")
        self._shared.pre_forward_comm(tokens)
        if is_capturing():  # A capture that ends here must have joined all its streams.
            torch.cuda.current_stream().wait_stream(self._shared.stream)

    def wait(self) -> None:
        """Let the shared experts' stream wait for the current one (0.18 and later)."""
        if hasattr(self._shared, "wait_current_stream"):
            self._shared.wait_current_stream()

    def fc1(self, moved: Tensor | None) -> None:
        """Run fc1 and the activation, after the dispatch has been launched.

        `moved`: the dispatched rows. Megatron launches their backward before the shared fc1's.
        """
        self._enter("PRE_FORWARD_COMM_DONE")
        self._shared.linear_fc1_forward_and_act(moved)

    def fc2(self, moved: Tensor) -> None:
        """Run fc2 and its reduction, after the combine has been launched."""
        self._shared.linear_fc2_forward(moved)
        self._shared.post_forward_comm()

    def _enter(self, state: str) -> None:
        if hasattr(self._shared, "_overlap_state"):
            states: Any = type(self._shared._overlap_state)
            self._shared._overlap_state = states[state]
