"""Decide which layers of a model share a store of rows: those of one model chunk.

A chunk is the part of the model that a pipeline stage runs at a time for a micro-batch. Layers join
in the order in which the model is built, which is also the order in which they run. A layer begins
a new chunk, with a store, if its config, its expert-parallel group or its virtual stage differs
from that of the layer before, or if its number is not larger, as in another model.
"""

import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from padded_dispatch.config import DispatchConfig
from padded_dispatch.experts.store import Store


@dataclass(kw_only=True, eq=False)
class Chunk:
    """Layers that share a store; `number` is the last one's."""

    config: TransformerConfig
    key: tuple[object, ...]
    store: Store
    number: int = 0


# The chunk that the next layer may join.
_last: weakref.ref[Chunk] | None = None


def join(
    config: TransformerConfig,
    number: int,
    dispatch_config: Callable[[], DispatchConfig],
    pipeline: dist.ProcessGroup | None = None,
    group: dist.ProcessGroup | None = None,
    name: str = "",
) -> tuple[Chunk, list[int]]:
    """Let a layer join the chunk of the one before it, or begin a new chunk.

    Args:
        config: the layer's TransformerConfig.
        number: the layer's number in the model, from 1.
        dispatch_config: returns the config of the layer's training passes.
        pipeline: the pipeline group; None for Megatron's own.
        group: the expert-parallel group.
        name: see `SelectAfterCounting.layer_name`.

    Returns:
        The chunk, and the numbers in the store of the layer's calls, its runs in one forward pass
        of the chunk. It has several if multi-token prediction repeats it, or if it takes a sequence
        in parts. It has none if backward always recomputes it.
    """
    global _last
    stage, index = _place(config, number, pipeline, name)
    chunk = None if _last is None else _last()
    if stage is None and chunk is not None:  # A hybrid stack's multi-token prediction.
        stage = chunk.key[1]
    key = group, stage
    if chunk is None or chunk.config is not config or chunk.key != key or number <= chunk.number:
        chunk = Chunk(config=config, key=key, store=Store())
        _last = weakref.ref(chunk)
    chunk.number = number
    num_calls = num_repeats(config, number) * getattr(config, "mlp_chunks_for_training", 1)
    if _is_recomputed(config, index):
        num_calls = 0
    return chunk, [chunk.store.add(dispatch_config) for _ in range(num_calls)]


def num_repeats(config: TransformerConfig, number: int) -> int:
    """Return how often a forward pass runs a layer, which multi-token prediction may repeat."""
    if number > config.num_layers and getattr(config, "mtp_use_repeated_layer", False):
        return config.mtp_num_layers or 1
    return 1


def _place(
    config: TransformerConfig, number: int, pipeline: dist.ProcessGroup | None, name: str
) -> tuple[int | None, int]:
    """Return a number that identifies a layer's virtual stage, and the layer's index in the stage.

    None for a hybrid stack's multi-token prediction; `join` takes the stage of the layer before.
    """
    if place := re.search(r"\.layers\.(\d+)\.mlp$", name):  # A layer of a hybrid stack.
        index = int(place[1])
        return number - index if number <= config.num_layers else None, index
    virtual = config.virtual_pipeline_model_parallel_size
    # Multi-token prediction follows the last layer.
    if config.pipeline_model_parallel_size == 1 or number > config.num_layers:
        return (virtual or 1) - 1, number - 1
    rank = pipeline.rank() if pipeline else parallel_state.get_pipeline_model_parallel_rank()
    numbers = range(virtual) if virtual else [None]
    offsets = [get_transformer_layer_offset(config, stage, rank) for stage in numbers]
    lower = [offset for offset in offsets if offset < number]
    # In a stack with a pattern of layers, no offset need be below the layer's number.
    return max(len(lower) - 1, 0), number - 1 - max(lower, default=0)


def _is_recomputed(config: Any, index: int) -> bool:
    """Return whether backward always recomputes a layer, so that its forward pass keeps no rows."""
    if config.recompute_granularity == "full":
        return config.recompute_method != "block" or index < config.recompute_num_layers
    # `MoELayer` recomputes nothing in `local` graphs: those of an iteration, up to 0.17.
    selective = config.recompute_granularity == "selective" and config.cuda_graph_impl != "local"
    return selective and "moe" in config.recompute_modules
