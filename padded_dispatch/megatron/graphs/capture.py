"""CUDA graphs for plain training loops, over Megatron's own two ways to make them.

    graphs = LayerGraphs(chunks, seq_length=S, micro_batch=B, optimizers=[optimizer])
    graphs.capture()          # after a few eager steps or before the first; between steps
    ...                       # train as before
    graphs.delete()           # before the process groups end

`LayerGraphs` is Megatron's TECudaGraphHelper: parts of every layer, as the config says
(`cuda_graph_impl="transformer_engine"`). `IterationGraph` is Megatron's FullCudaGraphWrapper: all
forward and backward passes of a step, and the reduction of gradients, as one graph. Either needs a
training stream other than the default one, made current before the model is built, and Transformer
Engine's random state tracker (`te_rng_tracker=True`).

Settings that spoil CUDA graphs, named before anything is captured.

Megatron's training script looks at most of them while it reads its arguments; a plain loop has no
such place. What Megatron's config itself refuses (scopes that exclude each other, full recompute
with graphs of layers, CPU offloading) is not repeated here.

A MoE layer by itself as CUDA graphs, without Megatron's transformer layer around it.

    graphed = GraphedMoELayer(layer, seq_length=S, micro_batch=B)
    graphed.capture()                 # self-test included
    (output,) = graphed(tokens)       # instead of layer(tokens), which stays eager
    graphed.delete()                  # before the process groups end

Megatron's own helper captures transformer layers only. This is PyTorch's
`torch.cuda.make_graphed_callables`, with the same self-test and guard as `LayerGraphs`.
"""

import functools
import gc
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from padded_dispatch.megatron.dispatcher import is_padded
from padded_dispatch.megatron.graphs import guard, memory
from padded_dispatch.megatron.graphs.selftest import (
    Sample,
    SelfTest,
    no_trace,
    run_eager,
    run_self_test,
)


def check_random_states(device: torch.device) -> None:
    """Refuse a random state tracker that sets states from host memory, as Megatron's own does.

    Raises:
        ValueError: on a GPU, where such a state is inside a capture.
    """
    tracker: Any = get_cuda_rng_tracker()
    states = tracker.get_states().values()
    if device.type == "cuda" and any(isinstance(state, Tensor) for state in states):
        raise ValueError(
            "te_rng_tracker=False is not possible with CUDA graphs: random states must be "
            "generators that a graph can hold; call model_parallel_cuda_manual_seed(seed, "
            "te_rng_tracker=True) before the model is built"
        )


def check_gradients_are_not_read(chunks: list[Any]) -> None:
    """Refuse checks of gradients that wait for their outcome within a step.

    Args:
        chunks: the model's, each in Megatron's DistributedDataParallel.

    Raises:
        ValueError: names the settings of its config.
    """
    for name in ("check_for_nan_in_grad", "check_for_large_grads"):
        if any(getattr(chunk.ddp_config, name) for chunk in chunks):
            raise ValueError(
                f"{name}=True is not possible with one CUDA graph of a whole step: it reads every "
                "norm on the host; set it to False in DistributedDataParallelConfig, or capture "
                "layers"
            )


_log = logging.getLogger("padded_dispatch")


class LayerGraphs:
    """The layers of a model as CUDA graphs: forward and backward, for each microbatch in flight.

    Megatron replays them in training mode; evaluation is eager. Layers with a padded dispatcher are
    guarded: see `padded_dispatch.megatron.graphs.guard`. All methods are to be called by all ranks.

    Args:
        chunks: the model's chunks on this rank, each in Megatron's DistributedDataParallel.
        seq_length: of a microbatch (S), before any split over tensor or context parallel ranks.
        micro_batch: sequences in a microbatch (B).
        optimizers: Megatron's, whose gradients the capture clears.

    Raises:
        ValueError: when the config captures nothing of this model; see `check_random_states`.
    """

    def __init__(
        self,
        chunks: list[Any],
        *,
        seq_length: int,
        micro_batch: int,
        optimizers: tuple[Any, ...] = (),
    ) -> None:
        config: Any = get_model_config(chunks[0])
        if config.cuda_graph_impl != "transformer_engine":
            raise ValueError(
                f"cuda_graph_impl={config.cuda_graph_impl!r} is not possible: graphs of layers are "
                "Transformer Engine's; set 'transformer_engine'"
            )
        check_random_states(next(chunks[0].parameters()).device)
        self._chunks = chunks
        self._new_helper = functools.partial(
            cuda_graphs.TECudaGraphHelper,
            chunks,
            config,
            seq_length,
            micro_batch,
            optimizers=list(optimizers),
        )
        self._helper: Any = self._new_helper()
        if not self._helper.flattened_callables:
            raise ValueError("the config's graph scopes are not possible: no layer has any of them")
        guard.install()

    def capture(self) -> SelfTest | None:
        """Warm up, capture, and compare replays with eager runs. Between two training steps.

        Clears gradients and Megatron's MoE metrics, as Megatron's capture does; counters and random
        states are left as they were.

        Returns:
            What was compared; None for a model with a MoE layer that is not padded, since stock
            layers do not promise the same bits twice.

        Raises:
            RuntimeError: see `run_self_test`.
        """
        if MoEAuxLossAutoScaler.main_loss_backward_scale is None:
            # Without a step before, the first layer would make one of a shape that Megatron's
            # schedules cannot set; and the graphs read it wherever it lies now.
            device = next(self._chunks[0].parameters()).device
            MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=device))
        with _without_forward_hooks(self._chunks):
            with no_trace(self._chunks):
                for sample in self._flat_samples():
                    run_eager(self._chunks, sample)
                held = memory.estimate(*self._samples_and_order())
                _log.info("CUDA graphs of %d layers will hold %s", self._num_layers(), held)
                with memory.out_of_memory_names_graphs(str(held)):
                    self._create()
            report = None
            if self._all_padded():
                report = run_self_test(self._chunks, self._flat_samples())
        if _gathers_in_forward(self._chunks):
            self._helper.cuda_graph_set_manual_hooks()
        if report is not None:
            _log.info("%d tensors of replays equal eager ones", report.num_tensors)
            if report.unreproducible:
                _log.info("eager runs differ: %s", ", ".join(report.unreproducible))
            if report.other_kernels:
                _log.warning(
                    "%s: graphs compute with other kernels than eager training, so that losses "
                    "differ by rounding. Recompute of 'moe' does this from Megatron-Core 0.18 on; "
                    "or Transformer Engine's attention, whose kernels are slower then: make "
                    "seq_length=%d a multiple of 128, or see what NVTE_DEBUG=1 says",
                    ", ".join(report.other_kernels),
                    self._helper.seq_length,
                )
        return report

    def delete(self) -> None:
        """Go back to eager, and give the memory back. A process group that a living graph has
        captured cannot be destroyed: that would hang.
        """
        if self._helper.graphs_created():
            self._helper.delete_cuda_graphs()
            self._helper = self._new_helper()  # From 0.17 on each of them captures once.
        gc.collect()

    def _create(self) -> None:
        try:
            self._helper.create_cudagraphs()
        finally:
            cuda_graphs._set_capture_end()  # Megatron does not when a layer raises.

    def _num_layers(self) -> int:
        return len(self._helper.flattened_callables)

    def _flat_samples(self) -> list[Sample]:
        chunks, _ = self._samples_and_order()
        return [sample for samples in chunks for sample in samples]

    def _samples_and_order(self) -> tuple[list[list[Sample]], list[int]]:
        """Inputs for each layer's first graph, by chunk, and the schedule of the capture.

        `_get_cuda_graph_input_data` has them in the order (chunk, microbatch, layer), 0.16.1 to
        0.19.0.
        """
        args, options = self._helper._get_cuda_graph_input_data()
        chunks, start = [], 0
        for layers in self._helper.callables_per_chunk:
            samples = []
            for number, layer in enumerate(layers, start):
                kwargs = options["sample_kwargs"][number]
                samples.append(Sample(layer=layer, args=args[number], kwargs=kwargs))
            chunks.append(samples)
            start += len(layers) * self._helper.num_microbatches
        return chunks, options["_order"]

    def _all_padded(self) -> bool:
        modules = (module for chunk in self._chunks for module in chunk.modules())
        return all(is_padded(module) for module in modules if isinstance(module, MoELayer))


class IterationGraph:
    """A step's forward and backward passes as one CUDA graph. Called like Megatron's schedules.

    Batches must be dicts of tensors. The first calls are eager; results are the graph's own tensors
    afterwards, which the next call overwrites. Only one can exist in a process, because Megatron
    keeps the graph in the class.

    Args:
        config: of the model; `cuda_graph_warmup_steps` calls are eager.
    """

    def __init__(self, config: Any) -> None:
        self._wrapped: Any = FullCudaGraphWrapper(
            get_forward_backward_func(), cuda_graph_warmup_steps=config.cuda_graph_warmup_steps
        )
        # It copies batches on a stream of its own, which until 0.17 does not wait for them.
        self._wrapped.static_loader.stream = torch.cuda.current_stream()
        self._layers: list[Any] = []
        self._facts: guard.Facts = {}

    def __call__(self, **kwargs: Any) -> list[Any]:
        """Run a training step's passes.

        Args:
            kwargs: those of Megatron's `forward_backward_func`, with `forward_only` False.

        Raises:
            ValueError: when they are not those of the first call; in the first, see
                `check_random_states` and `check_gradients_are_not_read`.
            torch.OutOfMemoryError: names the graph, where it did not fit.
        """
        if not self._facts:
            check_random_states(next(kwargs["model"][0].parameters()).device)
            check_gradients_are_not_read(kwargs["model"])
            self._layers = guard.padded_layers(kwargs["model"])
            self._facts = self._now(kwargs)
        guard.check_unchanged(self._facts, self._now(kwargs))
        if self._wrapped.curr_iter("training") != self._wrapped.cuda_graph_warmup_steps:
            return self._wrapped(**kwargs)
        # All that eager steps left behind; a capture cannot take it, nor give it back.
        gc.collect()
        torch.cuda.empty_cache()
        eager_peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        held = f"about what an eager step needs beside that, {eager_peak / 2**30:.2f} GiB at most"
        _log.info("the CUDA graph of a step will hold %s", held)
        with memory.out_of_memory_names_graphs(held):
            return self._wrapped(**kwargs)

    def _now(self, kwargs: dict[str, Any]) -> guard.Facts:
        names = ("num_microbatches", "seq_length", "micro_batch_size")
        return {name: kwargs[name] for name in names} | guard.facts_of(self._layers)

    def delete(self) -> None:
        """Give the memory back; the process groups can be destroyed then. The next calls are the
        first ones again.
        """
        # By hand: `reset_cuda_graph` is new in 0.18, and leaves the buffers of the batches.
        FullCudaGraphWrapper.cuda_graph["training"] = None
        FullCudaGraphWrapper.result["training"] = None
        FullCudaGraphWrapper.curr_iteration["training"] = 0
        StaticBufferLoader.static_buffers["training"] = []
        self._facts = {}
        gc.collect()


def _gathers_in_forward(chunks: list[Any]) -> bool:
    """Whether forward pre-hooks wait for parameters (`overlap_param_gather`)."""
    return any(chunk.ddp_config.overlap_param_gather for chunk in chunks)


@contextmanager
def _without_forward_hooks(chunks: list[Any]) -> Iterator[None]:
    """Transformer Engine captures no module that has hooks."""
    hooked = [chunk for chunk in chunks if chunk.ddp_config.overlap_param_gather]
    for chunk in hooked:
        chunk.disable_forward_pre_hook(param_sync=False)
    try:
        yield
    finally:
        for chunk in hooked:
            chunk.enable_forward_pre_hook()


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
