"""Two levels on the GPUs of one host, which play several: equal to the all-to-all, bit by bit.

    python -m tests.gpu.hosts --out notebooks/results/hosts.json --commit SHA

It uses all GPUs of the machine, as hosts of one GPU each and, from four on, as two hosts. `--cpu N`
tries the program on N processes over gloo, without CUDA graphs. No row is about speed: between
hosts, none has been measured.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from padded_dispatch import PaddedDispatcher
from tests.gpu.direct import run_part
from tests.support.direct_parity import (
    ROUTINGS,
    Layer,
    captured,
    differences,
    make_inputs,
    meet,
    my_gpu,
    step,
)
from tests.support.gpu_rows import Rows, parsed, wants
from tests.support.pool import WorkerPool

ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0"}

LAYERS = {
    "bf16": Layer(),
    "fp32": Layer(dtype=torch.float32, factor=0.8),
    "pool of a rank, rerouted": Layer(pool="rank", remedy="reroute", factor=0.9),
}


def dispatchers(layer: Layer, ranks_per_host: int) -> tuple[PaddedDispatcher, PaddedDispatcher]:
    """Return one by the all-to-all and one by two levels; a collective call."""
    plain = layer.dispatcher("alltoall")
    levels = PaddedDispatcher(
        plain.config,
        group=dist.group.WORLD,
        packed=True,
        exchange="two-level",
        ranks_per_host=ranks_per_host,
    )
    return plain, levels


def eager_equals(layer: Layer, ranks_per_host: int) -> list[str]:
    """Return what differs in eager, over all routings."""
    device = my_gpu() if torch.cuda.is_available() else torch.device("cpu")
    plain, levels = dispatchers(layer, ranks_per_host)
    found = []
    for seed, routing in enumerate(ROUTINGS):
        inputs = make_inputs(layer, routing, seed, device)
        names = differences(step(levels, inputs), step(plain, inputs))
        found += [f"{routing}: {name}" for name in names]
    meet()
    return found


def replays_equal(layer: Layer, ranks_per_host: int, num_replays: int) -> list[str]:
    """Return what differs between replays of two graphs; every replay has another routing."""
    device = my_gpu()
    static = make_inputs(layer, ROUTINGS[0], 0, device)
    distinct = [
        make_inputs(layer, routing, seed, device) for seed, routing in enumerate(2 * ROUTINGS)
    ]
    found = []
    both = dispatchers(layer, ranks_per_host)
    with torch.cuda.stream(torch.cuda.Stream()):
        graphs = [captured(lambda one=one: step(one, static)) for one in both]
        for number in range(num_replays):
            shift, which = divmod(number, len(distinct))
            static.copy_from(distinct[which], shift)
            for graph, _ in graphs:
                graph.replay()
            names = differences(graphs[1][1], graphs[0][1])
            found += [f"replay {number}: {name}" for name in names]
        meet()
    del graphs
    return found


def parts(
    arguments: argparse.Namespace,
) -> Iterator[tuple[dict[str, Any], Callable[..., Any], tuple[Any, ...]]]:
    """Yield for each part the fields of its row, the function that ranks run, and its arguments."""
    size = arguments.num_ranks
    for per_host in dict.fromkeys([1, size // 2]):
        for name, layer in LAYERS.items():
            if arguments.cpu:
                layer = dataclasses.replace(layer, tokens=33, width=8)
            hosts = f"{size // per_host} hosts of {per_host}, {name}"
            yield (
                {"check": f"two levels equal the all-to-all: {hosts}"},
                eager_equals,
                (
                    layer,
                    per_host,
                ),
            )
            if not arguments.cpu:
                row = {"check": f"1000 replays of two levels equal the all-to-all: {hosts}"}
                yield row, replays_equal, (layer, per_host, 1000)


def main() -> int:
    """Run all parts; return exit code 1 if one failed."""
    arguments = parsed(argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]))
    if arguments.num_ranks < 2:
        sys.exit("two levels need at least two ranks")
    os.environ.update(ENVIRONMENT)
    rows = Rows(arguments, arguments.num_gpus, ENVIRONMENT)
    with WorkerPool(arguments.num_ranks, backend=arguments.backend) as pool:
        for row, *call in parts(arguments):
            if wants(arguments, row["check"]):
                rows.add(run_part(pool, row, *call))
    return rows.exit_code()


if __name__ == "__main__":
    sys.exit(main())
