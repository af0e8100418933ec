"""CUDA graphs for plain training loops, through Megatron's own two ways of capturing.

`LayerGraphs` uses Megatron's TECudaGraphHelper (`cuda_graph_impl="transformer_engine"`): it
captures the parts of every layer that the config's graph scopes name. `IterationGraph` uses
Megatron's FullCudaGraphWrapper: it captures all forward and backward passes of a step, and the
reduction of gradients, as one graph. Both need Transformer Engine's random state tracker
(`te_rng_tracker=True`) and a training stream other than the default one, made current before the
model is built. Before a capture both run the checks of Megatron's training script that a plain loop
lacks. `padded_dispatch/megatron/RECIPES.md` has such a loop.
"""

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from torch import Tensor

from padded_dispatch.config import require
from padded_dispatch.megatron import guard
from padded_dispatch.megatron.compat import graph_scopes
from padded_dispatch.megatron.dispatcher import device_of, require_chunks
from padded_dispatch.megatron.retry import RandomStates


def check_random_states(device: torch.device) -> None:
    """Raise if the random state tracker sets states from host memory, as Megatron's own does.

    Raises:
        ValueError: on a GPU, where a capture cannot contain such a copy.
    """
    tracker: Any = get_cuda_rng_tracker()
    states = tracker.get_states().values()
    require(
        device.type != "cuda" or not any(isinstance(state, Tensor) for state in states),
        "te_rng_tracker",
        False,
        "be True with CUDA graphs, which can hold random states only as generators",
        "call model_parallel_cuda_manual_seed(seed, te_rng_tracker=True) before the model is built",
    )


def _check_chunks(chunks: list[Any]) -> None:
    """Raise unless each chunk is in a wrapper of Megatron's, which zeroes and reduces gradients."""
    require_chunks(chunks)
    bare = [type(chunk).__name__ for chunk in chunks if not hasattr(chunk, "ddp_config")]
    rule = "be in Megatron's DistributedDataParallel with CUDA graphs"
    require(not bare, "chunks", bare, rule, "wrap them")


class LayerGraphs:
    """CUDA graphs of a model's layers: forward and backward, for each microbatch in flight.

    Megatron replays them in training mode; evaluation is eager. Layers with a padded dispatcher are
    guarded: see `padded_dispatch.megatron.guard`. All ranks must call all methods.

    Args:
        chunks: the model's chunks on this rank, each in Megatron's DistributedDataParallel.
        seq_length: sequence length of a microbatch (S), before any split over tensor or context
            parallel ranks.
        micro_batch: sequences in a microbatch (B).
        optimizers: Megatron's optimizers, whose gradients the capture clears.

    Raises:
        ValueError: if a chunk is not in DDP, Transformer Engine is missing, or the config captures
            nothing of this model; see also `check_random_states`.
    """

    def __init__(
        self,
        chunks: list[Any],
        *,
        seq_length: int,
        micro_batch: int,
        optimizers: tuple[Any, ...] = (),
    ) -> None:
        _check_chunks(chunks)
        rule = "have a GPU, and Transformer Engine, which captures layers"
        require(cuda_graphs.HAVE_TE_GRAPHS, "LayerGraphs", "none", rule, "run eagerly on a CPU")
        config: Any = get_model_config(chunks[0])
        require(
            config.cuda_graph_impl == "transformer_engine",
            "cuda_graph_impl",
            config.cuda_graph_impl,
            "be 'transformer_engine' for graphs of layers",
            "set it",
        )
        check_random_states(device_of(chunks))
        self._chunks = chunks
        helper = cuda_graphs.TECudaGraphHelper
        arguments = chunks, config, seq_length, micro_batch
        # A helper captures once: its capture overwrites `num_model_chunks`, which a second one
        # would take for the model's.
        self._make_helper = functools.partial(helper, *arguments, optimizers=list(optimizers))
        self._helper = self._make_helper()
        # Sum over all ranks: a pipeline stage may have none, such as one of dense layers alone.
        num_layers = torch.tensor(len(self._helper.flattened_callables), device=device_of(chunks))
        dist.all_reduce(num_layers)
        require(
            num_layers.item() > 0,
            "cuda_graph_modules (cuda_graph_scope before 0.18)",
            sorted(graph_scopes(config)),
            "name a part that a layer of this model has",
            "add 'moe', or set none to capture whole layers",
        )

    def capture(self) -> None:
        """Warm up and capture. Call it between training steps.

        It clears gradients and Megatron's MoE metrics, as Megatron's own capture does. It restores
        random states and the counters of layers.
        """
        if MoEAuxLossAutoScaler.main_loss_backward_scale is None:
            # No step has run. The first layer would create the scale as a scalar, which Megatron's
            # schedules cannot set in place; and graphs read the scale at its present address.
            MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=device_of(self._chunks)))
        hooked = [
            chunk
            for chunk in self._chunks
            if chunk.ddp_config.overlap_param_gather and chunk.remove_forward_pre_hook_handles
        ]
        for chunk in hooked:  # Transformer Engine captures no module that has hooks.
            chunk.disable_forward_pre_hook(param_sync=False)
        states = RandomStates()
        try:
            with explain_out_of_memory():
                if self._helper.flattened_callables:
                    self._helper.create_cudagraphs()
                else:  # `create_cudagraphs` of 0.16 would capture an empty list of layers.
                    self._helper._finish_capturing(self._helper._start_capturing())
        finally:
            cuda_graphs._set_capture_end()  # Megatron does not call it if a layer raises.
            states.restore()
            for chunk in hooked:
                chunk.enable_forward_pre_hook()
        if hooked:
            self._helper.cuda_graph_set_manual_hooks()

    def delete(self) -> None:
        """Run eagerly again, and free the graphs' memory.

        Call it before process groups are destroyed: destroying one that a live graph has captured
        hangs.
        """
        if self._helper.graphs_created():
            release(self._helper)
        self._helper = self._make_helper()
        gc.collect()


class IterationGraph:
    """One CUDA graph of a step's forward and backward passes; called like Megatron's schedules.

    Batches must be dicts of tensors. The first calls are eager. Later results are the graph's own
    tensors, which the next call overwrites. A process can have only one, because Megatron stores
    the graph in a class attribute.

    `wrapped`: Megatron's own wrapper, around its schedule.

    Args:
        config: the model's config; the first `cuda_graph_warmup_steps` calls are eager.
    """

    def __init__(self, config: TransformerConfig) -> None:
        is_config, rule = isinstance(config, TransformerConfig), "be the model's TransformerConfig"
        require(is_config, "config", type(config).__name__, rule, "give that, not the model")
        self.wrapped: Any = FullCudaGraphWrapper(
            get_forward_backward_func(), cuda_graph_warmup_steps=config.cuda_graph_warmup_steps
        )
        # Before 0.18, `StaticBufferLoader` copies a batch on its own stream without waiting until
        # the batch is complete.
        self.wrapped.static_loader.stream = torch.cuda.current_stream()
        self._iteration: guard.Iteration | None = None  # Of the first call.

    def __call__(self, **kwargs: Any) -> list[Any]:
        """Run a training step's passes.

        Args:
            kwargs: arguments of Megatron's `forward_backward_func`, with `forward_only` False.

        Raises:
            ValueError: if an argument is missing, or the arguments or the layers have changed since
                the first call; in the first call, if the model is not in DDP, DDP reads gradients
                on the host, or attention of this length has wrong gradients in a graph (see
                `guard`), and see `check_random_states`.
            torch.OutOfMemoryError: if the graph does not fit; the message names it.
        """
        missing = [name for name in ("model", *guard.SIZES) if name not in kwargs]
        rule = "get all arguments of Megatron's schedules by name"
        require(not missing, "IterationGraph", f"no {', '.join(missing)}", rule)
        if self._iteration is None:
            model = kwargs["model"]
            chunks = model if isinstance(model, list) else [model]  # Schedules take both.
            _check_chunks(chunks)
            check_random_states(device_of(chunks))
            for name in ("check_for_nan_in_grad", "check_for_large_grads"):
                require(
                    not any(getattr(chunk.ddp_config, name) for chunk in chunks),
                    name,
                    True,
                    "be False with one CUDA graph of a whole step, because it reads norms on the "
                    "host",
                    "set it to False in DistributedDataParallelConfig, or use LayerGraphs",
                )
            self._iteration = guard.Iteration.of(chunks, kwargs)
        self._iteration.check(kwargs)
        if self.wrapped.curr_iter("training") != self.wrapped.cuda_graph_warmup_steps:
            return self.wrapped(**kwargs)
        # Empty the cache of the eager steps: a capture can neither use nor free those blocks.
        gc.collect()
        torch.cuda.empty_cache()
        with explain_out_of_memory():
            return self.wrapped(**kwargs)

    def delete(self) -> None:
        """Free the graph's memory, so that process groups can be destroyed.

        The next calls warm up eagerly and capture again.
        """
        guard.forget_iterations()
        if self._iteration is not None:
            guard.release_stores([*self._iteration.states], captured=True)
        self._iteration = None


def release(helper: cuda_graphs.TECudaGraphHelper) -> None:
    """Delete the graphs of Megatron's TECudaGraphHelper, and the stores that they use."""
    helper.delete_cuda_graphs()
    guard.release_stores(guard.padded_layers(helper.model), captured=True)


@contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Add to an out-of-memory error what makes graphs need less."""
    before = torch.cuda.memory_allocated()
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"the memory pools of the CUDA graphs do not fit beside the {before / 2**30:.2f} GiB "
            f"that are in use without them. To need less, use a smaller micro-batch or "
            "moe_expert_capacity_factor (the log says what it drops; experts that are not packed "
            "need less with recompute_modules=['moe_act']; 'moe' has no effect in a capture from "
            "Megatron-Core 0.18 on), more pipeline or expert parallelism, or a smaller scope of "
            f"the graphs (without 'moe'). {error}"
        ) from error
