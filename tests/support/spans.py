"""Kernels that a profiler saw: stream, kind and times of each."""

from collections.abc import Callable
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
