"""Replay equals eager, bit by bit, on fresh inputs, and never waits for the host.

Every captured layer runs three times on the same random input and from the same random state:
eager, eager again, replayed. Its output and the gradients of its input and of every parameter are
compared. Where two eager runs' backwards differ in anything, a replay's may differ in anything,
too: that is reported, not failed, and so for forward. Attention's backward does, unless
`deterministic_mode` and NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 are set. All layers of all ranks run the
same kernels, so one pair of eager runs that differs speaks for all of them: each pair alone may be
equal by luck. (Of 192 layers on 4 H200s, 26 had an equal pair and another replay.) Before anything
fails, all ranks run a few more pairs, for models of few layers.

Transformer Engine asks whether it is being captured when it chooses attention's kernels. With
2.20.2 on an H200, cuDNN's fused attention runs eagerly for sequences of 64, 96 and 128, but in a
capture for 128 only; the others get the unfused one. And from Megatron-Core 0.18 on, a checkpoint
(recompute of `moe`) is none in a capture, while eagerly its first pass, without gradients, rounds
otherwise: `topk` then leaves the choices unsorted. So these eager runs choose as a capture does,
and a fourth, which chooses as eager training does, tells whether that is something else.

Nothing remains of it: random states, buffers and counters are put back; gradients and Megatron's
metrics are cleared, as Megatron's own capture has left them, after which this runs.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import cuda_graphs
from torch import Tensor

from padded_dispatch.megatron.compat import clear_moe_metrics
from padded_dispatch.megatron.dispatcher import counts_put_back

try:
    from transformer_engine.pytorch.graph import set_capture_end, set_capture_start
except ImportError:  # Not on a CPU, where nothing has kernels to choose from.
    set_capture_start = set_capture_end = lambda: None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One captured layer, and inputs like those that it was captured with."""

    layer: Any
    args: tuple[Tensor, ...]
    kwargs: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """What was compared on this rank.

    `num_tensors`: how many were equal. `unreproducible`: those that were not, where eager runs
    were not, either. `other_kernels`: layers that eager training computes with other
    kernels, so that its results differ by rounding.
    """

    num_tensors: int
    unreproducible: tuple[str, ...]
    other_kernels: tuple[str, ...]


_MORE_PAIRS = 3
# By the bytes of an element.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PHASES = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class _Findings:
    """Of one rank; `differing` and `varying` by phase, the latter those of which eager runs were
    not equal.
    """

    equal: list[str] = field(default_factory=list)
    differing: dict[str, list[str]] = field(default_factory=lambda: {p: [] for p in _PHASES})
    varying: set[str] = field(default_factory=set)
    other_kernels: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def run_self_test(chunks: list[Any], samples: list[Sample]) -> SelfTest:
    """Compare every sample's layer with itself. To be called by all ranks.

    Args:
        chunks: the model in Megatron's DDP.
        samples: all layers that were captured, in order.

    Raises:
        RuntimeError: on all ranks, if any of them found a difference or a synchronisation; names
            rank, layer and tensor.
    """
    found = _Findings()
    with no_trace(chunks):
        for sample in samples:
            _compare(chunks, sample, found)
        failed, varying = _outcome(found)
        if failed and len(varying) < len(_PHASES):
            for sample in samples * _MORE_PAIRS:
                _eager_twice(chunks, sample, found)
            failed, varying = _outcome(found)
    if failed:
        heading = "the CUDA graphs are not what they were made from:"
        raise RuntimeError("\n  ".join([heading, *failed]))
    return SelfTest(
        num_tensors=len(found.equal),
        unreproducible=tuple(name for phase in varying for name in found.differing[phase]),
        other_kernels=tuple(found.other_kernels),
    )


def _outcome(found: _Findings) -> tuple[list[str], list[str]]:
    """What failed on any rank, and the phases that vary on any; the same on all of them."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    varying = [phase for phase in _PHASES if any(phase in one.varying for one in everyone)]
    failed = []
    for rank, one in enumerate(everyone):
        names = [n for phase in _PHASES if phase not in varying for n in one.differing[phase]]
        texts = one.errors + [f"{name} differs from eager" for name in names]
        failed += [f"rank {rank}: {text}" for text in texts]
    return failed, varying


def run_eager(chunks: list[Any], sample: Sample) -> dict[str, Tensor]:
    """Forward and backward without graphs, from the same random state and input on every call.

    Returns:
        The output, then the gradients, by name: where the model has them, until the next run.
    """
    graphs = sample.layer.cuda_graphs
    sample.layer.cuda_graphs = []
    try:
        return _run(chunks, sample)
    finally:
        sample.layer.cuda_graphs = graphs


@contextmanager
def no_trace(chunks: list[Any]) -> Iterator[None]:
    """Put back what passes through layers leave behind."""
    models = [chunk.module for chunk in chunks]  # DDP itself has buffers that count nothing.
    try:
        with ExitStack() as stack:
            stack.enter_context(counts_put_back(*models))
            stack.enter_context(_same_random_state())
            for chunk in chunks:
                stack.enter_context(chunk.no_sync())
            yield
    finally:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        clear_moe_metrics()


def _compare(chunks: list[Any], sample: Sample, found: _Findings) -> None:
    name = f"layer {sample.layer.layer_number}"
    eager, reproducible = _eager_twice(chunks, sample, found)
    (output,) = _by_phase(eager)["forward"]
    trained = run_eager(chunks, sample)
    if "forward" in reproducible and not _same_bits(eager[output], trained[output]):
        found.other_kernels.append(name)
    try:
        with _no_synchronisation(sample.args[0].device):
            replayed = _run(chunks, sample)
    except RuntimeError as error:
        found.errors.append(f"{name}: {error}")
        return
    for phase, tensors in _by_phase(eager).items():
        for what in tensors:
            same = _same_bits(eager[what], replayed[what])
            (found.equal if same else found.differing[phase]).append(f"{name}: {what}")


def _eager_twice(
    chunks: list[Any], sample: Sample, found: _Findings
) -> tuple[dict[str, Tensor], set[str]]:
    """Two eager runs, which choose as a capture does: a copy, and the phases in which they agree.

    It is the only copy: a layer's gradients can be as large as anything that training holds.
    """
    with _choosing_as_a_capture():
        eager = {what: tensor.clone() for what, tensor in run_eager(chunks, sample).items()}
        again = run_eager(chunks, sample)
    reproducible = {
        phase
        for phase, tensors in _by_phase(eager).items()
        if all(_same_bits(eager[what], again[what]) for what in tensors)
    }
    found.varying.update(set(_PHASES) - reproducible)
    return eager, reproducible


def _by_phase(results: dict[str, Tensor]) -> dict[str, list[str]]:
    output, *gradients = results
    return {"forward": [output], "backward": gradients}


def _run(chunks: list[Any], sample: Sample) -> dict[str, Tensor]:
    layer, (like, *_) = sample.layer, sample.args
    for chunk in chunks:
        chunk.zero_grad_buffer()
    given = _noise(like, seed=2 * layer.layer_number).requires_grad_()
    with _same_random_state(), _same_draws(layer):
        output = layer(given, **sample.kwargs)[0]
        output.backward(_noise(output, seed=2 * layer.layer_number + 1))
    assert given.grad is not None
    results = {"its output": output.detach(), "the gradient of its input": given.grad}
    for name, param in layer.named_parameters():
        if param.requires_grad:
            # Megatron's DDP takes it from where autograd has put it.
            gradient = param.main_grad if hasattr(param, "main_grad") else param.grad
            results[f"the gradient of {name}"] = gradient
    return results


def _noise(like: Tensor, seed: int) -> Tensor:
    """Standard normal, other on each rank, without a trace in any generator but its own."""
    own = torch.Generator(like.device).manual_seed(seed * dist.get_world_size() + dist.get_rank())
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=own)


@contextmanager
def _choosing_as_a_capture() -> Iterator[None]:
    is_warmup = cuda_graphs.is_graph_warmup
    # What recomputation asks, whenever it is about to begin.
    cuda_graphs.is_graph_warmup = lambda: True
    set_capture_start()
    try:
        yield
    finally:
        set_capture_end()
        cuda_graphs.is_graph_warmup = is_warmup


@contextmanager
def _same_random_state() -> Iterator[None]:
    """Leave every generator as it was found."""
    tracker: Any = get_cuda_rng_tracker()
    cpu, cuda, states = torch.get_rng_state(), torch.cuda.get_rng_state(), tracker.get_states()
    # With Transformer Engine's tracker they are generators that the graphs know; else states.
    positions = {
        name: state.get_state() for name, state in states.items() if hasattr(state, "get_state")
    }
    try:
        yield
    finally:
        for name, position in positions.items():
            states[name].set_state(position)
        tracker.set_states(states)
        torch.cuda.set_rng_state(cuda)
        torch.set_rng_state(cpu)


@contextmanager
def _same_draws(layer: Any) -> Iterator[None]:
    """Let the layer's router draw next what it would have drawn now (policy "random")."""
    counts = [buffer for name, buffer in layer.named_buffers() if name.endswith("num_draws")]
    kept = [count.clone() for count in counts]
    try:
        yield
    finally:
        for count, copy in zip(counts, kept, strict=True):
            count.copy_(copy)


@contextmanager
def _no_synchronisation(device: torch.device) -> Iterator[None]:
    """Let every call raise that waits for the device."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    bits = _INTEGERS[one.itemsize]
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))
