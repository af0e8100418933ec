"""Products and quantizing in e4m3, beside bf16 and torch: microseconds and errors on one GPU.

    python -m tests.gpu.fp8 --out notebooks/results/fp8.json --commit SHA

Rows and gradients are normal, so are weights. `burst`: a call in a graph of ten, a pause before
each; `sustained`: after a second of the same work. `error`: the norm of the difference to fp64,
relative, of the product of the values that were quantized (`sums`), and of those before (`all`).

Shape suffixes: L experts of the rank, N their rows, D hidden size, F ffn size, G = 2F.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from padded_dispatch.bench.cases import MODELS
from padded_dispatch.experts.activation import Activation
from padded_dispatch.experts.scaled import ScaledWeights, quantize, widen
from padded_dispatch.kernels import Scaled, Segments, activation, gemm, rows
from padded_dispatch.utils.results import about, append_run
from padded_dispatch.utils.routings import routing_scores

_CALLS = 10
_SECONDS = 1.0
# Private, and no other has a scale per row.
_scaled_grouped_mm: Any = torch._scaled_grouped_mm  # pyright: ignore[reportPrivateImportUsage]


def microseconds(run: Callable[[], object]) -> dict[str, float]:
    """Return the time of one call, burst and sustained, from a CUDA graph of ten."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            run()

    def timed(replays: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / replays / _CALLS * 1e3

    timed(1)
    bursts = []
    for _ in range(9):
        time.sleep(0.02)
        bursts.append(timed(1))
    burst = statistics.median(bursts)
    replays = max(4, int(_SECONDS * 1e6 / burst / _CALLS))
    timed(replays)
    return {"us": round(burst, 2), "sustained_us": round(timed(replays // 2), 2)}


def rows_of_experts(model: str, ep: int, num_tokens: int) -> Tensor:
    """Return the rows of each local expert, int64 [L], of a random routing of all ranks."""
    shape = MODELS[model]
    scores_TE = routing_scores(num_tokens * ep, shape.num_experts, shape.top_k)
    chosen_TK = torch.from_numpy(scores_TE).topk(shape.top_k).indices
    rows_E = torch.bincount(chosen_TK.flatten(), minlength=shape.num_experts)
    return rows_E[: shape.num_experts // ep]


def error(found: Tensor, exact: Tensor) -> float:
    """Return the relative norm of a difference."""
    return float(((found.double() - exact).norm() / exact.norm()).cpu())


class Layer:
    """The rows and weights of a rank's experts, in bf16 and in e4m3."""

    def __init__(self, model: str, ep: int, num_tokens: int) -> None:
        shape, count_L = MODELS[model], rows_of_experts(model, ep, num_tokens)
        self.D, self.F, self.L = shape.hidden_size, shape.ffn_size, len(count_L)
        self.top_k, self.count_L = shape.top_k, count_L.tolist()
        self.ends_L = count_L.cumsum(0).to("cuda", torch.int32)
        self.N = int(count_L.sum())
        segments = Segments(
            offsets=torch.cat([self.ends_L.new_zeros(1), self.ends_L]),
            num_experts=self.L,
            num_sources=1,
            num_rows=self.N,
            num_expected=self.N,
        )
        self.segments = dataclasses.replace(segments, tiles=gemm.row_tiles(segments))
        torch.manual_seed(0)
        self.fc1_LGD = self.draw(self.L, 2 * self.F, self.D)
        self.fc2_LDF = self.draw(self.L, self.D, self.F)
        self.scaled = ScaledWeights(self.fc1_LGD, self.fc2_LDF)
        self.scaled.refresh(self.fc1_LGD, self.fc2_LDF)

    @staticmethod
    def draw(*sizes: int) -> Tensor:
        return (torch.randn(sizes, device="cuda") * sizes[-1] ** -0.5).bfloat16()

    def empty(self, width: int) -> Scaled:
        device = torch.device("cuda")
        return Scaled.empty(self.N, width, dtype=torch.bfloat16, device=device)

    def products(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield products by name: the four that compute rows."""
        scaled, D, F, segments = self.scaled, self.D, self.F, self.segments
        for name, width, weight_LOI, eight in (
            ("fc1", D, self.fc1_LGD, scaled.fc1_LGD),
            ("fc2", F, self.fc2_LDF, scaled.fc2_LDF),
            ("fc2 dgrad", D, self.fc2_LDF.transpose(1, 2), scaled.fc2_LFD),
            ("fc1 dgrad", 2 * F, self.fc1_LGD.transpose(1, 2), scaled.fc1_LDG),
        ):
            rows_NI = self.draw(self.N, width)
            given, flops = quantize(rows_NI), 2 * self.N * width * weight_LOI.shape[1]
            count = next(count for count in self.count_L if count)
            first = self.count_L.index(count)
            weight = weight_LOI[first].double()
            exact = rows_NI[:count].double() @ weight.T
            widened = widen(given, torch.float64)[:count]
            as_given = widened @ (eight.values[first].double() * eight.scales[first, :, None]).T
            calls: dict[str, Callable[[], Tensor]] = {
                "bf16": lambda r=rows_NI, w=weight_LOI: gemm.rows_times_weights(
                    r, w, segments, stored=False
                ),
                "e4m3": lambda r=given, w=eight: gemm.rows_times_weights(
                    r, w, segments, stored=False
                ),
                "e4m3, torch": lambda r=given, w=eight: _scaled_grouped_mm(
                    r.values,
                    w.values.transpose(1, 2),
                    r.scales,
                    w.scales,
                    offs=self.ends_L,
                    out_dtype=torch.bfloat16,
                    use_fast_accum=True,
                ),
            }
            for kind, call in calls.items():
                found = call()[:count]
                errors = {"all": error(found, exact)}
                errors |= {} if kind == "bf16" else {"sums": error(found, as_given)}
                row = {"part": name, "kind": kind, "error": errors, **microseconds(call)}
                for at, us in (("tflops", "us"), ("sustained_tflops", "sustained_us")):
                    row[at] = round(flops / row[us] / 1e6, 1)
                yield f"{name}, {kind}", row
            del rows_NI, given, exact, widened, calls
            torch.cuda.empty_cache()

    def quantizing(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what makes rows in e4m3, beside the same kernel without, and weights."""
        D, F, N, segments = self.D, self.F, self.N, self.segments
        # Each token has up to K rows here, one after another over the rows that there are.
        num_tokens = -(-N // self.top_k)
        row_SPK = torch.arange(num_tokens * self.top_k, device="cuda", dtype=torch.int32)
        row_SPK = row_SPK[torch.randperm(len(row_SPK), device="cuda")]
        row_SPK = torch.where(row_SPK < N, row_SPK, -1).view(1, num_tokens, self.top_k)
        tokens, out = self.draw(1, num_tokens, D), {D: self.empty(D), F: self.empty(F)}
        out[2 * F] = self.empty(2 * F)
        how: Any = vars(Activation())
        fc1_NG, prob_N = self.draw(N, 2 * F), torch.rand(N, device="cuda")
        grad_NF, grad_prob_N = self.draw(N, F), torch.empty(N, device="cuda")

        def spread(scaled: Scaled | None) -> object:
            return rows.spread_rows(tokens, None, -1, row_SPK, segments, None, scaled=scaled)

        def activate(scaled: Scaled | None, *grads: Tensor) -> object:
            given = fc1_NG, None, prob_N, segments, *grads
            return activation.activate(*given, **how, scaled=scaled)

        def weights(stale: bool) -> None:
            if stale:
                self.scaled.mark_stale()
            self.scaled.refresh(self.fc1_LGD, self.fc2_LDF)

        grads, row = (grad_NF, grad_prob_N), N * 2
        moved = 2 * (self.fc1_LGD.numel() + self.fc2_LDF.numel())  # bytes in bf16
        for name, call, num_bytes in (
            ("rows of tokens", lambda: spread(None), row * D + tokens.nbytes),
            ("rows of tokens, e4m3 too", lambda: spread(out[D]), 1.5 * row * D + tokens.nbytes),
            ("activation", lambda: activate(None), row * 3 * F),
            ("activation, e4m3", lambda: activate(out[F]), row * 2.5 * F),
            ("its backward", lambda: activate(None, *grads), row * 6 * F),
            ("its backward, e4m3 too", lambda: activate(out[2 * F], *grads), row * 7 * F),
            ("weights that are stale", lambda: weights(True), 3 * moved),
            ("weights that are not", lambda: weights(False), 0),
        ):
            found = microseconds(call)
            speed = {"gb_per_s": round(num_bytes / found["us"] / 1e3, 1)} if num_bytes else {}
            yield name, {"part": name, **found, **speed}


def main() -> int:
    """Time all parts; return 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the results file")
    parser.add_argument("--commit", required=True, help="commit that this tree was made from")
    models = ["qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3"]
    parser.add_argument("--models", nargs="+", default=models)
    parser.add_argument("--ep", nargs="+", type=int, default=[2])
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    given = parser.parse_args()
    command = " ".join(["python -m tests.gpu.fp8", *sys.argv[1:]])
    run = about(num_gpus=1, command=command, commit=given.commit)
    for ep in given.ep:
        for model in given.models:
            layer = Layer(model, ep, given.tokens)
            for part in (layer.products, layer.quantizing):
                for name, row in part():
                    where = {"model": model, "ep": ep, "tokens": given.tokens}
                    append_run(given.out, run, [where | row])
                    line = f"{row['us']:.0f} us, sustained {row['sustained_us']:.0f}"
                    sys.stdout.write(f"{model}, EP {ep}, {name}: {line}\n")
                    sys.stdout.flush()
            del layer
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
