"""Self-test after a capture: replays equal eager runs bit by bit and never wait for the GPU.

Every captured layer runs with the same random input and from the same random state: eagerly,
eagerly again, and replayed. The test compares its output, the gradient of its input and the
gradients of its parameters.

Irreproducible eager runs. If the backward of two eager runs differs in any tensor, a replay's
backward may differ in any tensor too; such differences are reported, not failed. The same holds for
forward. Attention's backward is irreproducible unless `deterministic_mode` and
NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 are set. All layers of all ranks run the same kernels, so one
pair of eager runs that differs excuses all of them, while a single pair may be equal by luck: of
192 layers on 4 H200s, 26 had an equal pair and another replay. Before the test fails, all ranks run
a few more pairs, which matters for models of few layers.

Other kernels in a capture. Transformer Engine chooses attention kernels depending on whether it is
being captured. With 2.20.2 on an H200, cuDNN's fused attention runs eagerly for sequences of 64, 96
and 128, but in a capture for 128 only; the others get the unfused one. From Megatron-Core 0.18 on,
a checkpoint (recompute of `moe`) does nothing in a capture; eagerly, both of its passes have the
same bits. So the two eager runs choose kernels as a capture does. A third eager run chooses as
training does and shows whether that makes a difference (`SelfTest.other_kernels`).

Pieces of layers. With `overlap_moe_expert_parallel_comm` a replay returns what the schedule's next
piece takes, and with `delay_wgrad_compute` the schedule computes gradients of weights after
backward. The test runs whole layers: without the first setting, and with the call of the second.

Sequence parallelism. Megatron's block runs its layers, and the capture, with a generator of its
random state tracker. A graph draws from the generator that it was captured with, so the test's runs
take the same.

fp8 and fp4. All runs are those of a step's first microbatch, which quantizes the weights, in the
context that Megatron's transformer block enters, with the same scales: see
`padded_dispatch.megatron.graphs.quantized`.

The test restores random states, buffers, counters and scales. It runs after Megatron's capture and,
like that, leaves gradients and Megatron's MoE metrics cleared.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import cuda_graphs
from torch import Tensor

from padded_dispatch.megatron.compat import clear_moe_metrics
from padded_dispatch.megatron.dispatcher import counts_put_back
from padded_dispatch.megatron.graphs.quantized import first_microbatch, scales_put_back
from padded_dispatch.megatron.random_states import RandomStates, draws_of_a_block
from padded_dispatch.utils.patches import Patches

try:
    from transformer_engine.pytorch.graph import set_capture_end, set_capture_start
except ImportError:  # A CPU has no choice of kernels.
    set_capture_start = set_capture_end = lambda: None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One captured layer, and inputs of the shape and dtype that it was captured with."""

    layer: Any
    args: tuple[Tensor, ...]
    kwargs: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """Result of a self-test that passed, on this rank.

    `num_tensors`: number of tensors that were equal. `unreproducible`: names of tensors that
    differed, in a phase in which eager runs differ as well. `other_kernels`: layers that eager
    training computes with other kernels, so that its results differ by rounding.
    """

    num_tensors: int
    unreproducible: tuple[str, ...]
    other_kernels: tuple[str, ...]


_MORE_PAIRS = 3
# Integer types by bytes per element.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PHASES = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class _Findings:
    """Findings of one rank.

    `equal`: tensors whose replay equals eager. `differing`: the others, by phase. `varying`: phases
    in which two eager runs differed. `other_kernels`: see `SelfTest`. `errors`: layers whose replay
    raised, with the error.
    """

    equal: list[str] = field(default_factory=list)
    differing: dict[str, list[str]] = field(default_factory=lambda: {p: [] for p in _PHASES})
    varying: set[str] = field(default_factory=set)
    other_kernels: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def run_self_test(chunks: list[Any], samples: list[Sample]) -> SelfTest:
    """Compare replays of every sample's layer with eager runs. All ranks must call it.

    Args:
        chunks: the model in Megatron's DDP.
        samples: all layers that were captured, in order.

    Raises:
        RuntimeError: on all ranks, if any rank found a difference or a call that waits for the GPU;
            names rank, layer and tensor.
    """
    found = _Findings()
    with restore_state(chunks), _whole_layers(samples):
        for sample in samples:
            _compare(chunks, sample, found)
        failed, varying = _outcome(found)
        if failed and len(varying) < len(_PHASES):
            for sample in samples * _MORE_PAIRS:
                _eager_twice(chunks, sample, found)
            failed, varying = _outcome(found)
    if failed:
        heading = "the self-test of the CUDA graphs failed:"
        raise RuntimeError("\n  ".join([heading, *failed]))
    return SelfTest(
        num_tensors=len(found.equal),
        unreproducible=tuple(name for phase in varying for name in found.differing[phase]),
        other_kernels=tuple(found.other_kernels),
    )


def _outcome(found: _Findings) -> tuple[list[str], list[str]]:
    """Return the failures of all ranks, and the phases that vary on any rank."""
    all_found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_found, found)
    varying = [phase for phase in _PHASES if any(phase in one.varying for one in all_found)]
    failed = []
    for rank, one in enumerate(all_found):
        names = [n for phase in _PHASES if phase not in varying for n in one.differing[phase]]
        texts = one.errors + [f"{name} differs from eager" for name in names]
        failed += [f"rank {rank}: {text}" for text in texts]
    return failed, varying


def run_eager(chunks: list[Any], sample: Sample) -> dict[str, Tensor]:
    """Run forward and backward without graphs, with the same random state and input on every call.

    Returns:
        The output, then the gradients, by name. They are the model's own tensors, which the next
        run overwrites.
    """
    graphs = sample.layer.cuda_graphs
    sample.layer.cuda_graphs = []
    try:
        return _run(chunks, sample)
    finally:
        sample.layer.cuda_graphs = graphs


@contextmanager
def restore_state(chunks: list[Any]) -> Iterator[None]:
    """Restore counters, buffers, random states and scales; clear gradients and MoE metrics."""
    models = [chunk.module for chunk in chunks]  # Buffers of DDP itself count nothing.
    try:
        with ExitStack() as stack:
            stack.enter_context(counts_put_back(*models))
            stack.enter_context(scales_put_back(*models))
            stack.enter_context(_restore_random_state())
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
        with waiting_raises(sample.args[0].device):
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
    """Run twice eagerly with a capture's kernels; return the results and the phases that agree.

    Only the first run's results are copied: a layer's gradients can be as large as anything that
    training holds.
    """
    with _kernels_of_a_capture():
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
    with _restore_random_state(), counts_put_back(layer), scales_put_back(layer):
        # Draws of policy "random" are counts.
        with first_microbatch(layer), draws_of_a_block(layer.config):
            output = layer(given, **sample.kwargs)[0]
        output.backward(_noise(output, seed=2 * layer.layer_number + 1))
        _compute_delayed_gradients(layer)
    assert given.grad is not None
    results = {"its output": output.detach(), "the gradient of its input": given.grad}
    for name, param in layer.named_parameters():
        if param.requires_grad:
            # Megatron's DDP moves gradients from `grad` to `main_grad`.
            gradient = param.main_grad if hasattr(param, "main_grad") else param.grad
            results[f"the gradient of {name}"] = gradient
    return results


def _compute_delayed_gradients(layer: Any) -> None:
    """Compute what backward has left to the schedule, as the schedule does."""
    if not layer.config.delay_wgrad_compute:
        return
    layer.init_backward_dw_wrapper()
    if layer.cuda_graphs:
        layer.set_te_cuda_graph_backward_dw_wrapper()
    layer.mlp.backward_dw()
    layer.backward_dw_wrapper.backward_dw()


@contextmanager
def _whole_layers(samples: list[Sample]) -> Iterator[None]:
    """Let replays return the output of a layer, not the input of the schedule's next piece."""
    with Patches() as patches:
        for sample in samples:
            patches.set(sample.layer.config, "overlap_moe_expert_parallel_comm", False)
        yield


def _noise(like: Tensor, seed: int) -> Tensor:
    """Draw standard normal values, different on each rank; global generators do not advance."""
    generator = torch.Generator(like.device)
    generator.manual_seed(seed * dist.get_world_size() + dist.get_rank())
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)


@contextmanager
def _kernels_of_a_capture() -> Iterator[None]:
    """Let Transformer Engine and recomputation choose what they would choose in a capture."""
    with Patches() as patches:
        # Recomputation calls it before each pass.
        patches.set(cuda_graphs, "is_graph_warmup", lambda: True)
        set_capture_start()
        try:
            yield
        finally:
            set_capture_end()


@contextmanager
def _restore_random_state() -> Iterator[None]:
    """Restore all random states at the end."""
    before = RandomStates.now()
    try:
        yield
    finally:
        before.restore()


@contextmanager
def waiting_raises(device: torch.device) -> Iterator[None]:
    """Let calls that wait for the GPU raise; do nothing on a CPU."""
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
