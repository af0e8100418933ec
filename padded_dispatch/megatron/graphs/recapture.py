"""Let a model's CUDA graphs be captured again, whichever of Megatron's ways made them.

    recapture(chunks)      # between two steps, after a capacity factor has changed

A loop that owns its `LayerGraphs` or `IterationGraph` deletes and captures these. This is for loops
in which Megatron captures by itself, such as Megatron-LM's: the graphs are found, not given.

- `transformer_engine`: the helper with which the loop captured deletes its graphs and captures
  again, at once, with what it knows of sequence length and optimizers. It stays the loop's helper,
  which deletes the graphs at the end of training.
- `local`: Megatron captures at the end of the first step, in which it finds no graph. All that it
  remembers is reset, so the next step is eager and its end captures.
- Full iterations: Megatron counts eager steps and then captures. The count starts again, for
  evaluation too.

Nothing happens where nothing has been captured yet.
"""

import gc
from typing import Any

import torch
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.cuda_graphs import CudaGraphManager, _CudagraphGlobalRecord
from megatron.core.utils import get_model_config

from padded_dispatch.megatron.compat import captures_iteration
from padded_dispatch.megatron.graphs import guard
from padded_dispatch.megatron.graphs.capture import capture_by, forget_iterations, release


def recapture(chunks: list[Any]) -> None:
    """Delete a model's graphs, and capture them again now or let Megatron do it. All ranks call it.

    Args:
        chunks: the model's chunks on this rank, each in Megatron's DistributedDataParallel.
    """
    config: Any = get_model_config(chunks[0])
    if captures_iteration(config):
        forget_iterations()
    elif config.cuda_graph_impl == "local":
        _forget_local(chunks)
    elif config.cuda_graph_impl == "transformer_engine":
        helper = guard.helper_of(chunks)
        if helper is not None:
            release(helper)
            gc.collect()
            capture_by(helper, chunks)


def _forget_local(chunks: list[Any]) -> None:
    """Reset what Megatron remembers of `local` graphs, 0.16.1 to 0.19.0."""
    if not _CudagraphGlobalRecord.cudagraph_created:
        return
    torch.cuda.synchronize()
    # `delete_cuda_graphs` finds runners by the record of a capture, which a capture empties.
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, CudaGraphManager):
                manager: Any = module
                manager.cudagraph_runners = []
    pool: Any = getattr(_CudagraphGlobalRecord, "tensor_reuse_pool", None)  # Before 0.18.
    if pool is not None:
        for held in (pool.pool, pool.tensor_strong_refs, pool.tensor_strong_refs_dataptrs):
            held.clear()
    cuda_graphs.delete_cuda_graphs()
    _forget_uses()
    # What Megatron does when the first layer is made.
    CudaGraphManager.global_mempool = torch.cuda.graph_pool_handle()
    torch.cuda.set_stream(torch.cuda.Stream())
    observe: Any = getattr(_CudagraphGlobalRecord, "_enable_saved_tensors_observer", None)
    if observe is not None:  # From 0.19 on.
        observe()


def _forget_uses() -> None:
    """Take from tensors what Megatron notes about them while a step is recorded.

    A tensor that outlives the graphs, such as rotary embeddings, would keep its number of uses. The
    next capture adds to it, waits for more uses than there are, and fails in an assertion.
    """
    name = "cg_buffer_metadata"
    gc.collect()
    for held in gc.get_objects():
        if issubclass(type(held), torch.Tensor) and name in vars(held):
            delattr(held, name)
