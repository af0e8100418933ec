"""Compare the direct exchange with the all-to-all bit by bit, as functions that ranks run.

Experts are elementwise, so unspecified rows after the last real one do not reach real rows.

Letters: T tokens, D hidden size, K experts per token, N rows that this rank's experts can receive.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch import DispatchConfig, PaddedDispatcher
from padded_dispatch.dispatcher import Dispatched
from padded_dispatch.exchange.direct import DirectExchange
from padded_dispatch.utils.routings import routing_scores
from tests.support.rows import Findings

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The sizes of a layer: T, D, K, experts per rank, capacity factor, and the dtype of rows.

    `pool` as in a config. `microbatches_in_flight` forward passes precede the first
    backward pass.
    """

    tokens: int = 515
    width: int = 328
    top_k: int = 3
    local_experts: int = 5
    factor: float = 1.25
    dtype: torch.dtype = torch.bfloat16
    microbatches_in_flight: int = 1
    pool: Any = "expert"

    def dispatcher(self, exchange: Any) -> PaddedDispatcher:
        """Return a dispatcher over all ranks of the default group; a collective call."""
        size = dist.get_world_size()
        config = DispatchConfig(
            num_experts=self.local_experts * size,
            top_k=self.top_k,
            capacity_factor=self.factor,
            capacity_pool=self.pool,
            num_ranks=size,
        )
        group = dist.group.WORLD
        return PaddedDispatcher(
            config,
            group=group,
            packed=True,
            exchange=exchange,
            microbatches_in_flight=self.microbatches_in_flight,
        )


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Inputs of one microbatch, and the gradient of its output."""

    tokens_TD: Tensor
    probs_TE: Tensor
    map_TE: Tensor
    grad_TD: Tensor

    def copy_from(self, other: "Inputs", shift: int) -> None:
        """Copy the values of `other` into these tensors, every token `shift` places later."""
        with torch.no_grad():
            for mine, value in zip(vars(self).values(), vars(other).values(), strict=True):
                mine.copy_(value.roll(shift, 0))


# Skews of `routing_scores`, and: "idle", the last rank's experts get no token; "absent", the last
# rank has no real tokens.
ROUTINGS = ("uniform", "lognormal", "hot", "same", "idle", "absent", "none")


def make_inputs(layer: Layer, routing: str, seed: int, device: torch.device) -> Inputs:
    """Make random inputs of this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    seed = seed * size + rank
    num_experts = layer.local_experts * size
    shape = layer.tokens, num_experts, layer.top_k
    skew: Any = routing if routing in ("lognormal", "hot", "same") else "uniform"
    num_idle = layer.local_experts if routing == "idle" else 0
    scores_TE = torch.from_numpy(routing_scores(*shape, skew=skew, num_idle=num_idle, seed=seed))
    chosen_TK = scores_TE.topk(layer.top_k).indices
    map_TE = torch.zeros(scores_TE.shape, dtype=torch.bool).scatter(1, chosen_TK, True)
    if routing == "none" or (routing == "absent" and rank == size - 1):
        map_TE[:] = False
    scores_TE = scores_TE.float().softmax(1)
    probs_TE = torch.where(map_TE, scores_TE, 0)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2, layer.tokens, layer.width, generator=generator).to(device, layer.dtype)
    return Inputs(
        tokens_TD=rows[0].clone().requires_grad_(),
        probs_TE=probs_TE.to(device).requires_grad_(),
        map_TE=map_TE.to(device),
        grad_TD=rows[1].clone(),
    )


@dataclass(frozen=True, kw_only=True)
class Forward:
    """A forward pass that waits for its backward pass."""

    inputs: Inputs
    sent: Dispatched
    out_TD: Tensor


def forward(dispatcher: PaddedDispatcher, inputs: Inputs) -> Forward:
    """Run dispatch, experts and combine."""
    sent = dispatcher.dispatch(inputs.tokens_TD, inputs.probs_TE, inputs.map_TE)
    given = sent.expert_input
    out_ND = torch.tanh(given.rows_ND.float()) * given.probs_N[:, None]
    out_TD = dispatcher.combine(out_ND.to(given.rows_ND.dtype), sent)
    return Forward(inputs=inputs, sent=sent, out_TD=out_TD)


def backward(passed: Forward) -> dict[str, Tensor]:
    """Run the backward pass; return all tensors in which two exchanges must agree."""
    given = passed.sent.expert_input
    assert given.offsets_LS is not None
    row_N = torch.arange(given.probs_N.shape[0], device=given.probs_N.device)
    real_N = row_N < given.offsets_LS[-1, -1]
    # Read before the backward pass, after which the buffers may be used again.
    rows_ND = torch.where(real_N[:, None], given.rows_ND.detach(), 0)
    probs_N = torch.where(real_N, given.probs_N.detach(), 0)
    inputs = passed.inputs
    grad_TD, grad_TE = torch.autograd.grad(
        passed.out_TD, (inputs.tokens_TD, inputs.probs_TE), inputs.grad_TD
    )
    return {
        "rows": rows_ND,
        "probs": probs_N,
        "kept": given.kept_SL,
        "offsets": given.offsets_LS,
        "out": passed.out_TD.detach(),
        "grad_tokens": grad_TD,
        "grad_probs": grad_TE,
    }


def step(dispatcher: PaddedDispatcher, inputs: Inputs) -> dict[str, Tensor]:
    """Run forward and backward of one microbatch."""
    return backward(forward(dispatcher, inputs))


def direct_of(dispatcher: PaddedDispatcher) -> DirectExchange:
    """Return the exchange of a dispatcher that was made for direct stores."""
    exchange = dispatcher.exchanges.direct
    assert exchange is not None
    return exchange


def poison(dispatcher: PaddedDispatcher) -> None:
    """Fill this rank's buffers with NaN; peers write to them only after its next call begins.

    Places get zeros: with those of a call before, rows would not be copied.
    """
    for buffers in direct_of(dispatcher)._buffers.values():
        workspace = buffers.workspace
        receive_buffers = [*buffers._receive_buffers, workspace.gradients]
        everything = [workspace.slots_QD, workspace.meta_Q]
        for tensor in everything + [
            tensor for receive_buffer in receive_buffers for tensor in receive_buffer.take()
        ]:
            tensor.fill_(torch.nan)
        for receive_buffer in receive_buffers:
            receive_buffer.places(receive_buffer._shape.num_places, 1, 1).zero_()


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that are not equal bit by bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def meet() -> None:
    """Wait until all ranks are here with idle devices."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def my_gpu() -> torch.device:
    """Make this worker's device current and return it."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def eager_differences(layer: Layer) -> list[str]:
    """Return what differs in eager, over all routings, with and without NaN in the buffers."""
    device = my_gpu()
    direct, alltoall = layer.dispatcher("direct"), layer.dispatcher("alltoall")
    found = []
    for seed, routing in enumerate(ROUTINGS):
        inputs = make_inputs(layer, routing, seed, device)
        expected = step(alltoall, inputs)
        for poisoned in (False, True):
            if poisoned:
                poison(direct)
            names = differences(step(direct, inputs), expected)
            found += [f"{routing}{', poisoned' * poisoned}: {name}" for name in names]
        # Two microbatches without a host barrier between them.
        again = make_inputs(layer, routing, seed + 100, device)
        first, second = step(direct, inputs), step(direct, again)
        found += [f"{routing}, first of two: {name}" for name in differences(first, expected)]
        names = differences(second, step(alltoall, again))
        found += [f"{routing}, second of two: {name}" for name in names]
    meet()
    return found


def eager_differs(layer: Layer) -> Findings:
    """Return what differs in eager."""
    return Findings(broken=tuple(eager_differences(layer)))


def replay_differs(first: Layer, second: Layer, num_replays: int) -> Findings:
    """Return what differs in replays of two layers."""
    return Findings(broken=tuple(replay_differences((first, second), num_replays)[:20]))


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


def replay_differences(layers: tuple[Layer, ...], num_replays: int) -> list[str]:
    """Return what differs between replays of a graph and of the same graph with the all-to-all.

    The graph runs the forward of all layers, `microbatches_in_flight` times each, then all backward
    passes in the same order. Every replay has different tokens and routings. The host does not wait
    between replays, ranks run at different paces, buffers hold NaN before every second replay, and
    an eager pass without gradients follows every 50th.
    """
    device = my_gpu()
    layer_of = [i for i, layer in enumerate(layers) for _ in range(layer.microbatches_in_flight)]

    def fresh(seed: int) -> list[Inputs]:
        routing = ROUTINGS[seed % len(ROUTINGS)]
        return [
            make_inputs(layers[i], routing, seed * len(layer_of) + n, device)
            for n, i in enumerate(layer_of)
        ]

    static, distinct = fresh(0), [fresh(seed) for seed in range(4 * len(ROUTINGS))]

    def fill(number: int) -> None:
        for mine, value in zip(static, distinct[number % len(distinct)], strict=True):
            mine.copy_from(value, number // len(distinct))

    def run(dispatchers: list[PaddedDispatcher]) -> list[dict[str, Tensor]]:
        waiting = [
            forward(dispatchers[i], given) for i, given in zip(layer_of, static, strict=True)
        ]
        return [backward(passed) for passed in waiting]

    directs = [layer.dispatcher("direct") for layer in layers]
    alltoalls = [layer.dispatcher("alltoall") for layer in layers]
    paces = torch.Generator().manual_seed(dist.get_rank())
    found, kept = [], []
    meet()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph, results = captured(lambda: run(directs))
        for number in range(num_replays):
            torch.cuda._sleep(int(torch.randint(1_000_000, (), generator=paces)) * (number % 3))
            fill(number)
            if number % 2:
                for dispatcher in directs:
                    poison(dispatcher)
            graph.replay()
            kept.append([{n: t.clone() for n, t in result.items()} for result in results])
            if number % 50 == 49:
                with torch.no_grad():
                    forward(directs[0], static[0])
        meet()
        alltoall_graph, expected = captured(lambda: run(alltoalls))
        for number, results in enumerate(kept):
            fill(number)
            alltoall_graph.replay()
            for n, (one, other) in enumerate(zip(results, expected, strict=True)):
                found += [f"replay {number}, pass {n}: {x}" for x in differences(one, other)]
        meet()
    del graph, alltoall_graph
    return found
