"""A MoE layer by itself as CUDA graphs, without Megatron's transformer layer around it.

    graphed = GraphedMoELayer(layer, seq_length=S, micro_batch=B)
    graphed.capture()                 # self-test included
    (output,) = graphed(tokens)       # instead of layer(tokens), which stays eager
    graphed.delete()                  # before the process groups end

Megatron's own helper captures transformer layers only. This is PyTorch's
`torch.cuda.make_graphed_callables`, with the same self-test and guard as `LayerGraphs`.
"""

import gc
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from padded_dispatch.megatron.dispatcher import is_padded
from padded_dispatch.megatron.graphs import guard
from padded_dispatch.megatron.graphs.preflight import check_random_states
from padded_dispatch.megatron.graphs.selftest import (
    Sample,
    SelfTest,
    no_trace,
    run_eager,
    run_self_test,
)


class GraphedMoELayer(nn.Module):
    """Forward and backward of a padded MoE layer, each one graph; eager in evaluation.

    One pass at a time: a second forward before the backward overwrites what the first one saved.

    Not wrapped in Megatron's DDP when it is captured; it may be afterwards. All methods are to be
    called by all ranks.

    Args:
        layer: Megatron's MoELayer, in training mode.
        seq_length: positions that this rank passes in (S).
        micro_batch: sequences in a microbatch (B).

    Raises:
        ValueError: for a layer that is not padded, or recomputes itself; see also
            `check_random_states`.
    """

    def __init__(self, layer: Any, *, seq_length: int, micro_batch: int) -> None:
        super().__init__()
        if not is_padded(layer):
            raise ValueError(
                f"moe_token_dispatcher_type={layer.config.moe_token_dispatcher_type!r} is not "
                "possible: one graph of a MoE layer needs static shapes; set 'padded_alltoall'"
            )
        if layer.config.recompute_granularity is not None:
            raise ValueError(
                f"recompute_granularity={layer.config.recompute_granularity!r} is not possible "
                "with a MoE layer by itself: Megatron's recomputation refuses the way in which "
                "PyTorch captures gradients; leave it None, or use LayerGraphs with a GPTModel"
            )
        self.mlp = layer  # As transformer layers call it.
        self.config: Any = layer.config
        self.layer_number: int = layer.layer_number or 1
        self.cuda_graphs: list[Any] = []
        parameter = next(layer.parameters())
        check_random_states(parameter.device)
        shape = (seq_length, micro_batch, layer.config.hidden_size)
        self._like = torch.ones(shape, dtype=parameter.dtype, device=parameter.device)
        self._facts: guard.Facts = {}

    def forward(self, tokens: Tensor) -> tuple[Tensor]:
        """The layer's output, [S, B, D], as the only element.

        Raises:
            ValueError: where a graph would ignore what has changed since it was captured.
        """
        if not (self.training and self.cuda_graphs):
            return (_output(self.mlp, tokens),)
        guard.check_unchanged(self._facts, self._now(tokens))
        return (self.cuda_graphs[0](tokens),)

    def capture(self) -> SelfTest:
        """Warm up, capture, and compare a replay with eager runs. Clears gradients.

        Raises:
            RuntimeError: see `run_self_test`.
        """
        sample = Sample(layer=self, args=(self._like,), kwargs={})
        chunks: list[Any] = [_Bare(self)]
        with no_trace(chunks):
            run_eager(chunks, sample)
            given = self._like.clone().requires_grad_()
            graph = torch.cuda.make_graphed_callables(_Output(self.mlp), (given,))
        self._facts = self._now(self._like)
        self.cuda_graphs = [graph]
        return run_self_test(chunks, [sample])

    def delete(self) -> None:
        """Go back to eager, and give the memory back."""
        self.cuda_graphs = []
        gc.collect()

    def _now(self, tokens: Tensor) -> guard.Facts:
        given = {"tokens.shape": tuple(tokens.shape), "tokens.dtype": tokens.dtype}
        return given | guard.facts_of([self])


class _Output(nn.Module):
    """A MoE layer without the bias beside its output, which is None with all experts of ours."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, tokens: Tensor) -> Tensor:
        return _output(self.layer, tokens)


def _output(layer: Any, tokens: Tensor) -> Tensor:
    output, bias = layer(tokens)
    assert bias is None
    return output


class _Bare:
    """What the self-test asks of Megatron's DDP, for a module without it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.modules = module.modules

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def zero_grad_buffer(self) -> None:
        self.module.zero_grad()
