"""One rank of R, with made-up arrivals of R sources: how do the kernels of a layer grow with R?

    python notebooks/ranks.py --out notebooks/results/ranks.json --commit SHA [--only TEXT]

Nothing moves between ranks. A stand-in of a wire hands `experts.run` the plans and tokens of R
sources under uniform routing; the rows of a rank are then as many at any R. Forward and backward
are captured and replayed. `direct`: tokens lie in a landing buffer, the product sends rows home,
and where R is large tokens arrive again. `collectives`: sums are written for each slot in the list.
`push_mib` is what a rank sends for its tokens, forward and backward, and what it sends again.
"""

import argparse
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from padded_dispatch import experts
from padded_dispatch.config import DispatchConfig
from padded_dispatch.exchange.collectives import Arrived, Values
from padded_dispatch.experts import Activation, Call, ExpertWeights
from padded_dispatch.experts.store import Store, room_of_pass
from padded_dispatch.kernels import rows
from padded_dispatch.routing import Plan, make_plan
from padded_dispatch.utils.results import about, append_run

# E, K, D and F.
MODELS = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "gpt-oss-120b": (128, 4, 2880, 2880),
    "deepseek-v3": (256, 8, 7168, 2048),
}
CASES = [(ranks, 4096) for ranks in (1, 2, 8, 16, 32, 64, 128)] + [(64, 16384)]
FACTOR, REPLAYS, SAMPLES = 1.25, 10, 5


@dataclass(frozen=True, kw_only=True)
class Wire:
    """What a wire returns; all sources share one buffer at home."""

    arrived: Arrived
    plan: Plan
    direct: bool
    sends_again: bool
    home_QD: Tensor
    homes_S: Tensor | None

    def open(self, tokens_TD: Tensor, prob_TK: Tensor) -> Arrived:
        return replace(self.arrived, values=self._values(tokens_TD), sent_TD=tokens_TD)

    def push(self, values_TD: Tensor, again_TD: Tensor | None = None) -> Any:
        return self._values(values_TD), None if again_TD is None else self._values(again_TD)

    def routed(self) -> dict[str, Tensor]:
        return {}

    def rerouted(self, saved: dict[str, Any]) -> "Wire":
        return self

    def home(self, product: Any, listed: Any, offsets: Tensor, beside_N: Any = None) -> Any:
        given, beside_TK = {"offsets": offsets}, None
        if beside_N is not None:
            beside_TK = rows.send_numbers(beside_N, listed, **given)[0]
        result = product()
        if self.direct:
            return rows.sum_rows(self.home_QD, self.plan.expert_TK, choices=True), beside_TK
        return rows.sum_slots(result, listed, **given)[0].contiguous(), beside_TK

    def _values(self, own_TD: Tensor) -> Values:
        values = self.arrived.values
        if not self.direct:
            return values
        return replace(values, rows_SPD=values.rows_SPD[1:], own_TD=own_TD, own=0, lasts=False)


def make_wire(config: DispatchConfig, num_tokens: int, width: int, *, direct: bool) -> Wire:
    """Draw the tokens and plans of all sources."""
    ranks, local, top_k = config.num_ranks, config.num_local_experts, config.top_k
    generator = torch.Generator(device="cuda").manual_seed(3)
    plans = []
    for _ in range(ranks):
        given = {"generator": generator, "device": "cuda"}
        chosen_TK = torch.randn(num_tokens, config.num_experts, **given).topk(top_k, 1).indices
        none_TE = torch.zeros(num_tokens, config.num_experts, dtype=torch.bool, device="cuda")
        plans.append(make_plan(none_TE.scatter(1, chosen_TK, True), top_k=top_k))
    expert_SPK = torch.stack([plan.expert_TK for plan in plans])
    is_ours = (expert_SPK >= 0) & (expert_SPK < local)
    tokens_SPD = torch.randn(
        ranks, num_tokens, width, generator=generator, device="cuda", dtype=torch.bfloat16
    )
    home_QD = tokens_SPD.new_empty(num_tokens * top_k, width)
    homes_S = torch.full((ranks,), home_QD.data_ptr(), dtype=torch.int64, device="cuda")
    arrived = Arrived(
        values=Values(rows_SPD=tokens_SPD),
        expert_SPK=torch.where(is_ours, expert_SPK, -1).int(),
        place_SPK=torch.stack([plan.place_TK for plan in plans]),
        prob_SPK=torch.rand(expert_SPK.shape, generator=generator, device="cuda"),
        count_SL=torch.stack([plan.kept_E[:local] for plan in plans]),
        sent_TD=tokens_SPD[0],
    )
    return Wire(
        arrived=arrived,
        plan=plans[0],
        direct=direct,
        sends_again=direct and config.sends_again(),
        home_QD=home_QD,
        homes_S=homes_S if direct else None,
    )


def measure(model: str, ranks: int, num_tokens: int, *, direct: bool) -> dict[str, Any]:
    """Return milliseconds and kernels of one rank's experts, forward and backward in a graph."""
    num_experts, top_k, width, ffn = MODELS[model]
    config = DispatchConfig(
        num_experts=num_experts,
        top_k=top_k,
        capacity_factor=FACTOR,
        capacity_pool="store",
        num_ranks=ranks,
    )
    local = config.num_local_experts
    wire = make_wire(config, num_tokens, width, direct=direct)
    generator = torch.Generator(device="cuda").manual_seed(4)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device="cuda")
        return (drawn * scale).bfloat16()

    fc1_LGD = normal(local, 2 * ffn, width, scale=0.02).requires_grad_()
    fc2_LDF = normal(local, width, ffn, scale=0.02).requires_grad_()
    tokens_TD, grad_TD = normal(num_tokens, width).requires_grad_(), normal(num_tokens, width)
    prob_TK = torch.rand(num_tokens, top_k, generator=generator, device="cuda").requires_grad_()
    leaves = tokens_TD, prob_TK, fc1_LGD, fc2_LDF
    store = Store()
    number = store.add(lambda: config)
    weights = ExpertWeights(fc1_LGD=fc1_LGD, fc2_LDF=fc2_LDF)

    def step() -> None:
        take_room = room_of_pass(config, num_tokens, store, [number], leaves)
        call: Any = Call(wire=wire, take_room=take_room)
        out_TD = experts.run(tokens_TD, prob_TK, weights, Activation(), call)
        for leaf in leaves:
            leaf.grad = None
        out_TD.backward(grad_TD)

    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(SAMPLES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / REPLAYS)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    by_name: dict[str, float] = {}
    for event in profiled.events():
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            name = event.name.partition("(")[0][:44]
            by_name[name] = by_name.get(name, 0) + event.time_range.elapsed_us() / 3
    owner_TK = wire.plan.expert_TK // local
    first_TK = torch.ones_like(owner_TK, dtype=torch.bool)
    first_TK[:, 1:] = owner_TK[:, 1:] != owner_TK[:, :-1]
    sent_mib = int((first_TK & (owner_TK != 0)).sum()) * width * 2 / 2**20
    return {
        "ms": round(sorted(times)[SAMPLES // 2], 3),
        "rows": int(wire.arrived.count_SL.sum()),
        "gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "sends_again": wire.sends_again,
        "push_mib": [round(sent_mib, 1)] * (3 if wire.sends_again else 2),
        "kernels_us": {k: round(v, 1) for k, v in sorted(by_name.items(), key=lambda kv: -kv[1])},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--only", default="", help="run the cases whose name has this text")
    arguments = parser.parse_args()
    torch.cuda.set_stream(torch.cuda.Stream())
    command = f"python notebooks/ranks.py {shlex.join(sys.argv[1:])}"
    run = about(num_gpus=1, command=command, commit=arguments.commit)
    for model in MODELS:
        for ranks, num_tokens in CASES:
            for wire in ("direct", "collectives"):
                name = f"{model}, R {ranks}, T {num_tokens}, {wire}"
                too_large = model == "deepseek-v3" and (ranks < 8 or ranks * num_tokens > 300_000)
                if arguments.only not in name or too_large or (ranks == 1 and wire == "direct"):
                    continue
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                found = measure(model, ranks, num_tokens, direct=wire == "direct")
                row = {"model": model, "ranks": ranks, "tokens": num_tokens, "wire": wire, **found}
                append_run(arguments.out, run, [row])
                sys.stdout.write(f"{name}: {row['ms']} ms, {row['gib']} GiB\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
