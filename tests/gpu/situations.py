"""Test CUDA graphs of layers in many training situations on GPUs, and write results rows.

    python -m tests.gpu.situations --out notebooks/results/graph_situations.json --commit SHA
    python -m tests.gpu.situations --only pool --out notebooks/results/pools.json --commit SHA

Runs all cases that the machine has GPUs for: replayed training equals eager training bit by bit,
replays over a thousand routings equal eager runs, telemetry equals a count on the host, replays
never wait, and memory does not grow over two thousand steps. The results file is complete after
every case. A case that fails or times out is a row too, and the next one starts with new processes.
`--only TEXT` runs the cases whose names contain the text, or one of several. `--cpu N` tries the
program on N processes over gloo, with a stand-in for CUDA graphs and small sizes.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, get_args

from padded_dispatch.config import Policy, Remedy
from tests.support.gpu_cases import ENVIRONMENT, run_cases
from tests.support.gpu_rows import parsed
from tests.support.graph_routings import (
    RoutingCase,
    draws_repeat_with_the_seed,
    routings_equal_eager,
)
from tests.support.graph_telemetry import telemetry_is_a_hosts_count
from tests.support.graph_training import (
    Situation,
    memory_is_flat,
    replays_do_not_wait,
    replays_equal_eager,
)

Case = Situation | RoutingCase
Check = Callable[[Any], Any]

RANKS = (1, 2, 4, 8)
WHOLE, PARTIAL = ("attn", "moe"), ("attn", "moe_router", "moe_preprocess")
GPT_OSS: dict[str, Any] = {"hidden": 2880, "ffn": 2880, "heads": 64, "groups": 8}

_TINY = {"num_experts": 8, "top_k": 2, "hidden": 16, "ffn": 24}


def situations() -> Iterator[Situation]:
    """Yield training cases, from one rank to eight."""
    yield Situation(name="4 microbatches", microbatches=4)
    for module in ("moe", "moe_act", "layernorm"):
        yield Situation(name=f"recompute {module}", recompute=(module,))
    yield Situation(name="evaluation between steps", evaluates=(1, 256))
    yield Situation(name="evaluation of another shape", evaluates=(3, 160))
    yield Situation(name="evaluation of another shape, partial", evaluates=(3, 160), scopes=PARTIAL)
    two: dict[str, Any] = {"ranks": 2, "ep": 2}
    four: dict[str, Any] = {"ranks": 4, "ep": 2}
    plain_ddp = {"distributed_optimizer": False}
    for sizes, name in ((two, "EP2"), (four, "EP2, two replicas")):
        yield Situation(name=f"{name}: DDP", **plain_ddp, **sizes)
        overlap = {"overlap_grad_reduce": True, **sizes}
        yield Situation(name=f"{name}: DDP, overlapped reduce", **plain_ddp, **overlap)
        yield Situation(name=f"{name}: distributed optimizer", **sizes)
        both = {"overlap_param_gather": True, **overlap}
        yield Situation(name=f"{name}: distributed optimizer, all overlapped", **both)
    yield from _layouts()
    yield from _starved()
    for scopes in (WHOLE, PARTIAL):
        yield Situation(name=f"200 replays, {'+'.join(scopes)}", replays=200, scopes=scopes, **two)
    yield from _pools()
    yield Situation(name="EP2: local graphs of whole layers", impl="local", scopes=(), **two)
    mixed = {"num_layers": 3, "dense": (1,), "scopes": ("attn", "mlp", "moe")}
    yield Situation(name="dense and MoE layers", **mixed, **two)
    for sizes, name in (({"ranks": 2}, "PP2"), ({"ranks": 4, "ep": 2}, "PP2/EP2")):
        deep = {"pp": 2, "num_layers": 4, "microbatches": 4, **sizes}
        yield Situation(name=name, **deep)
        yield Situation(name=name.replace("PP2", "PP2/VPP2"), vpp=2, **deep)
    yield from _masked()
    yield from _packed()


def _masked() -> Iterator[Situation]:
    """Yield training with padding masks that change, in each kind of graph."""
    for ranks in (1, 2):
        sizes: dict[str, Any] = {"ranks": ranks, "ep": ranks, "masked": True, "replays": 6}
        for scopes in (("moe",), WHOLE, (), PARTIAL, ("attn",)):
            name = f"masks, EP{ranks}, {'+'.join(scopes) or 'whole layers'}"
            yield Situation(name=name, scopes=scopes, **sizes)
        yield Situation(name=f"masks, EP{ranks}, local", impl="local", scopes=(), **sizes)
        plain = {"distributed_optimizer": False, **sizes}
        yield Situation(name=f"masks, EP{ranks}, iterations", impl="full_iteration", **plain)
        name, chosen = list(pools(ranks))[-1]
        yield Situation(name=f"masks, {name}", **chosen, **sizes)
    deep: dict[str, Any] = {"pp": 2, "num_layers": 4, "microbatches": 4, "ranks": 2}
    yield Situation(name="masks, PP2", masked=True, replays=6, **deep)
    split: dict[str, Any] = {"ranks": 2, "tp": 2, "ep": 2}
    yield Situation(name="masks, TP2/EP2/ETP1", masked=True, replays=6, **split)
    parts: dict[str, Any] = {"ranks": 2, "cp": 2, "ep": 2, "masked": True, "replays": 6}
    for scopes in (WHOLE, ("moe",), ("moe_router", "moe_preprocess")):
        yield Situation(name=f"masks, CP2/EP2, {'+'.join(scopes)}", scopes=scopes, **parts)


def _packed() -> Iterator[Situation]:
    """Yield training with packed sequences, whose attention is not captured."""
    for ranks in (1, 2):
        sizes: dict[str, Any] = {"ranks": ranks, "ep": ranks, "packed": True, "replays": 6}
        for scopes in (("moe",), ("moe_router", "moe_preprocess")):
            name = f"packed sequences, EP{ranks}, {'+'.join(scopes)}"
            yield Situation(name=name, scopes=scopes, **sizes)
            yield Situation(name=f"{name}, with masks", scopes=scopes, masked=True, **sizes)


def pools(ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each pool of several experts with each exchange that it can have."""
    yield f"pool rank, EP{ranks}", {"capacity_pool": "rank", "exchange": "alltoall"}
    if ranks > 1:
        for pool in ("rank", "receiver"):
            chosen = {"capacity_pool": pool, "exchange": "direct"}
            yield f"pool {pool}, EP{ranks}, direct stores", chosen


def _pools() -> Iterator[Situation]:
    """Yield training with capacity pools: graphs of layers, of their parts, and of iterations."""
    for ranks in (1, 2, 4):
        for name, chosen in pools(ranks):
            sizes = {"ranks": ranks, "ep": ranks, **chosen}
            alone = [("attn", "moe_router")] if chosen["capacity_pool"] == "rank" else []
            for scopes in (WHOLE, PARTIAL, *alone):
                graphs = f"graphs of {'+'.join(scopes)}"
                yield Situation(name=f"{name}, {graphs}", scopes=scopes, microbatches=4, **sizes)
            plain = {"distributed_optimizer": False, **sizes}
            yield Situation(name=f"{name}, graph of iterations", impl="full_iteration", **plain)
            evaluates = {"evaluates": (3, 160), **sizes}
            yield Situation(name=f"{name}, evaluation that fits", **evaluates)
            recomputes = {"recompute": ("moe_act",), **sizes}
            yield Situation(name=f"{name}, recompute of moe_act", **recomputes)
    split: dict[str, Any] = {"ranks": 2, "tp": 2, "etp": 2, "capacity_pool": "rank"}
    yield Situation(name="pool rank, TP2/ETP2", exchange="alltoall", **split)
    for name, chosen in pools(2):
        deep = {"ranks": 4, "pp": 2, "ep": 2, "num_layers": 4, "microbatches": 4, **chosen}
        yield Situation(name=f"{name}, PP2", **deep)


def _layouts() -> Iterator[Situation]:
    """Yield parallel layouts of a model with GPT-OSS's width."""
    layouts: dict[str, dict[str, int]] = {
        "TP1/EP2": {"ranks": 2, "ep": 2},
        "TP2/EP2/ETP1": {"ranks": 2, "tp": 2, "ep": 2},
        "TP2/EP2/ETP2": {"ranks": 4, "tp": 2, "ep": 2, "etp": 2},
        "TP4/EP2/ETP1": {"ranks": 4, "tp": 4, "ep": 2},
        "TP4/EP2/ETP2": {"ranks": 4, "tp": 4, "ep": 2, "etp": 2},
        "TP4/EP4/ETP1": {"ranks": 4, "tp": 4, "ep": 4},
        "EP4": {"ranks": 4, "ep": 4},
        "TP4/EP2/ETP4": {"ranks": 8, "tp": 4, "ep": 2, "etp": 4},
        "EP8": {"ranks": 8, "ep": 8},
    }
    for name, sizes in layouts.items():
        for scopes in (WHOLE, PARTIAL):
            full_name = f"GPT-OSS {name}, {'+'.join(scopes)}"
            yield Situation(name=full_name, scopes=scopes, replays=3, **GPT_OSS, **sizes)


def _starved() -> Iterator[Situation]:
    """Yield cases in which a rank's experts, or one expert, get no tokens."""
    plain: dict[str, Any] = {"overlap_grad_reduce": True, "distributed_optimizer": False}
    for ranks in (2, 4):
        for scopes in (WHOLE, PARTIAL):
            name = f"EP{ranks}: a rank without tokens in some steps, {'+'.join(scopes)}"
            sizes = {"ranks": ranks, "ep": ranks, "scopes": scopes, "replays": 8}
            yield Situation(name=name, idle="rank", **plain, **sizes)
    yield Situation(name="EP2: an expert without tokens", idle="expert", ranks=2, ep=2, **plain)
    alone = {"ranks": 1, **plain}
    yield Situation(name="an expert without tokens", idle="expert", **alone)


def routing_cases() -> Iterator[RoutingCase]:
    """Yield cases of a thousand routings; of a hundred for each policy with each remedy."""
    for ranks in RANKS:
        yield RoutingCase(name=f"1,000 routings, EP{ranks}", ranks=ranks)
        packed: dict[str, Any] = {"ranks": ranks, "packed": True}
        yield RoutingCase(name=f"1,000 routings, EP{ranks}, packed experts", **packed)
        if ranks > 1:
            name = f"1,000 routings, EP{ranks}, direct stores"
            yield RoutingCase(name=name, exchange="direct", **packed)
        for name, chosen in pools(ranks):
            sizes = {"ranks": ranks, "packed": True, **chosen}
            yield RoutingCase(name=f"{name}, 1,000 routings", **sizes)
            for policy, remedy in itertools.product(get_args(Policy), get_args(Remedy)):
                how = {"policy": policy, "remedy": remedy, "num_routings": 100}
                full_name = f"{name}, 100 routings, {policy}, {remedy}"
                yield RoutingCase(name=full_name, **how, **sizes)
    yield RoutingCase(name="1,000 routings, nothing dropped", capacity_factor=None)
    for ranks, policy, remedy in itertools.product(RANKS, get_args(Policy), get_args(Remedy)):
        chosen: dict[str, Any] = {"policy": policy, "remedy": remedy, "num_routings": 100}
        name = f"100 routings, EP{ranks}, {policy}, {remedy}"
        yield RoutingCase(name=name, ranks=ranks, **chosen)


def telemetry_cases() -> Iterator[RoutingCase]:
    """Yield cases of a hundred replays whose telemetry is read."""
    for ranks, packed in itertools.product(RANKS, (False, True)):
        name = f"telemetry of 100 replays, EP{ranks}{', packed experts' * packed}"
        sizes = {"ranks": ranks, "packed": packed, "num_routings": 100}
        yield RoutingCase(name=name, capacity_factor=1.1, **sizes)
    for ranks in RANKS:
        pooled: dict[str, Any] = {"ranks": ranks, "packed": True, "capacity_pool": "rank"}
        name = f"pool rank, EP{ranks}, telemetry of 100 replays"
        yield RoutingCase(name=name, capacity_factor=0.3, num_routings=100, **pooled)


def memory_cases() -> Iterator[Situation]:
    """Yield training over two thousand steps, and over fewer with evaluations that fit."""
    for ranks in (1, 2):
        for name, chosen in (*pools(ranks), (f"pool expert, EP{ranks}", {})):
            sizes = {"ranks": ranks, "ep": ranks, **chosen}
            yield Situation(name=f"{name}, memory of 2,000 steps", replays=2000, **sizes)
        evaluates: dict[str, Any] = {"ranks": ranks, "ep": ranks, "evaluates": (3, 160)}
        name = f"pool rank, EP{ranks}, memory of 500 steps with evaluations that fit"
        yield Situation(name=name, capacity_pool="rank", replays=500, **evaluates)


def checks(num_ranks: int) -> list[tuple[str, Check, Case]]:
    """Return all checks that `num_ranks` GPUs can run, those with few ranks first."""
    found: list[tuple[str, Check, Case]] = [
        ("replay equals eager training", replays_equal_eager, case) for case in situations()
    ]
    found += [("replays equal eager runs", routings_equal_eager, case) for case in routing_cases()]
    found += [
        ("telemetry is a host's count", telemetry_is_a_hosts_count, case)
        for case in telemetry_cases()
    ]
    found += [("memory is flat", memory_is_flat, case) for case in memory_cases()]
    for ranks in RANKS:
        case = RoutingCase(name=f"draws of replays, EP{ranks}", ranks=ranks, policy="random")
        found.append(("draws repeat with the seed", draws_repeat_with_the_seed, case))
    for ranks in (1, 2, 4):
        for scopes in (WHOLE, PARTIAL):
            name = f"50 replayed steps, EP{ranks}, {'+'.join(scopes)}"
            case = Situation(name=name, ranks=ranks, ep=ranks, replays=50, scopes=scopes)
            found.append(("replays do not wait", replays_do_not_wait, case))
    return sorted((c for c in found if c[2].ranks <= num_ranks), key=lambda c: c[2].ranks)


def on_cpu(case: Case) -> Case | None:
    """Return a small version of a case for the CPU; None if Megatron needs a GPU for it."""
    if isinstance(case, RoutingCase):
        small = {**_TINY, "seq": 14, "num_routings": 8}
        return None if case.packed else dataclasses.replace(case, device="cpu", **small)
    if case.impl != "transformer_engine" or case.replays > 200:
        return None
    if case.capacity_pool != "expert" and "moe" in case.scopes:
        return None  # On CPUs, ops that pack rows have shapes that follow the values.
    if case.cp > 1 and "attn" in case.scopes:
        return None  # The stand-in for attention does not see whole sequences.
    if case.tp > 1 or case.recompute not in ((), ("moe",)) or case.replays == 50:
        return None
    return dataclasses.replace(
        case,
        device="cpu",
        **_TINY,
        heads=2,
        groups=2,
        head_size=8,
        vocab=32,
        seq=8,
        replays=min(case.replays, 4),
        evaluates=(3, 5) if case.evaluates else None,
        distributed_optimizer=False,
        overlap_param_gather=False,
        exchange="auto",
    )


def main() -> int:
    """Run all cases; return 1 if one failed."""
    arguments = parsed(argparse.ArgumentParser(description=__doc__.split("\n")[0]))
    wanted = (
        (check, run, on_cpu(case) if arguments.cpu else case)
        for check, run, case in checks(arguments.num_ranks)
    )
    return run_cases(arguments, ENVIRONMENT, wanted)


if __name__ == "__main__":
    sys.exit(main())
