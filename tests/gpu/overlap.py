"""Test Megatron's combined schedule (EP overlap) on GPUs, and write results rows.

    python -m tests.gpu.overlap --out notebooks/results/recipes.json --commit SHA

Two trainings run in lockstep, one with `overlap_moe_expert_parallel_comm`, the other with the plain
schedule. All losses, gradients, parameters, buffers, logged sums and counts are the same, bit by
bit. On GPUs, the facts of a row have the milliseconds of one more step of each training, `ms` and
`plain_ms`, and those in which kernels of several streams ran at once, `overlapped_ms`.
The results file is complete after every case. `--only TEXT` runs the cases whose names contain the
text. `--cpu N` tries the program on N processes over gloo; it leaves out pipeline stages, which
Megatron 0.16.1 computes differently there, with its own dispatcher too.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from typing import Any

from megatron.core import package_info

from tests.gpu.situations import ENVIRONMENT, run_case
from tests.support.gpu_rows import Rows, parsed, wants
from tests.support.overlapped_training import OverlapCase, overlapped_equals_plain
from tests.support.pool import WorkerPool

CHECK = "the combined schedule equals the plain one"
BEFORE_EXPERTS = ("attn", "moe_router", "moe_preprocess")

_GPU: dict[str, Any] = {
    "device": "cuda",
    "steps": 6,
    "microbatches": 4,
    "batch": 1,
    "seq": 2048,
    "num_layers": 3,
    "hidden": 1024,
    "heads": 8,
    "ffn": 512,
    "num_experts": 32,
    "top_k": 4,
    "vocab": 512,
}


def cases() -> Iterator[OverlapCase]:
    """Yield all cases: two ranks, then four."""
    for experts, delays in itertools.product(("module", "packed", "batched"), (False, True)):
        how: dict[str, Any] = {"experts": experts, "delay_wgrad": delays, **_GPU}
        name = f"{experts}{', delayed' * delays}"
        yield OverlapCase(name=name, **how)
        yield OverlapCase(name=f"{name}, reduction overlapped", overlap_grad_reduce=True, **how)
        for scopes in (("attn",), ("attn", "moe_router"), BEFORE_EXPERTS):
            # Graphs hold delayed gradients of weights only where these are added to `main_grad`.
            fields = {"gradient_accumulation_fusion": True} if delays else {}
            captured = how | {"scopes": scopes, "fields": fields}
            yield OverlapCase(name=f"{name}, graphs of {'+'.join(scopes)}", **captured)
        yield OverlapCase(name=f"{name}, one local expert", **how | {"num_experts": 2, "top_k": 2})
        yield OverlapCase(name=f"{name}, shared experts", shared_ffn=512, **how)
        yield OverlapCase(name=f"{name}, padding mask", padded=True, **how)
        if not delays and (package_info.MAJOR, package_info.MINOR) >= (0, 18):
            yield OverlapCase(name=f"{name}, beside dispatch", dispatch_backward=True, **how)
        deep = how | {"ranks": 4, "pp": 2, "vpp": 2, "num_layers": 4}
        yield OverlapCase(name=f"{name}, PP2/VPP2", **deep)


def on_cpu(case: OverlapCase) -> OverlapCase | None:
    """Return a small version of a case for the CPU; None if Megatron needs a GPU for it.

    Graphs of attention hold delayed gradients of weights, which the stand-in does not have.
    """
    if case.pp > 1 or (case.scopes and case.delay_wgrad):
        return None
    default = {field.name: field.default for field in dataclasses.fields(OverlapCase)}
    small = {name: default[name] for name in _GPU}
    small |= {"num_experts": min(case.num_experts, 4), "steps": 4 if case.scopes else 2}
    return dataclasses.replace(case, **small)


def main() -> int:
    """Run all cases; return 1 if one failed."""
    arguments = parsed(argparse.ArgumentParser(description=__doc__.split("\n")[0]))
    rows = Rows(arguments, arguments.num_gpus, ENVIRONMENT)
    pool = WorkerPool(2, backend=arguments.backend)
    for full in sorted(cases(), key=lambda case: case.ranks):
        case = on_cpu(full) if arguments.cpu else full
        if case is None or case.ranks > arguments.num_ranks or not wants(arguments, case.name):
            continue
        if pool.num_workers != case.ranks:
            pool.close()
            pool = WorkerPool(case.ranks, backend=arguments.backend)
        rows.add(run_case(pool, CHECK, overlapped_equals_plain, case))
    pool.close()
    return rows.exit_code()


if __name__ == "__main__":
    sys.exit(main())
