"""Compare replays of one captured MoE layer with eager runs, over many routings.

The router's weight is a unit matrix, so the first E features of a token are its logits, and the
input decides the routing. Forward and backward are one graph. The output and all gradients of each
replay are compared bit by bit on the device; the result is read once, at the end.

Letters: N routings, E experts, S positions, D hidden size.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.config import CapacityPool, ExchangeKind, Policy, Remedy
from padded_dispatch.megatron import PaddedOptions
from padded_dispatch.megatron.compat import training_stream
from padded_dispatch.utils.routings import routing_scores
from tests.support.graph_protocol import Tape, pretend_capture
from tests.support.graph_training import Findings, bits
from tests.support.layer_parity import LayerCase, build_layer
from tests.support.parity import megatron

KINDS = ("uniform", "lognormal", "hot", "idle rank")


@dataclass(frozen=True, kw_only=True)
class RoutingCase:
    """A layer over `ranks` expert-parallel ranks, and its number of routings.

    Routings cycle through `KINDS`. With "hot" every token asks for expert 0. With "idle rank" no
    token asks for the experts of the last rank; on a single rank, for the last half of the experts.
    `seed`: seed of policy "random".
    """

    name: str
    device: str = "cuda"
    ranks: int = 1
    capacity_factor: float | None = 1.25
    packed: bool = False
    exchange: ExchangeKind = "alltoall"
    capacity_pool: CapacityPool = "expert"
    policy: Policy | Literal["megatron"] = "megatron"
    remedy: Remedy = "none"
    seed: int = 0
    num_routings: int = 1000
    num_experts: int = 32
    top_k: int = 4
    hidden: int = 576
    ffn: int = 576
    seq: int = 256


def routings_equal_eager(case: RoutingCase) -> Findings:
    """Compare replays with eager runs. Runs on all `case.ranks` ranks of the default group."""
    with groups(case):
        layer = make_layer(case)
        tokens, grad = inputs = make_inputs(case, 0)
        replay, replayed = capture(lambda: results(layer, tokens, grad), case.device)
        differing = {
            name: torch.zeros((), dtype=torch.long, device=case.device) for name in replayed
        }
        asked_for = []
        counters = layer.token_dispatcher.counters
        for number in range(case.num_routings):
            copy_inputs(case, number, inputs)
            before_E = counters.demand_E.clone()
            set_draws(layer, number)
            replay()
            asked_for.append(counters.demand_E - before_E)
            set_draws(layer, number)
            for name, wanted in results(layer, tokens, grad).items():
                differing[name] += (bits(replayed[name]) != bits(wanted)).any()
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


def draws_repeat_with_the_seed(case: RoutingCase) -> Findings:
    """Check four passes of policy "random" over one input: all differ, eager as in a graph."""
    replayed, eager = outputs(case, graphed=True), outputs(case, graphed=False)
    other = outputs(dataclasses.replace(case, seed=case.seed + 1), graphed=True)
    broken = []
    for number, output in enumerate(replayed):
        if not torch.equal(output, eager[number]):
            broken.append(f"replay {number} is not eager pass {number}")
        if torch.equal(output, other[number]):
            broken.append(f"replay {number} is the same with another seed")
        if any(torch.equal(output, earlier) for earlier in replayed[:number]):
            broken.append(f"replay {number} draws what an earlier one drew")
    return Findings(facts={"passes": len(replayed)}, broken=tuple(broken))


def outputs(case: RoutingCase, *, graphed: bool) -> list[Tensor]:
    """Return the outputs of four passes from draw 0 on; every token asks for expert 0."""
    with groups(case):
        torch.manual_seed(0)  # On a CPU, weights are drawn from this generator.
        layer = make_layer(case)
        tokens, grad = make_inputs(case, KINDS.index("hot"))

        def run() -> dict[str, Tensor]:
            return results(layer, tokens, grad)

        def replayed() -> dict[str, Tensor]:
            replay()
            return found

        replay, found = capture(run, case.device)
        set_draws(layer, 0)
        one_pass = replayed if graphed else run
        return [one_pass()["the output"].clone() for _ in range(4)]


@contextmanager
def groups(case: RoutingCase) -> Iterator[None]:
    """Set up Megatron with the case's ranks, on a stream that can be captured."""
    with megatron(case.device, expert_model_parallel_size=case.ranks):
        if case.device == "cuda":
            torch.cuda.set_stream(training_stream())
        yield


def set_draws(layer: Any, number: int) -> None:
    """Set the router's next random draw to `number`, if its policy draws."""
    if layer.router.num_draws is not None:
        layer.router.num_draws.fill_(number)


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
        name=case.name,
        device=case.device,
        dtype=torch.bfloat16,
        ep=case.ranks,
        num_experts=case.num_experts,
        top_k=case.top_k,
        hidden=case.hidden,
        ffn=case.ffn,
        ours=(("moe_expert_capacity_factor", case.capacity_factor),),
        options=PaddedOptions(
            experts="packed" if case.packed else "module",
            exchange=case.exchange,
            capacity_pool=case.capacity_pool,
            seed=case.seed,
            policy=case.policy,
            remedy=case.remedy,
            reroute_rounds=2,
        ),
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
