"""Self-test after a capture: replays equal eager runs bit by bit and never wait for the GPU.

Every captured layer runs with the same random input and from the same random state: eagerly,
eagerly again, and replayed. Its output and all gradients are compared. It restores random states,
buffers, counters and scales, and leaves gradients and Megatron's MoE metrics cleared, as a capture.

- Irreproducible eager runs. If two eager runs differ in any tensor of a phase, so may a replay in
  any; such differences are reported, not failed. Attention's backward is irreproducible unless
  `deterministic_mode` and NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 are set. One pair of runs that differs
  excuses all layers, and a pair may be equal by luck (26 of 192 on 4 H200s), so a few more pairs
  run before the test fails.
- Other kernels in a capture. Transformer Engine chooses attention kernels depending on whether it
  is being captured, and from 0.18 on a checkpoint does nothing in a capture. So the two eager runs
  choose as a capture does; a third one, which chooses as training does, shows whether that makes a
  difference (`SelfTest.other_kernels`).
- Whole layers run, without `overlap_moe_expert_parallel_comm`; what the schedule would do around
  them is done here: gradients of `delay_wgrad_compute`, contexts and scales of fp8 and fp4.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import cuda_graphs
from torch import Tensor, nn

from padded_dispatch.megatron.compat import clear_moe_metrics
from padded_dispatch.megatron.dispatcher import counts_put_back
from padded_dispatch.megatron.retry import RandomStates
from padded_dispatch.megatron.watch import unseen
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
    with restore_state(chunks), Patches() as patches:
        for sample in samples:
            # Replays then return a layer's output, not the input of the schedule's next piece.
            patches.set(sample.layer.config, "overlap_moe_expert_parallel_comm", False)
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
            stack.enter_context(unseen())
            stack.enter_context(counts_put_back(*models))
            stack.enter_context(scales_put_back(*models))
            stack.callback(RandomStates.now().restore)
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
    with ExitStack() as stack, counts_put_back(layer), scales_put_back(layer):
        stack.callback(RandomStates.now().restore)
        # Megatron's block runs layers, and their capture, in a fork of its tracker.
        tracker: Any = get_cuda_rng_tracker()
        forked = tracker.fork() if layer.config.sequence_parallel else nullcontext()
        with first_microbatch(layer), forked:
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


_SCALINGS = ("scaling_fwd", "scaling_bwd")


def quantizes(config: Any) -> bool:
    """Return whether layers of a config may compute in fp8 or fp4."""
    return any(getattr(config, name, None) for name in ("fp8", "fp4", "quant_recipe"))


@contextmanager
def first_microbatch(layer: Any) -> Iterator[None]:
    """Let a layer's forward compute, or replay, what it would in a step's first microbatch.

    Args:
        layer: with `config` and `layer_number`; nothing happens if the config does not quantize.
    """
    if not quantizes(layer.config):
        yield
        return
    for module in layer.modules():
        if hasattr(module, "is_first_microbatch"):
            module.is_first_microbatch = True
    with Patches() as patches, _context(layer):
        patches.set(layer, "current_microbatch", 0)
        yield


def _context(layer: Any) -> AbstractContextManager[Any]:
    """Return the context in which Megatron runs a layer; some are in bf16, by their number."""
    config: Any = layer.config
    # Megatron quantizes all layers of multi-token prediction.
    number = -1 if getattr(layer, "is_mtp_layer", False) else layer.layer_number - 1
    if config.fp8:
        from megatron.core import fp8_utils

        return fp8_utils.get_fp8_context(config, number)
    if config.fp4:
        from megatron.core import fp4_utils

        return fp4_utils.get_fp4_context(config, number)
    return nullcontext()


@contextmanager
def scales_put_back(*models: nn.Module) -> Iterator[None]:
    """Restore scales, noted values, and which weights are to be quantized, at the end.

    A scale that is made inside the block becomes 1, as Transformer Engine makes it, with nothing
    noted.
    """
    modules = [module for model in models for module in model.modules()]
    firsts = [(m, m.is_first_microbatch) for m in modules if hasattr(m, "is_first_microbatch")]
    before = {
        id(scaling): (scaling, scaling.scale.clone(), scaling.amax_history.clone())
        for scaling in _scalings(modules)
    }
    try:
        yield
    finally:
        for module, first in firsts:
            module.is_first_microbatch = first
        with torch.no_grad():
            for scaling in _scalings(modules):
                if id(scaling) in before:
                    _, scale, history = before[id(scaling)]
                    scaling.scale.copy_(scale)
                    scaling.amax_history.copy_(history)
                else:
                    scaling.scale.fill_(1)
                    scaling.amax_history.zero_()


def _scalings(modules: list[Any]) -> Iterator[Any]:
    """Yield what Transformer Engine's modules and fused ops keep from pass to pass."""
    for module in modules:
        fused: Any = getattr(module, "_fp8_metas", None) or {}
        for meta in (getattr(module, "fp8_meta", None), *fused.values()):
            scalings = ((meta or {}).get(name) for name in _SCALINGS)
            yield from (one for one in scalings if hasattr(one, "amax_history"))
