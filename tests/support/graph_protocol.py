"""A stand-in for CUDA graphs, so that Megatron's capture and replay code runs on a CPU.

`TECudaGraphHelper.create_cudagraphs` passes every layer to Transformer Engine's
`make_graphed_callables`. The one in this module takes the same steps: it warms up all layers,
captures all forwards, captures all backwards, and returns a callable per layer. The callable copies
its inputs into the captured ones and replays inside an autograd function. A `Tape` replaces the
CUDA graph. Its replay runs no Python of the model, so attributes that the model set on `self`
during the capture are as stale as after a real capture.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.transformer import cuda_graphs, transformer_layer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from padded_dispatch.utils import phases


class Tape(TorchDispatchMode):
    """A CUDA graph without CUDA: the ops that ran inside its block, with their tensors.

    A stream's capture holds what torch's modes do not see, so in the block they see everything.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sees_all = patch.object(phases, "_disable_current_modes", nullcontext)
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __enter__(self) -> "Tape":
        self._sees_all.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._sees_all.stop()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, results))
        return results

    @torch.no_grad()
    def replay(self) -> None:
        """Run the ops again; each reads and writes the same memory as before."""
        for func, args, kwargs, results in self._calls:
            again = func(*args, **kwargs)
            for static, value in zip(tree_leaves(results), tree_leaves(again), strict=True):
                # Views and in-place ops have already written to the right memory.
                if isinstance(value, Tensor) and value.data_ptr() != static.data_ptr():
                    static.copy_(value)
                if isinstance(value, torch.ScriptObject):
                    value.wait()  # A collective, which Python waited for.


class GraphedLayer:
    def __init__(self, layer: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        self._layer, self._args, self._kwargs = layer, args, kwargs
        self._params = list(layer.parameters())
        self._inputs = [*args, *kwargs.values(), *self._params]
        self._outputs: list[Tensor] = []
        self._grad_outputs: list[Tensor | None] = []
        self._grad_inputs: list[Tensor | None] = []
        self._forward, self._backward = Tape(), Tape()

    def run_forward(self) -> None:
        self._outputs = list(self._layer(*self._args, **self._kwargs))

    def seed_backward(self) -> None:
        """Allocate gradients of the outputs, outside the capture."""
        self._grad_outputs = [
            torch.zeros_like(output) if output.requires_grad else None for output in self._outputs
        ]

    def run_backward(self) -> None:
        # Through `.grad`, like Transformer Engine, because recomputation puts gradients there.
        before = [given.grad for given in self._inputs]
        for given in self._inputs:
            given.grad = None
        pairs = zip(self._outputs, self._grad_outputs, strict=True)
        outputs, grads = zip(*(pair for pair in pairs if pair[1] is not None), strict=True)
        torch.autograd.backward(outputs, grads)
        self._grad_inputs = [given.grad for given in self._inputs]
        for given, grad in zip(self._inputs, before, strict=True):
            given.grad = grad

    def warm_up(self) -> None:
        self.run_forward()
        self.seed_backward()
        self.run_backward()

    def capture_forward(self) -> None:
        with pretend_capture(), self._forward:
            self.run_forward()

    def capture_backward(self) -> None:
        self.seed_backward()
        with pretend_capture(), self._backward:
            self.run_backward()

    def replay_forward(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for static, value in zip(self._inputs, given, strict=True):
            if static.data_ptr() != value.data_ptr():
                static.copy_(value)
        self._forward.replay()
        return tuple(output.detach() for output in self._outputs)

    def replay_backward(self, grads: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        for static, grad in zip(self._grad_outputs, grads, strict=True):
            if static is not None:
                static.copy_(grad)
        self._backward.replay()
        return tuple(None if grad is None else grad.detach() for grad in self._grad_inputs)

    def __call__(self, *args: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
        # Arguments that were not captured are dropped, for example `is_first_microbatch`.
        by_name = (kwargs[name] for name in self._kwargs)
        return _Replay.apply(self, *args, *by_name, *self._params)

    def reset(self) -> None:
        self._forward, self._backward = Tape(), Tape()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphed: GraphedLayer, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.graphed = graphed
        return graphed.replay_forward(given)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.graphed.replay_backward(grads)


@contextmanager
def pretend_capture() -> Iterator[None]:
    """Let torch report that a GPU exists and that its current stream is being captured."""
    yes = {"is_available": lambda: True, "is_current_stream_capturing": lambda: True}
    with patch.multiple(torch.cuda, **yes):
        yield


def make_graphed_callables(
    layers: tuple[Any, ...],
    sample_args: list[tuple[Tensor, ...]],
    *,
    sample_kwargs: list[dict[str, Tensor]],
    num_warmup_iters: int,
    _order: list[int],
    _num_layers_per_chunk: list[int],
    **options: object,
) -> list[GraphedLayer]:
    """Make one graph per layer and microbatch in flight; stands in for Transformer Engine's.

    `_order` is a schedule: 2 is a forward of all layers of chunk 2 with its next microbatch, -2 the
    backward. Samples and graphs are in the order (chunk, microbatch, layer).
    """
    num_microbatches = len(_order) // 2 // len(_num_layers_per_chunk)
    graphs: list[GraphedLayer] = []
    passes: dict[int, list[list[GraphedLayer]]] = {}
    for chunk, num_layers in enumerate(_num_layers_per_chunk, 1):
        first = sum(_num_layers_per_chunk[: chunk - 1])
        for _ in range(num_microbatches):
            start = len(graphs)
            for number, layer in enumerate(layers[first : first + num_layers], start):
                graphs.append(GraphedLayer(layer, sample_args[number], sample_kwargs[number]))
            for direction in (chunk, -chunk):
                passes.setdefault(direction, []).append(graphs[start:])
    for graph in graphs:
        for _ in range(num_warmup_iters):
            graph.warm_up()
    for direction in _order:
        captured = passes[direction].pop(0)
        for graph in captured if direction > 0 else reversed(captured):
            (graph.capture_forward if direction > 0 else graph.capture_backward)()
    return graphs


@contextmanager
def cuda_graphs_on_cpu() -> Iterator[None]:
    """Let Megatron's `cuda_graph_impl="transformer_engine"` use the stand-in."""
    names = ("transformer_engine", "transformer_engine.pytorch")
    modules = {name: sys.modules.get(name, ModuleType(name)) for name in names}
    recent = {"is_te_min_version": lambda version: True}
    with (
        patch.dict(sys.modules, modules),
        patch.multiple(transformer_layer, **recent),
        patch.multiple(cuda_graphs, HAVE_TE_GRAPHS=True, **recent),
        # Garbage collection around captures would take longer than everything else.
        patch.object(cuda_graphs, "gc"),
        patch.object(cuda_graphs, "make_graphed_callables", make_graphed_callables, create=True),
    ):
        yield
