"""Compare the telemetry of a captured layer's replays with a count on the host.

Letters: T tokens, E experts, P passes, R ranks.
"""

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from padded_dispatch.config import PoolSizes
from padded_dispatch.megatron.graphs.selftest import waiting_raises
from padded_dispatch.megatron.telemetry import Snapshots, Telemetry
from tests.support.graph_routings import (
    RoutingCase,
    capture,
    copy_inputs,
    groups,
    make_inputs,
    make_layer,
    results,
)
from tests.support.graph_training import Findings

EVERY = 7


class LastPass:
    """An observer that keeps the maps of the last pass, in tensors that replays write."""

    def __init__(self, case: RoutingCase) -> None:
        shape = case.seq, case.num_experts
        self.asked_TE = torch.zeros(shape, dtype=torch.bool, device=case.device)
        self.probs_TE = torch.zeros(shape, dtype=torch.float64, device=case.device)
        self.sizes: PoolSizes | None = None

    def observe(self, asked_TE, probs_TE, selection, sizes):
        self.asked_TE.copy_(asked_TE)
        self.probs_TE.copy_(probs_TE)
        self.sizes = sizes


class HostCount:
    """Policy "probs" and its counts in NumPy, for the tokens of one rank."""

    def __init__(self, num_experts: int) -> None:
        self.demand_E = np.zeros(num_experts, dtype=np.int64)
        self.kept_PE: list[Any] = []
        self.asked_mass = self.dropped_mass = self.lost_tokens = self.largest = self.num_slots = 0

    def add(self, asked_TE, probs_TE, sizes: PoolSizes) -> None:
        kept_TE = np.zeros_like(asked_TE)
        for g in range(sizes.num_pools):
            pool = slice(g * sizes.experts_per_pool, (g + 1) * sizes.experts_per_pool)
            tokens, experts = np.nonzero(asked_TE[:, pool])
            order = np.argsort(-probs_TE[:, pool][tokens, experts], kind="stable")
            kept = order[: sizes.pool_slots]
            kept_TE[:, pool][tokens[kept], experts[kept]] = True
            self.largest = max(self.largest, len(tokens))
        self.demand_E += asked_TE.sum(0)
        self.kept_PE.append(kept_TE.sum(0))
        self.asked_mass += int(np.rint(probs_TE[asked_TE] * 2**32).astype(np.int64).sum())
        dropped = probs_TE[asked_TE & ~kept_TE]
        self.dropped_mass += int(np.rint(dropped * 2**32).astype(np.int64).sum())
        self.lost_tokens += int((asked_TE.any(1) & ~kept_TE.any(1)).sum())
        self.num_slots += sizes.num_pools * sizes.pool_slots


def telemetry_is_a_hosts_count(case: RoutingCase) -> Findings:
    """Compare telemetry, read every `EVERY` replays without waiting, with the host. All ranks."""
    with groups(case):
        layer, last, host = make_layer(case), LastPass(case), HostCount(case.num_experts)
        layer.router.selector.observers.append(last)
        tokens, grad = inputs = make_inputs(case, 0)
        replay, _ = capture(lambda: results(layer, tokens, grad), case.device)
        telemetry = Telemetry([layer], every=EVERY)  # It leaves out the counts of the capture.
        reads = []
        for number in range(case.num_routings):
            copy_inputs(case, number, inputs)
            replay()
            with waiting_raises(torch.device(case.device)):
                snapshots = telemetry.step()
            reads += [snapshots] if snapshots is not None else []
            host.add(last.asked_TE.cpu().numpy(), last.probs_TE.cpu().numpy(), last.sizes)
        reads.append(telemetry.read())
        hosts: list[Any] = [None] * case.ranks
        dist.all_gather_object(hosts, host)
    counted, expected = _sum(reads), _counted(hosts, case)
    broken = [
        f"{name} is {counted[name]}, and the host counted {value}"
        for name, value in expected.items()
        if counted[name] != value
    ]
    for name in ("dropped_mass", "lost_tokens", *(("idle_passes",) if case.ranks > 1 else ())):
        if not np.any(expected[name]):
            broken.append(f"{name} was never above 0")
    return Findings(facts=expected | {"readings": len(reads)}, broken=tuple(broken))


def _sum(reads: list[Snapshots]) -> dict[str, Any]:
    """Add up the figures of all reads."""
    training = [dataclasses.asdict(snapshots.training) for snapshots in reads]

    def total(name: str) -> Any:
        return sum(figures[name][0] for figures in training).tolist()

    return {
        "steps": sum(snapshots.num_steps for snapshots in reads),
        "demand": total("demand_YE"),
        "kept": total("kept_YE"),
        "asked_mass": total("asked_mass_Y"),
        "dropped_mass": total("dropped_mass_Y"),
        "lost_tokens": total("lost_tokens_Y"),
        "largest": max(figures["max_demand_Y"][0] for figures in training).item(),
        "passes": total("num_passes_Y"),
        "positions": total("num_positions_Y"),
        "slots": total("num_slots_Y"),
        "idle_passes": total("idle_passes_YR"),
        "evaluations": sum(snapshots.evaluation.num_passes_Y[0] for snapshots in reads).item(),
    }


def _counted(hosts: list[HostCount], case: RoutingCase) -> dict[str, Any]:
    """Return the same figures from the counts of all hosts."""
    kept_PE = sum(np.array(host.kept_PE) for host in hosts)
    kept_PR = kept_PE.reshape(len(kept_PE), case.ranks, -1).sum(2)
    passes = case.num_routings * case.ranks
    return {
        "steps": case.num_routings,
        "demand": sum(host.demand_E for host in hosts).tolist(),
        "kept": kept_PE.sum(0).tolist(),
        "asked_mass": sum(host.asked_mass for host in hosts),
        "dropped_mass": sum(host.dropped_mass for host in hosts),
        "lost_tokens": sum(host.lost_tokens for host in hosts),
        "largest": max(host.largest for host in hosts),
        "passes": passes,
        "positions": passes * case.seq,
        "slots": sum(host.num_slots for host in hosts),
        "idle_passes": (kept_PR == 0).sum(0).tolist(),
        "evaluations": 0,
    }
