"""Compile all kernels without a GPU: `python -m tests.compile 90 100`, for sm_90a and sm_100a.

A stand-in for Triton's driver names the GPU, and a launch ends where the kernel is compiled. So a
pass of packed experts goes through with whatever its memory holds. What it does not launch is
launched one by one. Prints the bytes of each kernel's largest program. With `--once` each kernel is
compiled once for each choice of tensors that it is launched without, products once in all, which is
fast enough for a test.
"""

import os

os.environ.pop("TRITON_INTERPRET", None)

import dataclasses
import itertools
import math
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from padded_dispatch import routing
from padded_dispatch.config import DispatchConfig
from padded_dispatch.counters import Counters
from padded_dispatch.exchange.collectives import Collectives
from padded_dispatch.exchange.direct import DirectWire
from padded_dispatch.exchange.symmetric_memory import Buffers, SharedMemory
from padded_dispatch.experts.scaled import ScaledWeights
from padded_dispatch.kernels import (
    Scaled,
    activation,
    counters,
    direct,
    gemm,
    grouped,
    layout,
    rows,
    scaled,
    select,
)
from padded_dispatch.kernels import plan as plans
from tests.experts.test_packed import GPT_OSS, Case, trained

MODULES = activation, counters, direct, gemm, grouped, layout, plans, rows, scaled, select
bf16, int32 = torch.bfloat16, torch.int32


def kernels() -> set[str]:
    values = [value for module in MODULES for value in vars(module).values()]
    names = {name_of(value) for value in values if isinstance(value, JITFunction)}
    return {name for name in names if name.endswith("_kernel")}


def name_of(kernel: Any) -> str:
    return f"{kernel.module.rpartition('.')[2]}.{kernel.__name__}"


def launch_all() -> None:
    """Launch each kernel, with dtypes and sizes of launch parameters as in training."""
    with (
        patch.object(routing, "plan_in_torch", plans.plan),
        patch("tests.experts.test_packed.choice_probs", plans.ChoiceProbs.apply),
        patch.object(ScaledWeights, "refresh"),
        patch("tests.experts.test_packed.stacks_are_empty"),  # A kernel would say so.
    ):
        case = Case(biased=True, sums=True, activation=GPT_OSS)
        for direct_stores, is_scaled in itertools.product((False, True), repeat=2):
            with patch.object(Collectives, "start", start) if direct_stores else nullcontext():
                trained(dataclasses.replace(case, scaled=is_scaled), dtype=bf16)
    asked_TE, probs_TE = torch.ones(64, 8, dtype=torch.bool), torch.ones(64, 8)
    kept_TE, demand_E = select.kept_map(asked_TE, probs_TE, 3, "probs")
    made = Counters(DispatchConfig(num_experts=8, top_k=2), "cpu")
    for kept, demand in ((None, None), (kept_TE, demand_E)):
        counters.count(made.totals, made.max_need, asked_TE, kept, demand, 2)
    values, back = (Scaled.empty(2, 64, 64, like=torch.empty(0, dtype=bf16)) for _ in "ab")
    weights, stale = torch.ones(2, 64, 64, dtype=bf16), torch.ones(1, dtype=int32)
    scaled.quantize_weight(weights, stale, values, back)
    rows.zero_padding(torch.ones(16, 64, dtype=bf16), torch.ones(16), demand_E[None])


def start(
    collectives: Collectives,
    plan: routing.Plan,
    tokens_TD: Tensor,
    num_slots: int,
    *,
    sends_again: bool = False,
) -> DirectWire:
    """Return a wire of direct writes between two ranks, with nothing at its addresses."""
    by_choice = 2, num_slots, plan.expert_TK.shape[1]
    width, at_R = tokens_TD.shape[1], torch.zeros(2, dtype=torch.int64)
    buffers = Buffers(
        rank=0,
        barrier=lambda: None,
        rows_SPD=tokens_TD.new_empty(1, num_slots, width),
        expert_SPK=torch.zeros(by_choice, dtype=int32),
        place_SPK=torch.zeros(by_choice, dtype=int32),
        prob_SPK=torch.zeros(by_choice),
        count_SL=torch.zeros(2, len(plan.kept_E), dtype=int32),
        home_QD=tokens_TD.new_empty(math.prod(by_choice), width),
        beside_PK=torch.zeros(by_choice[1:]),
        again_SPD=tokens_TD.new_empty(1, num_slots, width) if sends_again else None,
        **dict.fromkeys(("arriving_R", "coming_R"), at_R),
        **dict.fromkeys(("again_at", "plan_at", "beside_at"), 0),
        shared=SharedMemory(),
        memories=(),
        sizes=(),
    )
    return DirectWire(plan=plan, buffers=buffers, homes_S=at_R)


def compiled(arch: int, *, once: bool = False) -> dict[str, int]:
    found: dict[str, int] = {}
    seen: set[tuple[object, ...]] = set()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        name = name_of(kernel)
        # Products take two seconds each, and one GPU runs all their forms.
        absent = () if kernel.__module__ == gemm.__name__ else [value is None for value in args]
        if once and (name, *absent) in seen:
            return
        seen.add((name, *absent))
        made: Any = launched(kernel, *args, grid=grid, warmup=True, **given)
        found[name] = max(found.get(name, 0), len(made.asm["cubin"]))

    launched, target = JITFunction.run, GPUTarget("cuda", arch, 32)
    stand_in = SimpleNamespace(
        get_current_device=lambda: arch,  # Programs are cached by device.
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
    )
    driver.set_active(stand_in)
    with (
        patch.object(JITFunction, "run", run),
        patch.object(gemm, "check_on_gpu", lambda *given: None),
        patch.object(gemm, "multiprocessors", lambda device: 132),
    ):
        launch_all()
    return found


if __name__ == "__main__":
    *archs, last = sys.argv[1:]
    for arch in map(int, archs if last == "--once" else [*archs, last]):
        sizes = compiled(arch, once=last == "--once")
        assert sizes.keys() == kernels(), sizes.keys() ^ kernels()
        line = ", ".join(f"{name} {size}" for name, size in sorted(sizes.items()))
        sys.stdout.write(f"sm_{arch}a, Triton {triton.__version__}: {line}\n")
