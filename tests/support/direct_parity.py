"""The wire of direct writes, from tokens to tokens and back, as functions that ranks run.

Experts multiply rows by small whole numbers and add a bias; bias and probabilities are whole, too.
So each row is known to the last bit, and what comes home follows without a second exchange: a
host's rows are added in the order of experts and rounded, then the hosts' sums in their order.
Kernels are real; layouts are made by torch, with the rows of a pass from row `BASE` of a store on,
and NaN wherever nothing was written.

Letters: T tokens, D hidden size, K experts per token, L experts of a rank, M rows of a store.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from padded_dispatch.exchange import symmetric_memory
from padded_dispatch.exchange.collectives import Arrived
from padded_dispatch.exchange.direct import DirectStores
from padded_dispatch.exchange.rails import Rails
from padded_dispatch.kernels import Segments, gemm, layout, rows
from padded_dispatch.routing import Plan, make_plan
from tests.support import reference
from tests.support.machines import rails_of, ranks_on
from tests.support.routings import maps_of, thin_out

_T = TypeVar("_T")

BASE = 3
# "out", "grad" of the tokens, probabilities "beside" it, and whether tokens came "again" unchanged.
Results = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The sizes of a layer: T, D, K, L, the slots P (0 for T), and the dtype of rows.

    Each (expert, source) has room for `level` rows. `sends_again`: backward sends tokens again.
    `microbatches_in_flight` forward passes precede the first backward pass. `machines`: a letter
    for the machine of each rank; "" for one machine.
    """

    tokens: int = 515
    width: int = 328
    top_k: int = 3
    local_experts: int = 5
    slots: int = 0
    level: int = 2**30
    sends_again: bool = False
    dtype: torch.dtype = torch.bfloat16
    microbatches_in_flight: int = 1
    machines: str = ""

    def direct(self, device: torch.device) -> DirectStores | Rails:
        """Return direct writes over the default group, in rails; a collective call."""
        if self.machines:
            return rails_of(self.local_experts, "direct", device)
        return DirectStores(self.local_experts, dist.group.WORLD)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    tokens_TD: Tensor
    grad_TD: Tensor
    prob_TK: Tensor
    plan: Plan

    def copy_from(self, other: "Inputs") -> None:
        for mine, value in zip(self._tensors(), other._tensors(), strict=True):
            mine.copy_(value)

    def _tensors(self) -> list[Tensor]:
        return [self.tokens_TD, self.grad_TD, self.prob_TK, *vars(self.plan).values()]


ROUTINGS = ("uniform", "lognormal-1.0", "hot", "same", "idle rank", "idle source", "none")


def make_inputs(layer: Layer, routing: str, seed: int, device: torch.device) -> Inputs:
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = layer.tokens, layer.local_experts * size, layer.top_k
    maps = maps_of(routing, sizes, num_ranks=size, num_sources=size, seed=seed * size)
    map_TE = thin_out(maps[rank], share=0.1, seed=seed * size + rank)  # 0 to K experts per token
    plan = make_plan(torch.from_numpy(map_TE), top_k=layer.top_k)
    generator = torch.Generator().manual_seed(seed * size + rank)

    def normal() -> Tensor:
        shape = layer.tokens, layer.width
        return torch.randn(shape, generator=generator).to(device, layer.dtype)

    probs = torch.randint(1, 4, (layer.tokens, layer.top_k), generator=generator)
    return Inputs(
        tokens_TD=normal(),
        grad_TD=normal(),
        prob_TK=probs.to(device, torch.float32),
        plan=Plan(**{name: tensor.to(device) for name, tensor in vars(plan).items()}),
    )


def _scale(expert: Tensor) -> Tensor:
    return (expert % 3 + 1).float()


def _bias(expert: Tensor, width: int) -> Tensor:
    column = torch.arange(width, device=expert.device)
    return ((expert[..., None] + column) % 3 - 1).float()


def forward(exchange: DirectStores | Rails, layer: Layer, inputs: Inputs) -> Callable[[], Results]:
    """Send tokens to experts, and their outputs home; return the backward pass.

    That sends gradients to experts and home, probabilities beside them, and returns all sums.
    """
    slots, sends_again = layer.slots or layer.tokens, layer.sends_again
    wire = exchange.start(inputs.plan, inputs.tokens_TD, slots, sends_again=sends_again)
    arrived = wire.open(inputs.tokens_TD, inputs.prob_TK)
    num_local, like = layer.local_experts, inputs.tokens_TD
    if not (layer.slots or layer.machines):
        ranks = len(arrived.expert_SPK)
        assert (ranks - 1) * layer.tokens == arrived.values.rows_SPD[..., 0].numel()
    segments = _segments(layer, arrived)
    num_rows = BASE + segments.num_rows
    prob_M = like.new_full((num_rows,), torch.nan, dtype=torch.float32)
    home_M = like.new_zeros(num_rows, dtype=torch.int64)
    listed = layout.list_slots(
        arrived.expert_SPK,
        arrived.place_SPK,
        arrived.prob_SPK,
        segments.offsets,
        like.new_full((1,), layer.level, dtype=torch.int32),
        num_local,
    )
    where = {"listed": listed, "segments": segments, "homes_S": wire.homes_S}
    rows_ND = rows.spread_rows(**arrived.values.rows(), **where, prob_M=prob_M, home_M=home_M)
    expert_L = dist.get_rank() * num_local + torch.arange(num_local, device=like.device)
    scale_LD = _scale(expert_L)[:, None].expand(-1, layer.width)
    weight_LDD = torch.diag_embed(scale_LD).to(layer.dtype)
    bias_LO = _bias(expert_L, layer.width).to(layer.dtype)
    given = {"stored": False, "at_M": home_M, "bias_LO": bias_LO, "prob_M": prob_M}
    product = partial(gemm.rows_times_weights, rows_ND, weight_LDD, segments, **given)
    out_TD, beside_TK = wire.home(product, listed, segments.offsets)
    assert beside_TK is None

    def backward() -> Results:
        again_TD = arrived.sent_TD if layer.sends_again else None
        values, again = wire.push(inputs.grad_TD, again_TD)
        grad_ND = rows.spread_rows(**values.rows(), **where)
        found = {}
        if again is not None:
            rows_again_ND = rows.spread_rows(**again.rows(), listed=listed, segments=segments)
            n = BASE + torch.arange(segments.num_rows, device=like.device)[:, None]
            same = (rows_again_ND == rows_ND) | (n >= segments.offsets[-1])
            found["again"] = same.all()
        given = grad_ND, weight_LDD.transpose(1, 2), segments
        product = partial(gemm.rows_times_weights, *given, stored=False, at_M=home_M)
        grad_TD, beside_TK = wire.home(product, listed, segments.offsets, prob_M[BASE:])
        return found | {"out": out_TD, "grad": grad_TD, "beside": beside_TK}

    return backward


def _segments(layer: Layer, arrived: Arrived) -> Segments:
    num_local, (num_sources, num_slots, top_k) = layer.local_experts, arrived.expert_SPK.shape
    ends = arrived.count_SL.T.clamp(max=layer.level).flatten().cumsum(0)
    offsets = (functional.pad(ends, (1, 0)) + BASE).int()
    num_rows = num_sources * num_slots * min(top_k, num_local)
    segments = Segments(
        offsets=offsets,
        num_experts=num_local,
        num_sources=num_sources,
        num_rows=num_rows,
        num_expected=num_rows,
    )
    return gemm.with_tiles(segments)


def step(exchange: DirectStores | Rails, layer: Layer, inputs: Inputs) -> Results:
    return forward(exchange, layer, inputs)()


def expected(layer: Layer, inputs: Inputs) -> Results:
    expert_TK, dtype = inputs.plan.expert_TK, layer.dtype
    kept_TK = (expert_TK >= 0) & (inputs.plan.place_TK < layer.level)
    scale_TK1 = (_scale(expert_TK) * kept_TK)[..., None]
    beside_TK = torch.where(kept_TK, inputs.prob_TK, 0)
    out_TKD, grad_TKD = (
        (scale_TK1 * of_TD[:, None]).to(dtype).float()
        for of_TD in (inputs.tokens_TD, inputs.grad_TD)
    )
    out_TKD = (out_TKD + _bias(expert_TK, layer.width) * beside_TK[..., None]).to(dtype).float()
    again = {"again": torch.ones((), dtype=torch.bool, device=expert_TK.device)}
    return (again if layer.sends_again else {}) | {
        "out": _summed(layer, out_TKD, expert_TK),
        "grad": _summed(layer, grad_TKD, expert_TK),
        "beside": beside_TK,
    }


def _summed(layer: Layer, rows_TKD: Tensor, expert_TK: Tensor) -> Tensor:
    """Add the rows of each token as `reference.sum_at_home` does; rows of no choice are zero."""
    rank_TK = torch.where(expert_TK < 0, -1, expert_TK // layer.local_experts)
    ranks_HG = reference.hosts(layer.machines or "a" * dist.get_world_size())
    total_TD = torch.zeros_like(rows_TKD[:, 0])
    for ranks_G in torch.from_numpy(ranks_HG).to(rank_TK):
        of_host_TD = torch.zeros_like(total_TD)
        for rank_T, row_TD in zip(rank_TK.T, rows_TKD.unbind(1), strict=True):
            of_host_TD += torch.where(torch.isin(rank_T, ranks_G)[:, None], row_TD, 0)
        total_TD += of_host_TD.to(layer.dtype)
    return total_TD.to(layer.dtype)


def differences(one: Results, other: Results) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def poison(exchange: DirectStores | Rails) -> None:
    """Fill this rank's buffers with NaN, while no rank sends anything."""
    direct: Any = exchange.inside if isinstance(exchange, Rails) else exchange
    shared = symmetric_memory.shared_memory(direct.group)
    for memory in (*shared.arriving, *shared.coming):
        memory.tensor(0, (memory.num_bytes,), torch.uint8).fill_(255)


def meet() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def my_gpu() -> torch.device:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def eager_differs(layer: Layer) -> list[str]:
    """Return what differs in eager, over all routings, with and without NaN in the buffers."""
    device = my_gpu()
    with ranks_on(layer.machines):
        exchange = layer.direct(device)
    found = []
    for seed, routing in enumerate(ROUTINGS):
        one, other = (make_inputs(layer, routing, s, device) for s in (seed, seed + 100))
        step(exchange, layer, other)
        meet()
        poison(exchange)
        meet()
        # Two microbatches without a host barrier between them.
        results = [(step(exchange, layer, inputs), inputs) for inputs in (one, other)]
        for number, (result, inputs) in enumerate(results):
            names = differences(result, expected(layer, inputs))
            found += [f"{routing}, pass {number}: {name}" for name in names]
    meet()
    return found


def captured(run: Callable[[], _T]) -> tuple[torch.cuda.CUDAGraph, _T]:
    """Capture `run` on the current (not the default) stream; return the graph and its outputs."""
    for _ in range(2):
        run()
    meet()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        results = run()
    meet()
    return graph, results


def replay_differs(first: Layer, second: Layer, num_replays: int) -> list[str]:
    """Return what differs in replays of two layers, forward passes first, in flight together.

    Every replay has different tokens and routings. The host does not wait between replays, ranks
    run at different paces; an eager pass follows every 50th replay, then buffers hold NaN.
    """
    device, layers = my_gpu(), (first, second)
    layer_of = [layer for layer in layers for _ in range(layer.microbatches_in_flight)]

    def fresh(seed: int) -> list[Inputs]:
        routing = ROUTINGS[seed % len(ROUTINGS)]
        return [
            make_inputs(layer, routing, seed * len(layer_of) + n, device)
            for n, layer in enumerate(layer_of)
        ]

    static, distinct = fresh(0), [fresh(seed) for seed in range(4 * len(ROUTINGS))]
    with ranks_on(first.machines):
        exchanges = {id(layer): layer.direct(device) for layer in layers}

    def run() -> list[Results]:
        waiting = [
            forward(exchanges[id(layer)], layer, inputs)
            for layer, inputs in zip(layer_of, static, strict=True)
        ]
        return [backward() for backward in waiting]

    paces = torch.Generator().manual_seed(dist.get_rank())
    kept = []
    meet()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph, results = captured(run)
        for number in range(num_replays):
            torch.cuda._sleep(int(torch.randint(1_000_000, (), generator=paces)) * (number % 3))
            for mine, value in zip(static, distinct[number % len(distinct)], strict=True):
                mine.copy_from(value)
            graph.replay()
            kept.append([{n: t.clone() for n, t in result.items()} for result in results])
            if number % 50 == 49:
                step(exchanges[id(first)], first, static[0])
                meet()
                for exchange in exchanges.values():
                    poison(exchange)
                meet()
        meet()
    found = []
    for number, of_passes in enumerate(kept):
        given = zip(of_passes, layer_of, distinct[number % len(distinct)], strict=True)
        for n, (result, layer, inputs) in enumerate(given):
            names = differences(result, expected(layer, inputs))
            found += [f"replay {number}, pass {n}: {name}" for name in names]
    del graph
    return found
