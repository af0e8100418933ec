"""Test Megatron's combined schedule (EP overlap) on GPUs, and write results rows.

    python -m tests.gpu.overlap --out notebooks/results/recipes.json --commit SHA

Two trainings run in lockstep, one with `overlap_moe_expert_parallel_comm`, the other with the plain
schedule. All losses, gradients, parameters, buffers, logged sums and counts are the same, bit by
bit. Cases with 'direct' in their name have direct stores in both. On GPUs, the facts of a row have
the milliseconds of one more step of each training, `ms` and `plain_ms`, and those in which kernels
of several streams ran at once, `overlapped_ms`.
The results file is complete after every case. `--only TEXT` runs the cases whose names contain the
text. `--cpu N` tries the program on N processes over gloo.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from typing import Any

from megatron.core import package_info

from tests.support.gpu_cases import ENVIRONMENT, run_cases
from tests.support.gpu_rows import parsed
from tests.support.overlapped_training import OverlapCase, overlapped_equals_plain

CHECK = "the combined schedule equals the plain one"
# The combined schedule of virtual pipeline stages needs them.
OVERLAPPED_SENDS = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
HAS_PRIORITY = (package_info.MAJOR, package_info.MINOR) >= (0, 19)
PRIORITY = {"high_priority_a2a_comm_stream": True}
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
            graphs = f"{name}, graphs of {'+'.join(scopes)}"
            yield OverlapCase(name=graphs, **captured)
            if not delays:
                yield OverlapCase(name=f"{graphs}, padding mask", padded=True, **captured)
        yield OverlapCase(name=f"{name}, one local expert", **how | {"num_experts": 2, "top_k": 2})
        yield OverlapCase(name=f"{name}, shared experts", shared_ffn=512, **how)
        yield OverlapCase(name=f"{name}, padding mask", padded=True, **how)
        # With TEGroupedMLP, Megatron's DDP never sees these gradients; its FSDP does.
        beside = experts != "module" and (package_info.MAJOR, package_info.MINOR) >= (0, 18)
        if beside and not delays:
            yield OverlapCase(name=f"{name}, beside dispatch", dispatch_backward=True, **how)
        deep = how | {"ranks": 4, "pp": 2, "vpp": 2, "num_layers": 4, "fields": OVERLAPPED_SENDS}
        yield OverlapCase(name=f"{name}, PP2/VPP2", **deep)
    yield from direct_cases()


def direct_cases() -> Iterator[OverlapCase]:
    """Yield cases with direct stores, which serve packed experts."""
    direct: dict[str, Any] = {"experts": "packed", "exchange": "direct", **_GPU}
    for delays in (False, True):
        how = direct | {"delay_wgrad": delays}
        name = f"direct{', delayed' * delays}"
        fused = {"gradient_accumulation_fusion": True} if delays else {}
        yield OverlapCase(name=name, **how)
        yield OverlapCase(name=f"{name}, reduction overlapped", overlap_grad_reduce=True, **how)
        yield OverlapCase(name=f"{name}, shared experts", shared_ffn=512, **how)
        yield OverlapCase(name=f"{name}, one local expert", **how | {"num_experts": 2, "top_k": 2})
        graphs = how | {"scopes": BEFORE_EXPERTS, "fields": fused}
        yield OverlapCase(name=f"{name}, graphs of {'+'.join(BEFORE_EXPERTS)}", **graphs)
        yield OverlapCase(name=f"{name}, graph of the iteration", graph="full-iteration", **how)
        deep = how | {"ranks": 4, "pp": 2, "vpp": 2, "num_layers": 4, "fields": OVERLAPPED_SENDS}
        yield OverlapCase(name=f"{name}, PP2/VPP2", **deep)
    yield OverlapCase(name="direct, shared slots", pool="receiver", delay_wgrad=True, **direct)
    if HAS_PRIORITY:
        yield OverlapCase(name="direct, priority", fields=PRIORITY, **direct)


def on_cpu(case: OverlapCase) -> OverlapCase | None:
    """Return a small version of a case for the CPU; None if Megatron needs a GPU for it.

    Graphs of attention hold delayed gradients of weights, which the stand-in does not have.
    """
    if (case.scopes and case.delay_wgrad) or case.graph != "none":
        return None
    default = {field.name: field.default for field in dataclasses.fields(OverlapCase)}
    small = {name: default[name] for name in _GPU if name != "microbatches"}
    small |= {"num_layers": case.num_layers} if case.pp > 1 else {}
    small |= {"num_experts": min(case.num_experts, 4), "steps": 4 if case.scopes else 2}
    return dataclasses.replace(case, **small)


def main() -> int:
    """Run all cases; return 1 if one failed."""
    arguments = parsed(argparse.ArgumentParser(description=__doc__.split("\n")[0]))
    wanted = sorted(cases(), key=lambda case: case.ranks)
    checks = (
        (CHECK, overlapped_equals_plain, on_cpu(case) if arguments.cpu else case) for case in wanted
    )
    return run_cases(arguments, ENVIRONMENT, checks)


if __name__ == "__main__":
    sys.exit(main())
