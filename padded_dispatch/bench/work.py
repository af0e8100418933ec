"""A worker's whole life: join the others, measure case by case, tell what was found."""

import gc
import itertools
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from padded_dispatch.bench.cases import CONTENDERS, Case
from padded_dispatch.bench.layer import build, stock_flags
from padded_dispatch.bench.measure import (
    Batch,
    Passes,
    PeakMemory,
    batches,
    floor,
    kernels_ms,
    phases_ms,
    timed,
)
from padded_dispatch.bench.table import line, table
from padded_dispatch.megatron import install
from padded_dispatch.megatron.cpu import megatron_on_cpu
from padded_dispatch.utils.results import about, append_run

_SHOWN_KERNELS = 24


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A run of the benchmark.

    `iterations`: passes per repeat. `router_fusion`: Megatron's flag, for all contenders.
    `phases`: profile a few passes of each case. `minutes`: no case is begun later. `out`: results
    file, which gets each row as it comes. `command`, `commit`: for the results.
    """

    cases: tuple[Case, ...]
    device: Literal["cpu", "cuda"]
    workers: int
    iterations: int
    repeats: int
    router_fusion: bool
    phases: bool
    minutes: float | None
    out: Path | None
    command: str
    commit: str | None


def work(settings: Settings) -> bool:
    """Measure all cases; whether none failed. To be called by every worker."""
    started = time.monotonic()
    num_gpus = settings.workers if settings.device == "cuda" else 0
    run = about(num_gpus=num_gpus, command=settings.command, commit=settings.commit)
    with _world(settings) as device:
        rows = []
        for ep, cases in itertools.groupby(settings.cases, key=lambda case: case.ep):
            with _expert_parallel(ep):
                for case in cases:
                    if settings.minutes is not None:
                        minutes = _slowest((time.monotonic() - started) / 60, device)
                        if minutes > settings.minutes:
                            break
                    rows.append(measure(case, settings, device))
                    if dist.get_rank() == 0:
                        _tell(rows[-1], settings, run)
        if dist.get_rank() == 0:
            _conclude(rows, settings)
    return all(row["error"] is None for row in rows)


def measure(case: Case, settings: Settings, device: torch.device) -> dict[str, Any]:
    """Measure one case: a row of a results file; a collective call."""
    started = time.monotonic()
    contender = CONTENDERS[case.contender]
    on_gpu = device.type == "cuda"
    flags = stock_flags(case, on_gpu=on_gpu, router_fusion=settings.router_fusion)
    row: dict[str, Any] = {
        "model": case.model,
        "ep": case.ep,
        "tokens": case.tokens,
        "capacity_factor": case.capacity_factor,
        "skew": case.skew,
        "contender": contender.name,
        "variant": contender.variant,
        "graph": contender.graph,
        "graph_impl": None if contender.graph == "none" else "torch.cuda.make_graphed_callables",
        "flags": flags,
        "iterations": settings.iterations,
        "ranks": dist.get_world_size(),
    }
    absent = (
        "ms",
        "samples_ms",
        "host_ms",
        "phases_ms",
        "kernels_ms",
        "floor_ms",
        "floor_parts_ms",
    )
    row |= dict.fromkeys((*absent, "fill", "tflops_per_gpu", "allocated_gib", "reserved_gib"))
    row["error"] = None
    try:
        row |= _figures(case, flags, settings, device)
    except Exception as error:  # the other contenders are still worth measuring
        row["error"] = f"{type(error).__name__}: {error}"[:500]
    gc.collect()  # layers are cycles, and a graph of theirs holds memory
    if on_gpu:
        # Private, but the only way: a stream's workspace would count for the first who used it.
        torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportAttributeAccessIssue]
        torch.cuda.empty_cache()
    return row | {"seconds": round(time.monotonic() - started, 1)}


def _figures(
    case: Case, flags: dict[str, Any], settings: Settings, device: torch.device
) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    graphed = CONTENDERS[case.contender].graph == "layer"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    data = batches(case, seed=dist.get_rank(), dtype=dtype, device=device)
    kept_SE = _kept(case, data)
    least = floor(kept_SE, case.shape)
    memory = PeakMemory() if on_gpu else None
    passes = Passes(build(case, flags, device), data, graphed=graphed)
    timing = timed(
        passes.run, iterations=settings.iterations, repeats=settings.repeats, device=device
    )
    figures = {
        "ms": timing.ms,
        "samples_ms": timing.samples_ms,
        "host_ms": timing.host_ms,
        "tflops_per_gpu": least.flops / timing.ms / 1e9,
    }
    if CONTENDERS[case.contender].drops:
        slots = case.shape.num_experts * case.dispatch_config().capacity(case.tokens)
        figures["fill"] = kept_SE.sum(1).mean().item() / slots
    if memory is not None:
        figures["floor_ms"] = least.ms
        figures["floor_parts_ms"] = {"gemm": least.gemm_ms, "wire": least.wire_ms}
        # Before the profiler, which is no part of the layer.
        figures["allocated_gib"] = memory.allocated_gib()
        figures["reserved_gib"] = memory.reserved_gib()
    if settings.phases and on_gpu:
        kernels = kernels_ms(passes.run, device)
        figures["phases_ms"] = phases_ms(kernels)
        longest = list(kernels.items())[:_SHOWN_KERNELS]
        figures["kernels_ms"] = {name[:120]: round(ms, 4) for name, ms in longest}
    return figures


def _kept(case: Case, data: list[Batch]) -> torch.Tensor:
    """Rows of the average batch that are kept, [R, E]: by source rank in this rank's EP group."""
    capacity = case.dispatch_config().capacity(case.tokens)
    counts = []
    for batch in data:
        chosen_TK = batch.logits[:, 0].topk(case.shape.top_k).indices
        count_E = torch.bincount(chosen_TK.flatten(), minlength=case.shape.num_experts)
        counts.append(count_E.clamp(max=capacity).float())
    mine_E = torch.stack(counts).mean(0)
    group = parallel_state.get_expert_model_parallel_group()
    everyone = [torch.empty_like(mine_E) for _ in range(case.ep)]
    dist.all_gather(everyone, mine_E, group=group)
    return torch.stack(everyone).cpu()


def _slowest(value: float, device: torch.device) -> float:
    """The largest of all ranks' values, so that they decide alike."""
    largest = torch.tensor(value, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def _tell(row: dict[str, Any], settings: Settings, run: dict[str, Any]) -> None:
    if settings.out is not None:
        append_run(settings.out, run, [row])
    sys.stdout.write(line(row) + "\n")
    sys.stdout.flush()


def _conclude(rows: list[dict[str, Any]], settings: Settings) -> None:
    sys.stdout.write(f"\n{table(rows)}\n")
    left = len(settings.cases) - len(rows)
    if left:
        sys.stdout.write(f"{left} of {len(settings.cases)} cases were not begun: out of time\n")


@contextmanager
def _world(settings: Settings) -> Iterator[torch.device]:
    """The default process group, with `padded_alltoall` installed; this worker's device.

    After an error nothing is torn down: peers may be inside a collective.
    """
    if settings.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        install()
        yield device
    else:
        dist.init_process_group("gloo")
        with megatron_on_cpu():
            install()
            yield torch.device("cpu")
    dist.destroy_process_group()


@contextmanager
def _expert_parallel(ep: int) -> Iterator[None]:
    """Megatron's groups; ranks beyond `ep` hold replicas."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    yield
    parallel_state.destroy_model_parallel()
