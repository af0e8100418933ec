"""Measure a layer: fresh batches in static inputs, wall time of many passes, kernels.

Copying a batch into the static inputs is part of the measured time, for all contenders alike.

Shape suffixes: T tokens of this rank, E experts. Tokens and logits have a batch axis of 1 between,
as Megatron's layers expect.
"""

import ctypes
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from padded_dispatch.bench.cases import MainGrad, routing_scores
from padded_dispatch.megatron.stacked_linear import StackedLinear
from padded_dispatch.utils.shapes import LayerShape

_WARMUP = 5
_REPEATS = 5
_REST_S = 0.5  # before each repeat, so that a GPU with a power cap begins it at its full clock
_PROFILED = 4
_NUM_BATCHES = 4
_SUSTAINED_MS = 1000
_SM_CLOCK = 1  # NVML_CLOCK_SM


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens [T, 1, D] and router logits [T, 1, E] (fp32) of one rank."""

    tokens: Tensor
    logits: Tensor


@functools.lru_cache(maxsize=1)
def batches(
    shape: LayerShape,
    num_tokens: int,
    skew: str,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Batch]:
    """Return the batches that iterations take in turn; do not write to them.

    Consecutive cases that differ only in factor or contender share one list: drawing 16,384 tokens
    takes longer than measuring them. `seed`: a different number on each rank.
    """
    drawn = []
    for i in range(_NUM_BATCHES):
        number = seed * _NUM_BATCHES + i
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randn(num_tokens, 1, shape.hidden_size, generator=generator, device="cpu")
        scores_TE = routing_scores(num_tokens, shape.num_experts, skew=skew, seed=number)
        logits = torch.from_numpy(scores_TE).float().unsqueeze(1)
        drawn.append(Batch(tokens=tokens.to(device, dtype), logits=logits.to(device)))
    return drawn


class Passes:
    """Repeated forward and backward passes of one layer.

    Args:
        layer: takes tokens and logits.
        batches: taken in turn.
        graphed: capture forward and backward as CUDA graphs, by
            `torch.cuda.make_graphed_callables` over the whole layer.
        main_grad: unless "none", each parameter gets the attributes that Megatron's DDP gives it:
            `main_grad`, an fp32 buffer, and `grad_added_to_main_grad`. A pass adds its gradients;
            with "first" packed experts store theirs.
    """

    def __init__(
        self,
        layer: nn.Module,
        batches: list[Batch],
        *,
        graphed: bool,
        main_grad: MainGrad = "none",
    ) -> None:
        self._batches = batches
        self._parameters: list[Any] = list(layer.parameters())
        self._main_grad = main_grad
        if main_grad != "none":
            for parameter in self._parameters:
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
                parameter.grad_added_to_main_grad = False
        linears = [module for module in layer.modules() if isinstance(module, StackedLinear)]
        self._zeroed = [linear.zeroed for linear in linears] if main_grad == "first" else []
        self._tokens = batches[0].tokens.clone().requires_grad_()
        self._logits = batches[0].logits.clone()
        self._grad = torch.randn_like(batches[0].tokens)
        self._fn: Any = layer
        if graphed:
            inputs = (self._tokens, self._logits)
            self._fn = torch.cuda.make_graphed_callables(layer, inputs, num_warmup_iters=3)

    def run(self, number: int) -> Tensor:
        """Run a pass of batch `number`, counted cyclically; return the output, [T, 1, D]."""
        batch = self._batches[number % len(self._batches)]
        with torch.no_grad():
            self._tokens.copy_(batch.tokens)
            self._logits.copy_(batch.logits)
        self._tokens.grad = None
        for parameter in self._parameters:
            parameter.grad = None
        for zeroed in self._zeroed:
            zeroed.fill_(1)
        output = self._fn(self._tokens, self._logits)
        output.backward(self._grad)
        if self._main_grad != "none":
            self._add_gradients()
        return output

    @torch.no_grad()
    def _add_gradients(self) -> None:
        # A replay does not set the flag: with "fused" it keeps its value from the capture.
        for parameter in self._parameters:
            if parameter.grad is not None and not parameter.grad_added_to_main_grad:
                parameter.main_grad += parameter.grad


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds per iteration on the slowest rank.

    `samples_ms`: one per repeat, a burst of a device that was idle. `host_ms`: time that the host
    was busy; near `ms`, the host is the bottleneck. `sm_mhz`: clock of this rank's multiprocessors
    at the end of each repeat. `sustained_ms`: after a second of the same work, when the GPU has met
    its power cap; `joules`: energy of an iteration then, the mean of the ranks. These three are
    None on CPUs; clock and energy are None without NVIDIA's library.
    """

    samples_ms: list[float]
    host_ms: float
    sm_mhz: list[int] | None = None
    sustained_ms: float | None = None
    joules: float | None = None

    @property
    def ms(self) -> float:
        """The median repeat."""
        return statistics.median(self.samples_ms)


def timed(run: Callable[[int], object], *, iterations: int, device: torch.device) -> Timing:
    """Warm up, then time `run(number)`; a collective call."""
    for number in range(_WARMUP):
        run(number)
    samples, hosts, clocks = [], [], []
    for _ in range(_REPEATS):
        time.sleep(_REST_S if device.type == "cuda" else 0)
        _meet(device)
        start = time.perf_counter()
        for number in range(iterations):
            run(number)
        hosts.append((time.perf_counter() - start) / iterations * 1e3)
        clocks.append(sm_mhz(device))  # while the device is busy
        # The device is idle at start and end, so the host's clock measures the device.
        _synchronize(device)
        samples.append((time.perf_counter() - start) / iterations * 1e3)
    *samples, host = _slowest([*samples, statistics.median(hosts)], device)
    known = None if None in clocks else clocks
    timing = Timing(samples_ms=samples, host_ms=host, sm_mhz=known)
    if device.type != "cuda":
        return timing
    iterations = math.ceil(_SUSTAINED_MS / timing.ms)

    def work() -> None:
        for number in range(iterations):
            run(number)
        _synchronize(device)

    work()  # It heats the GPU.
    before, start = joules(device), time.perf_counter()
    work()
    seconds, after = time.perf_counter() - start, joules(device)
    (sustained,) = _slowest([seconds / iterations * 1e3], device)
    used = math.nan if before is None or after is None else (after - before) / iterations
    mean = torch.tensor(used, device=device)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)  # Also if this GPU alone does not tell its energy.
    used = None if mean.isnan() else round(mean.item(), 4)
    return dataclasses.replace(timing, sustained_ms=sustained, joules=used)


def _slowest(numbers: list[float], device: torch.device) -> list[float]:
    """Return the maximum over all ranks of each number."""
    slowest = torch.tensor(numbers, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [round(number, 4) for number in slowest.tolist()]


def kernels_ms(run: Callable[[int], object], device: torch.device) -> dict[str, float]:
    """Profile `_PROFILED` iterations; return milliseconds of one by kernel name, longest first.

    Concurrent kernels each count in full, so the sum may exceed wall time. A collective call.
    """
    _meet(device)
    us_of = kernels_us(run, _PROFILED, device)
    sums = {name: sum(us) / 1e3 / _PROFILED for name, us in us_of.items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def kernels_us(
    run: Callable[[int], object], times: int, device: torch.device
) -> dict[str, list[float]]:
    """Profile iterations, numbered from 0; return microseconds of each kernel, by its name."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for number in range(times):
            run(number)
        _synchronize(device)
    events: Any = profiler.events()
    found: dict[str, list[float]] = {}
    for event in events:
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            found.setdefault(event.name, []).append(event.time_range.elapsed_us())
    return found


def _meet(device: torch.device) -> None:
    """Let all ranks start at the same time, with idle devices."""
    _synchronize(device)
    dist.barrier()
    _synchronize(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def sm_mhz(device: torch.device) -> int | None:
    """Return the clock of the GPU's multiprocessors now; None on CPUs and without NVIDIA's library.

    A time means little without it: under load an H200 meets its power cap, and its clock falls from
    1,980 MHz by a quarter. Calling `nvidia-smi` would take longer than the measured work.
    """
    return _ask(device, "nvmlDeviceGetClockInfo", ctypes.c_uint(), _SM_CLOCK)


def joules(device: torch.device) -> float | None:
    """Return the GPU's energy since the driver was loaded; None where `sm_mhz` is None."""
    found = _ask(device, "nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong())
    return None if found is None else found / 1e3


def cublas(device: torch.device) -> str | None:
    """Return the version of the cuBLAS that torch has loaded; None on CPUs.

    LD_PRELOAD or pip may have replaced the one that torch asks for, and the products with it.
    """
    if device.type != "cuda":
        return None
    cuda = (torch.version.cuda or "").split(".")[0]
    library = ctypes.CDLL(f"libcublasLt.so.{cuda}")
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    major, rest = divmod(library.cublasLtGetVersion(), 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _ask(device: torch.device, function: str, answer: Any, *arguments: int) -> int | None:
    """Return what a function of NVIDIA's library writes into `answer`, a ctypes number."""
    if device.type != "cuda":
        return None
    found = _nvml(torch.cuda.current_device() if device.index is None else device.index)
    if found is None:
        return None
    library, handle = found
    failed = getattr(library, function)(handle, *arguments, ctypes.byref(answer))
    return None if failed else answer.value


@functools.cache
def _nvml(index: int) -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """Return NVIDIA's library and its handle of torch's GPU `index`, by UUID; None without it."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    name = f"GPU-{torch.cuda.get_device_properties(index).uuid}".encode()
    failed = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle))
    return None if failed else (library, handle)
