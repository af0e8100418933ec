"""Kernels that a profiler saw: stream, kind and times of each."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from padded_dispatch.bench.measure import phase_of

KINDS = ("exchange", "gemm")


@dataclass(frozen=True, kw_only=True)
class Span:
    """A kernel; times in nanoseconds. `kind`: "exchange", "gemm" or "other"."""

    stream: int
    kind: str
    start: int
    end: int


def profiled(run: Callable[[], object]) -> list[Span]:
    """Run something once; return its kernels. Copies and fills are kernels of the kind "other"."""
    on_gpu = torch.cuda.is_available()
    with profile(
        activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    ) as profiler:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    assert profiler.profiler is not None
    return [
        Span(
            stream=event.device_resource_id(),
            kind=phase if (phase := phase_of(event.name())) in KINDS else "other",
            start=event.start_ns(),
            end=event.start_ns() + event.duration_ns(),
        )
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    ]


def union(times: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the times that are in at least one (start, end), in order and apart."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(times):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def common(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    """Return how long two results of `union` overlap."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total
