"""CUDA graphs of a standalone MoE layer, without Megatron's transformer layer around it.

    graphed = GraphedMoELayer(layer, seq_length=S, micro_batch=B)
    graphed.capture()                 # runs the self-test too
    (output,) = graphed(tokens)       # replaces layer(tokens), which stays eager
    graphed.delete()                  # before the process groups are destroyed

Megatron's own helper captures transformer layers only. This module uses PyTorch's
`torch.cuda.make_graphed_callables`, with the self-test and the guard of `LayerGraphs`.
"""

import gc
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from padded_dispatch.config import require
from padded_dispatch.megatron.dispatcher import is_padded
from padded_dispatch.megatron.graphs import guard
from padded_dispatch.megatron.graphs.capture import check_random_states
from padded_dispatch.megatron.graphs.selftest import (
    Sample,
    SelfTest,
    restore_state,
    run_eager,
    run_self_test,
)
from padded_dispatch.megatron.random_states import draws_of_a_block


class GraphedMoELayer(nn.Module):
    """A padded MoE layer whose forward and backward are one graph each; evaluation is eager.

    Run one pass at a time: a second forward before the backward overwrites what the first one
    saved. It takes no padding mask. Capture before the layer is wrapped in Megatron's DDP; wrap it
    afterwards if needed. All ranks must call all methods.

    Args:
        layer: Megatron's MoELayer, in training mode.
        seq_length: positions that this rank passes in (S).
        micro_batch: sequences in a microbatch (B).

    Raises:
        ValueError: for a layer that is not padded, recomputes itself, or quantizes; see also
            `check_random_states`.
    """

    def __init__(self, layer: Any, *, seq_length: int, micro_batch: int) -> None:
        super().__init__()
        require(
            is_padded(layer),
            "moe_token_dispatcher_type",
            layer.config.moe_token_dispatcher_type,
            "be 'padded_alltoall' for a graph of a MoE layer, which needs static shapes",
            "set it",
        )
        require(
            layer.config.recompute_granularity is None,
            "recompute_granularity",
            layer.config.recompute_granularity,
            "be None for a standalone MoE layer, because Megatron's recomputation rejects "
            "PyTorch's way of capturing gradients",
            "leave it out, or use LayerGraphs with a GPTModel",
        )
        for name in ("fp8", "fp4", "quant_recipe"):
            require(
                not getattr(layer.config, name, None),
                name,
                getattr(layer.config, name, None),
                "be unset for a standalone MoE layer, because PyTorch's way of capturing knows "
                "neither scales nor quantized weights",
                "leave it out, or use LayerGraphs with a GPTModel",
            )
        self.mlp = layer  # The name that transformer layers give it.
        self.config: Any = layer.config
        self.layer_number: int = layer.layer_number or 1
        self.cuda_graphs: list[Any] = []
        parameter = next(layer.parameters())
        check_random_states(parameter.device)
        shape = (seq_length, micro_batch, layer.config.hidden_size)
        self._sample = torch.ones(shape, dtype=parameter.dtype, device=parameter.device)
        self._invariants: guard.Invariants = {}

    def forward(self, tokens: Tensor) -> tuple[Tensor]:
        """Return the layer's output, [S, B, D], in a tuple of one.

        Raises:
            ValueError: if something that the graph depends on has changed since the capture.
        """
        if not (self.training and self.cuda_graphs):
            return (_output(self.mlp, tokens),)
        guard.check_unchanged(self._invariants, self._invariants_now(tokens))
        return (self.cuda_graphs[0](tokens),)

    def capture(self) -> SelfTest:
        """Warm up, capture, and compare a replay with eager runs. Clears gradients.

        Raises:
            RuntimeError: see `run_self_test`.
        """
        sample = Sample(layer=self, args=(self._sample,), kwargs={})
        chunks: list[Any] = [_WithoutDDP(self)]
        with restore_state(chunks):
            run_eager(chunks, sample)
            tokens = self._sample.clone().requires_grad_()
            with draws_of_a_block(self.config):
                graph = torch.cuda.make_graphed_callables(_OutputOnly(self.mlp), (tokens,))
        self._invariants = self._invariants_now(self._sample)
        self.cuda_graphs = [graph]
        return run_self_test(chunks, [sample])

    def delete(self) -> None:
        """Run eagerly again, and free the graphs' memory."""
        self.cuda_graphs = []
        gc.collect()

    def _invariants_now(self, tokens: Tensor) -> guard.Invariants:
        given = {"tokens.shape": tuple(tokens.shape), "tokens.dtype": tokens.dtype}
        return given | guard.invariants_of([self])


class _OutputOnly(nn.Module):
    """A MoE layer that returns its output without the bias, which is None for padded layers."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, tokens: Tensor) -> Tensor:
        return _output(self.layer, tokens)


def _output(layer: Any, tokens: Tensor) -> Tensor:
    output, bias = layer(tokens)
    assert bias is None
    return output


class _WithoutDDP:
    """A module with the methods of Megatron's DDP that the self-test calls."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.modules = module.modules

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def zero_grad_buffer(self) -> None:
        self.module.zero_grad()
