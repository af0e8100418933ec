"""What CUDA graphs of layers will hold, before they are captured, and what to do if it is too much.

Graphs keep their memory for as long as they live, in pools that nothing else can use. The estimate
covers what layers keep from their forward pass for their backward pass, for as many microbatches as
are in flight at once, and beside it one layer at work: its gradients and the buffers of its
dispatch. It does not cover workspaces of libraries, or what lies between blocks of the allocator.
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
    """Bytes on this rank: `kept` for backward passes by all microbatches in flight, `at_work` in
    the layer that needs most.
    """

    kept: int
    at_work: int

    def __str__(self) -> str:
        return (
            f"about {(self.kept + self.at_work) / _GIB:.2f} GiB: {self.kept / _GIB:.2f} kept for "
            f"backward passes, {self.at_work / _GIB:.2f} for one layer at work"
        )


def estimate(chunks: list[list[Sample]], order: list[int]) -> GraphMemory:
    """What graphs will hold; runs the forward pass of each layer once, to be called by all ranks.

    Args:
        chunks: for each model chunk on this rank, the layers that will be captured.
        order: of the passes, as Transformer Engine takes it: 2 is a forward pass of chunk 2, -2 its
            backward pass.
    """
    kept = [sum(saved_bytes(sample) for sample in samples) for samples in chunks]
    in_flight, most = 0, 0
    for direction in order:
        in_flight += kept[abs(direction) - 1] * (1 if direction > 0 else -1)
        most = max(most, in_flight)
    at_work = max(_bytes_at_work(sample) for samples in chunks for sample in samples)
    return GraphMemory(kept=most, at_work=at_work)


def saved_bytes(sample: Sample) -> int:
    """What the captured part of a layer keeps for its backward pass, its parameters aside."""
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        # Not the tensor: a node that saved its own output would hold itself for ever.
        return tensor.detach()

    given = [tensor.detach().requires_grad_() for tensor in sample.args]
    cuda_graphs._set_capture_start()  # Else a layer runs as a whole, whatever its scope.
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = sample.layer(*given, **sample.kwargs)
    finally:
        cuda_graphs._set_capture_end()
    for parameter in sample.layer.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    # Read now: recomputation has given back some of what was noted.
    num_bytes = sum(storage.nbytes() for storage in kept.values())
    del output
    return num_bytes


def _bytes_at_work(sample: Sample) -> int:
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
    )
    return gradients + buffers.total


@contextmanager
def out_of_memory_names_graphs(held: str) -> Iterator[None]:
    """Let an out-of-memory error say that it is the graphs' pools that did not fit.

    Args:
        held: what the graphs hold, for people.
    """
    before = torch.cuda.memory_allocated()
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"the memory pools of the CUDA graphs do not fit beside the {before / _GIB:.2f} GiB "
            f"that are in use without them. They hold {held}. To need less: a smaller micro-batch "
            "or moe_expert_capacity_factor, recompute_modules=['moe_act'] ('moe' has no effect in "
            "a capture from Megatron-Core 0.18 on), more pipeline or expert parallelism, or graphs "
            f"of less of each layer ('moe' left out). {error}"
        ) from error
