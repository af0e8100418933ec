"""Padding masks and packed sequences, which Megatron's schedules and CUDA graphs leave out.

Masks in graphs of layers. Where `cuda_graph_impl` is "transformer_engine", Megatron calls the MoE
part of a layer without the padding mask, in captures and in replays (0.16.1 to 0.20). So each layer
has one mask in memory that its graphs read: `note_mask` makes it, in an eager training pass that
has a mask; `captured` lets a capture read it; `replayed` writes the microbatch's mask to it before
a replay. Other graphs read the mask among their inputs.

Packed sequences (THD) are separated in attention; the MoE part sees T tokens of any sequences. A
graph of attention would keep the boundaries of its capture, so `check_packed` raises.

The combined schedule (`overlap_moe_expert_parallel_comm`) runs a layer in pieces. It calls the
router without the mask, and frees the input of a piece after its forward. `adapted` passes the mask
on. It keeps the inputs of the dispatcher's `kept_inputs`, which share memory with the outputs.

Letters: B sequences, S positions on this rank.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from padded_dispatch.config import require
from padded_dispatch.megatron.compat import MTP_HAS_MASKS, captures
from padded_dispatch.megatron.dispatcher import is_padded
from padded_dispatch.megatron.drops import see_pass
from padded_dispatch.utils.patches import Patches

# Masks that the next capture of a layer reads, and those that its present graphs read.
_noted: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()
_captured: WeakKeyDictionary[Any, Tensor | None] = WeakKeyDictionary()

_ROUTING = "moe", "moe_router", "moe_preprocess"
_REMEDY = (
    "run an eager training step with a mask of this shape before the capture "
    "(cuda_graph_warmup_steps does), or capture again after one"
)


def note_mask(layer: TransformerLayer, mask_BS: Tensor | None) -> None:
    """Make the mask that a layer's next capture reads; call it in each eager training pass.

    `mask_BS`: the pass's mask, True for padding tokens; None changes nothing.
    """
    if mask_BS is None or not _captures(layer.config):
        return
    noted_BS = _noted.get(layer)
    if noted_BS is None or noted_BS.shape != mask_BS.shape:
        _noted[layer] = torch.zeros_like(mask_BS, dtype=torch.bool)


@contextmanager
def captured(layer: TransformerLayer, hidden_states: Tensor) -> Iterator[None]:
    """Let the MoE part that is captured in this block read the layer's mask, if it has one.

    The graph starts with a copy of it, because a pipeline runs the next microbatch's forward before
    this one's backward, in which recomputation reads the mask.

    Raises:
        ValueError: if the mask has another shape than the hidden states, [S, B, D].
    """
    mask_BS = _captured[layer] = _noted.get(layer)
    if mask_BS is None:
        yield
        return
    _check_shape(mask_BS, (hidden_states.shape[1], hidden_states.shape[0]))
    with _mlp_with(layer, mask_BS.clone()):
        yield


def replayed(layer: TransformerLayer, mask_BS: Tensor | None) -> AbstractContextManager[None]:
    """Let a layer use a mask in this block, in the graphs that it replays and in its eager part.

    Raises:
        ValueError: if the layer was captured without a mask, or with one of another shape.
    """
    captured_BS = _captured.get(layer)
    is_captured = _captures(layer.config)
    if mask_BS is None:
        if is_captured and captured_BS is not None:
            captured_BS.zero_()
        return nullcontext()
    if is_captured:
        rule = "be None in a replay of a layer that was captured before any mask was given"
        shape = list(mask_BS.shape)
        require(captured_BS is not None, "padding_mask", shape, rule, _REMEDY)
        assert captured_BS is not None
        _check_shape(mask_BS, captured_BS.shape)
        captured_BS.copy_(mask_BS)
    return _mlp_with(layer, mask_BS)


def _captures(config: TransformerConfig) -> bool:
    return config.cuda_graph_impl == "transformer_engine" and captures(config, *_ROUTING)


def _check_shape(mask_BS: Tensor, shape: tuple[int, ...]) -> None:
    shown, rule = list(mask_BS.shape), f"be {list(shape)} as in the captured layer"
    require(mask_BS.shape == shape, "padding_mask.shape", shown, rule, _REMEDY)


@contextmanager
def _mlp_with(layer: TransformerLayer, mask_BS: Tensor) -> Iterator[None]:
    """Hand the mask to the layer's MoE part, which Megatron calls without it."""
    with Patches() as patches:
        patches.set(layer, "_forward_mlp", partial(layer._forward_mlp, padding_mask=mask_BS))
        yield


def check_packed(layer: TransformerLayer, packed_seq_params: Any) -> None:
    """Raise if graphs of this layer would ignore these sequences in training.

    With `tokens_per_sample` (0.19 and later) Megatron rearranges flattened samples for the MoE
    part, [B * S, 1, D] to [S, B, D], but not in a capture (`_te_cuda_graph_capture`).

    Raises:
        ValueError: if the config captures attention; or if it captures the routing, and a
            microbatch has several flattened samples.
    """
    if packed_seq_params is None:
        return
    config = layer.config
    require(
        not captures(config, "attn"),
        "packed_seq_params",
        packed_seq_params.qkv_format,
        "be None where a CUDA graph holds attention, which keeps the boundaries of its capture",
        "set cuda_graph_impl='transformer_engine' and leave 'attn' out of its scopes ('moe'; or "
        "'moe_router' and 'moe_preprocess'), or pad every sequence to one length",
    )
    length = getattr(packed_seq_params, "tokens_per_sample", None)
    require(
        length is None or not captures(config, *_ROUTING),
        "packed_seq_params.tokens_per_sample",
        length,
        "be None where a CUDA graph holds the router, because Megatron captures it without "
        "separating the samples",
        "set micro_batch_size=1 without it, or cuda_graph_impl='none'",
    )


def adapted(guarded: Callable[..., Any], build: Callable[..., None]) -> Callable[..., None]:
    """Wrap `TransformerLayerSchedulePlan._build_callable_nodes` to adapt padded layers.

    While the piece with the router of a padded layer runs, `MoELayer.route` gets the mask of the
    model's chunk. If the router is in a CUDA graph, its replay gets the mask.

    `guarded`: calls a replay; it gets the layer, the replay and the replay's arguments.
    """

    @functools.wraps(build)
    def build_adapted(plan: Any, *args: object, **kwargs: object) -> None:
        build(plan, *args, **kwargs)
        layer = _transformer_layer(plan.layer)
        if not is_padded(getattr(layer, "mlp", None)):
            return
        has_mask = layer is plan.layer or MTP_HAS_MASKS
        # The piece that ends with the dispatcher's first stage; `attn` until 0.18.
        first = getattr(plan, "attn", None) or plan.pre_dispatch_computation
        first.submodule = partial(_run_with_mask, guarded, layer, has_mask, first.submodule)
        for name in layer.mlp.token_dispatcher.kept_inputs:
            getattr(plan, name).free_input = False

    return build_adapted


def _transformer_layer(layer: TransformerLayer) -> Any:
    """Return the transformer layer inside a layer of multi-token prediction, else the layer."""
    for name in ("mtp_model_layer", "transformer_layer"):
        if hasattr(layer, name):
            return getattr(layer, name)
    return layer


def _run_with_mask(
    guarded: Callable[..., Any],
    layer: Any,
    has_mask: bool,
    run: Callable[..., Any],
    node: Any,
    *args: Any,
) -> Any:
    moe, route = layer.mlp, layer.mlp.route

    # Read the chunk's mask late: a layer of multi-token prediction first shifts it by a token.
    def mask() -> Tensor | None:
        return node.chunk_state.padding_mask if has_mask else None

    # The argument, from Megatron-Bridge, is the same mask as [B, S], and is not used.
    def route_with_mask(hidden_states: Tensor, padding_mask: Tensor | None = None) -> Any:
        mask_BS = mask()
        note_mask(layer, mask_BS)
        if mask_BS is None:
            return route(hidden_states)
        return route(hidden_states, padding_mask=mask_BS.transpose(0, 1).bool())

    def replay_with_mask(**kwargs: Any) -> Any:
        return guarded(layer, replay, **kwargs, padding_mask=mask())

    check_packed(layer, node.chunk_state.packed_seq_params)
    if moe.training and layer.config.cuda_graph_impl != "none":
        see_pass(moe)
    with Patches() as patches:
        patches.set(moe, "route", route_with_mask)
        if getattr(layer, "cuda_graphs", None):
            replay = layer._te_cuda_graph_replay
            patches.set(layer, "_te_cuda_graph_replay", replay_with_mask)
        return run(node, *args)
