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
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from padded_dispatch.config import DispatchConfig
from padded_dispatch.counters import Counters
from padded_dispatch.experts import packed
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
from padded_dispatch.routing import plan as routing
from tests.experts.test_packed import GPT_OSS, Case, trained

MODULES = activation, counters, direct, gemm, grouped, layout, plans, rows, scaled, select
bf16, int32 = torch.bfloat16, torch.int32


def kernels() -> set[str]:
    """Return the kernels that are launched; other functions of Triton's are parts of them."""
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
    ):
        case = Case(biased=True, sums=True, activation=GPT_OSS)
        trained(case, packed.run, bf16)
        with patch.object(ScaledWeights, "refresh"):
            trained(dataclasses.replace(case, scaled=True), packed.run, bf16)
    asked_TE, probs_TE = torch.ones(64, 8, dtype=torch.bool), torch.ones(64, 8)
    kept_TE, demand_E = select.kept_map(asked_TE, probs_TE, 3, "probs")
    made = Counters(DispatchConfig(num_experts=8, top_k=2), "cpu")
    for kept, demand in ((None, None), (kept_TE, demand_E)):
        counters.count(made.totals, made.max_need, asked_TE, kept, probs_TE, demand, 2, 2)
    values, back = (Scaled.empty(2, 64, 64, dtype=bf16, device=torch.device("cpu")) for _ in "ab")
    weights, stale = torch.ones(2, 64, 64, dtype=bf16), torch.ones(1, dtype=int32)
    scaled.quantize_weight(weights, stale, values, back)
    rows.zero_padding(torch.ones(16, 64, dtype=bf16), torch.ones(16), demand_E[None], 2)
    choices, at_R = torch.zeros(64, 2, dtype=int32), torch.zeros(2, dtype=torch.int64)
    sizes = {"rank": 0, "num_slots": 64, "num_local_experts": 4}
    for beside in ((choices, torch.ones(64, 2), demand_E), None):
        direct.push(torch.ones(64, 64, dtype=bf16), choices, at_R, at_R, **sizes, beside=beside)
    direct.send_beside(torch.ones(128), torch.zeros(2, 64, 2, dtype=int32), at_R, demand_E)
    segments = gemm.Segments(
        offsets=torch.zeros(3, dtype=int32),
        num_experts=2,
        num_sources=1,
        num_rows=64,
        num_expected=64,
        tiles=torch.zeros(4, 4, dtype=int32),
    )
    to = torch.zeros(64, dtype=torch.int64)
    gemm.rows_times_weights(weights[0], weights, segments, at_M=to, stored=False)
    eight = Scaled(values=values.values[0], scales=values.scales[0], dtype=bf16)
    gemm.rows_times_weights(eight, values, segments, at_M=to, stored=False)


def compiled(arch: int, *, once: bool = False) -> dict[str, int]:
    """Return the bytes of each kernel's largest program for a GPU."""
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
