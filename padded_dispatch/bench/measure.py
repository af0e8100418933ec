"""How a layer is measured: fresh batches in static inputs, events around many iterations, memory.

The copy of a batch into the inputs is inside the measured time, for all contenders alike.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from padded_dispatch import peak
from padded_dispatch.bench.cases import SKEWS, Case
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
