"""Compare replays of one captured MoE layer with eager runs: results and counts.

The router's weight is a unit matrix, so the first E features of a token are its logits, and the
input decides the routing. Forward and backward are one graph. The output and all gradients of each
replay are compared bit by bit on the device; the result is read once, at the end.

Letters: N routings, E experts, S positions, D hidden size, T tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.megatron import PaddedOptions
from padded_dispatch.megatron.compat import training_stream
from padded_dispatch.utils.routings import routing_scores
from tests.support.graph_protocol import Tape, pretend_capture
from tests.support.layer_parity import MODULE, LayerCase, build_layer
from tests.support.parity import megatron
from tests.support.rows import Findings
from tests.support.training import bits

KINDS = ("uniform", "lognormal", "hot", "idle rank")


@dataclass(frozen=True, kw_only=True)
class RoutingCase:
    """A layer over `ranks` expert-parallel ranks, and its number of routings.

    Routings cycle through `KINDS`. With "hot" every token asks for expert 0. With "idle rank" no
    token asks for the experts of the last rank; on a single rank, for the last half of the experts.
    """

    device: str = "cpu"
    ranks: int = 1
    factor: float | None = 1.25
    options: PaddedOptions = MODULE
    num_routings: int = 8
    num_experts: int = 8
    top_k: int = 2
    hidden: int = 16
    ffn: int = 24
    seq: int = 14


def routings_equal_eager(case: RoutingCase) -> Findings:
    """Compare replays with eager runs. Runs on all `case.ranks` ranks of the default group."""
    with groups(case):
        layer = make_layer(case)
        tokens, grad = inputs = make_inputs(case, 0)
        replay, replayed = capture(lambda: results(layer, tokens, grad), case.device)
        zero = torch.zeros((), dtype=torch.long, device=case.device)
        differing = {name: zero.clone() for name in ("the counts", *replayed)}
        asked_for = []
        counters = layer.token_dispatcher.counters
        for number in range(case.num_routings):
            copy_inputs(case, number, inputs)
            before, before_E = counters.totals.clone(), counters.demand_E.clone()
            replay()
            counted = counters.totals - before
            asked_for.append(counters.demand_E - before_E)
            for name, wanted in results(layer, tokens, grad).items():
                differing[name] += (bits(replayed[name]) != bits(wanted)).any()
            differing["the counts"] += (counters.totals - before != 2 * counted).any()
        found = {name: int(count) for name, count in differing.items()}
        demand_NE = torch.stack(asked_for).cpu()
    broken = _wrong_routings(case, demand_NE)
    return Findings(
        differing={name: count for name, count in found.items() if count},
        facts={
            "routings": case.num_routings,
            "tensors_per_routing": len(replayed),
            "different_demands": len(demand_NE.unique(dim=0)),
        },
        broken=tuple(broken),
    )


@contextmanager
def groups(case: RoutingCase) -> Iterator[None]:
    """Set up Megatron with the case's ranks, on a stream that can be captured."""
    with megatron(case.device, expert_model_parallel_size=case.ranks):
        if case.device == "cuda":
            torch.cuda.set_stream(training_stream())
        yield


def _wrong_routings(case: RoutingCase, demand_NE: Tensor) -> list[str]:
    """Describe routings whose demand does not fit their kind."""
    num_idle = _num_idle(case)
    broken = []
    for number, demand_E in enumerate(demand_NE):
        kind = KINDS[number % len(KINDS)]
        if kind == "hot" and demand_E[0] != case.seq:
            broken.append(f"not every token asked for expert 0 in routing {number}")
        if (kind == "idle rank") != (not demand_E[-num_idle:].any()):
            broken.append(f"routing {number} is {kind}, and its demand is {demand_E.tolist()}")
    return broken


def _num_idle(case: RoutingCase) -> int:
    return case.num_experts // max(2, case.ranks)


def make_layer(case: RoutingCase) -> Any:
    """Build the layer; its router reads a token's first E features as logits."""
    shape = LayerCase(
        device=case.device,
        dtype=torch.bfloat16,
        ep=case.ranks,
        num_experts=case.num_experts,
        top_k=case.top_k,
        hidden=case.hidden,
        ffn=case.ffn,
        ours=(("moe_expert_capacity_factor", case.factor),),
        options=case.options,
    )
    layer = build_layer(shape, "padded_alltoall")
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(*layer.router.weight.shape))
    return layer


def make_inputs(case: RoutingCase, number: int) -> tuple[Tensor, Tensor]:
    """Return tokens [S, 1, D] of a routing, different on each rank, and the output's gradient."""
    seed = number * case.ranks + dist.get_rank()
    kind = KINDS[number % len(KINDS)]
    scores_TE = routing_scores(
        case.seq,
        case.num_experts,
        case.top_k,
        skew="uniform" if kind == "idle rank" else kind,
        sigma=2.0,
        num_idle=_num_idle(case) if kind == "idle rank" else 0,
        seed=seed,
    )
    draw = torch.Generator().manual_seed(seed)
    tokens, grad = torch.randn(2, case.seq, 1, case.hidden, generator=draw)
    tokens[:, 0, : case.num_experts] = torch.from_numpy(scores_TE)
    tokens, grad = (tensor.to(case.device, torch.bfloat16) for tensor in (tokens, grad))
    return tokens.requires_grad_(), grad


def copy_inputs(case: RoutingCase, number: int, static: tuple[Tensor, Tensor]) -> None:
    """Copy the inputs of a routing into the graph's static inputs."""
    with torch.no_grad():
        for tensor, value in zip(static, make_inputs(case, number), strict=True):
            tensor.copy_(value)


def results(layer: Any, tokens: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Return the output and the gradients of the tokens and of every parameter."""
    output = layer(tokens)[0]
    names, parameters = zip(*layer.named_parameters(), strict=True)
    grads = torch.autograd.grad(output, (tokens, *parameters), grad)
    named = zip(("tokens", *names), grads, strict=True)
    return {"the output": output.detach()} | {f"the gradient of {n}": g for n, g in named}


def capture(
    work: Callable[[], dict[str, Tensor]], device: str
) -> tuple[Callable[[], None], dict[str, Tensor]]:
    """Return a function that replays the work, and the tensors that replays write."""
    work()  # Ranks compare shapes; libraries initialize.
    if device == "cpu":
        with pretend_capture(), Tape() as tape:
            found = work()
        return tape.replay, found
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # Other threads, such as NCCL's, may make calls that a capture forbids.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = work()
    return graph.replay, found
