"""What CUDA graphs of layers go through in training, shown on GPUs, and the rows that say so.

    python tests/graph_situations.py --out notebooks/results/graph_situations.json --commit SHA

Runs all that the machine has GPUs for: replayed training against eager training bit by bit, replays
over a thousand routings, and replays that never wait. The file is whole after every case; a case
that fails or does not end in time is a row, too, and the next one starts with new processes.
`--only TEXT` runs the cases whose name has the text; `--cpu N` tries out this program on N
processes over gloo, with a stand-in for CUDA graphs, in small sizes.
"""

import argparse
import dataclasses
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import torch
from graph_routings import RoutingCase, routings_equal_eager
from graph_training import Situation, replays_do_not_wait, replays_equal_eager
from megatron.core import package_info

from padded_dispatch.config import Policy, Remedy
from padded_dispatch.launch import WorkerError, WorkerPool
from padded_dispatch.results import about, append_run

Case = Situation | RoutingCase
Check = Callable[[Any], Any]

CASE_S = 180.0
WHOLE, PARTIAL = ("attn", "moe"), ("attn", "moe_router", "moe_preprocess")
GPT_OSS: dict[str, Any] = {"hidden": 2880, "ffn": 2880, "heads": 64, "groups": 8}

# Read by libraries as they are loaded, so set before a worker starts.
ENVIRONMENT = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
}

_TINY = {"num_experts": 8, "top_k": 2, "hidden": 16, "ffn": 24}


def situations() -> Iterator[Situation]:
    """Training, from one rank to eight."""
    yield Situation(name="4 microbatches", microbatches=4)
    # From 0.18 on graphs recompute nothing of `moe`, and eager training rounds otherwise.
    moe = ("moe",) if (package_info.MAJOR, package_info.MINOR) < (0, 18) else ()
    for module in (*moe, "moe_act", "layernorm"):
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
    yield Situation(name="EP2: local graphs of whole layers", impl="local", scopes=(), **two)
    mixed = {"num_layers": 3, "dense": (1,), "scopes": ("attn", "mlp", "moe")}
    yield Situation(name="dense and MoE layers", **mixed, **two)
    for sizes, name in (({"ranks": 2}, "PP2"), ({"ranks": 4, "ep": 2}, "PP2/EP2")):
        deep = {"pp": 2, "num_layers": 4, "microbatches": 4, **sizes}
        yield Situation(name=name, **deep)
        yield Situation(name=name.replace("PP2", "PP2/VPP2"), vpp=2, **deep)


def _layouts() -> Iterator[Situation]:
    """A model of GPT-OSS's width, in ways to share it."""
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
    """Nobody asks for a rank's experts, or for one expert."""
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
    """A thousand routings each; a hundred for each policy with each remedy."""
    for ranks in (1, 2, 4, 8):
        yield RoutingCase(name=f"1,000 routings, EP{ranks}", ranks=ranks)
        name = f"1,000 routings, EP{ranks}, packed experts"
        yield RoutingCase(name=name, ranks=ranks, packed=True)
    yield RoutingCase(name="1,000 routings, nothing dropped", capacity_factor=None)
    for ranks, policy, remedy in itertools.product((1, 2, 8), get_args(Policy), get_args(Remedy)):
        chosen: dict[str, Any] = {"policy": policy, "remedy": remedy, "num_routings": 100}
        name = f"100 routings, EP{ranks}, {policy}, {remedy}"
        yield RoutingCase(name=name, ranks=ranks, **chosen)


def checks(num_ranks: int) -> list[tuple[str, Check, Case]]:
    """All that `num_ranks` GPUs can run, few ranks first."""
    found: list[tuple[str, Check, Case]] = [
        ("replay equals eager training", replays_equal_eager, case) for case in situations()
    ]
    found += [("replays equal eager runs", routings_equal_eager, case) for case in routing_cases()]
    for ranks in (1, 2, 4):
        for scopes in (WHOLE, PARTIAL):
            name = f"50 replayed steps, EP{ranks}, {'+'.join(scopes)}"
            case = Situation(name=name, ranks=ranks, ep=ranks, replays=50, scopes=scopes)
            found.append(("replays do not wait", replays_do_not_wait, case))
    return sorted((c for c in found if c[2].ranks <= num_ranks), key=lambda c: c[2].ranks)


def on_cpu(case: Case) -> Case | None:
    """The same in small on a CPU; None for what Megatron cannot do there."""
    if isinstance(case, RoutingCase):
        small = {**_TINY, "seq": 14, "num_routings": 8}
        return None if case.packed else dataclasses.replace(case, device="cpu", **small)
    if case.impl == "local":
        return None
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
    )


def run_case(pool: WorkerPool, check: str, run: Check, case: Case) -> dict[str, Any]:
    """One row: the case, what was found, and whether it passed."""
    started = time.monotonic()
    row: dict[str, Any] = {"check": check, "passed": False, **dataclasses.asdict(case)}
    row |= {"contender": "ours", "facts": None, "failures": None}
    try:
        found = pool.run(run, case, timeout_s=CASE_S)
    except WorkerError as error:
        # Without tracebacks, which name the machine's folders.
        row["failures"] = [re.sub(r"\nTraceback.*?(?=\nrank \d|\Z)", "", str(error), flags=re.S)]
        pool.close()  # What is left in these processes would be the next case's trouble.
    else:
        row["facts"] = found[0].facts
        failures = {f"rank {r}: {text}" for r, f in enumerate(found) for text in f.failures()}
        row["failures"] = sorted(failures)[:20]
        row["passed"] = not failures
    return row | {"seconds": round(time.monotonic() - started, 2)}


def say(line: str) -> None:
    """A line for whoever watches."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def selected(arguments: argparse.Namespace, num_ranks: int) -> list[tuple[str, Check, Case]]:
    """The checks that the command line asks for."""
    found = [c for c in checks(num_ranks) if arguments.only in c[2].name]
    if arguments.cpu:
        small = [(name, run, on_cpu(case)) for name, run, case in found]
        found = [(name, run, case) for name, run, case in small if case is not None]
    return found


def main() -> int:
    """Run everything; the exit code is 1 when a case failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the results file")
    parser.add_argument("--commit", required=True, help="that this tree was made from")
    parser.add_argument("--command", help="as it was typed, if not as this process sees it")
    parser.add_argument("--only", default="", help="run cases with this text in their name")
    parser.add_argument("--cpu", type=int, metavar="N", help="N processes without GPUs")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    num_ranks = arguments.cpu or torch.cuda.device_count()
    if num_ranks == 0:
        parser.error("no GPU here; --cpu N runs without")
    command = arguments.command or " ".join(["python", *sys.argv])
    num_gpus = 0 if arguments.cpu else num_ranks
    run_about = about(num_gpus=num_gpus, command=command, commit=arguments.commit)
    run_about |= {"environment": ENVIRONMENT}

    backend = "gloo" if arguments.cpu else "nccl"
    pool, outcomes = WorkerPool(1, backend=backend), []
    for check, run, case in selected(arguments, num_ranks):
        if pool.num_workers != case.ranks:
            pool.close()
            pool = WorkerPool(case.ranks, backend=backend)
        row = run_case(pool, check, run, case)
        append_run(arguments.out, run_about, [row])
        outcomes.append(row["passed"])
        say(f"{'passed' if row['passed'] else 'FAILED'} {case.name}, {row['seconds']} s")
        for failure in row["failures"][:3]:
            say(f"    {failure.strip().splitlines()[-1][:300]}")
    pool.close()
    say(f"{sum(outcomes)} passed, {len(outcomes) - sum(outcomes)} failed")
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
