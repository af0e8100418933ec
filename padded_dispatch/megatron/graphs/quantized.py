"""fp8 and fp4 around a layer that runs by itself, between two steps of training.

Megatron's transformer block and schedules do three things around a layer that quantizes. A pass
outside of them, such as one of a self-test, has to do them as well:

- The context. The block enters Transformer Engine's context, without which a layer computes in
  bf16.
- Quantized weights. A step's first microbatch quantizes the weights, and the others take its
  copies. The optimizer's step makes the copies old, so a pass between two steps is a first
  microbatch. Layers are told by attributes; a replay reads the number of the microbatch.
- Scales. In the recipe `delayed`, each pass notes the largest values that it saw. They become the
  scales of the next pass when the context ends, for all models of the process at once. Here they
  are put back. The other recipes keep nothing.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core import fp4_utils, fp8_utils
from torch import nn

from padded_dispatch.utils.patches import Patches

_SCALINGS = ("scaling_fwd", "scaling_bwd")


def quantizes(config: Any) -> bool:
    """Return whether layers of a config may compute in fp8 or fp4."""
    return any(getattr(config, name, None) for name in ("fp8", "fp4", "quant_recipe"))


@contextmanager
def first_microbatch(layer: Any) -> Iterator[None]:
    """Let a layer's forward compute, or replay, what it would in a step's first microbatch.

    Args:
        layer: with `config` and `layer_number`; nothing happens if the config does not quantize.
    """
    if not quantizes(layer.config):
        yield
        return
    for module in layer.modules():
        if hasattr(module, "is_first_microbatch"):
            module.is_first_microbatch = True
    with Patches() as patches, _context(layer):
        patches.set(layer, "current_microbatch", 0)
        yield


def _context(layer: Any) -> AbstractContextManager[Any]:
    """Return the context in which Megatron runs a layer; some are in bf16, by their number."""
    config: Any = layer.config
    # Megatron quantizes all layers of multi-token prediction.
    number = -1 if getattr(layer, "is_mtp_layer", False) else layer.layer_number - 1
    if config.fp8:
        return fp8_utils.get_fp8_context(config, number)
    if config.fp4:
        return fp4_utils.get_fp4_context(config, number)
    return nullcontext()


@contextmanager
def scales_put_back(*models: nn.Module) -> Iterator[None]:
    """Restore scales, noted values, and which weights are to be quantized, at the end.

    A scale that is made inside the block becomes 1, as Transformer Engine makes it, with nothing
    noted.
    """
    modules = [module for model in models for module in model.modules()]
    firsts = [(m, m.is_first_microbatch) for m in modules if hasattr(m, "is_first_microbatch")]
    before = {
        id(scaling): (scaling, scaling.scale.clone(), scaling.amax_history.clone())
        for scaling in _scalings(modules)
    }
    try:
        yield
    finally:
        for module, first in firsts:
            module.is_first_microbatch = first
        with torch.no_grad():
            for scaling in _scalings(modules):
                if id(scaling) in before:
                    _, scale, history = before[id(scaling)]
                    scaling.scale.copy_(scale)
                    scaling.amax_history.copy_(history)
                else:
                    scaling.scale.fill_(1)
                    scaling.amax_history.zero_()


def _scalings(modules: list[Any]) -> Iterator[Any]:
    """Yield what Transformer Engine's modules and fused ops keep from pass to pass."""
    for module in modules:
        fused: Any = getattr(module, "_fp8_metas", None) or {}
        for meta in (getattr(module, "fp8_meta", None), *fused.values()):
            scalings = ((meta or {}).get(name) for name in _SCALINGS)
            yield from (one for one in scalings if hasattr(one, "amax_history"))
