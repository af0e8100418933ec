"""Time that a layer spends on the network between hosts: a model, from bytes counted in runs.

    python -m notebooks.network --out notebooks/results/network.json --commit SHA

Nothing here was measured on a network. Each way to cross is run with small sizes, on threads as
ranks, where the bytes that come to a rank from other machines are counted, forward and backward.
They must equal a formula, which then has the sizes of a model. A layer's own time is that of one
rank's experts on an H200 (`ranks.json`), and nothing overlaps. Hosts have eight GPUs.

- rail: ours with a store
- slots: ours with cells, and once with a store: P slots for each pair of ranks
- pad: Megatron's drop-and-pad, whose cells cross whether full or not; by formula alone
- least: each token once to each host of its experts, uniform routing; by formula alone
"""

import argparse
import json
import math
import shlex
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch import Activation, DispatchConfig, ExpertWeights, PaddedDispatcher
from padded_dispatch.utils.results import about, append_run
from tests.support.machines import ranks_on
from tests.support.threads import ThreadGroup, _Turns, run_on_threads

MODELS = {  # E, K, D
    "qwen3-30b-a3b": (128, 8, 2048),
    "gpt-oss-120b": (128, 4, 2880),
    "deepseek-v3": (256, 8, 7168),
}
FACTOR, GPUS, TOKENS, ELEMENT = 1.25, 8, 4096, 2
SPEEDS = 25, 50, 100  # GB/s that each GPU gets from other hosts
RANKS = 16, 32, 64


def config_of(ranks: int, num_experts: int, top_k: int, pool: Any) -> DispatchConfig:
    return DispatchConfig(
        num_experts=num_experts,
        top_k=top_k,
        capacity_factor=FACTOR,
        capacity_pool=pool,
        num_ranks=ranks,
    )


def received(way: str, ranks: int, gpus: int, experts: int, top_k: int, tokens: int, width: int):
    """Return the bytes that a rank gets from other hosts in a layer, forward and backward."""
    hosts, row = ranks // gpus, width * ELEMENT
    cells = config_of(ranks, experts, top_k, "cells")
    if way == "least":
        reached = 1 - math.comb(experts - experts // hosts, top_k) / math.comb(experts, top_k)
        return 4 * (hosts - 1) * reached * tokens * row
    if way == "pad":
        foreign = experts - experts // hosts
        return 4 * foreign * cells.capacity(tokens) * row
    # Two ways with rows, two with sums; one has plans and counts, one a number for each choice.
    blocks, slots, counts = hosts - 1, tokens, experts
    if way == "slots":
        blocks, slots = ranks - gpus, cells.wire_slots(tokens)
        counts = experts // ranks if slots < tokens else experts
    return blocks * (4 * slots * row + slots * top_k * (12 + 4) + counts * 4)


def count(way: str, ranks: int, gpus: int, experts: int, top_k: int, tokens: int, width: int):
    """Run a layer of each rank; return the bytes that came to each rank from other machines."""
    machines = "".join(chr(ord("a") + rank // gpus) for rank in range(ranks))
    came: dict[int, int] = defaultdict(int)
    meet = _Turns.meet

    def noted(turns: Any, group: ThreadGroup, name: str, data: Any, copy: Any) -> None:
        tensors = [part for part in data if isinstance(part, Tensor)]
        if name.startswith(("all_gather_single", "all_to_all_single")) and len(tensors) == 2:
            here = machines[group.own_rank]
            away = sum(machines[rank] != here for rank in group.ranks)
            came[group.own_rank] += tensors[0].nbytes // len(group.ranks) * away
        meet(turns, group, name, data, copy)

    def layer() -> None:
        pool = "store" if way == "rail" else "cells"
        config = config_of(ranks, experts, top_k, pool)
        dispatcher = PaddedDispatcher(config, group=dist.group.WORLD)
        generator = torch.Generator().manual_seed(dist.get_rank())
        tokens_TD = torch.randn(tokens, width, generator=generator).bfloat16().requires_grad_()
        probs_TE = torch.rand(tokens, experts, generator=generator).requires_grad_()
        map_TE = torch.zeros(tokens, experts, dtype=torch.bool)
        map_TE = map_TE.scatter(1, probs_TE.topk(top_k).indices, True)
        local = experts // ranks
        weights = ExpertWeights(
            fc1_LGD=torch.randn(local, 4, width).bfloat16().requires_grad_(),
            fc2_LDF=torch.randn(local, width, 2).bfloat16().requires_grad_(),
        )
        out_TD = dispatcher.run(tokens_TD, probs_TE, map_TE, weights, Activation())
        out_TD.sum().backward()

    with patch.object(_Turns, "meet", noted), ranks_on(machines):
        run_on_threads(ranks, layer)
    assert len(came) == ranks and len(set(came.values())) == 1, came
    return came[0]


def layer_ms(path: Path, model: str, ranks: int) -> float:
    """Return the newest measured time of one rank's experts over direct writes."""
    wanted = {"model": model, "ranks": ranks, "tokens": TOKENS, "wire": "direct"}
    runs = json.loads(path.read_text())["runs"]
    return [row["ms"] for run in runs for row in run["rows"] if wanted.items() <= row.items()][-1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    command = f"python -m notebooks.network {shlex.join(sys.argv[1:])}"
    run = about(num_gpus=0, command=command, commit=arguments.commit)
    checked = []
    for ranks, gpus in ((4, 2), (16, 8), (12, 4), (32, 8)):
        for way in ("rail", "slots"):
            sizes = {"ranks": ranks, "gpus": gpus, "experts": 2 * ranks, "top_k": 4}
            sizes |= {"tokens": 48, "width": 24}
            counted = count(way, **sizes)
            assert counted == received(way, **sizes), (way, sizes, counted)
            checked.append({"way": way, **sizes, "bytes_counted": counted})
    append_run(arguments.out, run, checked)
    measured = Path(__file__).with_name("results") / "ranks.json"
    for model, (experts, top_k, width) in MODELS.items():
        for ranks in RANKS:
            alone = layer_ms(measured, model, ranks)
            for way in ("slots", "rail", "pad", "least"):
                total = received(way, ranks, GPUS, experts, top_k, TOKENS, width)
                row: dict[str, Any] = {"model": model, "ranks": ranks, "way": way}
                row |= {"mb_a_way": round(total / 4 / 1e6, 1), "layer_ms": alone}
                row |= {f"network_ms_at_{s}": round(total / s / 1e6, 2) for s in SPEEDS}
                append_run(arguments.out, run, [row])
                sys.stdout.write(f"{row}\n")


if __name__ == "__main__":
    main()
