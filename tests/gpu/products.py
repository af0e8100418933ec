"""Grouped products of a rank's experts by themselves, ours beside torch's: microseconds of a call.

    python -m tests.gpu.products --out notebooks/results/grouped_gemm.json --commit SHA

It uses one GPU. A random routing of all ranks brings each expert its rows. Products are rows times
weights (`fc1`, `fc2`), gradients of rows (`dgrad`) and of weights (`wgrad`), and weight gradients
added to fp32 buffers, by torch a product and an addition.

Shape suffixes: L experts of the rank, N their rows, I and O widths of a product.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from padded_dispatch.bench.cases import MODELS
from padded_dispatch.kernels import Segments, gemm
from padded_dispatch.utils.results import about, append_run
from padded_dispatch.utils.routings import routing_scores

_CALLS = 10
# Private until torch 2.10.
_grouped_mm: Any = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]


def microseconds(run: Callable[[], object], repeats: int) -> list[float]:
    """Return the time of one call in each repeat, averaged over ten in a CUDA graph."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            run()
    samples = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # Keeps the device busy while the host launches the timed replay.
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(round(start.elapsed_time(end) / _CALLS * 1e3, 2))
    return samples


def rows_of_experts(model: str, ep: int, num_tokens: int) -> Tensor:
    """Return the rows of each local expert, int64 [L], of a random routing of all ranks."""
    shape = MODELS[model]
    scores_TE = routing_scores(num_tokens * ep, shape.num_experts, shape.top_k)
    chosen_TK = torch.from_numpy(scores_TE).topk(shape.top_k).indices
    rows_E = torch.bincount(chosen_TK.flatten(), minlength=shape.num_experts)
    return rows_E[: shape.num_experts // ep]


def products(
    name: str, count_L: Tensor, width_in: int, width_out: int
) -> dict[str, Callable[[], object]]:
    """Return calls of each product of a linear by name."""
    num_local, num_rows = len(count_L), int(count_L.sum())
    ends_L = count_L.cumsum(0).to("cuda", torch.int32)
    segments = Segments(
        offsets=torch.cat([ends_L.new_zeros(1), ends_L]),
        num_experts=num_local,
        num_sources=1,
        num_rows=num_rows,
        num_expected=num_rows,
    )
    segments = dataclasses.replace(segments, tiles=gemm.row_tiles(segments))
    torch.manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return (torch.randn(sizes, device="cuda") * sizes[-1] ** -0.5).bfloat16()

    rows_NI, grad_NO = draw(num_rows, width_in), draw(num_rows, width_out)
    weight_LOI = draw(num_local, width_out, width_in)
    weight_LIO = weight_LOI.transpose(1, 2)
    sums_LOI = torch.zeros_like(weight_LOI, dtype=torch.float32)
    ours = functools.partial(gemm.rows_times_weights, segments=segments, stored=False)
    how: dict[str, Any] = {"grad_stored": False, "rows_stored": False}
    operands = grad_NO, rows_NI, segments
    torchs = functools.partial(_grouped_mm, offs=ends_L)
    return {
        name: lambda: ours(rows_NI, weight_LOI),
        f"{name}, torch": lambda: torchs(rows_NI, weight_LIO),
        f"{name} dgrad": lambda: ours(grad_NO, weight_LIO),
        f"{name} dgrad, torch": lambda: torchs(grad_NO, weight_LOI),
        f"{name} wgrad": lambda: gemm.weight_gradients(*operands, **how),
        f"{name} wgrad, torch": lambda: torchs(grad_NO.T, rows_NI),
        f"{name} wgrad added": lambda: gemm.add_weight_gradients(*operands, sums_LOI, **how),
        f"{name} wgrad added, torch": lambda: sums_LOI.add_(torchs(grad_NO.T, rows_NI)),
    }


def main() -> int:
    """Time all products; return 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the results file")
    parser.add_argument("--commit", required=True, help="commit that this tree was made from")
    parser.add_argument("--models", nargs="+", default=["qwen3-30b-a3b", "gpt-oss-20b"])
    parser.add_argument("--ep", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    given = parser.parse_args()
    command = " ".join(["python -m tests.gpu.products", *sys.argv[1:]])
    run = about(num_gpus=1, command=command, commit=given.commit)
    for ep in given.ep:
        for model in given.models:
            shape, count_L = MODELS[model], rows_of_experts(model, ep, given.tokens)
            widths = {
                "fc1": (shape.hidden_size, 2 * shape.ffn_size),
                "fc2": (shape.ffn_size, shape.hidden_size),
            }
            for linear, (width_in, width_out) in widths.items():
                flops = 2 * int(count_L.sum()) * width_in * width_out
                for part, call in products(linear, count_L, width_in, width_out).items():
                    samples = microseconds(call, repeats=9)
                    us = statistics.median(samples)
                    row = {"model": model, "ep": ep, "tokens": given.tokens, "part": part}
                    row |= {"us": us, "samples_us": samples, "tflops": flops / us / 1e6}
                    append_run(given.out, run, [row])
                    sys.stdout.write(f"{model}, EP {ep}, {part}: {us:.0f} us\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
