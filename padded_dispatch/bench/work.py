"""A worker of the benchmark: join the process group, measure case by case, report each row."""

import gc
import itertools
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
from torch import Tensor

from padded_dispatch.bench.cases import CONTENDERS, Case
from padded_dispatch.bench.clocks import max_sm_mhz
from padded_dispatch.bench.layer import build, chosen, stock_flags
from padded_dispatch.bench.measure import (
    Batch,
    Passes,
    batches,
    kernels_ms,
    phases_ms,
    profiled,
    timed,
)
from padded_dispatch.bench.roofline import roofline
from padded_dispatch.bench.table import line, table
from padded_dispatch.config import DispatchConfig
from padded_dispatch.exchange.symmetric_memory import allocated_gib, reserved_gib
from padded_dispatch.megatron import install
from padded_dispatch.megatron.world import world
from padded_dispatch.utils.results import about, append_run

_SHOWN_KERNELS = 24
_FIGURES = (
    "chosen",
    "ms",
    "samples_ms",
    "host_ms",
    "sm_mhz",
    "phases_ms",
    "kernels_ms",
    "floor_ms",
    "sustained_floor_ms",
    "floor_parts_ms",
    "fill",
    "dropped",
    "tflops_per_gpu",
    "allocated_gib",
    "reserved_gib",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A run of the benchmark.

    Args:
        cases: in the order of measuring; a change of `ep` makes new process groups.
        device: of all workers.
        workers: processes.
        iterations: passes per repeat.
        repeats: samples per case.
        router_fusion: Megatron's `moe_router_fusion`, for all contenders.
        phases: profile a few passes of each case.
        minutes: no case starts after this time.
        out: results file; each row is added when it is measured.
        command: command line, for the results.
        commit: of the code, for the results.
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
    """Measure all cases and return True if none failed; every worker calls this."""
    started = time.monotonic()
    num_gpus = settings.workers if settings.device == "cuda" else 0
    run = about(num_gpus=num_gpus, command=settings.command, commit=settings.commit)
    with world(settings.device) as device:
        run["max_sm_mhz"] = max_sm_mhz(device)
        install()
        rows = []
        for ep, cases in itertools.groupby(settings.cases, key=lambda case: case.ep):
            with _expert_parallel(ep):
                for case in cases:
                    if settings.minutes is not None:
                        minutes = _largest((time.monotonic() - started) / 60, device)
                        if minutes > settings.minutes:
                            break
                    rows.append(measure(case, settings, device))
                    if dist.get_rank() == 0:
                        _report(rows[-1], settings, run)
        if dist.get_rank() == 0:
            _summarize(rows, settings)
    return all(row["error"] is None for row in rows)


def measure(case: Case, settings: Settings, device: torch.device) -> dict[str, Any]:
    """Measure one case and return its row of a results file; a collective call."""
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
        "main_grad": case.main_grad,
        "contender": contender.name,
        "variant": contender.variant,
        "graph": contender.graph,
        "graph_impl": None if contender.graph == "none" else "torch.cuda.make_graphed_callables",
        "flags": flags,
        "iterations": settings.iterations,
        "ranks": dist.get_world_size(),
    }
    row |= dict.fromkeys(_FIGURES)
    row["error"] = None
    try:
        row |= _figures(case, flags, settings, device)
    except Exception as error:  # the other contenders can still be measured
        row["error"] = f"{type(error).__name__}: {error}"[:500]
    gc.collect()  # a layer is a reference cycle, and its graph holds memory
    if on_gpu:
        # Private API, no other exists: a stream's workspace would count for its first user.
        torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportAttributeAccessIssue]
        torch.cuda.empty_cache()
    return row | {"seconds": round(time.monotonic() - started, 1)}


def _figures(
    case: Case, flags: dict[str, Any], settings: Settings, device: torch.device
) -> dict[str, Any]:
    """Return what was measured, by `_FIGURES`; absent ones are left out."""
    on_gpu = device.type == "cuda"
    graphed = CONTENDERS[case.contender].graph == "layer"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    data = batches(case, seed=dist.get_rank(), dtype=dtype, device=device)
    config, demand_BSE = case.dispatch_config(), _demand(case, data)
    kept_SE = torch.stack([_kept(d_SE, config, case.tokens) for d_SE in demand_BSE]).mean(0)
    least = roofline(kept_SE, case.shape, main_grad=case.main_grad != "none")
    before = _fresh_peak_gib() if on_gpu else (0.0, 0.0)
    layer = build(case, flags, device)
    passes = Passes(layer, data, graphed=graphed, main_grad=case.main_grad)
    timing = timed(
        passes.run, iterations=settings.iterations, repeats=settings.repeats, device=device
    )
    figures: dict[str, Any] = {
        "chosen": chosen(layer),
        "ms": timing.ms,
        "samples_ms": timing.samples_ms,
        "host_ms": timing.host_ms,
        "sm_mhz": timing.sm_mhz,
        "tflops_per_gpu": least.flops / timing.ms / 1e9,
    }
    if CONTENDERS[case.contender].drops:
        slots = case.shape.num_experts * config.capacity(case.tokens)
        figures["fill"] = kept_SE.sum(1).mean().item() / slots
        figures["dropped"] = 1 - kept_SE.sum().item() / demand_BSE.float().mean(0).sum().item()
    if on_gpu:
        figures["floor_ms"] = least.ms
        figures["sustained_floor_ms"] = least.sustained_ms
        figures["floor_parts_ms"] = {
            "gemm": least.gemm_ms,
            "sustained_gemm": least.sustained_gemm_ms,
            "wire": least.wire_ms,
        }
        # Before the profiler, whose memory is no part of the layer.
        allocated, reserved = before
        figures["allocated_gib"] = round(allocated_gib() - allocated, 3)
        figures["reserved_gib"] = round(reserved_gib() - reserved, 3)
    if settings.phases and on_gpu:
        kernels = kernels_ms(profiled(passes.run, device))
        figures["phases_ms"] = phases_ms(kernels)
        longest = list(kernels.items())[:_SHOWN_KERNELS]
        figures["kernels_ms"] = {name[:120]: round(ms, 4) for name, ms in longest}
    return figures


def _fresh_peak_gib() -> tuple[float, float]:
    """Reset the peaks and return what is allocated and reserved now, before the layer is built."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return allocated_gib(), reserved_gib()


def _demand(case: Case, data: list[Batch]) -> Tensor:
    """Return the rows asked for in each batch, int32 [batches, R, E], by source rank of the group.

    The group is this rank's expert-parallel one.
    """
    counts = []
    for batch in data:
        chosen_TK = batch.logits[:, 0].topk(case.shape.top_k).indices
        counts.append(torch.bincount(chosen_TK.flatten(), minlength=case.shape.num_experts))
    mine_BE = torch.stack(counts).to(torch.int32)
    group: Any = parallel_state.get_expert_model_parallel_group()
    gathered = [torch.empty_like(mine_BE) for _ in range(case.ep)]
    dist.all_gather(gathered, mine_BE, group=group)
    return torch.stack(gathered, 1).cpu()


def _kept(demand_SE: Tensor, config: DispatchConfig, num_tokens: int) -> Tensor:
    """Return the rows that keep a slot, [S, E]; sums over a pool are exact.

    Which experts of a pool lose rows depends on the policy; here each loses the same share.
    """
    sizes = config.sizes(num_tokens)
    demand_SGX = demand_SE.unflatten(1, (sizes.num_pools, -1)).float()
    share_SG1 = (sizes.pool_slots / demand_SGX.sum(2, keepdim=True).clamp(min=1)).clamp(max=1)
    return (demand_SGX * share_SG1).flatten(1)


def _largest(value: float, device: torch.device) -> float:
    """Return the largest value of all ranks, so that all decide alike."""
    reduced = torch.tensor(value, device=device)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
    return reduced.item()


def _report(row: dict[str, Any], settings: Settings, run: dict[str, Any]) -> None:
    if settings.out is not None:
        append_run(settings.out, run, [row])
    sys.stdout.write(line(row) + "\n")
    sys.stdout.flush()


def _summarize(rows: list[dict[str, Any]], settings: Settings) -> None:
    sys.stdout.write(f"\n{table(rows)}\n")
    left = len(settings.cases) - len(rows)
    if left:
        sys.stdout.write(f"{left} of {len(settings.cases)} cases were not started: out of time\n")


@contextmanager
def _expert_parallel(ep: int) -> Iterator[None]:
    """Make Megatron's process groups; ranks beyond `ep` hold replicas."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    yield
    parallel_state.destroy_model_parallel()
