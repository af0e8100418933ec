"""Padding masks and packed sequences, which Megatron's CUDA graphs leave out.

Masks in graphs of layers. Where `cuda_graph_impl` is "transformer_engine", Megatron calls the MoE
part of a layer without the padding mask, in captures and in replays (0.16.1 to 0.20). So each layer
has one mask in memory that its graphs read: `note_mask` makes it, in an eager training pass that
has a mask; `captured` lets a capture read it; `replayed` writes the microbatch's mask to it before
a replay. Other graphs read the mask among their inputs.

Packed sequences (THD) are separated in attention; the MoE part sees T tokens of any sequences. A
graph of attention would keep the boundaries of its capture, so `check_packed` raises.

Letters: B sequences, S positions on this rank.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from padded_dispatch.config import require
from padded_dispatch.megatron.compat import captures
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


def check_packed(layer: TransformerLayer, packed_seq_params: PackedSeqParams | None) -> None:
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
