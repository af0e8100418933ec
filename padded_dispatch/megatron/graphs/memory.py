"""Estimate the memory of CUDA graphs of layers before a capture, and explain out-of-memory errors.

Graphs hold their memory for as long as they live, in pools that nothing else can use. The estimate
covers what layers save in forward for backward, for as many microbatches as are in flight at once,
plus the working memory of one layer: its gradients and the buffers of its dispatch. It does not
cover workspaces of libraries or fragmentation of the allocator.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core.transformer import cuda_graphs
from torch import Tensor

from padded_dispatch.megatron.dispatcher import is_padded
from padded_dispatch.megatron.graphs.selftest import Sample

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class GraphMemory:
    """Bytes on this rank.

    `kept`: saved for backward by all microbatches in flight. `working`: working memory of the layer
    that needs most.
    """

    kept: int
    working: int

    def __str__(self) -> str:
        return (
            f"about {(self.kept + self.working) / _GIB:.2f} GiB: {self.kept / _GIB:.2f} kept for "
            f"backward, {self.working / _GIB:.2f} of working memory for one layer"
        )


def estimate(chunks: list[list[Sample]], order: list[int]) -> GraphMemory:
    """Estimate what graphs will hold. Runs each layer's forward once, so all ranks must call it.

    Args:
        chunks: for each model chunk on this rank, the layers that will be captured.
        order: order of the passes in Transformer Engine's form: 2 is a forward pass of chunk 2, -2
            its backward pass.
    """
    kept = [sum(saved_bytes(sample) for sample in samples) for samples in chunks]
    in_flight, most = 0, 0
    for direction in order:
        in_flight += kept[abs(direction) - 1] * (1 if direction > 0 else -1)
        most = max(most, in_flight)
    working = max(_working_bytes(sample) for samples in chunks for sample in samples)
    return GraphMemory(kept=most, working=working)


def saved_bytes(sample: Sample) -> int:
    """Return the bytes that the captured part of a layer saves for backward, without parameters."""
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        # Detached, because a node that saved its own output would keep itself alive.
        return tensor.detach()

    given = [tensor.detach().requires_grad_() for tensor in sample.args]
    cuda_graphs._set_capture_start()  # Otherwise the whole layer runs, whatever its scope.
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = sample.layer(*given, **sample.kwargs)
    finally:
        cuda_graphs._set_capture_end()
    for parameter in sample.layer.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    # Sizes are read now, after recomputation has freed some of the storages.
    num_bytes = sum(storage.nbytes() for storage in kept.values())
    del output
    return num_bytes


def _working_bytes(sample: Sample) -> int:
    gradients = sum(p.numel() * p.element_size() for p in sample.layer.parameters())
    if not is_padded(sample.layer.mlp):
        return gradients
    tokens, dispatcher = sample.args[0], sample.layer.mlp.token_dispatcher
    config, num_tokens = dispatcher.dispatch_config, tokens.shape[:-1].numel()
    buffers = config.buffer_bytes(
        num_tokens,
        tokens.shape[-1],
        tokens.element_size(),
        packed=dispatcher.exchanges.is_packed(config, num_tokens),
        num_hosts=dispatcher.exchanges.num_hosts,
    )
    return gradients + buffers.total


@contextmanager
def explain_out_of_memory(held: str) -> Iterator[None]:
    """Add to an out-of-memory error what the graphs' pools hold and how to need less.

    Args:
        held: description of what the graphs hold, for the message.
    """
    before = torch.cuda.memory_allocated()
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"the memory pools of the CUDA graphs do not fit beside the {before / _GIB:.2f} GiB "
            f"that are in use without them. They hold {held}. To need less, use a smaller "
            "micro-batch or moe_expert_capacity_factor, recompute_modules=['moe_act'] ('moe' has "
            "no effect in a capture from Megatron-Core 0.18 on), more pipeline or expert "
            f"parallelism, or a smaller scope of the graphs (without 'moe'). {error}"
        ) from error
