"""Padding masks that follow their microbatch into CUDA graphs of layers.

Megatron hands a padding mask to the layers of a model, but where `cuda_graph_impl` is
"transformer_engine" it calls their MoE part without it, in captures and in replays (0.16.1 to
0.20, `TransformerLayer._te_cuda_graph_capture` and `_te_cuda_graph_replay`). Padding tokens would
take slots and count in the losses. Here each layer has one mask in memory that its graphs read:

- `note` makes it, in an eager training pass that has a mask. Without such a pass there is none, and
  graphs are those of a model without masks.
- `captured` lets a capture read it. The graph starts by copying it, because a pipeline runs the
  next microbatch's forward before this one's backward, and recomputation reads the mask there.
- `replayed` writes the microbatch's mask to it before a replay, or False everywhere without a mask.
  What runs eagerly within a replay gets the mask of the microbatch itself.

Megatron's own graphs of layers (`local`) take the mask as an input, and graphs of whole iterations
read it from the batch: they need nothing of this.

Letters: B sequences, S positions on this rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from padded_dispatch.config import require
from padded_dispatch.megatron.compat import captures_routing
from padded_dispatch.utils.patches import Patches

# Masks that the next capture of a layer reads, and those that its present graphs read.
_noted: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()
_captured: WeakKeyDictionary[Any, Tensor | None] = WeakKeyDictionary()

_REMEDY = (
    "run an eager training step with a mask of this shape before the capture "
    "(cuda_graph_warmup_steps does), or capture again after one"
)


def note(layer: Any, mask_BS: Tensor | None) -> None:
    """Make the mask that a layer's next capture reads; call it in each eager training pass.

    Args:
        layer: a transformer layer.
        mask_BS: the pass's mask, True for padding tokens; None changes nothing.
    """
    if mask_BS is None or not _captures(layer.config):
        return
    known = _noted.get(layer)
    if known is None or known.shape != mask_BS.shape:
        _noted[layer] = torch.zeros_like(mask_BS, dtype=torch.bool)


def sample(layer: Any) -> dict[str, Tensor]:
    """Return a mask to test a layer's graphs with, as its keyword argument; {} if it has none.

    Every third token is masked.
    """
    if layer not in _noted:
        return {}
    mask_BS = _noted[layer]
    every_third = torch.arange(mask_BS.numel(), device=mask_BS.device) % 3 == 1
    return {"padding_mask": every_third.view_as(mask_BS)}


@contextmanager
def captured(layer: Any, hidden_states: Tensor) -> Iterator[None]:
    """Let the MoE part that is captured in this block read the layer's mask, if it has one.

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


@contextmanager
def replayed(layer: Any, mask_BS: Tensor | None) -> Iterator[None]:
    """Let the graphs that are replayed in this block, and what is eager in it, use a mask.

    Raises:
        ValueError: if the layer was captured without a mask, or with one of another shape.
    """
    if _captures(layer.config):
        _load(layer, mask_BS)
    if mask_BS is None:
        yield
        return
    with _mlp_with(layer, mask_BS):
        yield


def _load(layer: Any, mask_BS: Tensor | None) -> None:
    captured_BS = _captured.get(layer)
    if captured_BS is None:
        require(
            mask_BS is None,
            "padding_mask",
            None if mask_BS is None else list(mask_BS.shape),
            "be None in a replay of a layer that was captured before any mask was given",
            _REMEDY,
        )
    elif mask_BS is None:
        captured_BS.zero_()
    else:
        _check_shape(mask_BS, captured_BS.shape)
        captured_BS.copy_(mask_BS)


def _captures(config: Any) -> bool:
    return config.cuda_graph_impl == "transformer_engine" and captures_routing(config)


def _check_shape(mask_BS: Tensor, shape: tuple[int, ...]) -> None:
    shown, rule = list(mask_BS.shape), f"be {list(shape)} as in the captured layer"
    require(mask_BS.shape == shape, "padding_mask.shape", shown, rule, _REMEDY)


@contextmanager
def _mlp_with(layer: Any, mask_BS: Tensor) -> Iterator[None]:
    """Hand the mask to the layer's MoE part, which Megatron calls without it."""
    with Patches() as patches:
        patches.set(layer, "_forward_mlp", partial(layer._forward_mlp, padding_mask=mask_BS))
        yield
