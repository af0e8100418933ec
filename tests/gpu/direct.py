"""Compare direct stores with the all-to-all on the GPUs of one host: equal bits, and speed.

    python -m tests.gpu.direct --out notebooks/results/direct.json --commit SHA

It uses all GPUs of the machine. Every part writes a row, and the file is complete after each row. A
part that fails or exceeds its time limit does not stop the others. `--only TEXT` runs the parts
with this text in their names: "eager", "replays", "exchange", "a rank".

    compute-sanitizer --tool memcheck --show-backtrace no --report-api-errors no \\
        --target-processes all --error-exitcode 9 python -m tests.gpu.direct --small

is a short run on two GPUs for the sanitizer's tools, without a results file. (With backtraces the
sanitizer keeps Python's frames, and with them the tensors of a call; its receive buffer then looks
as if it still waited for its backward pass. torch tries kinds of shared memory that a machine may
refuse; that is no error of a kernel.)
"""

import argparse
import dataclasses
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from padded_dispatch.config import CAPACITY_POOLS, NO_DROP
from padded_dispatch.exchange import Exchange
from padded_dispatch.exchange.alltoall import AllToAllExchange, all_to_all, group_name
from padded_dispatch.exchange.direct import DirectExchange, _push_rows, maps_of, return_rows
from padded_dispatch.kernels import direct as kernels
from padded_dispatch.ops.plan import DispatchPlan, make_plan
from padded_dispatch.ops.select import select
from padded_dispatch.utils.launch import start_workers, torchrun_env
from padded_dispatch.utils.shapes import SHAPES, LayerShape
from tests.support.direct_parity import (
    Layer,
    captured,
    eager_differences,
    lose_a_rank,
    make_inputs,
    meet,
    my_gpu,
    replay_differences,
    small_run,
)
from tests.support.gpu_rows import Rows, add_only, add_results, wants
from tests.support.pool import WorkerError, WorkerPool

LIMIT_S = 60.0

# No multicast: the direct exchange does not use it, and not every host offers it.
ENVIRONMENT = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
}

SMALL = Layer()
RANK = dataclasses.replace(SMALL, pool="rank", factor=0.9)
EAGER = {
    "bf16": SMALL,
    "fp32, no dropping": dataclasses.replace(SMALL, dtype=torch.float32, factor=NO_DROP),
    "one of everything": Layer(tokens=1, width=8, top_k=1, local_experts=1),
    "rank": RANK,
    "rank, fp32, no dropping": dataclasses.replace(RANK, dtype=torch.float32, factor=NO_DROP),
}
WIDE = Layer(tokens=260, width=1032, top_k=4, local_experts=8, factor=0.5, microbatches_in_flight=3)
IN_FLIGHT = {
    "expert": (dataclasses.replace(SMALL, microbatches_in_flight=3), WIDE),
    "pools": (
        dataclasses.replace(RANK, microbatches_in_flight=3),
        dataclasses.replace(WIDE, pool="rank"),
    ),
}
_REPEATS = 10  # calls in a graph
_SAMPLES = 7


def graphed_us(call: Callable[[], object]) -> float:
    """Return microseconds of a call inside a graph: the median sample of the slowest rank."""

    def repeatedly() -> None:
        for _ in range(_REPEATS):
            call()

    meet()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph, _ = captured(repeatedly)
        samples = []
        for _ in range(_SAMPLES):
            meet()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) / _REPEATS * 1e3)
        meet()
        del graph
    slowest = torch.tensor(sorted(samples)[_SAMPLES // 2], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return round(slowest.item(), 1)


@contextmanager
def programs(number: int) -> Iterator[None]:
    """Set the number of programs of the kernels that store to peers."""
    usual = kernels.PROGRAMS
    kernels.PROGRAMS = number
    try:
        yield
    finally:
        kernels.PROGRAMS = usual


def there_and_back(
    exchange: Exchange, tokens_TD: Tensor, probs_TE: Tensor, plan: DispatchPlan, num_rows: int
) -> Tensor:
    """Run all stages forward with identity experts."""
    outgoing = exchange.prepare(tokens_TD, probs_TE, plan, num_rows)
    given = exchange.arrange(exchange.move(outgoing))
    returned = exchange.move_back(exchange.disarrange(given.rows_ND, given.offsets_LS))
    return exchange.combine(returned, plan, given.offsets_LS)


def speed(factor: float, pool: Any, shape: LayerShape) -> dict[str, Any]:
    """Time the direct exchange on 4,096 tokens, and the all-to-all beside it."""
    device, size = my_gpu(), dist.get_world_size()
    layer = Layer(
        tokens=4096,
        width=shape.hidden_size,
        top_k=shape.top_k,
        local_experts=shape.num_experts // size,
        factor=factor,
        microbatches_in_flight=1,
        pool=pool,
    )
    given = make_inputs(layer, "uniform", 0, device)
    config = layer.dispatcher("direct").config
    sizes = config.sizes(layer.tokens)
    with torch.no_grad():
        exchange = DirectExchange(layer.local_experts, dist.group.WORLD)
        kept = select(given.map_TE, given.probs_TE, sizes=sizes, policy=config.policy)
        plan = make_plan(kept.kept_TE, top_k=layer.top_k, sizes=sizes)
        tokens_TD, probs_TE = given.tokens_TD.detach(), kept.probs_TE.detach()
        passed = tokens_TD, probs_TE, plan, sizes.num_rows
        there_and_back(exchange, *passed)
        (buffers,) = exchange._buffers.values()
        maps, where = maps_of(plan), (sizes.num_rows, size, buffers.key, False)
        rows_ND, _, offsets_LS = _push_rows(tokens_TD, probs_TE, *maps, *where)
        out_ND = rows_ND.clone()
        calls: dict[str, Callable[[], object]] = {
            "barrier": buffers.workspace.barrier,
            "push": lambda: _push_rows(tokens_TD, probs_TE, *maps, *where),
            "return": lambda: return_rows(out_ND, None, offsets_LS, *maps, buffers.key),
            "dispatch and combine": lambda: there_and_back(exchange, *passed),
        }
        gradients = buffers.workspace.gradients
        places_RTK = gradients.places(size, *plan.slot_of_TK.shape)
        grad_ND, _ = gradients.take()
        calls["copies"] = lambda: kernels.copy_rows(grad_ND, places_RTK, buffers.rank)
        slots_GPD = tokens_TD.new_zeros(sizes.num_pools, sizes.pool_slots, layer.width)
        nccl = AllToAllExchange(
            layer.local_experts,
            dist.group.WORLD,
            packed=True,
            experts_per_pool=sizes.experts_per_pool,
        )
        name = group_name(dist.group.WORLD)
        calls["nccl"] = lambda: all_to_all(slots_GPD, name)
        calls["dispatch and combine, nccl"] = lambda: there_and_back(nccl, *passed)
        us = {label: graphed_us(call) for label, call in calls.items()}
        for number in (264, 1056, 2112):
            with programs(number):
                for label in ("push", "return"):
                    us[f"{label}, {number} programs"] = graphed_us(calls[label])
    real = plan.kept_E.sum()
    owner_TK = torch.where(plan.slot_of_TK >= 0, plan.expert_of_TK // layer.local_experts, -1)
    owned_RTK = torch.stack([owner_TK == owner for owner in range(size)])
    owned_RTK[dist.get_rank()] = False
    totals = torch.stack((real, owned_RTK.any(2).sum(), owned_RTK.sum()))
    dist.all_reduce(totals)
    real_rows, *rows = (totals / size).tolist()
    row_bytes = layer.width * layer.dtype.itemsize
    link_bytes = {
        "push": rows[0] * row_bytes,
        "return": rows[1] * row_bytes,
        "nccl": slots_GPD.numel() / layer.width * row_bytes * (size - 1) / size,
    }
    rates = {
        label: round(link_bytes[way] / value / 1e3, 1)
        for label, value in us.items()
        for way in link_bytes
        if label.startswith(way)
    }
    return {
        "us": us,
        "gb_per_s_over_links": rates,
        "real_rows": real_rows,
        "link_bytes": link_bytes,
    }


def parts(size: int) -> Iterator[tuple[dict[str, Any], Callable[..., Any], tuple[Any, ...]]]:
    """Yield for each part the fields of its row, the function that ranks run, and its arguments."""
    for name, layer in EAGER.items():
        yield {"check": f"eager equals all-to-all: {name}"}, eager_differences, (layer,)
    for name, layers in IN_FLIGHT.items():
        row = {"check": f"1000 replays equal all-to-all: {name}"}
        yield row, replay_differences, (layers, 1000)
    for model in ("qwen3-30b-a3b", "gpt-oss-20b"):
        for pool in CAPACITY_POOLS if model.startswith("qwen3") else ("expert",):
            for factor in (1.0, 2.0) if pool == "expert" else (1.0,):
                row: dict[str, Any] = {"measure": "exchange", "model": model}
                row |= {"capacity_pool": pool, "capacity_factor": factor}
                yield row, speed, (factor, pool, SHAPES[model])


def run_part(
    pool: WorkerPool, row: dict[str, Any], fn: Callable[..., Any], args: tuple[Any, ...]
) -> dict[str, Any]:
    """Run one part on all ranks; return its row with the results."""
    started = time.monotonic()
    row = row | {"ranks": pool.num_workers, "passed": False, "failures": None}
    try:
        found = pool.run(fn, *args, timeout_s=LIMIT_S)
    except WorkerError as error:
        row["failures"] = [str(error)[-3000:]]
    else:
        if "check" in row:
            row["failures"] = sorted({f"rank {r}: {x}" for r, of in enumerate(found) for x in of})
            row["num_failures"] = len(row["failures"])
            row["failures"] = row["failures"][:40]
            row["passed"] = not row["failures"]
        else:
            row |= found[0] | {"passed": True}
    return row | {"seconds": round(time.monotonic() - started, 1)}


def lost_rank(num_ranks: int, how: str) -> dict[str, Any]:
    """Lose the last rank; return a row with the time and the messages of the other ranks' ends.

    The other ranks must end by themselves within the time limit; only then are they killed.
    """
    started = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    left = spawn.Event()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(rank)) for rank in range(num_ranks)]
        processes = [
            spawn.Process(
                target=lose_a_rank,
                args=(how, torchrun_env(rank, num_ranks, store.port), str(log), left),
                daemon=True,
            )
            for rank, log in enumerate(logs)
        ]
        for process in processes:
            process.start()
        began = left.wait(LIMIT_S)
        since = time.monotonic()
        for process in processes[:-1]:
            process.join(max(0.0, since + LIMIT_S - time.monotonic()))
        seconds_to_end = time.monotonic() - since
        ended = [process.exitcode is not None for process in processes[:-1]]
        codes = [process.exitcode for process in processes[:-1]]
        for process in processes:
            process.kill()
            process.join()
        texts = [log.read_text(errors="replace") if log.exists() else "" for log in logs[:-1]]
    name = re.compile(rf"^.*\brank {num_ranks - 1}\b.*$", re.MULTILINE)
    words = [match[0] if (match := name.search(text)) else None for text in texts]
    named = [word is not None for word in words]
    passed = began and all(ended) and all(named)
    return {
        "check": f"a rank {how} in the middle of replays, and all others end and name it",
        "ranks": num_ranks,
        "passed": passed,
        "failures": [] if passed else [text[-3000:] for text in texts],
        "seconds_to_end": round(seconds_to_end, 1),
        "exit_codes": codes,
        "words": words,
        "seconds": round(time.monotonic() - started, 1),
    }


def run_all(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield all rows that the command line asks for."""
    with WorkerPool(arguments.gpus, backend="nccl") as pool:
        for row, *call in parts(arguments.gpus):
            if wants(arguments, row.get("check") or row["measure"]):
                yield run_part(pool, row, *call)
    for how in ("dies", "stalls"):
        if wants(arguments, f"a rank {how}"):
            yield lost_rank(arguments.gpus, how)


def main() -> int:
    """Run all parts; return exit code 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_results(parser, required=False)
    add_only(parser)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--small", action="store_true", help="only a short run on two GPUs")
    arguments = parser.parse_args()
    if arguments.gpus < 2:
        parser.error("direct stores need at least two GPUs")
    if arguments.small:
        os.environ.update(ENVIRONMENT)
        start_workers(small_run, num_workers=2)
        return 0
    if arguments.out is None or arguments.commit is None:
        parser.error("--out and --commit are needed for a results file")
    rows = Rows(arguments, arguments.gpus, ENVIRONMENT)
    for row in run_all(arguments):
        rows.add(row)
    return rows.exit_code()


if __name__ == "__main__":
    sys.exit(main())
