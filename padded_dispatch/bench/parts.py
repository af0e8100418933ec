"""`padded-dispatch parts`: time kernels and experts by themselves, on one device.

It answers what a layer's benchmark cannot: how near each kernel comes to the rate of a plain copy,
and what experts cost when half of their slots are empty. Routings are uniform; all experts get
the same number of rows. Each part runs alone, on GPUs as a CUDA graph of several calls, and the
median of the repeats counts.

A kernel's bytes are those of real rows, each read and written as often as its task needs. `gather`
also writes zeros into empty slots, for the padded layout. These are not counted, so they lower its
rate: at fill 0.8 to at most 82 % of a copy's with D 2048, K 8. In the packed layout empty slots are
never read, and neither `gather, packed` nor `unpack` writes them.

Direct stores, on GPUs, are those of one of `--ep` ranks, and the memory of all ranks is this
device's: the time that is left where links cost nothing. `push each` sends every row, `push once`
one copy of a token to each other rank, where `copies` makes the others; `return` is the way home,
`return sums` that of one sum of a token's rows.

`products` are the grouped products of a rank's experts, by themselves, with the rows that a random
routing of all ranks brings each expert: rows times weights (`fc1`, `fc2`), gradients of rows
(`dgrad`) and of weights (`wgrad`) by our kernels and by torch's; the list of tiles that four of
ours share; weight gradients added to fp32 by our kernel, and by torch's with an addition.
`--only products` measures nothing else.

With `--select-experts`, selection runs alone, for numbers of experts instead of models: pools of
one expert, of E / 8 and of E / 2, at factor 1.0, where about half of them overflow, and with one
expert that every token asks for. Its bytes are the map once in and once out, and the scores.

Shape suffixes: those of the README (T K E L S C D F); N packed rows, M = S * L buffers.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from padded_dispatch.bench.arguments import PARTS, read_parts, with_defaults
from padded_dispatch.bench.cases import MODELS
from padded_dispatch.bench.clocks import max_sm_mhz
from padded_dispatch.config import DispatchConfig, Policy, require
from padded_dispatch.experts import ExpertWeights, Linear, grouped_mlp
from padded_dispatch.ops.activation import Activation
from padded_dispatch.ops.counters import Counters
from padded_dispatch.ops.grouped import (
    add_outer_by_expert,
    batched_linear,
    grouped_linear,
    outer_by_expert,
    row_tiles,
)
from padded_dispatch.ops.plan import make_plan
from padded_dispatch.ops.rows import (
    combine_rows,
    gather_meta,
    gather_rows,
    pack_rows,
    running_offsets,
    unpack_rows,
)
from padded_dispatch.ops.select import kept_map, kept_map_in_torch, select
from padded_dispatch.utils.results import about, append_run, require_results
from padded_dispatch.utils.shapes import LayerShape

_CALLS = 10
_COPIED = 2**27  # bytes; far more than the caches hold
_FILLS = (1.0, 0.75, 0.5, 0.25)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A function to time.

    Args:
        name: as in results files.
        run: one call.
        fill: real rows per slot of its input or output.
        bytes: least number that it must read and write; 0 if that is no measure of it.
        flops: of its GEMMs; 0 without any.
    """

    name: str
    run: Callable[[], object]
    fill: float
    bytes: int = 0
    flops: int = 0


def main(argv: list[str]) -> int:
    """Measure all parts and return the exit code, 0.

    Raises:
        ValueError: for mistakes in `argv`.
    """
    given = with_defaults(read_parts(argv))
    require(given.repeats >= 1, "--repeats", given.repeats, "be at least 1")
    if given.out:
        require_results("--out", given.out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for num_experts in given.select_experts:
        valid = num_experts >= 8 and num_experts % 8 == 0
        require(valid, "--select-experts", num_experts, "be a multiple of 8")
    num_gpus, command = int(device.type == "cuda"), " ".join(["padded-dispatch parts", *argv])
    run = about(num_gpus=num_gpus, command=command, commit=given.commit)
    run["max_sm_mhz"] = max_sm_mhz(device)
    cases = _selection_cases if given.select_experts else _model_cases
    for where, part in cases(given, device):
        row = where | _row(part, given.repeats, device)
        if given.out:
            append_run(given.out, run, [row])
        sys.stdout.write(f"{_line(row)}\n")
        sys.stdout.flush()
    return 0


def _model_cases(
    given: argparse.Namespace, device: torch.device
) -> Iterator[tuple[dict[str, Any], Part]]:
    """Yield all parts of each model, and where they belong in a table."""
    for model in given.models:
        for num_tokens in given.tokens:
            for factor in given.capacity_factors:
                config = MODELS[model].dispatch_config(factor, given.ep)
                where = {
                    "model": model,
                    "ep": given.ep,
                    "tokens": num_tokens,
                    "capacity_factor": factor,
                    "capacity": config.capacity(num_tokens),
                }
                for part in _parts(MODELS[model], config, num_tokens, device, given.only):
                    yield where, part


def _selection_cases(
    given: argparse.Namespace, device: torch.device
) -> Iterator[tuple[dict[str, Any], Part]]:
    """Yield selection alone, for pools of one expert and of the experts of 8 and of 2 ranks."""
    for num_experts in given.select_experts:
        config = DispatchConfig(num_experts=num_experts, top_k=min(8, num_experts // 8))
        for num_tokens in given.tokens:
            for num_pools in (num_experts, 8, 2):
                slots = max(1, num_tokens * config.top_k // num_pools)
                where = {
                    "model": f"{num_experts} experts",
                    "ep": 1 if num_pools == num_experts else num_pools,
                    "tokens": num_tokens,
                    "capacity_factor": 1.0,
                    "capacity": slots,
                }
                for part in _pool_selections(config, num_tokens, num_pools, slots, device):
                    yield where, part


def _pool_selections(
    config: DispatchConfig, num_tokens: int, num_pools: int, slots: int, device: torch.device
) -> Iterator[Part]:
    """Yield the selection of each policy, and of a hot expert; with pools of one, torch's, too."""
    num_experts, top_k = config.num_experts, config.top_k
    probs_TE, map_TE = _routing(config, num_tokens, device)
    width = num_experts // num_pools
    least = 2 * map_TE.numel() + probs_TE.element_size() * num_tokens * top_k

    def part(name: str, function: Callable[..., object], *arguments: object) -> Part:
        run = functools.partial(function, map_TE, probs_TE, slots, *arguments)
        return Part(name=name, run=run, fill=1.0, bytes=least)

    for policy in get_args(Policy):
        yield part(f"select {policy}, X {width}", kept_map, policy, width)
    if num_pools == num_experts:
        yield part("select probs, torch", kept_map_in_torch, "probs")
    hot_TE = probs_TE.index_fill(1, torch.zeros(1, dtype=torch.int64, device=device), 1.0)
    hot_map_TE = torch.zeros_like(map_TE).scatter_(1, hot_TE.topk(top_k).indices, True)
    hot = functools.partial(kept_map, hot_map_TE, probs_TE, slots, "probs", width)
    yield Part(name=f"select probs, hot, X {width}", run=hot, fill=1.0, bytes=least)


def microseconds(run: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Return the time of one call in each repeat, averaged over ten; on GPUs in a CUDA graph."""
    if device.type == "cpu":
        return [_measured(run) for _ in range(repeats)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            run()
    graph.replay()
    samples = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # Keeps the device busy while the host launches the timed replay.
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / _CALLS)
    return samples


def _measured(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(_CALLS):
        run()
    return (time.perf_counter() - start) * 1e6 / _CALLS


def _row(part: Part, repeats: int, device: torch.device) -> dict[str, Any]:
    samples = microseconds(part.run, repeats, device)
    us = statistics.median(samples)
    return {
        "part": part.name,
        "fill": part.fill,
        "us": us,
        "samples_us": samples,
        "gb_per_s": part.bytes / us / 1e3 if part.bytes else None,
        "tflops": part.flops / us / 1e6 if part.flops else None,
    }


def _line(row: dict[str, Any]) -> str:
    rates = [f"{row['gb_per_s']:8.0f} GB/s"] if row["gb_per_s"] else []
    rates += [f"{row['tflops']:8.0f} TFLOP/s"] if row["tflops"] else []
    return (
        f"{row['model']:16} EP{row['ep']} T {row['tokens']:6} CF {row['capacity_factor']:<5} "
        f"{row['part']:24} fill {row['fill']:4.0%} {row['us']:9.1f} us {' '.join(rates)}"
    )


def _parts(
    shape: LayerShape,
    config: DispatchConfig,
    num_tokens: int,
    device: torch.device,
    only: Sequence[str] = PARTS,
) -> Iterator[Part]:
    """Yield the parts of the groups in `only`, in the order of `PARTS`."""
    groups = {
        "copy": lambda: _copies(device),
        "selection": lambda: _selections(config, num_tokens, device),
        "rows": lambda: _kernels(shape, config, num_tokens, device),
        "direct": lambda: _direct_stores(shape, config, num_tokens, device),
        "products": lambda: _products(shape, config, num_tokens, device),
        "experts": lambda: _experts(shape, config, num_tokens, device),
    }
    if device.type == "cpu" or config.num_ranks == 1:
        del groups["direct"]
    for name, group in groups.items():
        if name in only:
            yield from group()


def _copies(device: torch.device) -> Iterator[Part]:
    source = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    yield Part(name="copy", run=lambda: target.copy_(source), fill=1.0, bytes=2 * _COPIED)


def _selections(config: DispatchConfig, num_tokens: int, device: torch.device) -> Iterator[Part]:
    """Yield each policy: forward only, the same for any routing."""
    capacity, sizes = config.capacity(num_tokens), config.sizes(num_tokens)
    probs_TE, map_TE = _routing(config, num_tokens, device)
    fill = int(map_TE.sum(0).clamp(max=capacity).sum()) / (config.num_experts * capacity)

    for policy in get_args(Policy):
        run = functools.partial(select, map_TE, probs_TE, sizes=sizes, policy=policy)
        yield Part(name=f"select {policy}", run=run, fill=fill)
    yield _telemetry(config, probs_TE, map_TE)


def _telemetry(config: DispatchConfig, probs_TE: Tensor, map_TE: Tensor) -> Part:
    """Return the part that counts what a layer counts in one pass."""
    counters = Counters(config, map_TE.device)
    capacity = config.capacity(len(map_TE))
    sizes = config.sizes(len(map_TE))
    selection = select(map_TE, probs_TE, sizes=sizes)
    plan = make_plan(selection.kept_TE, top_k=config.top_k, sizes=sizes)
    num_slots = config.num_experts * capacity

    def count() -> None:
        counters.observe(map_TE, probs_TE, selection, sizes)
        counters.add_unplaced(plan.unplaced_E)
        counters.add_received(plan.kept_E)

    return Part(name="telemetry", run=count, fill=int(plan.kept_E.sum()) / num_slots)


def _routing(
    config: DispatchConfig, num_tokens: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return probabilities and map of random tokens, both [T, E]."""
    torch.manual_seed(0)
    probs_TE = torch.rand(num_tokens, config.num_experts, device=device).softmax(1)
    map_TE = torch.zeros_like(probs_TE, dtype=torch.bool)
    return probs_TE, map_TE.scatter_(1, probs_TE.topk(config.top_k).indices, True)


def _kernels(
    shape: LayerShape, config: DispatchConfig, num_tokens: int, device: torch.device
) -> Iterator[Part]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    capacity, sizes = config.capacity(num_tokens), config.sizes(num_tokens)
    probs_TE, map_TE = _routing(config, num_tokens, device)
    tokens_TD = torch.randn(num_tokens, shape.hidden_size, device=device).to(dtype)
    kept_TE = select(map_TE, probs_TE, sizes=sizes).kept_TE
    plan = make_plan(kept_TE, top_k=config.top_k, sizes=sizes)
    rows_ECD = gather_rows(tokens_TD, plan)
    num_kept = int(plan.kept_E.sum())
    fill = num_kept / (config.num_experts * capacity)
    per_row = shape.hidden_size * tokens_TD.element_size()
    once = (num_tokens + num_kept) * per_row

    def select_and_plan() -> None:
        kept_TE = select(map_TE, probs_TE, sizes=sizes).kept_TE
        make_plan(kept_TE, top_k=config.top_k, sizes=sizes)

    yield Part(name="select and plan", run=select_and_plan, fill=fill)
    yield Part(name="meta", run=lambda: gather_meta(probs_TE, plan), fill=fill)
    for name, zeros in (("gather", True), ("gather, packed", False)):
        spread = functools.partial(gather_rows, tokens_TD, plan, zeros=zeros)
        yield Part(name=name, run=spread, fill=fill, bytes=once)
    yield Part(name="combine", run=lambda: combine_rows(rows_ECD, plan), fill=fill, bytes=once)

    # All ranks route alike, so received slots are as full as sent ones.
    num_sources, num_local = config.num_sources, config.num_local_experts
    slots_MCD = rows_ECD.view(num_sources * num_local, capacity, -1)
    offsets_LS = running_offsets(plan.kept_E.view(num_sources, num_local))
    packed_ND = pack_rows(slots_MCD, offsets_LS)
    twice = 2 * num_kept * per_row
    yield Part(name="pack", run=lambda: pack_rows(slots_MCD, offsets_LS), fill=fill, bytes=twice)
    unpack = functools.partial(unpack_rows, packed_ND, offsets_LS, zeros=False)
    yield Part(name="unpack", run=unpack, fill=fill, bytes=twice)


def _direct_stores(
    shape: LayerShape, config: DispatchConfig, num_tokens: int, device: torch.device
) -> Iterator[Part]:
    """Yield the kernels that store to peers; all ranks route alike.

    A part is to be run before the next one is taken: the buffers are this generator's.
    """
    from padded_dispatch.kernels import direct, links

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes, num_ranks, num_experts = config.sizes(num_tokens), config.num_ranks, config.num_experts
    probs_TE, map_TE = _routing(config, num_tokens, device)
    tokens_TD = torch.randn(num_tokens, shape.hidden_size, device=device).to(dtype)
    kept_TE = select(map_TE, probs_TE, sizes=sizes).kept_TE
    plan = make_plan(kept_TE, top_k=config.top_k, sizes=sizes)

    held = []  # A kernel gets addresses, which keep no buffer alive.

    def of_all_ranks(*size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return a buffer of rank 0, and the addresses of those of all ranks."""
        buffers = [torch.empty(size, dtype=dtype, device=device) for _ in range(num_ranks)]
        held.extend(buffers)
        return buffers[0], torch.tensor([one.data_ptr() for one in buffers], device=device)

    def ints(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=device)

    rows_ND, rows_R = of_all_ranks(sizes.num_rows, shape.hidden_size, dtype=dtype)
    _, probs_R = of_all_ranks(sizes.num_rows, dtype=torch.float32)
    places_RTK, places_R = of_all_ranks(num_ranks, num_tokens, config.top_k, dtype=torch.int32)
    _, slots_R = of_all_ranks(plan.choice_of_slot_GP.numel(), shape.hidden_size, dtype=dtype)
    table_RE = plan.kept_E.expand(num_ranks, -1).contiguous()
    offsets_LS = ints(num_experts // num_ranks, num_ranks)
    count_SL = torch.empty(offsets_LS.numel(), device=device)
    where = sizes.pool_slots, sizes.experts_per_pool

    def maps_of(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        shift_E = ints(num_experts)
        direct.place_rows(table_RE, rank, shift_E, offsets_LS, count_SL, *where)
        return plan.slot_of_TK, plan.expert_of_TK, shift_E

    for rank in range(1, num_ranks):
        maps = maps_of(rank)
        links.push_tokens(tokens_TD, probs_TE, *maps, rows_R, probs_R, places_R, rank)
    pushed = tokens_TD, probs_TE, *maps_of(0), rows_R, probs_R

    kept_TRL = kept_TE.view(num_tokens, num_ranks, -1)
    num_TR, num_kept = kept_TRL.sum(2), int(plan.kept_E.sum())
    num_elsewhere, num_own = int((num_TR[:, 1:] > 0).sum()), int(num_TR[:, 0].sum())
    num_again = int((num_TR[:, 0] > 1).sum()) * (num_ranks - 1)
    num_copies = int((num_TR[:, 0] - 1).clamp(min=0).sum()) * (num_ranks - 1)
    num_slots = plan.choice_of_slot_GP.numel()
    row_bytes = shape.hidden_size * tokens_TD.element_size()
    part = functools.partial(Part, fill=num_kept / num_slots)
    each = functools.partial(direct.push_rows, *pushed)
    yield part(name="push each", run=each, bytes=(num_tokens + num_kept) * row_bytes)
    once = functools.partial(links.push_tokens, *pushed, places_R, 0)
    num_stored = num_own + num_elsewhere
    yield part(name="push once", run=once, bytes=(num_tokens + num_stored) * row_bytes)
    copy = functools.partial(links.copy_rows, rows_ND, places_RTK, 0)
    yield part(name="copies", run=copy, bytes=(num_again + num_copies) * row_bytes)
    home = functools.partial(direct.return_rows, rows_ND, None, offsets_LS, None, slots_R, probs_R)
    home = functools.partial(home, 0, *where)
    num_received = num_ranks * int(num_TR[:, 0].sum())
    yield part(name="return", run=home, bytes=2 * num_received * row_bytes)
    lists_STK, lists_R = of_all_ranks(num_ranks, num_tokens, 2, config.top_k, dtype=torch.int32)
    home_TK, num_local = ints(num_tokens, config.top_k), num_experts // num_ranks
    for rank in range(num_ranks):
        maps = plan.slot_of_TK, plan.expert_of_TK
        links.list_slots(*maps, lists_R, home_TK, rank, num_local)
    sums = functools.partial(links.return_sums, rows_ND, None, offsets_LS, None, lists_STK)
    sums = functools.partial(sums, slots_R, probs_R, 0, *where)
    num_sums = num_ranks * int((num_TR[:, 0] > 0).sum())
    yield part(name="return sums", run=sums, bytes=(num_received + num_sums) * row_bytes)


def _products(
    shape: LayerShape, config: DispatchConfig, num_tokens: int, device: torch.device
) -> Iterator[Part]:
    """Yield each grouped product of a rank's experts, by our kernels and by torch's."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    num_local = config.num_local_experts
    _, map_TE = _routing(config, num_tokens * config.num_sources, device)
    offsets_L = map_TE[:, :num_local].sum(0).cumsum(0).to(torch.int32)
    num_rows = int(offsets_L[-1])
    listing = functools.partial(row_tiles, offsets_L, num_rows)
    yield Part(name="tiles of rows", run=listing, fill=1.0)
    tiles = listing()

    def draw(*sizes: int) -> Tensor:
        return (torch.randn(sizes, device=device) * sizes[-1] ** -0.5).to(dtype)

    def torch_added(grad_NO: Tensor, rows_NI: Tensor, sums_LOI: Tensor) -> None:
        sums_LOI.add_(torchs_outer(grad_NO, rows_NI, offsets_L))

    for name, width_in, width_out in (
        ("fc1", shape.hidden_size, 2 * shape.ffn_size),
        ("fc2", shape.ffn_size, shape.hidden_size),
    ):
        rows_NI, grad_NO = draw(num_rows, width_in), draw(num_rows, width_out)
        weight_LOI = draw(num_local, width_out, width_in)
        sums_LOI = torch.zeros_like(weight_LOI, dtype=torch.float32)
        part = functools.partial(Part, fill=1.0, flops=2 * num_rows * width_in * width_out)
        weight_LIO = weight_LOI.transpose(1, 2)
        for product, given in (
            (name, (rows_NI, weight_LOI)),
            (f"{name} dgrad", (grad_NO, weight_LIO)),
        ):
            ours = functools.partial(grouped_linear, *given, offsets_L, tiles=tiles)
            yield part(name=product, run=ours)
            run = functools.partial(torchs_linear, *given, offsets_L)
            yield part(name=f"{product}, torch", run=run)
        outer = functools.partial(outer_by_expert, grad_NO, rows_NI, offsets_L)
        yield part(name=f"{name} wgrad", run=outer)
        run = functools.partial(torchs_outer, grad_NO, rows_NI, offsets_L)
        yield part(name=f"{name} wgrad, torch", run=run)
        given = grad_NO, rows_NI, offsets_L, sums_LOI
        yield part(name=f"{name} wgrad added", run=functools.partial(add_outer_by_expert, *given))
        run = functools.partial(torch_added, grad_NO, rows_NI, sums_LOI)
        yield part(name=f"{name} wgrad added, torch", run=run)


# Private until torch 2.10, and without a kernel on CPUs.
_grouped_mm: Any = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]


def torchs_linear(rows_NI: Tensor, weight_LOI: Tensor, offsets_L: Tensor) -> Tensor:
    """Do `grouped_linear` by torch's own product, on CPUs by ours."""
    if not rows_NI.is_cuda:
        return grouped_linear(rows_NI, weight_LOI, offsets_L)
    return _grouped_mm(rows_NI, weight_LOI.transpose(1, 2), offs=offsets_L)


def torchs_outer(grad_NO: Tensor, rows_NI: Tensor, offsets_L: Tensor) -> Tensor:
    """Do `outer_by_expert` by torch's own product, on CPUs by ours."""
    if not rows_NI.is_cuda:
        return outer_by_expert(grad_NO, rows_NI, offsets_L)
    return _grouped_mm(grad_NO.T, rows_NI, offs=offsets_L)


def _experts(
    shape: LayerShape, config: DispatchConfig, num_tokens: int, device: torch.device
) -> Iterator[Part]:
    """Yield forward and backward over all slots of a rank; packed, at decreasing fill."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    num_local, width, ffn = config.num_local_experts, shape.hidden_size, shape.ffn_size
    slots = config.num_sources * config.capacity(num_tokens)

    def draw(*sizes: int) -> Tensor:
        drawn = torch.randn(sizes, device=device) * sizes[-1] ** -0.5
        return drawn.to(dtype).requires_grad_()

    rows_ND, grad_ND = draw(num_local * slots, width), draw(num_local * slots, width).detach()
    probs_N = torch.rand(num_local * slots, device=device).requires_grad_()
    weights = ExpertWeights(
        fc1_LGD=draw(num_local, 2 * ffn, width), fc2_LDF=draw(num_local, width, ffn)
    )
    inputs = rows_ND, probs_N, weights.fc1_LGD, weights.fc2_LDF
    for fill in _FILLS:
        per_expert = round(slots * fill)
        offsets_L = torch.arange(1, num_local + 1, device=device, dtype=torch.int32) * per_expert

        def both_ways(offsets_L: Tensor = offsets_L, linear: Linear = grouped_linear) -> None:
            out_ND = grouped_mlp(rows_ND, probs_N, offsets_L, weights, Activation(), linear=linear)
            torch.autograd.grad(out_ND, inputs, grad_ND)

        flops = 18 * num_local * per_expert * width * ffn
        if fill == 1.0:
            one_product = functools.partial(both_ways, linear=batched_linear)
            yield Part(name="batched experts", run=one_product, fill=fill, flops=flops)
        yield Part(name="packed experts", run=both_ways, fill=fill, flops=flops)
