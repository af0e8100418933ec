"""Differences between Megatron-Core 0.16.1, 0.19 and 0.20, and nothing else."""

import pkgutil
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
    """Return what Megatron-Core has under a name, such as `utils.get_model_config`, else None."""
    try:
        return pkgutil.resolve_name(f"megatron.core.{name}")
    except (ImportError, AttributeError):
        return None


# True if layers of multi-token prediction get the padding mask.
MTP_HAS_MASKS = _IS_18

# True if `local` graphs reuse an input's buffer while backward still reads it.
FREES_GRAPH_INPUTS = not _IS_18

# True if fused SwiGLU applies `activation_func_clamp_value`.
FUSED_SWIGLU_CLAMPS = found("fusions.fused_bias_swiglu.clamped_swiglu") is not None

# True if `local` graphs add gradients to `main_grad` themselves, but for those of parameters that
# say `grad_added_to_main_grad`. Before, they restore that flag at a replay only where the config
# has `gradient_accumulation_fusion`.
LOCAL_GRAPHS_ADD_GRADIENTS = _IS_19

# Beside these, what is logged: each has a dict of tensors.
_LOGGED = (
    "transformer.multi_token_prediction.MTPLossLoggingHelper",
    "transformer.experimental_attention_variant.dsa.DSAIndexerLossLoggingHelper",
)


def layer_graphs(*scopes: str) -> dict[str, Any]:
    """Return config fields that let Transformer Engine capture parts of every layer.

    Without scopes, whole layers are captured. The field of the scopes is `cuda_graph_scope` in 0.16
    and 0.17, `cuda_graph_modules` from 0.18 on.
    """
    name = "cuda_graph_modules" if _IS_18 else "cuda_graph_scope"
    return {"cuda_graph_impl": "transformer_engine", name: list(scopes)}


def graph_scopes(config: Any) -> set[str]:
    """Return names of the parts of a layer that a config captures; empty means whole layers."""
    scopes = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", ())
    return {getattr(scope, "name", scope) for scope in scopes or ()}


def captures_moe(config: Any) -> bool:
    """Return whether a config names a part of MoE layers to capture, before Megatron parsed it.

    Before parsing, scopes are strings or enum members: one, a list of them, or one string with
    commas; and the fields `external_cuda_graph` and `enable_cuda_graph` may ask for graphs.
    """
    scopes = [getattr(config, name, None) for name in ("cuda_graph_modules", "cuda_graph_scope")]
    asked = config.cuda_graph_impl != "none" or config.external_cuda_graph
    return (asked or config.enable_cuda_graph) and "moe" in str(scopes)


def captures(config: Any, *parts: str) -> bool:
    """Return whether a config captures one of these parts of layers in training."""
    if getattr(config, "cuda_graph_impl", "none") in (None, "none"):
        return False
    scopes = graph_scopes(config)
    return not scopes or captures_iteration(config) or not scopes.isdisjoint(parts)


def iteration_graph() -> dict[str, Any]:
    """Return config fields for one graph of all passes of a step; before 0.18 it is a scope."""
    if _IS_18:
        return {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}
    return {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}


def capturing() -> bool:
    """Return whether a CUDA graph is being captured: by Megatron, or of a whole iteration.

    The passes with which Megatron warms up for a capture count, too.
    """
    return is_capturing() or is_graph_capturing() or is_graph_warmup()


def captures_iteration(config: Any) -> bool:
    """Return whether a config asks for one graph of all passes of a step."""
    impl = getattr(config, "cuda_graph_impl", "none")
    return impl == "full_iteration" or (
        impl == "local" and "full_iteration" in graph_scopes(config)
    )


def training_stream() -> torch.cuda.Stream:
    """Return a stream to build the model and train on, so that both kinds of graph can be captured.

    From 0.18 on `FullCudaGraphWrapper` captures on a stream that it creates. Work on another stream
    would join that capture, but memory that crosses streams is not reused within a graph.
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
    multi-token prediction and of sparse attention's indexer, where this version has them.
    """
    logged = {
        f"moe {name}": entry["values"] if isinstance(entry, dict) else entry.values
        for name, entry in _moe_metrics().items()
    }
    for helper in _LOGGED:
        for name, value in getattr(found(helper), "tracker", {}).items():
            if isinstance(value, Tensor):
                logged[f"{helper} {name}"] = value
    return logged


def put_logged_back(kept: dict[str, Tensor]) -> None:
    """Set `logged_tensors` to copies that were made of them; those that are new since, to 0."""
    for name, tensor in logged_tensors().items():
        tensor.copy_(kept.get(name, torch.zeros_like(tensor)))


def forget_moe_state() -> None:
    """Clear the state that MoE layers of earlier models left in Megatron's globals.

    It consists of the routers' metrics, in arrays whose length is the first model's number of
    layers, and of the losses' scale, which a plain backward pass leaves as a scalar that schedules
    cannot set in place.
    """
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    _moe_metrics().clear()


def number_in_model(router: Any) -> int:
    """Return a router's layer number in the model, from 1.

    From 0.17 on Megatron numbers layers for multi-token prediction from 1 again; here they follow
    the others. In hybrid stacks of 0.18 and 0.19 only their names tell them apart.
    """
    later = getattr(router, "is_mtp_layer", False) or "mtp" in router.layer_name.split(".")
    return router.layer_number + (router.config.num_layers if later else 0)


class SharedExpertOverlap:
    """`SharedExpertMLP`'s overlap protocol in an order that all versions accept.

    0.16 and 0.17 run fc1 in `dispatch_postprocess` and fc2 in `combine_postprocess`; 0.18 and later
    run them right after the all-to-all, wait for the current stream before it, and enforce the
    order with a state machine. Running them after the all-to-all satisfies both.

    With `moe_preprocess` in a CUDA graph, a capture ends after `start`, and a call with a replay
    begins there. Stock leaves the state machine in the state of the capture's end, so its next call
    raises; here `start` and `fc1` set the state that they need.
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

        Backward, Megatron puts the shared fc1 right behind what `moved` came from.
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
