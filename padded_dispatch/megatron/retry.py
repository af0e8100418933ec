"""Repeat a training step that dropped rows, so that no update of the weights lacks any.

`Retry` runs Megatron's schedule, or a CUDA graph of it, unchanged. Then it sums the dropped rows of
all layers and ranks, and the host waits for the sum. If any row was dropped, `Retry` restores the
state before the step, and runs the same microbatches once more, eagerly, with sizes that fit the
routing. The optimizer gets the gradients of a run that drops nothing, with the same bits if that
run has the same experts and kernels. What a step changes, and how it is restored:

- Gradients are zeroed again, which also resets the state of DDP's buckets. The schedule ended with
  `finalize_model_grads`, so no reduction is in flight. Gathered parameters stay valid.
- Random states: Python's, NumPy's and torch's generators, and Megatron's tracker.
- Counts on the device (buffers such as the counts and the bias of
  `moe_router_enable_expert_bias`) and sums that Megatron logs are copied before the step. Only the
  layers' counters stay as the first run left them: logs show what a step dropped.
- Microbatches are recorded while the schedule reads them, and read again: `record`, `replay`.
"""

import copy
import logging
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.distributed import distributed_c10d

from padded_dispatch.config import require
from padded_dispatch.counters import counts_in, dropped_rows
from padded_dispatch.megatron.compat import logged_tensors, put_logged_back
from padded_dispatch.megatron.config import padded_options
from padded_dispatch.megatron.dispatcher import (
    Copies,
    counting_tensors,
    device_of,
    require_chunks,
)
from padded_dispatch.megatron.telemetry import padded_moe_layers
from padded_dispatch.utils.patches import Patches

_log = logging.getLogger("padded_dispatch")


class Retry:
    """A forward-backward function of Megatron's that repeats a step which dropped rows.

    Call it like the function that it wraps, once per step and on all ranks, with gradients zeroed.
    Calls with `forward_only` pass through.

    Attributes:
        forward_backward_func, chunks: the arguments.
        num_steps: training steps so far.
        num_retried: how many of them ran twice.

    Args:
        forward_backward_func: the result of `get_forward_backward_func()`, or a graph of it: an
            `IterationGraph` or Megatron's FullCudaGraphWrapper.
        chunks: the model's chunks on this rank, in Megatron's DistributedDataParallel. Their
            options must have `on_overflow="retry"`.
        counting: objects of the loop with numbers that forward steps add to.

    Raises:
        ValueError: if a setting cannot be combined with repeated steps; names it.
    """

    def __init__(
        self,
        forward_backward_func: Callable[..., list[Any]],
        chunks: list[Any],
        counting: tuple[Any, ...] = (),
    ) -> None:
        check_retry(chunks)
        self._counting = counting
        self.forward_backward_func = forward_backward_func
        self.chunks = chunks
        self.num_steps = 0
        self.num_retried = 0
        self._layers = [*padded_moe_layers(chunks).values()]
        dispatchers = [layer.token_dispatcher for layer in self._layers]
        for dispatcher in dispatchers:
            dispatcher.configs.retry = weakref.ref(self)
        self._counters = [c for d in dispatchers for c in (d.counters, d.eval_counters)]

    def __call__(self, **kwargs: Any) -> list[Any]:
        """Run a step's passes, and run them again if any row was dropped.

        Args:
            kwargs: arguments of Megatron's `forward_backward_func`.

        Returns:
            The results of the run whose gradients stand.

        Raises:
            RuntimeError: on all ranks, if the second run dropped rows, too.
        """
        if kwargs.get("forward_only"):
            return self.forward_backward_func(**kwargs)
        start = _StepStart(self.chunks, self._counting)
        dropped_before = self._dropped()
        recorded = record(kwargs["data_iterator"])
        results = self.forward_backward_func(**{**kwargs, "data_iterator": recorded})
        self.num_steps += 1
        num_dropped = self._dropped_since(dropped_before)
        if num_dropped == 0:
            return results
        del results  # Free what the first run returned.
        first_counts = Copies(t for counters in self._counters for t in counters.tensors())
        start.restore()
        with without_graphs(self.chunks), dropping_nothing(self._layers):
            again = uncaptured(self.forward_backward_func)
            results = again(**{**kwargs, "data_iterator": replay(recorded)})
        self.num_retried += 1
        self._note(num_dropped)
        still_dropped = self._dropped_since(dropped_before)
        if still_dropped:
            raise RuntimeError(
                f"a repeated step must drop no row, got {still_dropped} dropped rows after "
                f"{num_dropped} in its first run; please report this defect"
            )
        first_counts.restore()
        return results

    def _dropped(self) -> Tensor:
        """Return the rows that layers of this rank have dropped, also in evaluation mode."""
        if not self._counters:
            return torch.zeros((), dtype=torch.int64, device=device_of(self.chunks))
        counts = counts_in(torch.stack([counters.totals for counters in self._counters]).sum(0))
        in_cells = self._layers[0].token_dispatcher.configs.training.capacity_pool == "cells"
        return dropped_rows(counts, in_cells=in_cells)

    def _dropped_since(self, before: Tensor) -> int:
        """Return the rows that all ranks have dropped since `before`; waits for the device.

        Ranks that route the same tokens each count them; only whether it is zero matters.
        """
        num_dropped = self._dropped() - before
        dist.all_reduce(num_dropped)
        return int(num_dropped.item())

    def _note(self, num_dropped: int) -> None:
        """Log the first, second, fourth, eighth ... retry on rank 0."""
        if self.num_retried.bit_count() == 1 and dist.get_rank() == 0:
            _log.warning(
                "retried steps: %d of %d; this one dropped %d rows and ran again without dropping",
                self.num_retried,
                self.num_steps,
                num_dropped,
            )


@contextmanager
def dropping_nothing(layers: list[Any]) -> Iterator[None]:
    """Let sizes of padded MoE layers' passes, in either mode, follow from the routing (`FIT`)."""
    with Patches() as patches:
        for configs in (layer.token_dispatcher.configs for layer in layers):
            for name in ("training", "evaluation"):
                patches.set(configs, name, configs.fitting)
        yield


def check_retry(chunks: list[Any]) -> None:
    """Raise if steps of a model cannot be repeated.

    Raises:
        ValueError: names the setting, its value and what to change.
    """
    require_chunks(chunks)
    for chunk in chunks:
        rule = "be in Megatron's DistributedDataParallel, whose gradients can be taken back"
        fix = "wrap them, or choose another on_overflow"
        require(
            isinstance(chunk, DistributedDataParallel), "chunks", type(chunk).__name__, rule, fix
        )
        require(
            not chunk.ddp_config.reuse_grad_buf_for_mxfp8_param_ag,
            "reuse_grad_buf_for_mxfp8_param_ag",
            True,
            "be False with on_overflow='retry', which zeroes gradients that share memory with "
            "parameters",
            "set it to False",
        )
    config: Any = get_model_config(chunks[0])
    # Options of `install` are those of a config that was made before it, once a layer is built.
    for layer in padded_moe_layers(chunks).values():
        on_overflow = padded_options(layer.config).on_overflow
        require(on_overflow == "retry", "on_overflow", on_overflow, "be 'retry'", "set it")
    require(
        config.finalize_model_grads_func is not None,
        "finalize_model_grads_func",
        None,
        "be set with on_overflow='retry': a step must be one call that ends with the reduction of "
        "gradients",
        "set it to megatron.core.distributed.finalize_model_grads",
    )
    rule = "keep no history of earlier passes with on_overflow='retry'"
    fix = "set 'tensorwise', 'blockwise' or 'mxfp8', or train in bf16"
    require(
        not config.fp8 or config.fp8_recipe != "delayed", "fp8_recipe", config.fp8_recipe, rule, fix
    )


class _StepStart:
    """The state of this rank and of its chunks of the model, before a step."""

    def __init__(self, chunks: list[Any], counting: tuple[Any, ...]) -> None:
        self._chunks = chunks
        self._numbers = [(one, _numbers_of(one)) for one in counting]
        self._random = RandomStates()
        self._counts = Copies(t for chunk in chunks for t in counting_tensors(chunk.module))
        self._logged = {name: tensor.clone() for name, tensor in logged_tensors().items()}
        # QK-clip's largest logits: each pass sets a new tensor.
        self._max_logits = [
            (module, module.current_max_attn_logits)
            for chunk in chunks
            for module in chunk.modules()
            if "current_max_attn_logits" in vars(module)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Set everything that a step changes back, and clear the gradients."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._counts.restore()
        put_logged_back(self._logged)
        for attention, max_logits in self._max_logits:
            attention.current_max_attn_logits = max_logits
        for one, numbers in self._numbers:
            vars(one).update(numbers)
        self._random.restore()


def _numbers_of(thing: object) -> dict[str, Any]:
    """Return the attributes of an object that are numbers."""
    return {name: value for name, value in vars(thing).items() if type(value) in (int, float, bool)}


@contextmanager
def without_graphs(chunks: list[Any]) -> Iterator[None]:
    """Run every captured layer of a model eagerly inside the block, and keep its graphs."""
    with Patches() as patches:
        for chunk in chunks:
            for module in chunk.modules():
                if getattr(module, "cuda_graphs", None):
                    patches.set(module, "cuda_graphs", [])
        yield


def uncaptured(forward_backward_func: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return a function that runs the passes of a step without a graph of the whole step.

    Args:
        forward_backward_func: an `IterationGraph`, Megatron's FullCudaGraphWrapper, or a function
            without a graph, which is returned.
    """
    wrapper: Any = getattr(forward_backward_func, "wrapped", forward_backward_func)
    if type(wrapper).__name__ == "PagedStashRunner":  # For `--moe-expert-rank-capacity-factor`.
        return uncaptured(wrapper.forward_backward_func)
    if not isinstance(wrapper, FullCudaGraphWrapper):
        return forward_backward_func

    def run(**kwargs: Any) -> list[Any]:
        # Forward steps expect batches as the wrapper hands them out: on the GPU, in its buffers.
        batches = wrapper.data_read(
            kwargs["data_iterator"], kwargs["model"], True, kwargs["num_microbatches"]
        )
        return wrapper.forward_backward_func(**{**kwargs, "data_iterator": batches})

    return run


def generator_states() -> tuple[Any, ...]:
    """Return the states of generators that any code of this process may draw from."""
    torch_states = torch.cuda.get_rng_state(), torch.get_rng_state()
    return random.getstate(), np.random.get_state(), *torch_states


def set_generators(states: tuple[Any, ...]) -> None:
    """Set all generators to these states."""
    setters = random.setstate, np.random.set_state, torch.cuda.set_rng_state, torch.set_rng_state
    for set_state, state in zip(setters, states, strict=True):
        set_state(state)


class RandomStates:
    """The states of all random generators, Megatron's tracker included, when the object is made."""

    def __init__(self) -> None:
        tracker: Any = get_cuda_rng_tracker()
        self._generators = generator_states()
        self._tracker = tracker.get_states()  # Tensors, or generators, whose states change.
        generators = {n: e for n, e in self._tracker.items() if hasattr(e, "get_state")}
        self._positions = {name: entry.get_state() for name, entry in generators.items()}

    def restore(self) -> None:
        """Set all generators to these states."""
        tracker: Any = get_cuda_rng_tracker()
        for name, position in self._positions.items():
            self._tracker[name].set_state(position)
        tracker.set_states(self._tracker)
        set_generators(self._generators)


class RecordedMicrobatches:
    """An iterator that yields the microbatches of `source`, and can yield them once more.

    It records copies, because a loader may fill the same memory again and a forward step may change
    its batch. Reading may draw random numbers, so the second time the generators get the states
    that they had after the first. Other attributes are those of `source`.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._recorded: list[tuple[Any, tuple[Any, ...]]] = []

    def __iter__(self) -> "RecordedMicrobatches":
        return self

    def __next__(self) -> Any:
        microbatch = next(self._source)
        self._recorded.append((_copy(microbatch), generator_states()))
        return microbatch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def replay(self) -> Iterator[Any]:
        """Yield the recorded microbatches."""
        for microbatch, states in self._recorded:
            set_generators(states)
            yield microbatch


def record(data_iterator: Any) -> Any:
    """Return `data_iterator` in a form that records what is read from it.

    Args:
        data_iterator: what Megatron's schedules take: an iterator, a list with one for each model
            chunk, or None on ranks that read no data.
    """
    if isinstance(data_iterator, list | tuple):
        return [record(iterator) for iterator in data_iterator]
    return None if data_iterator is None else RecordedMicrobatches(data_iterator)


def replay(recorded: Any) -> Any:
    """Return an iterator over what the result of `record` has recorded, in the same form."""
    if isinstance(recorded, list):
        return [replay(iterator) for iterator in recorded]
    return None if recorded is None else recorded.replay()


def _copy(microbatch: object) -> Any:
    """Copy a microbatch with all that it holds, except process groups, which stay the same.

    Raises:
        ValueError: says why a part cannot be copied.
    """
    groups: dict[int, Any] = {id(group): group for group in distributed_c10d._world.pg_map}
    try:
        return copy.deepcopy(microbatch, groups)
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            "a microbatch must be what copy.deepcopy copies with on_overflow='retry', which reads "
            f"it twice, got {type(microbatch).__name__} ({error}); leave such a part out in the "
            "data loader"
        ) from error
