"""`padded-dispatch bench`: from a command line to workers, which report each row they measure."""

import argparse
import contextlib
import datetime
import gc
import itertools
import logging
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import fused_a2a
from torch import Tensor

from padded_dispatch.bench.cases import CONTENDERS, MODELS, README_FLAGS, STOCK, Case, sweep
from padded_dispatch.bench.layer import RoutedLayer, build, megatron_flags
from padded_dispatch.bench.measure import Batch, Passes, batches, cublas, kernels_ms, timed
from padded_dispatch.bench.report import differences, line, readme_table, roofline, table
from padded_dispatch.config import require
from padded_dispatch.exchange.symmetric_memory import allocated_gib, reset_peaks
from padded_dispatch.megatron import install
from padded_dispatch.megatron.world import world
from padded_dispatch.utils.flags import errors_name_flags
from padded_dispatch.utils.launch import start_workers
from padded_dispatch.utils.logs import show, torchrun_ranks
from padded_dispatch.utils.results import about, append_run, require_results

_SHOWN_KERNELS = 24
_VOTE = datetime.timedelta(minutes=2)  # limit for gathering the errors of all ranks of a case


def main(given: argparse.Namespace) -> int:
    """Run the benchmark; return 0 when every case was measured, 1 when one failed.

    Raises:
        ValueError: for mistakes in the flags, before any worker starts.
        SystemExit: see `start_workers`.
    """
    settings = resolve(given)
    show(f"{len(settings.cases)} cases, a line for each; starting takes 10 to 30 seconds")
    succeeded = start_workers(work, (settings,), num_workers=settings.workers)
    return 0 if succeeded else 1


def resolve(given: argparse.Namespace) -> argparse.Namespace:
    """Return flags with the machine's defaults, `workers` and `cases`.

    Raises:
        ValueError: names the option, its rule, its value and the fix.
    """
    num_gpus = torch.cuda.device_count()
    device = given.device or ("cuda" if num_gpus else "cpu")
    on_gpu = device == "cuda"
    workers = torchrun_ranks()[1] or max(given.ep or [num_gpus if on_gpu else 2])
    defaults = {
        "device": device,
        "ep": [workers],
        "models": ["qwen3-30b-a3b", "gpt-oss-20b"] if on_gpu else ["tiny"],
        "tokens": [4096 if on_gpu else 64],
        "contenders": [
            name for name, one in CONTENDERS.items() if (on_gpu or one.on_cpu) and one.by_default
        ],
    }
    known = {name: value for name, value in vars(given).items() if value is not None}
    if given.readme:
        known |= README_FLAGS
    given = argparse.Namespace(**vars(given) | defaults | known, workers=workers)
    with errors_name_flags(vars(given)):
        _check(given)
        given.cases = tuple(sweep(given))
    return given


def _check(given: argparse.Namespace) -> None:
    if given.out is not None:
        require_results("out", given.out)
    require(given.iterations >= 1, "iterations", given.iterations, "be at least 1")
    num_gpus = torch.cuda.device_count()
    on_cpu = given.device == "cpu"
    require(on_cpu or num_gpus, "device", given.device, "be cpu where PyTorch sees no GPU")
    for flag in ("readme", "kernels"):
        value = getattr(given, flag)
        require(not (on_cpu and value), flag, value, "be left out without a GPU, which it measures")
    rule = "be left out without --out, which alone holds them"
    require(given.out or not given.kernels, "kernels", given.kernels, rule)
    rule = "be one size with --readme, whose table has one"
    require(len(given.ep) == 1 or not given.readme, "ep", given.ep, rule)
    for factor in given.capacity_factors:
        finite = 0 < factor < math.inf
        require(finite, "capacity_factors", factor, "be above 0 and finite")
    for ep in given.ep:
        require(ep >= 1, "ep", ep, "be at least 1")
        divides = given.workers % ep == 0
        require(divides, "ep", ep, f"divide the number of processes, {given.workers}")
        # Under torchrun some may be on other machines.
        fits = on_cpu or torchrun_ranks()[1] or ep <= num_gpus
        require(fits, "ep", ep, f"be at most {num_gpus}, the GPUs here")
        for model in given.models:
            experts = MODELS[model].num_experts
            require(experts % ep == 0, "ep", ep, f"divide the {experts} experts of {model}")
    for key in given.contenders:
        runs = not on_cpu or CONTENDERS[key].on_cpu
        require(runs, "contenders", key, "run on a CPU", "leave it out, or run on a GPU")
        runs = max(given.ep) == 1 or not CONTENDERS[key].keeps_counts
        require(runs, "contenders", key, "run on several ranks", "leave it out, or set --ep 1")
        runs = min(given.ep) > 1 or CONTENDERS[key].variant != "ncclep"
        require(runs, "contenders", key, "run on one rank", "leave it out, or set --ep 2")
        # DeepEP looks at the budget only where it permutes rows, too, and else writes beyond it.
        fits = CONTENDERS[key].variant != "hybridep" or set(given.skews) == {"uniform"}
        fix = f"leave --contenders {key} out: it does not see what exceeds its budget"
        require(fits, "skews", given.skews, "be uniform", fix)
    for main_grad in given.main_grad:
        runs = not on_cpu or main_grad == "none"
        require(runs, "main_grad", main_grad, "be none on a CPU", "run on a GPU")


def work(settings: argparse.Namespace) -> bool:
    """Measure all cases and return True if none failed; every worker calls this."""
    num_gpus = settings.workers if settings.device == "cuda" else 0
    run = about(num_gpus=num_gpus, command=settings.command, commit=settings.commit)
    rows = []
    with world(settings.device) as device, _quiet():
        install()
        votes = dist.new_group(backend="gloo", timeout=_VOTE)
        # Ranks beyond `ep` hold replicas.
        for ep, cases in itertools.groupby(settings.cases, key=lambda case: case.ep):
            parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
            for case in cases:
                rows.append(measure(case, settings, device, votes))
                if settings.out is not None and dist.get_rank() == 0:
                    append_run(settings.out, run, rows[-1:])
                show(line(rows[-1]))
            parallel_state.destroy_model_parallel()
        show(f"\n{table(rows)}")
        if settings.device == "cpu":
            show("Times on a CPU say nothing about GPUs: kernels run as plain torch there.")
        if settings.readme:
            text = readme_table(rows) or "A contender failed: no table."
            show(f"{text}\n\n{differences(run)}")
    return all(row["error"] is None for row in rows)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of drops: contenders drop on purpose, and the table has a column for it."""
    log = logging.getLogger("padded_dispatch")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def measure(
    case: Case, settings: argparse.Namespace, device: torch.device, votes: Any = None
) -> dict[str, Any]:
    """Measure one case and return its row of a results file; a collective call.

    A case has failed if it failed on any rank of the group `votes`. If the other ranks wait for
    that rank inside the layer, its error ends the run after the time limit of `votes`.
    """
    started = time.monotonic()
    contender = CONTENDERS[case.contender]
    on_gpu = device.type == "cuda"
    flags = megatron_flags(case, on_gpu=on_gpu)
    row: dict[str, Any] = {
        **vars(case),
        "contender": contender.name,
        "variant": contender.variant,
        "graph": contender.graph,
        "flags": flags,
        "iterations": settings.iterations,
        "ranks": dist.get_world_size(),
        "cublas": cublas(device),
    }
    error, errors = None, [None] * dist.get_world_size()
    try:
        row |= _figures(case, flags, settings, device)
    except Exception as raised:  # the other contenders can still be measured
        error = f"{type(raised).__name__}: {raised}"[:500]
        dist.all_gather_object(errors, error, group=votes)  # `raised` stays its context.
    else:
        dist.all_gather_object(errors, error, group=votes)
    row["error"] = error or next(filter(None, errors), None)
    gc.collect()  # a layer is a reference cycle, and its graph holds memory
    if contender.variant == "ncclep":
        # Else the next case would have the sizes of this one. Before 0.19 there is none.
        getattr(fused_a2a, "nccl_ep_finalize", bool)()
    if on_gpu:
        # Private API, no other exists: a stream's workspace would count for its first user.
        torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportAttributeAccessIssue]
        torch.cuda.empty_cache()
    return row | {"seconds": round(time.monotonic() - started, 1)}


def _figures(
    case: Case, flags: dict[str, Any], settings: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Measure one case and return its figures; on a CPU, those that need a GPU are None."""
    on_gpu = device.type == "cuda"
    contender = CONTENDERS[case.contender]
    dtype = torch.bfloat16 if on_gpu else torch.float32
    sizes = case.shape, case.tokens, case.skew
    data = batches(*sizes, seed=dist.get_rank(), dtype=dtype, device=device)
    if on_gpu:
        torch.cuda.empty_cache()
        reset_peaks()
    held_gib = allocated_gib() if on_gpu else 0.0
    layer = build(case, flags, device)
    graphed = contender.graph == "layer"
    passes = Passes(layer, data, graphed=graphed, main_grad=case.main_grad)
    timing = timed(passes.run, iterations=settings.iterations, device=device)
    if contender.variant in STOCK:
        # A dispatcher with a budget drops what exceeds it, and tells by this flag alone.
        exceeded = getattr(layer.layer.token_dispatcher, "check_over_budget", lambda: None)()
        if exceeded is not None and exceeded.item():
            raise RuntimeError("a rank got more rows than its budget has room for: no figures")
    # Before the profiler, whose memory is no part of the layer.
    allocated = round(allocated_gib() - held_gib, 3) if on_gpu else None
    demand_BSE = _demand(case, data)
    kept_SE = _kept(case, layer, passes, demand_BSE)
    kept_share = kept_SE.sum().item() * len(data) / demand_BSE.sum().item()
    floor = None
    if on_gpu and not contender.fp8:
        gpu = torch.cuda.get_device_name(device)
        floor = roofline(kept_SE, case.shape, gpu, main_grad=case.main_grad != "none")
    kernels = kernels_ms(passes.run, device) if settings.kernels else {}
    shown: dict[str, float] = {}  # Names that are cut to the same text share an entry.
    for name, ms in list(kernels.items())[:_SHOWN_KERNELS]:
        shown[name[:120]] = round(shown.get(name[:120], 0) + ms, 4)
    return {
        "chosen": getattr(layer.layer.token_dispatcher, "chosen", None),  # Stock's has none.
        "ms": timing.ms,
        **vars(timing),
        "dropped": 1 - kept_share if contender.drops else None,
        "floor_ms": floor,
        "allocated_gib": allocated,
        "kernels_ms": shown,
    }


def _demand(case: Case, data: list[Batch]) -> Tensor:
    """Return the rows that each source of this group asks for in each batch, int64 [B, S, E]."""
    counts = []
    for batch in data:
        chosen_TK = batch.logits[:, 0].topk(case.shape.top_k).indices
        counts.append(torch.bincount(chosen_TK.flatten(), minlength=case.shape.num_experts))
    mine_BE = torch.stack(counts)
    gathered = [torch.empty_like(mine_BE) for _ in range(case.ep)]
    dist.all_gather(gathered, mine_BE, group=_group())
    return torch.stack(gathered, 1)


def _kept(case: Case, layer: RoutedLayer, passes: Passes, demand_BSE: Tensor) -> Tensor:
    """Return the rows that a pass computes, the mean of all batches, [S, E].

    Those of stock follow from its cells. Ours are counted by expert, and each source is taken to
    lose the same share of an expert's rows.
    """
    counters = getattr(layer.layer.token_dispatcher, "counters", None)
    if counters is None:
        slots = case.dispatch_config().capacity(case.tokens)
        return demand_BSE.clamp(max=slots).double().mean(0)
    before_E = counters.kept_E.clone()
    for number in range(len(demand_BSE)):
        passes.run(number)
    kept_E = counters.kept_E - before_E
    dist.all_reduce(kept_E, group=_group())
    return demand_BSE.double().mean(0) * (kept_E.double() / demand_BSE.sum((0, 1)).clamp(min=1))


def _group() -> Any:
    return parallel_state.get_expert_model_parallel_group()
