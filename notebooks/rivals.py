"""One MoE layer, forward and backward, with kernels of other projects and with ours, in one run.

    python notebooks/rivals.py --out notebooks/results/rivals.json --commit SHA [--ep 2] [--kernels]

All contenders get the same tokens, chosen experts, probabilities, weights and output gradient. A
pass starts there, without a router, and ends with the gradients of tokens, probabilities and
weights. Errors are relative norms against fp64 at the measured size, and must be at most twice
those of `torch` in the same case: `wrong` lists the others. What cannot be imported, run or
captured has a `reason`. `recorded` draws experts with the frequencies of a recorded run, added up
in groups where a model has fewer; `busiest` is the largest load relative to the mean. With `--ep`
each rank has its tokens and a part of the experts; rank 0 measures. With `--kernels` a row names
the kernels of a graph. From:

torch       torchtitan b5bcd76c6, models/common/{moe,token_dispatcher}.py; scatter_add is torch's
sonic       sonic-moe 0.1.2, functional/__init__.py, `moe_TC_softmax_topk_layer` after its router
liger       liger-kernel 0.8.5, ops/fused_moe.py
ligercute   liger-cute-kernels 0.8.5, called as in liger-kernel 0.8.5, ops/cute/ops/moe.py
scattermoe  shawntan/scattermoe 47b5e15, mlp.py, GLUMLP
megablocks  databricks/megablocks 78eea65, layers/dmoe.py, on tgale96/grouped_gemm ebeae0b

With `--ep` torch is torchtitan's AllToAllTokenDispatcher, which reads counts on the host, and
minimal its MinimalAsyncEP. All rows that it has room for are copied, since backward's exchange
overwrites them (torchtitan runs the layer again instead). Its buffers are not in `peak_gib`, nor
are those of ligercute, which needs NVSHMEM 3.6.5, CUDA 12's runtime and `NVSHMEM_DISABLE_NVLS=1`.
"""

import argparse
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from padded_dispatch import Activation, DispatchConfig, ExpertWeights, PaddedDispatcher
from padded_dispatch.bench.cases import MODELS
from padded_dispatch.bench.measure import kernels_us, sm_mhz
from padded_dispatch.exchange.symmetric_memory import allocated_gib
from padded_dispatch.utils.results import about, append_run, require_results

RECORDED, STEP, LAYER = Path(__file__).parent / "results" / "routing_counts.npz", 10, 6
SAMPLES, PASSES, SUSTAINED_MS, PROFILED = 5, 20, 1000, 5
LIMIT_S = 400  # of one row: QuACK and Triton tune when a shape is new

Row, Inputs = dict[str, Any], SimpleNamespace


def draw(case: Row) -> Inputs:
    """Return what all ranks get. The gate is the first half of fc1; probabilities are fp32."""
    shape, T = MODELS[case["model"]], case["tokens"] * case["ep"]
    D, E, K, width = shape.hidden_size, shape.num_experts, shape.top_k, shape.ffn_size
    torch.manual_seed(1234)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", None)
    normal = partial(torch.randn, device=device, dtype=dtype)
    count_E = np.ones(E)
    if case["routing"] == "recorded":
        count_E = np.load(RECORDED)["counts"][STEP, LAYER].sum(0).reshape(E, -1).sum(1)
    # The largest K of log frequencies with Gumbel noise are a draw without putting back.
    noise_TE = torch.empty(T, E, device=device).exponential_().log()
    score_TE = torch.tensor(np.maximum(count_E, 0.5), device=device).log() - noise_TE
    return Inputs(
        tokens_TD=normal(T, D),
        prob_TK=normal(T, K).float().softmax(-1),
        expert_TK=score_TE.topk(K).indices,
        fc1_EGD=normal(E, 2 * width, D) * D**-0.5,
        fc2_EDF=normal(E, D, width) * width**-0.5,
        grad_TD=normal(T, D),
    )


class Contender:
    """A layer with weights in its own layout, and the distribution and module that it needs."""

    package = module = "torch"

    def __init__(self, given: Inputs, num_ranks: int) -> None:
        self.num_ranks, self.top_k = num_ranks, given.prob_TK.shape[1]
        self.num_experts = len(given.fc1_EGD) * num_ranks
        self.lib: Any = importlib.import_module(self.module)
        weights = self.convert(given.fc1_EGD, given.fc2_EDF)
        self.weights = [nn.Parameter(weight.contiguous().clone()) for weight in weights]

    def convert(self, fc1_EGD: Tensor, fc2_EDF: Tensor) -> list[Tensor]:
        """Return weights, or their gradients, in the contender's layout."""
        return [fc1_EGD, fc2_EDF]


class Torch(Contender):
    def convert(self, fc1_EGD: Tensor, fc2_EDF: Tensor) -> list[Tensor]:
        return [*fc1_EGD.chunk(2, 1), fc2_EDF]

    def forward(self, tokens_TD: Tensor, prob_TK: Tensor, expert_TK: Tensor) -> Tensor:
        choice_N = expert_TK.flatten().argsort(stable=True)
        token_N = choice_N // self.top_k
        rows_ND = self.experts(tokens_TD[token_N], self.counts(expert_TK))
        rows_ND = (rows_ND.float() * prob_TK.flatten()[choice_N, None]).to(tokens_TD.dtype)
        index_ND = token_N[:, None].expand_as(rows_ND)
        return torch.zeros_like(tokens_TD).scatter_add(0, index_ND, rows_ND)

    def counts(self, expert_TK: Tensor) -> Tensor:
        E = self.num_experts
        return torch.histc(expert_TK.float(), E, 0, E).long()

    def experts(self, rows_ND: Tensor, count_L: Tensor) -> Tensor:
        gate, up, down = (w.transpose(-2, -1) for w in self.weights)
        product = partial(torch._grouped_mm, offs=count_L.cumsum(0, dtype=torch.int32))
        return product(F.silu(product(rows_ND, gate)) * product(rows_ND, up), down)


class AllToAll(Torch):
    def experts(self, rows_ND: Tensor, count_E: Tensor) -> Tensor:
        sent_RL = count_E.view(self.num_ranks, -1)
        dist.all_to_all_single(came_RL := torch.empty_like(sent_RL), sent_RL)
        sent, came = (count_RL.sum(1).tolist() for count_RL in (sent_RL, came_RL))
        rows_ND = all_to_all_single_autograd(rows_ND, came, sent, dist.group.WORLD)
        local_RL = torch.arange(came_RL.shape[1], device=rows_ND.device).expand_as(came_RL)
        order_N = local_RL.flatten().repeat_interleave(came_RL.flatten()).argsort(stable=True)
        rows_ND = super().experts(rows_ND[order_N], came_RL.sum(0))[order_N.argsort()]
        return all_to_all_single_autograd(rows_ND, sent, came, dist.group.WORLD)


class Minimal(Torch):
    package, module = "torchtitan", "torchtitan.distributed.minimal_async_ep"

    def __init__(self, given: Inputs, num_ranks: int) -> None:
        super().__init__(given, num_ranks)
        (num_tokens, width), like = given.tokens_TD.shape, given.tokens_TD
        sizes = num_tokens, len(given.fc1_EGD), self.top_k
        self.lib.init_buffer(dist.group.WORLD, width, *sizes, like.dtype, like.device)

    def forward(self, tokens_TD: Tensor, prob_TK: Tensor, expert_TK: Tensor) -> Tensor:
        (T, K), R, count_E = expert_TK.shape, self.num_ranks, self.counts(expert_TK)
        most = R * T * min(K, self.num_experts // R)
        rows_ND, *way, choice_N, row_N, count_L = self.lib.dispatch_op(
            tokens_TD, expert_TK, count_E, most, R
        )
        rows_ND = self.experts(rows_ND.clone(), count_L)
        beside = row_N, choice_N, prob_TK.flatten(), T, K
        return self.lib.combine_op(rows_ND, *way, *beside)[0]


class Ours(Contender):
    package, module = "padded-dispatch", "padded_dispatch"

    def __init__(self, given: Inputs, num_ranks: int) -> None:
        super().__init__(given, num_ranks)
        sizes = {"num_experts": self.num_experts, "top_k": self.top_k, "num_ranks": num_ranks}
        config = DispatchConfig(**sizes, capacity_factor=1.25, capacity_pool="store")
        group = dist.group.WORLD if num_ranks > 1 else None
        self.dispatcher = PaddedDispatcher(config, group=group)
        self.experts = ExpertWeights(fc1_LGD=self.weights[0], fc2_LDF=self.weights[1])

    def forward(self, tokens_TD: Tensor, prob_TK: Tensor, expert_TK: Tensor) -> Tensor:
        prob_TE = prob_TK.new_zeros(len(prob_TK), self.num_experts).scatter(1, expert_TK, prob_TK)
        map_TE = torch.zeros_like(prob_TE, dtype=torch.bool).scatter(1, expert_TK, True)
        return self.dispatcher.run(tokens_TD, prob_TE, map_TE, self.experts, Activation())


class Sonic(Contender):
    package, module = "sonic-moe", "sonicmoe.functional"

    def convert(self, fc1_EGD: Tensor, fc2_EDF: Tensor) -> list[Tensor]:
        return [fc1_EGD.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2), fc2_EDF]  # in turns

    def forward(self, tokens_TD: Tensor, prob_TK: Tensor, expert_TK: Tensor) -> Tensor:
        lib, E, (T, K) = self.lib, self.num_experts, expert_TK.shape
        swiglu, fc1, fc2 = lib.ActivationType.SWIGLU, *(w.permute(1, 2, 0) for w in self.weights)
        sizes = (E, E + 1, T * K, T * K, T * K)
        count, end, *index = (tokens_TD.new_empty(n, dtype=torch.int32) for n in sizes)
        lib.TC_topk_router_metadata_triton(expert_TK.int(), E, count, end, *index)
        up = (tokens_TD, fc1, None, end, T * K, K, *index, None, False, swiglu, False, False)
        rows, kept = lib._UpProjection.apply(*up)
        down = (rows, kept, fc2, None, prob_TK, end, T, K, *index, None, False, swiglu)
        return lib._DownProjection.apply(*down)


class Liger(Contender):
    package, module = "liger-kernel", "liger_kernel.ops.fused_moe"

    def forward(self, tokens_TD: Tensor, prob_TK: Tensor, expert_TK: Tensor) -> Tensor:
        inputs = (tokens_TD, *self.weights, expert_TK.int(), prob_TK)
        return self.lib.LigerFusedMoEFunction.apply(*inputs)


class LigerCute(Torch):
    package, module = "liger-cute-kernels", "liger_kernel.ops.cute.ops.moe"

    def __init__(self, given: Inputs, num_ranks: int) -> None:
        super().__init__(given, num_ranks)
        if num_ranks == 1:  # NVSHMEM starts from a process group.
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        native = importlib.import_module("liger_cute_kernels")
        sizes = *given.tokens_TD.shape, self.num_experts, self.top_k
        native.configure(moe=native.MoEConfig(*sizes, num_hosts=1, gpus_per_host=num_ranks))

    def forward(self, tokens_TD: Tensor, prob_TK: Tensor, expert_TK: Tensor) -> Tensor:
        inputs = (tokens_TD, expert_TK.int(), prob_TK.to(tokens_TD.dtype), *self.weights)
        apply = self.lib.LigerExpertParallelFusedMoEFunction.apply
        return apply(*inputs, self.num_experts, self.top_k, None)  # None: all ranks


class ScatterMoE(Contender):
    package, module = "scattermoe", "scattermoe.mlp"

    def convert(self, fc1_EGD: Tensor, fc2_EDF: Tensor) -> list[Tensor]:
        return [torch.cat(fc1_EGD.chunk(2, 1)[::-1], 1), fc2_EDF]  # up before the gate

    def __init__(self, given: Inputs, num_ranks: int) -> None:
        super().__init__(given, num_ranks)
        with torch.device("meta"):
            self.mlp = self.lib.GLUMLP(*given.fc2_EDF.shape[1:], self.num_experts, self.top_k)
        self.mlp.experts.weight, self.mlp.output_experts.weight = self.weights

    def forward(self, tokens_TD: Tensor, prob_TK: Tensor, expert_TK: Tensor) -> Tensor:
        return self.mlp(tokens_TD, prob_TK.to(tokens_TD.dtype), expert_TK)


class MegaBlocks(Contender):
    package, module = "megablocks", "megablocks"

    def convert(self, fc1_EGD: Tensor, fc2_EDF: Tensor) -> list[Tensor]:
        return [w.flatten(0, 1) for w in (*fc1_EGD.chunk(2, 1), fc2_EDF.transpose(1, 2))]

    def __init__(self, given: Inputs, num_ranks: int) -> None:
        super().__init__(given, num_ranks)
        _, D, width = given.fc2_EDF.shape
        sizes = {"hidden_size": D, "ffn_hidden_size": width, "moe_num_experts": self.num_experts}
        kind = {"mlp_type": "glu", "bias": False, "activation_fn": F.silu, "moe_top_k": self.top_k}
        arguments = self.lib.Arguments(**sizes, **kind, fp16=False, bf16=True)
        self.mlp = self.lib.ParallelDroplessMLP(arguments)
        self.mlp.mlp.w1, self.mlp.mlp.v1, self.mlp.mlp.w2 = self.weights

    def forward(self, tokens_TD: Tensor, prob_TK: Tensor, expert_TK: Tensor) -> Tensor:
        return self.mlp.forward_once(tokens_TD, prob_TK.to(tokens_TD.dtype), expert_TK)[0]


# Errors are compared with the first's.
KINDS = (Torch, Ours, Sonic, LigerCute, Liger, ScatterMoE, MegaBlocks)
CONTENDERS = {kind.__name__.lower(): kind for kind in KINDS}
ON_RANKS = {"torch": AllToAll, "ours": Ours, "minimal": Minimal, "ligercute": LigerCute}


def reference(given: Inputs) -> list[Tensor]:
    """Return output and gradients in fp64, expert by expert."""
    inputs = (given.tokens_TD, given.prob_TK, given.fc1_EGD, given.fc2_EDF)
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    tokens, prob, fc1, fc2 = leaves
    output = torch.zeros_like(tokens)
    for expert, (both, down) in enumerate(zip(fc1.unbind(), fc2.unbind(), strict=True)):
        token, k = (given.expert_TK == expert).nonzero(as_tuple=True)
        gate, up = (tokens[token] @ both.T).chunk(2, -1)
        output = output.index_add(0, token, (F.silu(gate) * up) @ down.T * prob[token, k, None])
    return [output.detach(), *torch.autograd.grad(output, leaves, given.grad_TD.double())]


def timed(run: Callable[[], object]) -> Row:
    """Return milliseconds of a pass: by events, of the host, and after a second of the same."""

    def repeat(passes: int) -> tuple[float, float]:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin = time.perf_counter()
        first.record()
        for _ in range(passes):
            run()
        last.record()
        host = (time.perf_counter() - begin) / passes * 1e3
        last.synchronize()
        return first.elapsed_time(last) / passes, host

    repeat(5)
    torch.cuda.reset_peak_memory_stats()
    samples, hosts = zip(*(repeat(PASSES) for _ in range(SAMPLES)), strict=True)
    ms, peak = statistics.median(samples), allocated_gib()
    passes = torch.tensor(round(SUSTAINED_MS / ms), device="cuda")
    if dist.is_initialized():
        dist.broadcast(passes, 0)
    repeat(passes := int(passes))  # It heats the GPU.
    row = {"ms": ms, "host_ms": statistics.median(hosts), "sustained_ms": repeat(passes)[0]}
    row |= {"peak_gib": peak, "sm_mhz": sm_mhz(torch.device("cuda")) or 0}
    return {n: round(x, 4) for n, x in row.items()} | {"samples_ms": [round(x, 4) for x in samples]}


def kernels(run: Callable[[], object]) -> list[Row]:
    """Return count and microseconds by kernel name in a pass, from 5 us on, longest first."""
    found = kernels_us(lambda _: run(), PROFILED, torch.device("cuda"))
    sums = {name: (len(us) / PROFILED, round(sum(us) / PROFILED, 2)) for name, us in found.items()}
    longest = sorted(sums.items(), key=lambda item: -item[1][1])
    rows = [{"name": name[:160], "count": count, "us": us} for name, (count, us) in longest]
    return [row for row in rows if row["us"] >= 5]


def measured(case: Row, wait: Callable[[], object]) -> Iterator[Row]:
    """Yield more and more of a row; `wait` comes between what can go beside others and the work."""
    rank, num_ranks = int(os.environ.get("RANK", 0)), case["ep"]
    kind = (CONTENDERS if num_ranks == 1 else ON_RANKS)[case["contender"]]
    importlib.import_module(kind.module)
    found = distributions(name=kind.package)  # none if it is run from its sources
    row = case | {"version": next((one.version for one in found), None)}
    yield row
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        torch.cuda.set_stream(torch.cuda.Stream())  # A capture must not meet the default stream.
    wait()
    if num_ranks > 1:
        dist.init_process_group()
    whole = draw(case)
    own = {name: value.chunk(num_ranks)[rank] for name, value in vars(whole).items()}
    given = Inputs(**own)
    contender = kind(given, num_ranks)
    tokens, prob = given.tokens_TD.requires_grad_(), given.prob_TK.requires_grad_()
    leaves = [tokens, prob, *contender.weights]

    def run() -> list[Tensor]:
        output = contender.forward(tokens, prob, given.expert_TK)
        return [output.detach(), *torch.autograd.grad(output, leaves, given.grad_TD)]

    def errors(results: list[Tensor]) -> dict[str, float]:
        pairs = zip(results, [*expected[:3], *contender.convert(*expected[3:])], strict=True)
        off = [((found - want).norm() / want.norm()).item() for found, want in pairs]
        return {"output": off[0], "tokens": off[1], "prob": off[2], "weights": max(off[3:])}

    load_E = whole.expert_TK.flatten().bincount(minlength=contender.num_experts).double()
    row["busiest"] = round((load_E.max() / load_E.mean()).item(), 3)
    row["eager"] = timed(run) if tokens.is_cuda else {}
    expected = [value.chunk(num_ranks)[rank] for value in reference(whole)]
    row["eager"]["errors"] = errors(run())
    yield row
    if not tokens.is_cuda:
        return
    try:
        graph = torch.cuda.CUDAGraph()
        # Threads of NCCL and NVSHMEM may call CUDA meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = run()
        row["graph"] = timed(graph.replay) | {"peak_gib": None}  # of replays alone it says nothing
        row["graph"]["errors"] = errors(results)
    except Exception as error:
        row["graph"] = {"reason": repr(error)[:300]}
    yield row
    if "kernels" in case and "ms" in row["graph"]:
        row["kernels"] = kernels(graph.replay)
        yield row


def rows_of(case: Row, wait: Callable[[], object]) -> Iterator[Row]:
    """Yield the row of a case as `measured` does, with the reason at the end if it fails."""
    row = case
    try:
        for row in measured(case, wait):
            yield row
    except Exception as error:
        yield row | {"reason": repr(error)[:300]}


def in_processes(cases: list[Row], seconds: float) -> Iterator[Row]:
    """Yield the row of each case from its own process; the next one starts meanwhile."""
    start = partial(subprocess.Popen, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    program, num_ranks = [sys.executable], cases[0]["ep"]
    if num_ranks > 1:
        program += f"-m torch.distributed.run --standalone --nproc-per-node {num_ranks}".split()
    commands = [[*program, __file__, "--row", json.dumps(case)] for case in cases]
    begin, following = time.monotonic(), start(commands[0])
    for case, then in itertools.zip_longest(cases, commands[1:]):
        process, following = following, start(then) if then else None
        try:
            output, _ = process.communicate("go\n", timeout=LIMIT_S)
            end = f"exit code {process.returncode}" if process.returncode else None
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate()
            end = f"longer than {LIMIT_S} s"
        lines = [line for line in output.splitlines() if line.startswith("{")]
        row = json.loads(lines[-1]) if lines else case
        yield {"reason": end} | row if end else row
        if following and time.monotonic() - begin > seconds:
            return following.terminate()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="results file")
    parser.add_argument("--commit", help="of the code")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts")
    parser.add_argument("--only", nargs="+", choices=sorted({*CONTENDERS, *ON_RANKS}))
    parser.add_argument("--models", nargs="+", default=["qwen3-30b-a3b", "gpt-oss-20b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 8192, 16384])
    parser.add_argument("--kernels", action="store_true", help="profile each graph")
    parser.add_argument("--seconds", type=float, default=480, help="start no case later")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes in this process")
    parser.add_argument("--row", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.row:
        for row in rows_of(given.row, sys.stdin.readline):
            if os.environ.get("RANK", "0") == "0":
                print(json.dumps(row), flush=True)
            elif "reason" in row:
                sys.exit(row["reason"])  # The launcher ends rank 0, too.
        os._exit(0)  # Without the libraries' own ends, in which a process may crash.
    if given.out is None:
        parser.error("--out must be a results file, got none")
    try:
        require_results("--out", given.out)
    except ValueError as error:
        parser.error(str(error))
    tokens, models = ((64,), ("tiny",)) if given.cpu else (given.tokens, given.models)
    only = given.only or (CONTENDERS if given.ep == 1 else ON_RANKS)
    order = itertools.product(models, tokens, ("uniform", "recorded"), only)
    names = ("model", "tokens", "routing", "contender")
    first: Row = {"ep": given.ep} | ({"kernels": []} if given.kernels else {})
    cases = [first | dict(zip(names, values, strict=True)) for values in order]
    command = " ".join(["notebooks/rivals.py", *(sys.argv[1:] if argv is None else argv)])
    run_about = about(num_gpus=0 if given.cpu else given.ep, command=command, commit=given.commit)
    rows = in_processes(cases, given.seconds)
    if given.cpu and given.ep == 1:
        rows = (list(rows_of(case, lambda: None))[-1] for case in cases)
    known: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        key = row["tokens"], row["routing"], row["model"]
        ways = [row.get("eager", {}), row.get("graph", {})]
        for way in (way for way in ways if "errors" in way):
            if row["contender"] == "torch":
                known.setdefault(key, way["errors"])
            if key in known:
                way["wrong"] = [n for n, x in way["errors"].items() if x > 2 * known[key][n]]
        append_run(given.out, run_about, [row])
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
