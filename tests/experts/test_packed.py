"""The pass of a layer on a GPU, in Triton's interpreter, beside the plain one and fp64.

Ranks are threads. Unused memory is NaN: what a pass must not read would show in its results.
"""

import dataclasses
import itertools
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from padded_dispatch.config import DispatchConfig, StoreSizes
from padded_dispatch.exchange import collectives
from padded_dispatch.exchange.collectives import Collectives, CollectiveWire
from padded_dispatch.exchange.direct import DirectStores
from padded_dispatch.experts import Activation, Call, ExpertWeights, Sums, packed, plain
from padded_dispatch.experts.scaled import ScaledWeights
from padded_dispatch.experts.store import Buffers, Room, Store, TakeRoom, fitting, scratch
from padded_dispatch.kernels import Segments, SlotList, gemm
from padded_dispatch.memory import LayerMemory
from padded_dispatch.routing import choice_probs, make_plan, select
from tests.support.device import INTERPRETED, ints, nan, small_tiles
from tests.support.direct_parity import differences
from tests.support.machines import rails_of, ranks_on
from tests.support.threads import grid, poisoned_memory, run_on_threads, threads_as_ranks
from tests.support.whole_layers import OneRank, make_case, selective, stacks_are_empty

pytestmark = INTERPRETED


@pytest.fixture(autouse=True)
def products() -> Iterator[None]:
    """Let them take fp32, since the interpreter's bf16 is none, in small tiles."""
    with patch.object(gemm, "check_on_gpu", lambda *given: None), small_tiles():
        yield


WIDTH, FFN, TOKENS = 16, 32, 5
# For tests of several passes, which are about their order: an expert takes as long as its rows.
SMALL: dict[str, int] = {"tokens": 3, "slots": 3, "local_experts": 2}
SWIGLU, GPT_OSS = Activation(), Activation(function="quick_gelu", clamp=7.0, offset=1.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with a layer for each routing, whose experts are those of `ranks` ranks, or of `etp`.

    `slots`: P, which may be more than the tokens: other ranks have more. `capacity`: with cells, C,
    and P is L * C. `again`: whether tokens are sent again; None: as the config says.
    `machines`: a letter for the machine of each rank; "" for one machine.
    """

    ranks: int = 1
    etp: int = 1
    routings: tuple[str, ...] = ("thin",)
    factor: float = 1.0
    exchange: str = "alltoall"
    activation: Activation = SWIGLU
    biased: bool = False
    sums: bool = False
    scaled: bool = False
    frozen: bool = False
    tokens: int = TOKENS
    slots: int = TOKENS
    capacity: int = 0
    local_experts: int = 3
    again: bool | None = None
    machines: str = ""

    @property
    def config(self) -> DispatchConfig:
        return DispatchConfig(
            num_experts=self.local_experts * self.ranks,
            top_k=2,
            capacity_factor=self.factor,
            capacity_pool="store",
            num_ranks=self.ranks,
            etp_size=self.etp,
        )


class Model:
    """A model whose experts `run` computes; its leaves are drawn alike for each dtype."""

    def __init__(
        self, case: Case, run: Any = packed.run, dtype: torch.dtype = torch.float32
    ) -> None:
        self.case, self.run, self.store = case, run, Store()
        self.add = Tensor.add_  # A result can be changed in place.
        if case.machines:
            self.exchange: Any = rails_of(case.local_experts, case.exchange, torch.device("cpu"))
        elif case.exchange == "direct":
            self.exchange = DirectStores(case.local_experts, dist.group.WORLD)
        else:
            group, etp_group, _ = grid(case.ranks, case.etp)
            self.exchange = Collectives(case.local_experts, group, etp_group)
        sizes: Any = {"num_tokens": case.tokens, "hidden": WIDTH, "ffn": FFN}
        how = {"activation": case.activation, "biased": case.biased}
        drawn = make_case(case.config, case.routings, **sizes, **how)
        self.rank = rank = OneRank(drawn, dtype)
        self.tokens_TD, self.grad_TD = rank.tokens_TD, rank.grad_TD
        self.maps_YTE, self.probs_YTE = rank.maps_YTE, rank.probs_YTE
        self.weights: list[ExpertWeights] = []
        for weights in rank.weights_Y:
            self.store.add(lambda: case.config)
            weights.fc1_LGD.requires_grad_(not case.frozen)
            if weights.fc2_bias_LD is not None:  # Probabilities have its gradient all the same.
                weights.fc2_bias_LD.requires_grad_(not case.frozen)
            leaves = weights.fc1_LGD.detach(), weights.fc2_LDF.detach()
            more: dict[str, Any] = {}
            if case.sums:
                more = {"fc1_sums": sums_of_ones(leaves[0]), "fc2_sums": sums_of_ones(leaves[1])}
            if case.scaled:
                more["scaled"] = ScaledWeights(*leaves)
                more["scaled"].refresh(*leaves)
            self.weights.append(dataclasses.replace(weights, **more))

    def forward(self, room: TakeRoom | None = None, numbers: Iterable[int] | None = None) -> Tensor:
        case, hidden_TD = self.case, self.tokens_TD
        for number in range(len(self.weights)) if numbers is None else numbers:
            asked_TE, probs_TE = self.maps_YTE[number], self.probs_YTE[number]
            capacity = case.capacity or case.tokens
            map_TE = select(asked_TE, probs_TE, capacity=capacity).kept_TE
            plan = make_plan(map_TE, top_k=2)
            again = case.again
            if again is None:
                again = case.config.sends_again(self.exchange.num_hosts)
            wire = self.exchange.start(plan, hidden_TD, case.slots, sends_again=again)
            prob_TK = choice_probs(probs_TE, plan.expert_TK)
            take_room = room or partial(self.store.take, [number], case.tokens)
            given = self.weights[number], case.activation, Call(wire=wire, take_room=take_room)
            out_TD = self.run(hidden_TD, prob_TK, *given)
            hidden_TD = self.add(out_TD, hidden_TD)
        return hidden_TD

    def gradients(self) -> dict[str, Tensor]:
        found = {name: leaf.grad for name, leaf in self.rank.leaves().items()}
        for number, weights in enumerate(self.weights):
            if weights.fc1_sums is not None and weights.fc2_sums is not None:
                found[f"fc1_LGD {number}"] = weights.fc1_sums.sums_LOI
                found[f"fc2_LDF {number}"] = weights.fc2_sums.sums_LOI
        return {name: value.detach().double() for name, value in found.items() if value is not None}


def sums_of_ones(weight_LOI: Tensor) -> Sums:
    ones, zeroed = torch.ones_like(weight_LOI), torch.zeros(2, dtype=torch.int32)
    return Sums(sums_LOI=ones, spare_LOI=torch.empty_like(ones), zeroed=zeroed)


def trained(case: Case, passes: int = 1, **how: Any) -> dict[str, Tensor]:
    model = Model(case, **how)
    for _ in range(passes):
        out_TD = model.forward()
        out_TD.backward(model.grad_TD)
    assert stacks_are_empty(model.store)
    return {"out": out_TD.detach().double()} | model.gradients()


def on_ranks(case: Case, work: Any = trained, **how: Any) -> list[Any]:
    if case.ranks * case.etp == 1:
        return [work(case, **how)]
    with threads_as_ranks(), ranks_on(case.machines):
        return run_on_threads(case.ranks * case.etp, partial(work, case, **how))


CASES = [
    Case(),
    Case(routings=("one rank",)),
    Case(factor=0.5, routings=("full", "hot", "thin")),
    Case(factor=0.5, routings=("hot", "full"), biased=True, activation=GPT_OSS),
    Case(biased=True, sums=True, activation=Activation(function="squared_relu", gated=False)),
    Case(biased=True, frozen=True),
    Case(routings=("full", "hot"), sums=True, factor=0.4),
    Case(tokens=1),
    Case(ranks=2, routings=("full", "thin")),
    Case(ranks=2, routings=("full", "idle rank"), factor=0.6),
    Case(ranks=4, routings=("one rank", "hot"), factor=0.5, tokens=3),
    Case(ranks=4, routings=("full", "hot", "full"), capacity=1, slots=3),
    Case(etp=2, routings=("thin", "full"), biased=True),
    Case(ranks=2, etp=2, routings=("full", "hot"), factor=0.6, capacity=1, slots=3),
    # Rows of a layer past five shares find no room.
    Case(ranks=6, routings=("one rank", "hot"), factor=0.3, tokens=3, local_experts=2),
    Case(ranks=6, routings=("one rank",), exchange="direct", tokens=3, local_experts=2),
    Case(ranks=2, routings=("thin", "full"), exchange="direct", biased=True),
    Case(ranks=2, exchange="direct", routings=("idle rank",), sums=True),
    Case(ranks=2, routings=("one rank", "full", "thin"), exchange="direct", factor=0.5),
    Case(ranks=2, routings=("idle source", "none"), exchange="direct", factor=1.5),
    Case(ranks=4, routings=("full", "hot"), exchange="direct", factor=0.6, tokens=3),
    Case(ranks=2, routings=("full", "idle rank", "hot"), exchange="direct", factor=0.3, again=True),
    Case(ranks=2, etp=2, routings=("full", "hot"), factor=0.6, again=True),
    *(
        Case(
            ranks=4, routings=("full", "hot"), factor=0.6, machines=machines, exchange=kind, **SMALL
        )
        for machines, kind in (("aabb", "alltoall"), ("aabb", "direct"), ("abba", "direct"))
    ),
    *(
        Case(ranks=4, routings=("hot", "thin"), machines="aabb", exchange=kind, again=True, **SMALL)
        for kind in ("alltoall", "direct")
    ),
    # All rows go to one host, or come from one: the other has none.
    *(
        Case(ranks=4, routings=("one rank", "idle half"), machines="aabb", exchange=kind, **SMALL)
        for kind in ("alltoall", "direct")
    ),
    Case(
        ranks=6, routings=("one rank",), exchange="direct", factor=0.3, machines="abcabc", **SMALL
    ),
]


@pytest.mark.parametrize("scaled", [False, True], ids=["fp32", "e4m3"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_pass_beside_the_plain_one(case: Case, scaled: bool):
    """Beside fp64: the error of sums of so many terms of the size of the largest value, or of 1.

    In e4m3 beside fp32: both round the same rows, unless sums in another order lie on either side
    of a tie.
    """
    case = dataclasses.replace(case, scaled=scaled)
    with poisoned_memory():
        ours = on_ranks(case)
    dtype = torch.float32 if scaled else torch.float64
    beside = dataclasses.replace(case, exchange="alltoall")
    plains = on_ranks(beside, run=plain.run, dtype=dtype)
    terms = WIDTH + FFN + 2 * case.tokens * case.ranks * case.etp
    allowed = (8 if scaled else 1) * terms * 2**-24
    for got, expected in zip(ours, plains, strict=True):
        for name, value in expected.items():
            assert bool(got[name].isfinite().all()), name
            most = allowed * value.abs().max().clamp(min=0 if scaled else 1)
            assert (got[name] - value).abs().max() <= most, name


@pytest.mark.parametrize("kind", [{}, {"scaled": True}, {"frozen": True}], ids=str)
@pytest.mark.parametrize("exchange", ["alltoall", "direct"])
def test_bits_do_not_depend_on_the_factor(exchange: str, kind: dict[str, Any]):
    """At 0.01 a store holds a layer, which the next one overwrites; at 2 all layers."""
    case = Case(ranks=2, routings=("full", "hot", "one rank"), exchange=exchange, **kind, **SMALL)
    with poisoned_memory():
        cases = (dataclasses.replace(case, factor=factor) for factor in (0.01, 2.0))
        few, many = (on_ranks(one, passes=2) for one in cases)
    assert not any(map(differences, few, many))


_OVERFLOWS, _HOLDS, _FROZEN = (0.01, False), (2.0, False), (0.3, True)  # factors; frozen fc1


@pytest.mark.parametrize(
    ("machines", "routing", "kinds"),
    [
        ("aa", "hot", [_OVERFLOWS, _HOLDS, _FROZEN]),
        ("aa", "one rank", [_OVERFLOWS]),
        ("aa", "idle source", [_HOLDS]),
        ("abba", "hot", [_OVERFLOWS, _FROZEN]),
    ],
)
@pytest.mark.parametrize("exchange", ["alltoall", "direct"])
def test_bits_do_not_depend_on_what_is_sent_again(
    machines: str, exchange: str, routing: str, kinds: list[tuple[float, bool]]
):
    """Stores that overflow and such that do not, a frozen fc1 on all ranks; with a rail, too."""
    how: dict[str, Any] = {"exchange": exchange, "ranks": len(machines), **SMALL}
    if len(set(machines)) > 1:
        how["machines"] = machines
    for factor, frozen in kinds:
        case = Case(routings=(routing, "full"), factor=factor, frozen=frozen, **how)
        with poisoned_memory():
            cases = (dataclasses.replace(case, again=again) for again in (False, True))
            kept, again = (on_ranks(one, passes=2) for one in cases)
        assert not any(map(differences, kept, again))


def _memory(case: Case) -> LayerMemory:
    sizes = {"hidden_size": WIDTH, "fc1_width": 2 * FFN, "element_size": 4}
    return LayerMemory(
        config=case.config,
        num_tokens=case.tokens,
        direct=case.exchange == "direct",
        num_hosts=len(set(case.machines)) or 1,
        **sizes,
    )


def _kept(case: Case) -> list[tuple[int, int]]:
    """Return the bytes of tokens, and of other numbers, that each layer keeps until backward."""
    kept = []

    def run(tokens_TD: Tensor, *given: Any) -> Tensor:
        out_TD = packed.run(tokens_TD, *given)
        node: Any = out_TD.grad_fn
        saved = dict(zip(node.state.names, node.saved_tensors, strict=True))
        others = "fc1_LGD", "fc2_LDF", "length", "offsets", "tiles", "before"
        saved = {name: one for name, one in saved.items() if name not in others and one is not None}
        tokens = [saved.pop(name) for name in ("kept_SPD", "own_TD") if name in saved]
        tokens = [one for one in tokens if one.data_ptr() != tokens_TD.data_ptr()]
        kept.append((sum(one.nbytes for one in tokens), sum(one.nbytes for one in saved.values())))
        return out_TD

    model = Model(case, run=run)
    model.forward().backward(model.grad_TD)
    return kept


# K = 2 and the factor 1 send again from 5 ranks on: 4 others are more than 1.5 * 2 shares. Behind a
# rail they always do.
SENT = {"aaaa": False, "aaaaa": True, "aabb": True, "aaabbb": True}
WAYS = [("a", "alltoall"), *itertools.product(SENT, ("alltoall", "direct"))]


def _on_machines(machines: str, exchange: str) -> Case:
    many = machines if len(set(machines)) > 1 else ""
    case = Case(ranks=len(machines), machines=many, exchange=exchange, routings=("full", "thin"))
    return dataclasses.replace(case, **SMALL)


def _plans(case: Case) -> int:
    """Return the bytes of whole numbers that a forward pass gathers from other ranks."""
    with torch.no_grad():
        Model(case).forward(partial(scratch, case.config, case.tokens))
    return _came.total


@pytest.mark.parametrize("machines", ["aaaa", "aabb", "aabbcc"])
def test_plans_that_are_gathered_are_those_that_a_plan_counts(machines: str):
    case = dataclasses.replace(_on_machines(machines, "alltoall"), routings=("full",))
    gathered = collectives._gathered

    def note(blocks: Tensor, group: Any) -> Tensor:
        found = gathered(blocks, group)
        if blocks.dtype == torch.int32 and group is not None:
            _came.total = getattr(_came, "total", 0) + found.nbytes - blocks.nbytes
        return found

    with patch.object(collectives, "_gathered", note):
        assert set(on_ranks(case, _plans)) == {_memory(case).plans_on_the_wire}


@pytest.mark.parametrize(("machines", "exchange"), WAYS)
def test_a_pass_keeps_the_bytes_that_a_plan_counts(machines: str, exchange: str):
    case = _on_machines(machines, exchange)
    layer, again = _memory(case), SENT.get(machines, False)
    assert layer.sends_again == again
    assert (layer.kept_tokens == 0) == (machines == "a" or (again and not case.machines))
    sizes = StoreSizes.of([case.config] * 2, case.tokens)
    numbers = [layer.kept_numbers(overwritten=one) for one in sizes.overwritten]
    for found in on_ranks(case, _kept):
        assert found == [(layer.kept_tokens, one) for one in numbers]


class _Live(TorchDispatchMode):
    """Bytes of the tensors that operations return, while these live: `peak` is the most."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
        result = func(*args, **kwargs or {})
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, Tensor):
                address = one.untyped_storage().data_ptr()
                if address not in given or self._known.get(address):
                    self.see(one)
        return result

    def see(self, tensor: Tensor) -> Tensor:
        """Count a tensor, once for all tensors that share its memory."""
        address, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if not self._known.get(address):
            self.live += size
            self.peak = max(self.peak, self.live)
        self._known[address] = self._known.get(address, 0) + 1
        weakref.finalize(tensor, self._end, address, size)
        return tensor

    def _end(self, address: int, size: int) -> None:
        self._known[address] -= 1
        if not self._known[address]:
            self.live -= size


_seen, _came = threading.local(), threading.local()


def _peak(case: Case) -> int:
    """Return the most bytes that a pass allocates at a time, without its first pass's store."""
    model = Model(case)
    model.forward().backward(model.grad_TD)
    with _Live() as _seen.live:
        out_TD = model.forward()
        out_TD.backward(model.grad_TD)
    _seen.live, live = None, _seen.live
    return live.peak


@pytest.mark.parametrize(("machines", "exchange"), WAYS)
def test_a_pass_allocates_what_a_plan_counts(machines: str, exchange: str):
    """And some more that has T rows, or an element for each tile or expert."""
    case = dataclasses.replace(_on_machines(machines, exchange), sums=True, routings=("full",))
    layer = _memory(case)
    sizes = StoreSizes.of([case.config], case.tokens)
    planned = layer.kept_tokens + layer.kept_numbers(overwritten=False)
    planned += layer.temporaries(sizes.max_rows[0], FFN)
    see = lambda make: lambda *given: _see(make(*given))  # noqa: E731
    with (
        patch.object(collectives, "_gathered", see(collectives._gathered)),
        patch.object(CollectiveWire, "_swap", see(CollectiveWire._swap)),
    ):
        found = on_ranks(case, _peak)
    few = 4 * case.tokens * layer.token_bytes
    assert planned <= min(found) and max(found) <= planned + few


def _see(tensor: Tensor) -> Tensor:
    live = getattr(_seen, "live", None)
    return tensor if live is None else live.see(tensor)


def _behind_another_pass(case: Case, runs: bool) -> dict[str, Tensor]:
    """A pass without gradients, which may run before backward, has rows for all choices at home."""
    model, first = Model(case), case.local_experts * dist.get_rank()
    out_TD = model.forward()
    if runs:
        model.maps_YTE = [torch.zeros_like(map_TE) for map_TE in model.maps_YTE]
        for map_TE in model.maps_YTE:
            map_TE[:, first : first + 2] = True
        with torch.no_grad():
            model.forward(partial(scratch, case.config, case.tokens))
    out_TD.backward(model.grad_TD)
    return model.gradients()


def test_rows_without_room_add_nothing_behind_any_pass():
    """Their places at home hold what another pass has left there."""
    case = Case(ranks=6, routings=("one rank",), exchange="direct", tokens=3, local_experts=2)
    found, expected = (on_ranks(case, _behind_another_pass, runs=runs) for runs in (True, False))
    assert not any(map(differences, found, expected))


def _routes_otherwise_again(case: Case, recompute: bool) -> dict[str, Tensor]:
    """The first token chooses other experts from the second pass on, which alone is right."""
    model = Model(case)
    maps_YTE, passes = model.maps_YTE, []

    def run() -> Tensor:
        passes.append(1)
        if len(passes) == 1 and recompute:
            model.maps_YTE = [map_TE.clone() for map_TE in maps_YTE]
            for map_TE in model.maps_YTE:
                map_TE[0] = map_TE[0].roll(1)
        else:
            model.maps_YTE = maps_YTE
        return model.forward(partial(scratch, case.config, case.tokens))

    out_TD = checkpoint(run, use_reentrant=False) if recompute else run()
    out_TD.backward(model.grad_TD)
    assert len(passes) == 1 + recompute
    return model.gradients()


@pytest.mark.parametrize(
    ("machines", "exchange"),
    [("a", "alltoall"), *itertools.product(("aa", "aabb"), ("alltoall", "direct"))],
)
def test_a_recompute_that_routes_a_token_otherwise_has_its_own_gradients(
    machines: str, exchange: str
):
    """Of the rail's routing, too, and of that inside of a host."""
    case = _on_machines(machines, exchange)
    case = dataclasses.replace(case, routings=("thin",), again=exchange == "direct")
    with poisoned_memory():
        found, expected = (
            on_ranks(case, _routes_otherwise_again, recompute=again) for again in (True, False)
        )
    assert not any(map(differences, found, expected))


def test_direct_stores_equal_collectives_in_bits_where_a_rank_has_one_choice():
    """Collectives round the sum of each rank; with one expert each there is nothing to add."""
    case = Case(ranks=2, routings=("full", "full"), factor=1.5, local_experts=1, tokens=3)
    ours = on_ranks(dataclasses.replace(case, exchange="direct"), passes=2)
    theirs = on_ranks(case, passes=2)
    assert not any(map(differences, ours, theirs))


def _trained_in_flight(case: Case, in_flight: int) -> dict[str, Tensor]:
    """Two forward passes, with one or both of them in flight, each with a backward pass."""
    model = Model(case)
    waiting: list[Tensor] = []
    for _ in range(2):
        waiting.append(model.forward())
        if len(waiting) == in_flight:
            for out_TD in waiting:
                out_TD.backward(model.grad_TD)
            waiting.clear()
    assert stacks_are_empty(model.store)
    return model.gradients()


@pytest.mark.parametrize("exchange", ["alltoall", "direct"])
def test_microbatches_in_flight_whose_rows_are_computed_again(exchange: str):
    case = Case(ranks=2, routings=("full", "hot", "full"), exchange=exchange, factor=0.3, **SMALL)
    with poisoned_memory(), threads_as_ranks():
        one, two = (run_on_threads(2, _trained_in_flight, case, count) for count in (1, 2))
    assert not any(map(differences, two, one))


def _trained_beside_a_broken_pass(case: Case, breaks: bool) -> dict[str, Tensor]:
    """Two layers are trained; a third one runs behind them, and nobody asks for its gradients."""
    model = Model(case)
    out_TD = model.forward(numbers=range(2))
    if breaks:
        model.forward(numbers=[2])
    out_TD.backward(model.grad_TD)
    return model.gradients()


def test_a_pass_that_broke_off_may_have_overwritten_rows():
    case = Case(routings=("full", "hot", "full"), factor=0.7)
    with poisoned_memory():
        found, expected = (_trained_beside_a_broken_pass(case, breaks) for breaks in (True, False))
    assert differences(found, expected) == []


def test_rows_refilled_elsewhere_leave_out_the_same_choices(monkeypatch):
    """-1, an expert of another rank, and -2, a row without room, are no rows to be moved."""
    monkeypatch.setattr(packed, "_multiply_by_fc1", lambda *given: None)
    offsets, row_AK = ints(1, 3, 4), ints([1, -1], [-2, 3], [2, -1])
    sizes: Any = {"num_experts": 2, "num_sources": 1, "num_rows": 4, "num_expected": 4}
    listed = SlotList(
        slot_A=None, length=None, row_AK=row_AK, prob_AK=nan(3, 2), num_sources=1, num_slots=3
    )
    room = Room(limit=9, max_rows=4, share=4, top=ints(9, 9, 0))
    where = Segments(offsets=offsets, **sizes)
    here = packed._Rows(listed=listed, segments=where, buffers=room.buffers(9, 8, torch.empty(0)))
    given: Any = here, room, None, None, None
    there = packed._refill(*given, gives_back=False)
    assert there.listed.row_AK.tolist() == [[0, -1], [-2, 2], [1, -1]]
    assert there.segments.offsets.tolist() == [0, 2, 3] and len(there.buffers.fc1_MG) == 4
    there = packed._refill(*given, gives_back=True)
    assert there is here


def test_transients_hold_what_can_arrive(monkeypatch):
    found = []
    tiled = gemm.with_tiles
    monkeypatch.setattr(gemm, "with_tiles", lambda one: found.append(one.num_rows) or tiled(one))
    on_ranks(Case(ranks=4, routings=("full",), tokens=3, slots=3))
    assert found == [4 * 3 * 2] * 4  # 4 sources, 3 tokens, K = 2; five shares are 30.
    found.clear()
    on_ranks(Case(ranks=4, routings=("full",), local_experts=1, tokens=3, slots=3))
    assert found == [4 * 3 * 1] * 4


def test_rooms_that_keep_nothing_compute_the_same():
    case = Case(routings=("thin", "full"))
    model = Model(case)
    with poisoned_memory():
        kept = model.forward()
        with torch.no_grad():
            assert torch.equal(model.forward(partial(scratch, case.config, case.tokens)), kept)
            assert torch.equal(model.forward(fitting), kept)


def _without_gradients(case: Case) -> None:
    with torch.no_grad():
        Model(case).forward(partial(scratch, case.config, case.tokens))


def test_a_pass_without_gradients_keeps_no_tokens(monkeypatch):
    kept, spread_rows = [], packed.rows.spread_rows

    def noted(*args: Any, kept_SPD: Any = None, **given: Any) -> Any:
        kept.append(kept_SPD)
        return spread_rows(*args, kept_SPD=kept_SPD, **given)

    monkeypatch.setattr(packed.rows, "spread_rows", noted)
    with threads_as_ranks():
        run_on_threads(2, _without_gradients, Case(ranks=2, exchange="direct"))
    assert kept == [None] * 2


def test_recompute_frees_what_the_first_pass_kept(monkeypatch):
    """With torch's hooks of saved tensors, whose second pass only fills the memory again."""
    case, made, found = Case(routings=("thin",)), [], []
    buffers_of = Room.buffers

    def noted(room: Room, *sizes: int, like: Tensor) -> Buffers:
        made.append(buffers := buffers_of(room, *sizes, like=like))
        return buffers

    monkeypatch.setattr(Room, "buffers", noted)
    for recompute in (False, True):
        model = Model(case)
        run = partial(model.forward, partial(scratch, case.config, TOKENS))
        with poisoned_memory():
            out_TD = checkpoint(run, use_reentrant=False) if recompute else run()
            kept = [weakref.ref(buffers.fc1_MG) for buffers in made]
            made.clear()
            assert [one() is None for one in kept] == [recompute]
            out_TD.backward(model.grad_TD)
        assert len(made) == recompute
        made.clear()
        found.append({"out": out_TD.detach()} | model.gradients())
    assert differences(*found) == []


def _selectively_recomputed(case: Case, saves: str) -> dict[str, Tensor]:
    model = Model(case)
    model.add = torch.add  # What selective recompute has saved may not be changed.
    run = partial(model.forward, partial(scratch, case.config, case.tokens))
    how: dict[str, Any] = {"use_reentrant": False, "context_fn": selective(saves)}
    out_TD = checkpoint(run, **how) if saves else run()
    out_TD.backward(model.grad_TD)
    return {"out": out_TD.detach()} | model.gradients()


@pytest.mark.parametrize("exchange", ["alltoall", "direct"])
def test_selective_recompute_has_the_same_bits(exchange: str):
    """Kernels are no operations of torch's: they run again, in memory that may be the first's."""
    case = Case(ranks=2, routings=("hot",), exchange=exchange, biased=True, **SMALL)
    with poisoned_memory(), threads_as_ranks():
        expected = run_on_threads(2, _selectively_recomputed, case, "")
        for saves in ("nothing", "all"):
            found = run_on_threads(2, _selectively_recomputed, case, saves)
            assert not any(map(differences, found, expected)), saves


def test_sizes_that_products_need(monkeypatch):
    """They read fc2: fc1 is as wide as gate and up, where a half of the multiple would do."""
    asked = []
    monkeypatch.setattr(gemm, "check_on_gpu", lambda *given: asked.append(given[1:]))
    for scaled in (False, True):
        trained(Case(scaled=scaled))
    shape = Model(Case()).weights[0].fc2_LDF.shape
    assert [(weight.shape, multiple) for weight, multiple in asked] == [(shape, 8), (shape, 16)]


@pytest.mark.parametrize("experts", [plain, packed], ids=["plain", "packed"])
def test_a_partial_backward_changes_sums_of_what_it_asks_for_alone(experts: Any):
    """Also with `zeroed` set, with which a gradient would be stored over the sums."""
    for asks in ("tokens", "fc2", "all"):
        model = Model(Case(sums=True, biased=True), experts.run)
        weights: Any = model.weights[0]
        weights.fc1_sums.zeroed.fill_(1), weights.fc2_sums.zeroed.fill_(1)
        out_TD = model.forward()
        if asks == "tokens":
            (found,) = torch.autograd.grad(out_TD, model.tokens_TD, model.grad_TD)
            assert found.any()
        elif asks == "fc2":
            out_TD.backward(model.grad_TD, inputs=[weights.fc2_LDF])
        else:
            out_TD.backward(model.grad_TD)
        for name, is_asked in (("fc1", asks == "all"), ("fc2", asks != "tokens")):
            sums = getattr(weights, f"{name}_sums")
            changed = not torch.equal(sums.sums_LOI, torch.ones_like(sums.sums_LOI))
            assert (changed, int(sums.zeroed[0])) == (is_asked, 0 if is_asked else 1)


def test_a_gradient_that_is_asked_for_by_name_is_found():
    """As Transformer Engine's graphs ask for the gradients of weights."""
    model = Model(Case())
    weight = model.weights[0].fc1_LGD
    (found,) = torch.autograd.grad(model.forward(), weight, model.grad_TD)
    out_TD = model.forward()
    out_TD.backward(model.grad_TD)
    assert torch.equal(found, weight.grad)


def _trained_by(case: Case, grad_of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    model = Model(case)
    model.forward().backward(grad_of(model.grad_TD))
    return model.gradients()


@pytest.mark.parametrize(("ranks", "exchange"), [(1, "alltoall"), (2, "alltoall"), (2, "direct")])
def test_a_gradient_may_lie_in_memory_in_any_way(ranks: int, exchange: str):
    """Like that of a sum, which is one number, or of a transpose behind the layer."""
    case = Case(ranks=ranks, exchange=exchange, **SMALL)
    for way in (lambda one: one[:1, :1].expand_as(one), lambda one: one.T.contiguous().T):
        alike = lambda one, way=way: way(one).contiguous()  # noqa: E731
        with poisoned_memory():
            found, expected = (on_ranks(case, _trained_by, grad_of=of) for of in (way, alike))
        assert not any(map(differences, found, expected))


def test_backward_runs_once():
    for experts in (plain, packed):
        model = Model(Case(), experts.run)
        out_TD = model.forward()
        out_TD.sum().backward(retain_graph=True)
        with pytest.raises(ValueError, match="once per forward pass"):
            out_TD.sum().backward()
        with pytest.raises(ValueError, match=r"^create_graph must be False in the backward pass"):
            torch.autograd.grad(model.forward().sum(), model.tokens_TD, create_graph=True)


@pytest.mark.parametrize("factor", [0.5, 0.8, 2.0])
@pytest.mark.parametrize("experts", [plain, packed], ids=["plain", "packed"])
def test_backward_passes_in_the_order_of_forward_passes(experts: Any, factor: float):
    """As with a loss for each layer: the rows of a layer behind stay, those of another move."""
    case, found = Case(routings=("full", "hot", "full"), factor=factor), []
    for in_order in (False, True):
        model, outs, lasts = Model(case, experts.run), [], []
        with poisoned_memory():
            for number in range(3):
                outs.append(model.forward(numbers=[number]))
                model.tokens_TD = outs[-1].detach()
            for out_TD in outs if in_order else reversed(outs):
                out_TD.backward(model.grad_TD)
                lasts += [stack.last for stack in model.store._stacks]
        assert stacks_are_empty(model.store) != in_order
        # Then the next pass begins at 0.
        assert lasts == ([2, 2, -1] if in_order else [1, 0, -1])
        found.append(model.gradients())
    assert differences(*found) == []


def _passes(case: Case, order: list[tuple[bool, int, int]]) -> dict[tuple[int, int], Any]:
    """Run passes of micro-batches through single layers; return gradients by both.

    `order`: whether a pass is a forward one, its micro-batch and layer.
    """
    model, outs, found = Model(case), {}, {}
    tokens_TD = model.tokens_TD.detach()
    for is_forward, number, layer in order:
        if is_forward:
            model.tokens_TD = (tokens_TD * (1 + number) + layer).requires_grad_()
            outs[number, layer] = model.tokens_TD, model.forward(numbers=[layer])
        else:
            own_TD, out_TD = outs.pop((number, layer))
            leaves = own_TD, model.probs_YTE[layer], model.weights[layer].fc1_LGD
            found[number, layer] = torch.autograd.grad(out_TD, leaves, model.grad_TD)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_passes_of_layers_and_micro_batches_in_any_order(seed: int):
    """Each has the gradients that it has alone, in a store that holds it."""
    rng, order, waiting = random.Random(seed), [], []
    case = Case(routings=("full", "hot", "full"), factor=rng.choice([0.3, 0.5, 0.8]))
    layers = {number: iter(range(3)) for number in (0, 1)}
    for number in rng.sample([0, 0, 0, 1, 1, 1], 6):
        order.append((True, number, next(layers[number])))
        waiting.insert(rng.randrange(len(waiting) + 1), (False, *order[-1][1:]))
        if rng.random() < 0.3:
            order.append(waiting.pop())
    with poisoned_memory():
        found = _passes(case, order + waiting)
    room = dataclasses.replace(case, factor=3.0)
    for (number, layer), gradients in found.items():
        alone = _passes(room, [(True, number, layer), (False, number, layer)])[number, layer]
        assert all(map(torch.equal, gradients, alone)), (number, layer)


@pytest.mark.parametrize("experts", [plain, packed], ids=["plain", "packed"])
def test_a_pass_that_goes_on_behind_another_order_of_backward_passes(experts: Any):
    """Two branches on a trunk, a gradient of each, then both again in the usual order."""
    case, found = Case(routings=("full",) * 3, factor=1.0), []
    for before in (False, True):
        model = Model(case, experts.run)
        trunk_TD, first_TD = model.forward(numbers=[0]), model.tokens_TD
        model.tokens_TD = trunk_TD.detach().requires_grad_()
        if before:
            for out_TD in [model.forward(numbers=[number]) for number in (1, 2)]:
                out_TD.backward(model.grad_TD)
            model.tokens_TD.grad = model.weights[1].fc1_LGD.grad = None
        one_TD, other_TD = (model.forward(numbers=[number]) for number in (1, 2))
        other_TD.backward(model.grad_TD)
        one_TD.backward(model.grad_TD)
        trunk_TD.backward(model.tokens_TD.grad)
        found.append((model.tokens_TD.grad, model.weights[1].fc1_LGD.grad, first_TD.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("factor", [0.01, 0.9])
@pytest.mark.parametrize("experts", [plain, packed], ids=["plain", "packed"])
def test_micro_batches_in_turn_share_stacks(experts: Any, factor: float, scaled: bool):
    """Layer by layer they have the gradients that they have one after the other."""
    case = Case(
        routings=("full", "hot", "full"), factor=factor, scaled=scaled, biased=True, **SMALL
    )
    found = []
    for parts in ([(0,), (1,)], [(0, 1)]):
        model = Model(case, experts.run)
        given = [(model.tokens_TD.detach() * n).requires_grad_() for n in (1, 2)]
        hidden = list(given)
        for part in parts:
            with poisoned_memory():
                for number, n in itertools.product(range(3), part):
                    model.tokens_TD = hidden[n]
                    hidden[n] = model.forward(numbers=[number])
                for n in part:
                    hidden[n].backward(model.grad_TD)
        gradients = [one.grad for one in (*given, *(w.fc1_LGD for w in model.weights))]
        found.append([*hidden, *gradients])
        assert {stack.last for stack in model.store._stacks} == {-1}
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
