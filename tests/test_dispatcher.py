"""Whole layers through the dispatcher on all ranks against the oracle; unused memory is NaN."""

import dataclasses
import gc
import os
import re
import weakref
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import padded_dispatch.dispatcher
from padded_dispatch import Activation, DispatchConfig, ExpertWeights, PaddedDispatcher, Store
from padded_dispatch.config import FIT, NO_DROP
from padded_dispatch.exchange import choose
from padded_dispatch.exchange.collectives import Collectives
from padded_dispatch.experts import padded
from padded_dispatch.experts.scaled import ScaledWeights
from padded_dispatch.utils.launch import start_workers
from tests.support import whole_layers
from tests.support.device import INTERPRETED
from tests.support.threads import run_on_threads
from tests.support.whole_layers import (
    ROUTINGS,
    Case,
    Found,
    Model,
    OneRank,
    assert_found,
    check,
    expected,
    make_case,
    on_all_ranks,
    stacks_are_empty,
)

POOLS = pytest.mark.parametrize("pool", ["store", "cells", "padded"])


def config_of(pool: str, num_ranks: int = 1, etp_size: int = 1, **changes: Any) -> DispatchConfig:
    """Return a config for a store, for cells that our experts read, or for padded ones."""
    experts = 2 * num_ranks
    sizes: Any = dict(num_experts=experts, top_k=min(3, experts), capacity_factor=0.75)
    sizes |= dict(capacity_pool="store" if pool == "store" else "cells", **changes)
    return DispatchConfig(**sizes, num_ranks=num_ranks, etp_size=etp_size)


@POOLS
@pytest.mark.parametrize(("num_ranks", "etp_size"), [(1, 1), (1, 4), (4, 1), (2, 2), (8, 1)])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_layers_are_the_oracle(num_ranks, etp_size, routing, pool):
    """Layers that overflow one after the other."""
    check(make_case(config_of(pool, num_ranks, etp_size), [routing, "hot", "one rank"]), pool)


@POOLS
@pytest.mark.parametrize(
    ("changes", "num_tokens"),
    [
        ({"policy": "position"}, 7),
        ({"capacity_factor": NO_DROP}, 7),
        ({"capacity_factor": FIT}, 7),
        ({"capacity_factor": FIT, "alignment": 16}, 9),
        ({"capacity_factor": 0.01}, 9),
        ({"capacity_factor": 0.3}, 9),
        ({"capacity_factor": 0.3, "policy": "position"}, 9),
        ({"num_experts": 4, "top_k": 4}, 70),
        ({"alignment": 16}, 7),
        ({"top_k": 1}, 1),
    ],
    ids=str,
)
def test_every_setting_is_the_oracle(pool, changes, num_tokens):
    config = config_of(pool, 4, **changes)
    check(make_case(config, ["thin", "hot"], num_tokens=num_tokens), pool)


@pytest.mark.parametrize("recompute", ["reentrant", "other"])
@pytest.mark.parametrize("num_ranks", [1, 4, 8])
def test_recomputed_layers_are_the_oracle(num_ranks, recompute):
    """With eight ranks, both passes of the first layer overflow alike."""
    config = config_of("store", num_ranks, capacity_factor=2.0)
    check(make_case(config, ["one rank", "hot"], num_tokens=9), "store", recompute)


@pytest.mark.parametrize("saves", whole_layers.SAVES)
@pytest.mark.parametrize("pool", ["store", "padded"])
def test_layers_that_are_selectively_recomputed_are_the_oracle(pool, saves):
    """Also with tokens that are struck."""
    for num_ranks, factor in ((2, 2.0), (8, 0.75)):
        config = config_of(pool, num_ranks, capacity_factor=factor)
        check(make_case(config, ["one rank", "hot"], num_tokens=9), pool, saves)


def _routed_otherwise(case: Case, pool: str, recompute: bool) -> Found:
    """Return gradients; tokens 0 and 1 change places in the map once a pass has run."""
    model, rank = Model(case, pool), OneRank(case)
    given_TE = rank.maps_YTE[0]
    other_TE = given_TE[[1, 0, *range(2, len(given_TE))]]

    def run(tokens_TD: Tensor) -> Tensor:
        out_TD = model.layer(rank, 0, tokens_TD)
        rank.maps_YTE[0] = other_TE
        return out_TD

    if recompute:
        found = rank.found(checkpoint(run, rank.tokens_TD, use_reentrant=False))
    else:
        rank.maps_YTE[0] = other_TE
        found = rank.found(run(rank.tokens_TD))
    del found["out"]
    return found


@pytest.mark.parametrize(
    ("pool", "kernels"),
    [("store", False), ("padded", False), pytest.param("padded", True, marks=INTERPRETED)],
)
def test_a_pass_that_is_recomputed_with_another_routing_has_its_gradients(
    monkeypatch, pool, kernels
):
    """Nothing of the first pass is left in them: a token that ties may choose otherwise."""
    monkeypatch.setattr(whole_layers, "_check_input", lambda *given: None)
    monkeypatch.setattr(padded, "_has_kernels", lambda values: kernels)
    for factor in (2.0, 0.75, 0.3):  # Cells have room for fewer tokens than there are, at last.
        case = make_case(config_of(pool, 2, capacity_factor=factor), ["thin"])
        assert any((layer.map_STE[:, 0] != layer.map_STE[:, 1]).any() for layer in case.layers)
        again, once = (
            on_all_ranks(case.config, _routed_otherwise, case, pool, recompute)
            for recompute in (True, False)
        )
        assert_found(again, once)


def differentiated_twice(case: Case, pool: str) -> None:
    rank = OneRank(case)
    outs = [Model(case, pool).forward(rank)]
    if pool == "padded":  # And between dispatch and combine.
        dispatcher = PaddedDispatcher(case.config, group=dist.group.WORLD)
        given = rank.tokens_TD, rank.probs_YTE[0].detach(), rank.maps_YTE[0]
        outs.append(dispatcher.dispatch(*given).expert_input.rows_ND)
    for out in outs:
        with pytest.raises(ValueError, match=r"^create_graph must be False .* got True; take sec"):
            torch.autograd.grad(out.sum(), rank.tokens_TD, create_graph=True)


@pytest.mark.parametrize("pool", ["store", "padded"])
def test_second_derivatives_of_an_exchange_are_refused(pool):
    config = config_of(pool, 2)
    on_all_ranks(config, differentiated_twice, make_case(config, ["full"]), pool)


def test_a_layer_without_gradients_takes_no_stack():
    """It would end at once, and the next layer would begin a stack beside that of the first."""
    case = make_case(config_of("store"), ["thin"] * 3)
    model, rank = Model(case, "store"), OneRank(case)
    rank.probs_YTE[1].requires_grad_(False)
    for weight in rank.weights_Y[1].tensors().values():
        weight.requires_grad_(False)
    first_TD = model.layer(rank, 0, rank.tokens_TD)
    first_TD = first_TD + model.layer(rank, 1, first_TD.detach())
    model.layer(rank, 2, first_TD)
    assert len(model.store._stacks) == 1


def _after_another_policy(case: Case) -> Found:
    config = dataclasses.replace(case.config, policy="probs")
    model, rank = Model(dataclasses.replace(case, config=config), "cells"), OneRank(case)
    with torch.no_grad():
        model.forward(rank)
    for dispatcher in model.dispatchers:
        dispatcher.config = case.config
    return rank.found(model.forward(rank))


def test_a_replaced_policy_decides_which_rows_keep_a_slot():
    case = make_case(config_of("cells", 8, policy="position"), ["hot"], num_tokens=9)
    assert_found(on_all_ranks(case.config, _after_another_policy, case), expected(case))


def test_sixty_four_ranks_are_the_oracle():
    check(make_case(config_of("store", 64), ["hot", "masked"], num_tokens=3), "store")


def test_padded_rows_need_slots_of_their_own():
    expected = r"^capacity_pool must be 'cells' with experts that read padded cells, got 'store'"
    dispatcher = PaddedDispatcher(config_of("store"))
    with pytest.raises(ValueError, match=expected):
        dispatcher.dispatch(torch.zeros(1, 3), torch.zeros(1, 2), torch.zeros(1, 2) > 0)


@pytest.mark.parametrize("field", ["num_ranks", "etp_size"])
def test_a_config_of_another_size_than_its_group_is_refused(field):
    config = DispatchConfig(num_experts=4, top_k=2, **{field: 2})
    with pytest.raises(ValueError, match=rf"^{field}\b.*2") as refused:
        PaddedDispatcher(config)
    assert "process group" in str(refused.value)


@pytest.mark.parametrize("name", ["group", "etp_group"])
def test_a_group_of_other_ranks_is_refused(name):
    """`new_group` returns a number on ranks that are not in the group."""
    config = DispatchConfig(num_experts=4, top_k=2)
    with pytest.raises(ValueError, match=f"^{name} must be a process group that this rank is in"):
        PaddedDispatcher(config, **{name: dist.GroupMember.NON_GROUP_MEMBER})


def test_an_unknown_exchange_is_refused():
    with pytest.raises(ValueError, match=r"^exchange must be one of auto, alltoall, direct"):
        PaddedDispatcher(config_of("store"), exchange="nccl")  # pyright: ignore


@pytest.mark.parametrize("packed", [True, False])
def test_direct_stores_need_gpus_and_packed_experts(packed):
    dispatcher = PaddedDispatcher(config_of("cells"), exchange="direct")
    given = torch.zeros(1, 3), torch.zeros(1, 2), torch.zeros(1, 2) > 0
    weights = ExpertWeights(fc1_LGD=torch.zeros(2, 2, 3), fc2_LDF=torch.zeros(2, 3, 1))
    words = "tokens on GPUs" if packed else "experts='packed'"
    with pytest.raises(ValueError, match=rf"^exchange must .*; direct writes need {words}"):
        if packed:
            dispatcher.run(*given, weights, Activation())
        else:
            dispatcher.dispatch(*given)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_collectives_that_were_asked_for_are_taken(device):
    given: Any = config_of("store"), None, None, "alltoall"
    exchange, reason = choose(*given, packed=True, device=torch.device(device))
    assert isinstance(exchange, Collectives) and reason == 'exchange="alltoall" was asked for'


def test_a_pass_behind_one_that_broke_off_is_refused(monkeypatch):
    dispatcher = PaddedDispatcher(config_of("cells"))
    given = torch.zeros(1, 3), torch.zeros(1, 2), torch.zeros(1, 2) > 0
    dispatcher.dispatch(*given)
    monkeypatch.setattr(Collectives, "broke_off", lambda exchange: True)
    with pytest.raises(ValueError, match=r"^the pass before this one must run to its end"):
        dispatcher.dispatch(*given)


def _first_pass_behind_another_dispatchers() -> list[str]:
    """Rank 1 has a pass of another dispatcher that broke off, when the first of this one comes."""
    given = torch.zeros(1, 3), torch.zeros(1, 4), torch.zeros(1, 4) > 0
    dispatcher = PaddedDispatcher(config_of("cells", 2), group=dist.group.WORLD)
    found = []
    for _ in range(2):
        try:
            dispatcher.dispatch(*given)
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_first_pass_behind_one_of_another_dispatcher_that_broke_off_is_refused(monkeypatch):
    """On all ranks, once: they share the buffers of direct writes."""
    open_ranks = {1}

    def broke_off(exchange: Collectives) -> bool:
        was_open = dist.get_rank() in open_ranks
        open_ranks.discard(dist.get_rank())
        return was_open

    monkeypatch.setattr(Collectives, "broke_off", broke_off)
    found, other = run_on_threads(2, _first_pass_behind_another_dispatchers)
    assert found == other and found[1] == ""
    assert found[0].startswith("the pass before this one must run to its end on all ranks, got")


def test_experts_and_cells_have_an_exchange_each(monkeypatch):
    chosen = Mock(side_effect=choose)
    monkeypatch.setattr(padded_dispatch.dispatcher, "choose", chosen)
    dispatcher = PaddedDispatcher(config_of("cells"))
    given = torch.zeros(1, 3), torch.zeros(1, 2), torch.zeros(1, 2) > 0
    weights = ExpertWeights(fc1_LGD=torch.zeros(2, 2, 3), fc2_LDF=torch.zeros(2, 3, 1))
    for _ in range(2):
        dispatcher.run(*given, weights, Activation())
        dispatcher.dispatch(*given)
    assert [call.kwargs["packed"] for call in chosen.call_args_list] == [True, False]


def test_direct_writes_that_were_asked_for_do_not_fall_back():
    given: Any = config_of("store"), None, None
    how: Any = {"packed": True, "device": torch.device("cuda")}
    with pytest.raises(ValueError, match="got an expert-parallel group of one rank; set"):
        choose(*given, "direct", **how)
    exchange, reason = choose(*given, "auto", **how)
    assert isinstance(exchange, Collectives) and reason == "one rank"


def _differing(what: str) -> str:
    other = dist.get_rank() == 1
    pool: Any = "store" if what == "pool" and other else "cells"
    sizes = {"num_experts": 4, "top_k": 2, "num_ranks": 1 if what == "size" and other else 2}
    config = DispatchConfig(**sizes, capacity_pool=pool, capacity_factor=1.0)
    exchange: Any = "direct" if what == "exchange" and other else "auto"
    num_tokens = 0 if what == "none" else 3
    given: Any = [torch.zeros(num_tokens, size) for size in (3, 4, 4)]
    given[2] = given[2] > 0
    fc1_LGD = torch.zeros(1 if what == "weights" and other else 2, 2, 3)
    weights: Any = ExpertWeights(fc1_LGD=fc1_LGD, fc2_LDF=torch.zeros(2, 3, 1))
    given[1].requires_grad_(what == "probabilities" and other)
    fc1_LGD.requires_grad_(what in ("frozen", "recompute") and (other or what == "recompute"))
    activation: Any = None if what == "activation" and other else Activation()
    if what == "objects":  # Each rank has its own, at another address.
        activation = object()
    if what in CHANGES and other:
        index, change = CHANGES[what]
        given[index] = change(given[index])
    if what == "dtype" and other:
        weights = ExpertWeights(fc1_LGD=fc1_LGD.double(), fc2_LDF=torch.zeros(2, 3, 1).double())
    if what == "e4m3" and other:
        scaled = ScaledWeights(weights.fc1_LGD, weights.fc2_LDF)
        weights = dataclasses.replace(weights, scaled=scaled)
    if what == "no weights" and other:
        weights = {"fc1_LGD": fc1_LGD}
    try:
        dispatcher = PaddedDispatcher(config, group=dist.group.WORLD, exchange=exchange)
        if what == "pool" or (what == "method" and other):
            dispatcher.dispatch(*given)
        elif what == "recompute" and other:
            checkpoint(dispatcher.run, *given, weights, activation, use_reentrant=False)
        else:
            dispatcher.run(*given, weights, activation)
    except ValueError as error:
        return str(error)
    return "none"


# What the second rank gives instead of the tokens, probabilities and map.
CHANGES: dict[str, tuple[int, Any]] = {
    "dimensions": (0, lambda tokens_TD: tokens_TD[None]),
    "no tensor": (0, lambda tokens_TD: tokens_TD.tolist()),
    "integers": (0, lambda tokens_TD: tokens_TD.int()),
    "list": (1, lambda probs_TE: probs_TE.tolist()),
    "no map": (2, lambda map_TE: None),
    "sparse tokens": (0, lambda tokens_TD: tokens_TD.to_sparse()),
    "nested tokens": (
        0,
        lambda tokens_TD: torch.nested.nested_tensor([*tokens_TD], layout=torch.jagged),
    ),
    "sparse map": (2, lambda map_TE: map_TE.to_sparse()),
}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("exchange", "exchange is auto on rank 0, direct on rank 1"),
        ("method", "packed is True on rank 0, False on rank 1"),
        ("pool", "capacity_pool is cells on rank 0, store on rank 1"),
        ("size", "num_ranks is 2 on rank 0, 1 on rank 1"),
        ("weights", "fc1_LGD is ((2, 2, 3), torch.float32, 'cpu') on rank 0, ((1, 2, 3), "),
        ("dtype", "fc1_LGD is ((2, 2, 3), torch.float32, 'cpu') on rank 0, ((2, 2, 3), torch.fl"),
        ("e4m3", "weights in e4m3 is False on rank 0, True on rank 1"),
        ("no weights", "weights is absent on rank 0, dict on rank 1"),
        ("activation", "offset=0.0) on rank 0, NoneType on rank 1"),
        ("objects", "activation must be an Activation, got <object object"),
        ("recompute", "pass keeps what backward reads is True on rank 0, False on rank 1"),
        ("dimensions", "D is 3 on rank 0, ((1, 3, 3), torch.float32, 'cpu') on rank 1"),
        ("no tensor", "D is 3 on rank 0, list on rank 1"),
        ("integers", "D is 3 on rank 0, ((3, 3), torch.int32, 'cpu') on rank 1"),
        ("list", "probs_TE is ((3, 4), torch.float32, 'cpu') on rank 0, list on rank 1"),
        ("no map", "map_TE is ((3, 4), torch.bool, 'cpu') on rank 0, NoneType on rank 1"),
        ("sparse tokens", "D is 3 on rank 0, torch.sparse_coo tensor on rank 1"),
        ("nested tokens", "D is 3 on rank 0, nested tensor on rank 1"),
        ("sparse map", "'cpu') on rank 0, torch.sparse_coo tensor on rank 1"),
        ("probabilities", "probabilities need gradients is False on rank 0, True on rank 1"),
        ("frozen", "any need gradients is False on rank 0, True on rank 1"),
        ("none", "num_tokens must be at least 1, got 0"),
    ],
)
def test_ranks_that_differ_all_raise(what, words):
    assert all(words in error for error in run_on_threads(2, _differing, what))


def _dispatch_and_combine() -> list[list[float]]:
    dist.init_process_group("gloo")
    config = DispatchConfig(num_experts=2, top_k=1, num_ranks=2)
    dispatcher = PaddedDispatcher(config, group=dist.group.WORLD)
    tokens_TD = torch.arange(4.0).reshape(2, 2) + 10 * dist.get_rank()
    sent = dispatcher.dispatch(tokens_TD, torch.ones(2, 2), torch.eye(2).bool())
    scaled_ND = sent.expert_input.rows_ND * (1 + dist.get_rank())  # Expert 1 doubles.
    home_TD = dispatcher.combine(scaled_ND, sent)
    dist.barrier()
    return home_TD.tolist()


def test_ranks_may_be_processes_that_share_no_memory(monkeypatch):
    """Other tests fork their ranks or start threads, which have objects at the same addresses."""
    monkeypatch.delenv("RANK", raising=False)
    assert start_workers(_dispatch_and_combine, num_workers=2) == [[0, 1], [4, 6]]


def _threads_of_a_job() -> list[int]:
    """Return this process's threads beyond those at first: with a dispatcher, and after the job."""
    found, before = [], len(os.listdir("/proc/self/task"))
    group = dist.new_group()
    case = make_case(config_of("store", 2), ["thin"])
    rank, dispatcher = OneRank(case), PaddedDispatcher(case.config, group=group)
    given = rank.tokens_TD, rank.probs_YTE[0], rank.maps_YTE[0]
    rank.found(dispatcher.run(*given, rank.weights_Y[0], case.activation))
    found.append(len(os.listdir("/proc/self/task")) - before)
    dist.destroy_process_group(group)
    del group, dispatcher
    return [*found, len(os.listdir("/proc/self/task")) - before]


def test_threads_of_gloo_end_with_the_group(pool2):
    """A thread that frees a tensor while Python ends would abort the process."""
    for during, after in pool2.run(_threads_of_a_job):
        assert during > after == 0


def _asking_for_too_many(pool: str) -> str:
    dispatcher = PaddedDispatcher(config_of(pool, 2, top_k=2), group=dist.group.WORLD)
    map_TE = torch.eye(4).bool()
    map_TE[3] = dist.get_rank() == 1  # Its one token more asks for all four experts.
    weights = ExpertWeights(fc1_LGD=torch.zeros(2, 2, 3), fc2_LDF=torch.zeros(2, 3, 1))
    try:
        if pool == "padded":
            dispatcher.dispatch(torch.zeros(4, 3), torch.zeros(4, 4), map_TE)
        else:
            dispatcher.run(torch.zeros(4, 3), torch.zeros(4, 4), map_TE, weights, Activation())
    except ValueError as error:
        return str(error)
    return "none"


@POOLS
def test_a_token_with_more_than_k_experts_is_refused_on_all_ranks(pool):
    assert (
        run_on_threads(2, _asking_for_too_many, pool)
        == [
            "top_k must be the most experts that a token can have, and tokens of sources [1] have "
            "more, got 2; set it (moe_router_topk) to that most, or let the router choose fewer"
        ]
        * 2
    )


SHAPES = {
    "probs_TE": (3, 4),
    "map_TE": (3, 4),
    "fc1_LGD": (4, 2, 3),
    "fc2_LDF": (4, 3, 1),
    "fc1_bias_LG": (4, 2),
    "fc2_bias_LD": (4, 3),
}


@pytest.mark.parametrize("what", SHAPES)
def test_shapes_that_do_not_fit_are_refused(what):
    shapes = SHAPES | {what: (9, *SHAPES[what][1:])}
    given = {name: torch.zeros(shape) for name, shape in shapes.items()}
    routing = given.pop("probs_TE"), given.pop("map_TE").bool()
    dispatcher = PaddedDispatcher(DispatchConfig(num_experts=4, top_k=2))
    words = re.escape(f"{what} must have shape {SHAPES[what]}, got {shapes[what]}")
    with pytest.raises(ValueError, match=f"^{words}$"):
        dispatcher.run(torch.zeros(3, 3), *routing, ExpertWeights(**given), Activation())


def _given(**changes: Any) -> list[Any]:
    made: dict[str, Any] = {"tokens": torch.zeros(3, 3), "probs": torch.zeros(3, 4)}
    made |= {"map": torch.zeros(3, 4) > 0, "activation": Activation()}
    shapes = {"fc1_LGD": (4, 2, 3), "fc2_LDF": (4, 3, 1)}
    weights: dict[str, Any] = {name: torch.zeros(size) for name, size in shapes.items()}
    weights |= {name: value for name, value in changes.items() if name.startswith("fc")}
    made |= {"weights": ExpertWeights(**weights)} | changes
    return [made[name] for name in ("tokens", "probs", "map", "weights", "activation")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": torch.zeros(3, 1, 3)}, "tokens_TD must be a floating point tensor [T, D], got"),
        ({"tokens": torch.zeros(3, 3).int()}, "tokens_TD must be a floating point tensor [T, D]"),
        ({"tokens": [[0.0]]}, "tokens_TD must be a floating point tensor [T, D], got 'list'; fla"),
        (
            {"probs": torch.zeros(3, 4).int()},
            "probs_TE must be of a floating point dtype of at least 16 bits, got torch.int32",
        ),
        (
            {"probs": torch.zeros(3, 4, dtype=torch.float8_e4m3fn)},
            "probs_TE must be of a floating point dtype of at least 16 bits, got torch.float8",
        ),
        (
            {"tokens": torch.zeros(3, 3, dtype=torch.float8_e4m3fn)},
            "tokens_TD must have at least 16 bits, got torch.float8_e4m3fn",
        ),
        ({"probs": [[0.0]]}, "probs_TE must be a tensor, or ExpertWeights of tensors, got 'list'"),
        (
            {"weights": None},
            "weights must be a tensor, or ExpertWeights of tensors, got 'NoneType'",
        ),
        (
            {"weights": torch.zeros(4, 2, 3)},
            "weights must be a tensor, or ExpertWeights of tensors, got ((4, 2, 3), torch.float32",
        ),
        (
            {"fc1_LGD": None},
            "fc1_LGD must be a tensor, or ExpertWeights of tensors, got 'NoneType'",
        ),
        ({"fc2_LDF": [0.0]}, "fc2_LDF must be a tensor, or ExpertWeights of tensors, got 'list'"),
        (
            {"fc2_bias_LD": [0.0]},
            "fc2_bias_LD must be a tensor, or ExpertWeights of tensors, got 'list'",
        ),
        (
            {"probs": torch.zeros(3, 4, device="meta")},
            "probs_TE must be on the device of the tokens, cpu, got 'meta'; move it there",
        ),
        (
            {"fc1_LGD": torch.zeros(4, 2, 3, device="meta")},
            "fc1_LGD must be on the device of the tokens, cpu, got 'meta'; move it there",
        ),
        (
            {"activation": None},
            "activation must be an Activation, got None; Activation() is SwiGLU",
        ),
        (
            {"tokens": torch.zeros(3, 3, dtype=torch.bfloat16)},
            "fc1_LGD must have the dtype of the tokens, torch.bfloat16, got torch.float32",
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_is_no_tensor_or_has_another_dtype_is_refused(changes, words):
    dispatcher = PaddedDispatcher(DispatchConfig(num_experts=4, top_k=2))
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        dispatcher.run(*_given(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": {"num_experts": 4}}, "config must be a DispatchConfig, got 'dict'"),
        ({"store": "mine"}, "store must be a Store that dispatchers share, or None .*, got 'mine'"),
        ({"group": 1}, "group must be a process group that this rank is in, or None .*, got 1"),
    ],
)
def test_what_no_dispatcher_can_be_made_of_is_refused(changes, words):
    made: dict[str, Any] = {"config": DispatchConfig(num_experts=4, top_k=2)} | changes
    with pytest.raises(ValueError, match=f"^{words}$"):
        PaddedDispatcher(made.pop("config"), **made)


def test_combine_refuses_what_no_dispatch_has_returned():
    dispatcher = PaddedDispatcher(DispatchConfig(num_experts=4, top_k=2))
    sent = dispatcher.dispatch(*_given()[:3])
    with pytest.raises(ValueError, match=r"^dispatched must be what dispatch returned, got 'Expe"):
        dispatcher.combine(sent.expert_input.rows_ND, cast(Any, sent.expert_input))


def _backward_twice_on_one_rank() -> str:
    case = make_case(config_of("store", 2), ["thin"])
    model, rank = Model(case, "store"), OneRank(case)
    out_TD = model.forward(rank)
    out_TD.sum().backward(retain_graph=True)
    if dist.get_rank() == 0:
        return "none"
    with pytest.raises(ValueError, match="backward must run once") as error:
        out_TD.sum().backward()
    return str(error.value)


def test_a_second_backward_on_one_rank_raises_before_it_waits():
    assert run_on_threads(2, _backward_twice_on_one_rank)[0] == "none"


def _replaced(case: Case, recompute: str) -> str:
    model, rank = Model(case, "store"), OneRank(case)
    out_TD = model.forward(rank, recompute)
    for dispatcher in model.dispatchers:
        dispatcher.config = dataclasses.replace(case.config, capacity_factor=0.1)
    try:
        rank.found(out_TD)
    except ValueError as error:
        return str(error)
    return "none"


def test_a_factor_that_is_replaced_before_backward_recomputes_is_refused():
    """The second pass would keep other rows; without recompute the pass has what it decided."""
    case = make_case(config_of("store", 2), ["hot"])
    words = "config must stay as it is until backward has recomputed the pass, whose rows it dec"
    for recompute, wanted in (("", "none"), ("other", words), ("reentrant", words)):
        found = run_on_threads(2, _replaced, case, recompute)
        assert all(one.startswith(wanted) for one in found)


def test_a_store_follows_a_factor_that_is_replaced():
    config = DispatchConfig(num_experts=4, top_k=1, capacity_factor=6.0, capacity_pool="store")
    store = Store()
    dispatchers = [PaddedDispatcher(config, store=store) for _ in range(6)]
    assert store.sizes(10).num_rows == 60  # At most 10 rows a layer.
    for dispatcher in dispatchers:
        dispatcher.config = dataclasses.replace(config, capacity_factor=0.9)
    assert store.sizes(10).num_rows == 54


def test_the_memory_of_a_store_ends_with_its_last_dispatcher():
    """At once, and not when Python collects garbage: that sees no need of a GPU's memory."""
    gc.disable()
    try:
        case = make_case(config_of("store"), ["thin"] * 2)
        model, rank = Model(case, "store"), OneRank(case)
        rank.found(model.forward(rank))
        (stack,) = map(weakref.ref, model.store._stacks)
        assert stack() is not None
        del model.store, model.dispatchers[0]
        assert stack() is not None
        del model.dispatchers[0]
        assert stack() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_a_map_of_numbers_is_refused(dtype):
    """`one_hot` makes such a map."""
    dispatcher = PaddedDispatcher(DispatchConfig(num_experts=2, top_k=1))
    words = rf"^map_TE must be torch.bool, got {dtype}; use .bool\(\)$"
    with pytest.raises(ValueError, match=words):
        dispatcher.dispatch(torch.ones(2, 1), torch.ones(2, 2), torch.eye(2, dtype=dtype))


def with_frozen(case: Case, frozen: tuple[str, ...], pool: str) -> dict[str, Tensor | None]:
    model, rank = Model(case, pool), OneRank(case)
    leaves = rank.leaves()
    for name in frozen:
        leaves[name].requires_grad_(False)
    model.forward(rank).sum().backward()
    assert stacks_are_empty(model.store)
    return {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("pool", ["store", "padded"])
@pytest.mark.parametrize(
    "frozen",
    [
        ("tokens",),
        ("probs 0",),
        ("fc1_LGD 0", "fc2_LDF 0"),
        ("tokens", "probs 0", "fc1_LGD 0", "fc1_bias_LG 0"),
        ("probs 0", "fc1_LGD 0", "fc2_LDF 0", "fc1_bias_LG 0", "fc2_bias_LD 0"),
    ],
    ids=str,
)
def test_what_is_frozen_changes_no_other_gradient(pool, frozen):
    case = make_case(config_of(pool, 2), ["thin"])
    results, whole = (on_all_ranks(case.config, with_frozen, case, f, pool) for f in (frozen, ()))
    for found, wanted in zip(results, whole, strict=True):
        for name, gradient in wanted.items():
            if name in frozen:
                assert found[name] is None
            else:
                assert torch.equal(found[name], gradient), name


def in_dtypes(case: Case, dtype: torch.dtype, probs_dtype: torch.dtype) -> Found:
    rank = OneRank(case, dtype, probs_dtype)
    found = rank.found(Model(case, "store").layer(rank, 0, rank.tokens_TD))
    for name, value in found.items():
        assert value.dtype == (probs_dtype if name == "probs 0" else dtype)
    return found


@pytest.mark.parametrize("probs_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_ranks", "etp_size"), [(1, 1), (2, 2)])
def test_dtypes_stay_and_are_as_exact_as_they_can_be(dtype, probs_dtype, num_ranks, etp_size):
    """Against fp64: a few units in the last place of the largest value."""
    config = config_of("store", num_ranks, etp_size, capacity_factor=NO_DROP)
    case = make_case(config, ["thin"], hidden=16, ffn=16)
    given = [(dtype, probs_dtype), (torch.float64, torch.float64)]
    found, exact = (on_all_ranks(config, in_dtypes, case, *one) for one in given)
    for of_rank, exact_of_rank in zip(found, exact, strict=True):
        for name, wanted in exact_of_rank.items():
            error = (of_rank[name].double() - wanted).abs().max()
            eps = max(torch.finfo(dtype).eps, torch.finfo(of_rank[name].dtype).eps)
            assert error <= 8 * eps * wanted.abs().max(), name
