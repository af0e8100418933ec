"""Adapt Megatron's combined schedule to padded layers: padding masks, and inputs that it frees.

With `overlap_moe_expert_parallel_comm` Megatron runs a layer in pieces. Two things are adapted.

Masks. Megatron calls the router without the mask that the model was given (0.16.1 to 0.20,
`build_transformer_layer_callables`). Padding tokens would take slots and count in the losses. The
mask is at hand, in the state of the model's chunk. While the piece with the router of a padded
layer runs, `MoELayer.route` has it, and so has the replay of a layer whose router is in a CUDA
graph.

Inputs. Megatron frees what goes into the dispatch and into the experts once these pieces have run
forward (`should_free_input`, `ScheduleNode._forward`). Where a layer has direct stores, the
dispatch takes tokens, which the router's backward pass needs, and the experts read rows where they
arrived, in memory that no allocator can free. These inputs are kept. They cost nothing: other
objects hold the same memory.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from padded_dispatch.megatron import masks
from padded_dispatch.megatron.compat import MTP_HAS_MASKS
from padded_dispatch.megatron.dispatcher import is_padded
from padded_dispatch.megatron.packed import check_packed
from padded_dispatch.utils.patches import Patches


def adapted(build: Callable[..., None]) -> Callable[..., None]:
    """Wrap `TransformerLayerSchedulePlan._build_callable_nodes` to adapt padded layers."""

    @functools.wraps(build)
    def build_adapted(plan: Any, *args: Any, **kwargs: Any) -> None:
        build(plan, *args, **kwargs)
        layer = _transformer_layer(plan.layer)
        if not is_padded(getattr(layer, "mlp", None)):
            return
        if layer is plan.layer or MTP_HAS_MASKS:
            # The piece that ends with the dispatcher's first stage; `attn` until 0.18.
            first = getattr(plan, "attn", None) or plan.pre_dispatch_computation
            first.submodule = functools.partial(_run_with_mask, layer, first.submodule)
        if layer.mlp.token_dispatcher.stores_late:
            plan.moe_dispatch.free_input = plan.mlp.free_input = False

    return build_adapted


def _transformer_layer(layer: Any) -> Any:
    """Return a layer, or the one in a layer of multi-token prediction."""
    for name in ("mtp_model_layer", "transformer_layer"):
        if hasattr(layer, name):
            return getattr(layer, name)
    return layer


def _run_with_mask(layer: Any, run: Callable[..., Any], node: Any, *args: Any) -> Any:
    moe, route = layer.mlp, layer.mlp.route

    # The mask is read here: a layer of multi-token prediction has moved it on by one token by now.
    # Megatron-Bridge hands on the same mask, as [B, S].
    def route_with_mask(hidden_states: Tensor, padding_mask: Tensor | None = None) -> Any:
        mask_BS = node.chunk_state.padding_mask
        masks.note(layer, mask_BS)
        if mask_BS is None:
            return route(hidden_states)
        return route(hidden_states, padding_mask=mask_BS.transpose(0, 1).bool())

    def replay_with_mask(**kwargs: Any) -> Any:
        return replay(**kwargs, padding_mask=node.chunk_state.padding_mask)

    check_packed(layer, node.chunk_state.packed_seq_params)
    with Patches() as patches:
        patches.set(moe, "route", route_with_mask)
        if getattr(layer, "cuda_graphs", None):
            replay = layer._te_cuda_graph_replay
            patches.set(layer, "_te_cuda_graph_replay", replay_with_mask)
        return run(node, *args)
