"""How a layer is measured: fresh batches in static inputs, events around many iterations, memory.

The copy of a batch into the inputs is inside the measured time, for all contenders alike.

From kernels to phases: a graph has no Python to ask, but its kernels have names.

A kernel's name says what it does, not for whom. `gather` is therefore rows into slots: the forward
of dispatch and the backward of combine; `combine` is the sum back: the forward of combine and the
backward of dispatch. `exchange` includes what a collective or a barrier waits for its
peers. `copies` are where the padded layout is regrouped, and where a graph's inputs are filled.
Whatever matches nothing is `other`: the router, losses, fused element-wise code.

The floor: what arithmetic and the wire take when nothing else does, on NVIDIA H200s.

GEMMs at 790 TFLOP/s, the best rate that torch reaches on these shapes in bf16, and every real row
once over the wire at 450 GB/s each way, NVLink's rated speed, four hops: dispatch and combine,
forward and backward. Nothing overlaps, nothing is padded, and nothing else costs anything. The
slowest rank decides.
"""

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from padded_dispatch.bench.cases import SKEWS, Case, LayerShape
from padded_dispatch.exchange import symmetric_memory as peak
from padded_dispatch.utils.routings import routing_scores

_WARMUP = 5
_PROFILED = 4
_NUM_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's tokens [T, 1, D] and router logits [T, 1, E] (fp32)."""

    tokens: Tensor
    logits: Tensor


def batches(case: Case, *, seed: int, dtype: torch.dtype, device: torch.device) -> list[Batch]:
    """A few batches that iterations take in turn; `seed` is this rank's."""
    shape = case.shape
    made = []
    for number in range(_NUM_BATCHES):
        generator = torch.Generator().manual_seed(seed * _NUM_BATCHES + number)
        tokens = torch.randn(case.tokens, 1, shape.hidden_size, generator=generator)
        scores_TE = routing_scores(
            case.tokens,
            shape.num_experts,
            shape.top_k,
            num_idle=case.num_idle,
            seed=seed * _NUM_BATCHES + number,
            **SKEWS[case.skew],
        )
        logits = torch.from_numpy(scores_TE).float().unsqueeze(1)
        made.append(Batch(tokens=tokens.to(device, dtype), logits=logits.to(device)))
    return made


class Passes:
    """Forward and backward of one layer, again and again.

    Args:
        layer: takes tokens and logits.
        batches: taken in turn.
        graphed: capture forward and backward as CUDA graphs, by
            `torch.cuda.make_graphed_callables` over the whole layer.
    """

    def __init__(self, layer: nn.Module, batches: list[Batch], *, graphed: bool) -> None:
        self._batches = batches
        self._parameters = list(layer.parameters())
        self._tokens = batches[0].tokens.clone().requires_grad_()
        self._logits = batches[0].logits.clone()
        self._grad = torch.randn_like(batches[0].tokens)
        self._fn: Any = layer
        if graphed:
            inputs = (self._tokens, self._logits)
            self._fn = torch.cuda.make_graphed_callables(layer, inputs, num_warmup_iters=3)

    def run(self, number: int) -> Tensor:
        """One forward and backward of batch `number` modulo their count; the output."""
        batch = self._batches[number % len(self._batches)]
        with torch.no_grad():
            self._tokens.copy_(batch.tokens)
            self._logits.copy_(batch.logits)
        self._tokens.grad = None
        for parameter in self._parameters:
            parameter.grad = None
        output = self._fn(self._tokens, self._logits)
        output.backward(self._grad)
        return output


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds per iteration, each of the slowest rank.

    `samples_ms`: one per repeat. `host_ms`: what the host was busy for; near `ms`, the host is
    what limits.
    """

    samples_ms: list[float]
    host_ms: float

    @property
    def ms(self) -> float:
        """The median repeat."""
        return statistics.median(self.samples_ms)


def timed(
    run: Callable[[int], object], *, iterations: int, repeats: int, device: torch.device
) -> Timing:
    """Time `run(number)`, after warming up; a collective call."""
    for number in range(_WARMUP):
        run(number)
    samples, hosts = [], []
    for _ in range(repeats):
        _meet(device)
        start = time.perf_counter()
        for number in range(iterations):
            run(number)
        hosts.append((time.perf_counter() - start) / iterations * 1e3)
        # From an idle device to an idle device: the host's clock is the device's, too.
        _synchronize(device)
        samples.append((time.perf_counter() - start) / iterations * 1e3)
    slowest = torch.tensor([*samples, statistics.median(hosts)], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    *samples, host = [round(ms, 4) for ms in slowest.tolist()]
    return Timing(samples_ms=samples, host_ms=host)


def kernels_ms(run: Callable[[int], object], device: torch.device) -> dict[str, float]:
    """Milliseconds per iteration by kernel name, longest first; a collective call.

    Concurrent kernels count each, so the sum may exceed the wall's time.
    """
    _meet(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for number in range(_PROFILED):
            run(number)
        _synchronize(device)
    sums: dict[str, float] = {}
    events: Any = profiler.events()
    for event in events:
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            ms = event.time_range.elapsed_us() / 1e3 / _PROFILED
            sums[event.name] = sums.get(event.name, 0.0) + ms
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


class PeakMemory:
    """GiB of device memory since its creation, at the highest: what it found there not counted."""

    def __init__(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._allocated, self._reserved = peak.allocated_gib(), peak.reserved_gib()

    def allocated_gib(self) -> float:
        """By tensors, those of the direct exchange included."""
        return round(peak.allocated_gib() - self._allocated, 3)

    def reserved_gib(self) -> float:
        """By the caching allocator, graph pools included, and by the direct exchange."""
        return round(peak.reserved_gib() - self._reserved, 3)


def _meet(device: torch.device) -> None:
    _synchronize(device)
    dist.barrier()
    _synchronize(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# The first that matches decides.
_PHASES = {
    "select": r"_select_kernel|_choice_ranks_kernel",
    "plan": r"_rank_kernel|_slot_kernel|_row_id_map",
    "side": r"_(gather|scatter)_meta_kernel",
    "gather": r"_spread_rows_kernel|\b_permute_kernel|_unpermute_bwd",
    "combine": r"_sum_rows_kernel|_unpermute_kernel",
    "regroup": r"_regroup|_pack_rows|_unpack_rows|sort_chunks",
    "exchange": r"nccl|_push_rows|_return_rows|_push_counts|_place_rows|barrier_kernel",
    "gemm": r"nvjet|cutlass|gemm|sm90_xmma|cublas",
    "activation": r"silu|swiglu|gated|gelu|sigmoid|_activation_kernel",
    "copies": r"Memcpy|Memset|copy_kernel|FillFunctor|CatArray",
}
_MATCHES = {phase: re.compile(pattern, re.IGNORECASE) for phase, pattern in _PHASES.items()}


def phase_of(kernel: str) -> str:
    """The phase that a kernel of this name belongs to."""
    return next((phase for phase, m in _MATCHES.items() if m.search(kernel)), "other")


def phases_ms(kernels_ms: dict[str, float]) -> dict[str, float]:
    """Milliseconds by phase, from milliseconds by kernel, in the order of the work."""
    sums = dict.fromkeys((*_MATCHES, "other"), 0.0)
    for kernel, ms in kernels_ms.items():
        sums[phase_of(kernel)] += ms
    return {phase: round(ms, 4) for phase, ms in sums.items() if ms}


_FLOP_PER_S = 790e12
_BYTES_PER_S = 450e9
_HOPS = 4
_ELEMENT_BYTES = 2  # bf16


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Least milliseconds of one forward and backward, and the FLOPs of the busiest rank."""

    gemm_ms: float
    wire_ms: float
    flops: float

    @property
    def ms(self) -> float:
        """Of both, one after the other."""
        return self.gemm_ms + self.wire_ms


def floor(rows_SE: Tensor, shape: LayerShape) -> Floor:
    """The floor for rows that source ranks send to experts.

    A row costs `2 * D * 2F` FLOPs in fc1 and `2 * F * D` in fc2, and each again twice backward:
    `18 * D * F`.

    Args:
        rows_SE: numbers of rows, [R, E]; the experts of rank r are the r-th of R equal parts.
        shape: of the layer.

    Example: 8 ranks that send 256 rows to each of 128 experts of Qwen3-30B-A3B's (T = 4,096, K = 8)
    give 1.17 ms of GEMMs and 1.04 ms on the wire.
    """
    num_ranks = rows_SE.shape[0]
    rows_SR = rows_SE.double().unflatten(1, (num_ranks, -1)).sum(2)
    stay_R = rows_SR.diagonal()
    crossing = max((rows_SR.sum(1) - stay_R).max().item(), (rows_SR.sum(0) - stay_R).max().item())
    flops = 18 * shape.hidden_size * shape.ffn_size * rows_SR.sum(0).max().item()
    wire_bytes = _HOPS * crossing * shape.hidden_size * _ELEMENT_BYTES
    return Floor(
        gemm_ms=flops / _FLOP_PER_S * 1e3, wire_ms=wire_bytes / _BYTES_PER_S * 1e3, flops=flops
    )
