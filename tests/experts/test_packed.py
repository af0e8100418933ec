"""The pass of a layer on a GPU, in Triton's interpreter, beside the plain one and fp64.

Ranks are threads. Unused memory is NaN: what a pass must not read would show in its results.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.config import DispatchConfig
from padded_dispatch.exchange.collectives import Collectives
from padded_dispatch.exchange.direct import DirectStores
from padded_dispatch.experts import Call, Delayed, ExpertWeights, packed, plain
from padded_dispatch.experts.activation import Activation
from padded_dispatch.experts.store import Rooms, Store, fitting, scratch
from padded_dispatch.kernels import gemm
from padded_dispatch.routing.plan import choice_probs, make_plan
from tests.support.thread_memory import threads_as_ranks
from tests.support.threads import run_on_threads

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels would not be interpreted; see tests/gpu"
)


@pytest.fixture(autouse=True)
def any_dtype() -> Iterator[None]:
    """Let products take fp32: the interpreter's bf16 is none."""
    with patch.object(gemm, "check_on_gpu", lambda rows, weight: None):
        yield


WIDTH, FFN, TOKENS = 16, 8, 7
SWIGLU, GPT_OSS = Activation(), Activation(function="quick_gelu", clamp=7.0, offset=1.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of `layers` layers, whose experts are those of `ranks` ranks."""

    ranks: int = 1
    layers: int = 1
    factor: float = 1.0
    routing: str = "random"
    exchange: str = "alltoall"
    activation: Activation = SWIGLU
    biased: bool = False
    sums: bool = False
    delayed: bool = False
    tokens: int = TOKENS
    local_experts: int = 3

    @property
    def config(self) -> DispatchConfig:
        return DispatchConfig(
            num_experts=self.local_experts * self.ranks,
            top_k=2,
            capacity_factor=self.factor,
            capacity_pool="store",
            num_ranks=self.ranks,
        )


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill fresh memory with NaN, or with the least whole number."""
    empty, new_empty, empty_like = torch.empty, Tensor.new_empty, torch.empty_like

    def fill(made: Tensor) -> Tensor:
        with torch.no_grad():
            if made.is_floating_point():
                return made.fill_(torch.nan)
            return made.fill_(False if made.dtype == torch.bool else torch.iinfo(made.dtype).min)

    def wrap(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: fill(fn(*args, **kwargs))

    with (
        patch.object(torch, "empty", wrap(empty)),
        patch.object(torch, "empty_like", wrap(empty_like)),
        patch.object(Tensor, "new_empty", wrap(new_empty)),
    ):
        yield


def routing_map(case: Case, layer: int) -> Tensor:
    """Draw the map of this rank's tokens, the same in every call."""
    rank = dist.get_rank() if case.ranks > 1 else 0
    generator = torch.Generator().manual_seed(rank + 10 * layer)
    num_experts = case.config.num_experts
    scores_TE = torch.rand(case.tokens, num_experts, generator=generator)
    if case.routing == "all to one":
        scores_TE[:, :2] += 1
    if case.routing == "idle":  # The last rank's experts get nothing.
        scores_TE[:, -case.local_experts :] -= 1
    if case.routing == "absent" and rank == case.ranks - 1:
        scores_TE[:] = 0
    map_TE = torch.zeros_like(scores_TE, dtype=torch.bool)
    map_TE.scatter_(1, scores_TE.topk(2).indices, True)
    return map_TE & (scores_TE > 0.1)


@dataclass(kw_only=True)
class Model:
    """The leaves of a model, drawn alike for each dtype, and where it keeps its rows."""

    case: Case
    dtype: torch.dtype
    store: Store = field(default_factory=Store)
    weights: list[ExpertWeights] = field(default_factory=list)

    def __post_init__(self) -> None:
        case = self.case
        rank = dist.get_rank() if case.ranks > 1 else 0
        generator = torch.Generator().manual_seed(100 + rank)
        halves = 2 if case.activation.gated else 1

        def drawn(*shape: int) -> Tensor:
            value = torch.randn(shape, generator=generator) / 2
            return value.to(self.dtype).requires_grad_()

        for _ in range(case.layers):
            self.store.add(lambda: case.config)
            first = drawn(case.local_experts, halves * FFN, WIDTH)
            second = drawn(case.local_experts, WIDTH, FFN)
            biases = [drawn(case.local_experts, halves * FFN), drawn(case.local_experts, WIDTH)]
            sums: list[Tensor | None] = [None, None]
            if case.sums:
                sums = [torch.ones_like(one, dtype=torch.float32) for one in (first, second)]
            self.weights.append(
                ExpertWeights(
                    fc1_LGD=first,
                    fc2_LDF=second,
                    fc1_bias_LG=biases[0] if case.biased else None,
                    fc2_bias_LD=biases[1] if case.biased else None,
                    fc1_sums_LGD=sums[0],
                    fc2_sums_LDF=sums[1],
                    fc1_delayed=Delayed() if case.delayed else None,
                    fc2_delayed=Delayed() if case.delayed else None,
                )
            )
        self.tokens_TD = drawn(case.tokens, WIDTH)
        self.grad_TD = drawn(case.tokens, WIDTH).detach()
        probs = torch.rand(case.layers, case.tokens, case.config.num_experts, generator=generator)
        self.probs = probs.to(torch.promote_types(self.dtype, torch.float32)).requires_grad_()

    def gradients(self) -> dict[str, Tensor]:
        found = {"tokens": self.tokens_TD.grad, "probs": self.probs.grad}
        for number, weights in enumerate(self.weights):
            if self.case.sums:
                found[f"fc1 {number}"] = weights.fc1_sums_LGD
                found[f"fc2 {number}"] = weights.fc2_sums_LDF
            else:
                found[f"fc1 {number}"] = weights.fc1_LGD.grad
                found[f"fc2 {number}"] = weights.fc2_LDF.grad
            if self.case.biased:
                found[f"fc1 bias {number}"] = weights.fc1_bias_LG.grad
                found[f"fc2 bias {number}"] = weights.fc2_bias_LD.grad
        return {name: value.detach().double() for name, value in found.items()}


def exchange_of(case: Case) -> Any:
    group = dist.group.WORLD if case.ranks > 1 else None
    if case.exchange == "direct":
        return DirectStores(case.local_experts, group)
    return Collectives(case.local_experts, group)


def forward(model: Model, run: Any, exchange: Any, rooms: Callable[[int], Rooms]) -> Tensor:
    case, hidden_TD = model.case, model.tokens_TD
    for number, weights in enumerate(model.weights):
        plan = make_plan(routing_map(case, number), top_k=2)
        wire = exchange.start(plan, hidden_TD, case.tokens)
        prob_TK = choice_probs(model.probs[number], plan.expert_TK)
        call = Call(plan=plan, wire=wire, rooms=rooms(number))
        hidden_TD = run(hidden_TD, prob_TK, weights, case.activation, call) + hidden_TD
    return hidden_TD


def trained(case: Case, run: Any, dtype: torch.dtype, passes: int = 1) -> dict[str, Tensor]:
    """Return the output and every gradient."""
    model, exchange = Model(case=case, dtype=dtype), exchange_of(case)
    out_TD = torch.empty(0)
    for _ in range(passes):
        out_TD = forward(
            model, run, exchange, lambda number: model.store.rooms([number], case.tokens)
        )
        out_TD.backward(model.grad_TD)
        for weights in model.weights:
            for tensor, waiting in (
                (weights.fc2_LDF, weights.fc2_delayed),
                (weights.fc1_LGD, weights.fc1_delayed),
            ):
                if waiting is not None:
                    gradient = waiting.popleft()()
                    assert not waiting
                    if not case.sums:
                        assert tensor.grad is None
                        tensor.grad = gradient
    return {"out": out_TD.detach().double()} | model.gradients()


def on_ranks(case: Case, *args: Any) -> list[dict[str, Tensor]]:
    if case.ranks == 1:
        return [trained(case, *args)]
    with threads_as_ranks():
        return run_on_threads(case.ranks, trained, case, *args)


CASES = [
    Case(),
    Case(routing="all to one"),
    Case(factor=0.5, layers=3),
    Case(factor=0.5, layers=2, routing="all to one", biased=True, activation=GPT_OSS),
    Case(biased=True, sums=True, activation=Activation(function="squared_relu", gated=False)),
    Case(layers=2, delayed=True),
    Case(layers=2, delayed=True, sums=True, factor=0.4),
    Case(tokens=1),
    Case(ranks=2, layers=2),
    Case(ranks=2, layers=2, factor=0.6, routing="idle"),
    Case(ranks=4, routing="all to one", factor=0.5, layers=2),
    Case(ranks=2, layers=2, exchange="direct", biased=True),
    Case(ranks=2, exchange="direct", routing="idle", sums=True),
    Case(ranks=2, layers=3, exchange="direct", routing="all to one", factor=0.5),
    Case(ranks=2, layers=2, exchange="direct", routing="absent", factor=1.5, delayed=True),
    Case(ranks=4, layers=2, exchange="direct", factor=0.6),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_pass_beside_fp64(case: Case):
    """In fp32: the error of sums of so many terms, relative to the largest value."""
    with poisoned():
        ours = on_ranks(case, packed.run, torch.float32)
    exact = on_ranks(dataclasses.replace(case, exchange="alltoall"), plain.run, torch.float64)
    allowed = (WIDTH + FFN + 2 * case.tokens * case.ranks) * 2**-24
    for got, expected in zip(ours, exact, strict=True):
        for name, value in expected.items():
            assert bool(got[name].isfinite().all()), name
            assert (got[name] - value).abs().max() <= allowed * value.abs().max(), name


def test_direct_stores_equal_collectives_in_bits_where_a_rank_has_one_choice():
    """Collectives round the sum of each rank; with one expert each there is nothing to add."""
    case = Case(ranks=2, layers=2, factor=1.5, local_experts=1)
    ours = on_ranks(dataclasses.replace(case, exchange="direct"), packed.run, torch.float32, 3)
    theirs = on_ranks(case, packed.run, torch.float32, 3)
    for got, expected in zip(ours, theirs, strict=True):
        for name, value in expected.items():
            assert torch.equal(got[name], value), name


def test_rooms_that_keep_nothing_compute_the_same():
    case = Case(layers=2)
    model, exchange = Model(case=case, dtype=torch.float32), exchange_of(case)
    given = partial(forward, model, packed.run, exchange)
    with poisoned():
        kept = given(lambda number: model.store.rooms([number], case.tokens))
        with torch.no_grad():
            assert torch.equal(given(lambda number: scratch(case.config, case.tokens)), kept)
            assert torch.equal(given(lambda number: fitting()), kept)


def test_backward_runs_once():
    case = Case()
    model = Model(case=case, dtype=torch.float32)
    out_TD = forward(
        model, packed.run, exchange_of(case), lambda n: model.store.rooms([n], case.tokens)
    )
    out_TD.sum().backward(retain_graph=True)
    with pytest.raises(ValueError, match="once per forward pass"):
        out_TD.sum().backward()
