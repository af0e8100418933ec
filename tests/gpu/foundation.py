"""Check on GPUs that the padded layer and stock Megatron compute the same; write the errors.

    python -m tests.gpu.foundation --out notebooks/results/foundation.json --commit SHA

It uses all GPUs of the machine: parity of the MoE layer in every mix of parallelism that fits them,
and of a pipelined GPT. The results file is complete after every row. `--only TEXT` runs the cases
whose name contains TEXT. `--cpu N` runs N processes over gloo, to try this program without GPUs.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from padded_dispatch.megatron import PaddedOptions
from padded_dispatch.megatron.options import to_plain
from tests.support.gpu_rows import Rows, parsed, wants
from tests.support.layer_parity import LayerCase, layer_parity, single_draws
from tests.support.pipeline_parity import STAGES, PipelineCase, pipeline_parity
from tests.support.pool import WorkerError, WorkerPool

DTYPES = (torch.bfloat16, torch.float32)
CASE_S = 120.0
OVERLAP = (("moe_shared_expert_overlap", True),)
# The recipes that Hopper has; "blockwise" needs widths that are multiples of 128.
FP8_RECIPES = {"tensorwise": "hybrid", "delayed": "hybrid", "blockwise": "e4m3"}
RECOMPUTE = (("recompute_granularity", "selective"), ("recompute_modules", ["moe"]))

# Libraries read these when they are loaded, so they are set before a worker starts. Without the
# first, Transformer Engine computes fp32 products in TF32.
ENVIRONMENT = {
    "NVIDIA_TF32_OVERRIDE": "0",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def layer_cases(device: str, num_ranks: int) -> Iterator[LayerCase]:
    """Yield the cases of `num_ranks` ranks; ranks beyond tp * ep are replicas with other tokens."""
    sizes: dict[str, Any] = {"device": device}
    if device == "cuda":
        sizes |= {"num_experts": 16, "top_k": 4, "hidden": 256, "ffn": 192, "seq": 130}
    for dtype in DTYPES:
        plain = {**sizes, "dtype": dtype}
        for ep in (1, 2, 4, 8):
            if num_ranks % ep == 0:
                yield LayerCase(name=f"EP{ep}", ep=ep, **plain)
        if num_ranks % 2 == 0:
            yield LayerCase(name="TP2/EP2", tp=2, ep=2, **plain)
            yield LayerCase(name="TP2/ETP2", tp=2, etp=2, **plain)
        if num_ranks % 4 == 0:
            yield LayerCase(name="TP2/EP2/ETP2", tp=2, ep=2, etp=2, **plain)
        wide = {**plain, "ep": num_ranks}
        few = {**wide, "num_experts": max(2, num_ranks), "top_k": 1}
        yield LayerCase(name="fewest experts", **few)
        full = {**wide, "top_k": 1, "routing": "one expert"}
        yield LayerCase(name="every token to one expert", **full)
        if num_ranks > 1:
            yield LayerCase(name="a rank whose experts get nothing", routing="idle rank", **wide)
        yield LayerCase(name="default options", options=PaddedOptions(), **wide)
        yield LayerCase(name="bias", bias=True, **wide)
        yield LayerCase(name="recompute", ours=RECOMPUTE, **wide)
        if dtype == torch.bfloat16 or device == "cpu":
            batched = PaddedOptions(experts="batched")
            yield LayerCase(name="batched experts", options=batched, **wide)
            yield LayerCase(name="batched experts, every token to one", options=batched, **full)
            packed = {"options": PaddedOptions(experts="packed")}
            yield LayerCase(name="packed experts", **packed, **wide)
            yield LayerCase(name="packed experts, every token to one", **packed, **full)
            for experts in ("module", "packed", "batched"):
                options = PaddedOptions(experts=experts, exchange="alltoall")
                if num_ranks % 2 == 0 and experts != "module":
                    split = {"tp": 2, "ep": num_ranks // 2, "etp": 2, "options": options, **plain}
                    yield LayerCase(name=f"{experts} experts, ETP2", **split)
                if device == "cuda":  # Megatron asks for Transformer Engine.
                    name = f"{experts} experts, latent"
                    yield LayerCase(name=name, options=options, latent=64, **wide)
            gpt_oss = {"bias": True, "gpt_oss": True}
            yield LayerCase(name="packed experts like GPT-OSS's", **packed, **gpt_oss, **wide)
        if dtype == torch.bfloat16 and device == "cuda":
            for recipe, number in FP8_RECIPES.items():
                both = (("fp8", number), ("fp8_recipe", recipe))
                yield LayerCase(name=f"fp8, {recipe}", both=both, **{**wide, "ffn": 256})
        yield LayerCase(name="shared experts", shared_ffn=64, **wide)
        yield LayerCase(name="shared experts, overlap", shared_ffn=64, ours=OVERLAP, **wide)


def pipeline_cases(device: str, num_ranks: int) -> Iterator[PipelineCase]:
    """Yield the cases of two pipeline stages with `num_ranks / 2` ranks each."""
    sizes: dict[str, Any] = {"device": device, "ep": num_ranks // STAGES}
    if device == "cuda":
        sizes |= {"num_experts": 8, "hidden": 256, "ffn": 192, "heads": 4, "vocab": 512, "seq": 64}
    if num_ranks % STAGES == 0:
        for dtype in DTYPES:
            yield PipelineCase(name=f"PP2/VPP2/EP{sizes['ep']}", dtype=dtype, **sizes)


def fields_of(case: Any) -> dict[str, Any]:
    """Return the fields of a case as JSON values."""
    row = dataclasses.asdict(case) | {"dtype": str(case.dtype).removeprefix("torch.")}
    return row | {"options": to_plain(case.options)} if isinstance(case, LayerCase) else row


def run_case(pool: WorkerPool, check: str, parity: Callable[..., Any], case: Any) -> dict[str, Any]:
    """Run one case; return its row: the case, its errors, and whether it passed."""
    started = time.monotonic()
    row: dict[str, Any] = {"check": check, "passed": False, **fields_of(case)}
    row |= {"contender": "ours", "baseline": case.stock_type, "ranks": pool.num_workers}
    row |= {"repeats": None, "errors": None, "failures": None}
    try:
        found = pool.run(parity, case, timeout_s=CASE_S)
    except WorkerError as error:
        row["failures"] = [str(error)[-2000:]]
    else:
        row["repeats"] = all(rank.repeats for rank in found)
        row["errors"] = {name: dataclasses.asdict(e) for name, e in found[0].errors.items()}
        row["failures"] = sorted({failure for rank in found for failure in rank.failures()})
        row["passed"] = not row["failures"]
    return row | {"seconds": round(time.monotonic() - started, 2)}


def count_misses(pool: WorkerPool, case: LayerCase, num_draws: int) -> dict[str, Any]:
    """Return a row that counts how often ours and stock break the rule, draw by draw."""
    misses = pool.run(single_draws, case, num_draws, timeout_s=CASE_S)[0]
    return {
        "check": "single draws",
        **fields_of(case),
        "draws": num_draws,
        "misses": {name: dataclasses.asdict(m) for name, m in misses.items()},
        "passed": True,  # The row only counts.
        "failures": None,
    }


def main() -> int:
    """Run all cases; return 1 when one failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--draws", type=int, help="only count how many single draws of 'bias', fp32, EP2 miss"
    )
    arguments = parsed(parser)
    rows = Rows(arguments, arguments.num_gpus, ENVIRONMENT)
    device = "cpu" if arguments.cpu else "cuda"
    layers = list(layer_cases(device, arguments.num_ranks))
    checks: list[tuple[str, Callable[..., Any], Any]]
    checks = [("layer parity", layer_parity, case) for case in layers]
    for case in pipeline_cases(device, arguments.num_ranks):
        checks.append(("pipeline parity", pipeline_parity, case))
    with WorkerPool(arguments.num_ranks, backend=arguments.backend) as pool:
        if arguments.draws:
            checks = []
            (bias,) = (c for c in layers if c.name == "bias" and c.dtype == torch.float32)
            rows.add(count_misses(pool, dataclasses.replace(bias, ep=2), arguments.draws))
        for check, parity, case in checks:
            if wants(arguments, case.name):
                rows.add(run_case(pool, check, parity, case))
    return rows.exit_code()


if __name__ == "__main__":
    sys.exit(main())
