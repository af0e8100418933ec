"""Layers whose rows share a store, and evaluation that fits, on one rank and on two."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from padded_dispatch.config import FIT, NO_DROP
from padded_dispatch.experts import store
from padded_dispatch.megatron import dispatcher, experts
from padded_dispatch.utils.logs import log_once
from tests.support import tiny
from tests.support.machines import ranks_on
from tests.support.parity import megatron
from tests.support.tiny import tokens

pytestmark = pytest.mark.usefixtures("one_process")

E, K = tiny.NUM_EXPERTS, tiny.TOP_K


def layer(pool: Any, factor: Any, *, eval_factor: Any = None, **settings: Any) -> Any:
    options = {"experts": "packed", "capacity_pool": pool, "eval_factor": eval_factor}
    made = tiny.padded_layer(**options, moe_expert_capacity_factor=factor, **settings)
    with torch.no_grad():
        made.router.weight[0] += 3 * made.router.weight[1]  # Expert 0 is busy, and so is rank 0.
    return made


def chain(
    number: int, factor: float | None, pool: Any = "store", eval_factor: Any = None, **settings: Any
) -> list[Any]:
    given: Any = {"num_layers": number, "moe_expert_capacity_factor": factor, "later": settings}
    options = {"experts": "packed", "capacity_pool": pool, "eval_factor": eval_factor}
    config = tiny.config(**given, **options)
    return [tiny.layer(config, index + 1, padded=True) for index in range(number)]


def through(layers: list[Any], hidden: Tensor) -> Tensor:
    for made in layers:
        hidden = hidden + made(hidden)[0]
    return hidden


def grads(layers: list[Any]) -> list[Tensor]:
    found = [p.grad.clone() for made in layers for p in made.parameters() if p.requires_grad]
    for made in layers:
        made.zero_grad()
    return found


@pytest.fixture
def rooms_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    def note(owner: Any, name: str) -> None:
        make = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: found.append(name) or make(*args))

    note(store.Store, "take")
    note(store, "scratch")
    note(store, "fitting")
    return found


def test_rows_of_a_full_store_are_kept_and_counted(caplog):
    """Three layers with half of the room: rows that are overwritten are computed again."""
    layers = chain(3, 0.5)
    for made in layers:
        with torch.no_grad():
            made.router.weight[0] += 3 * made.router.weight[1]
    caplog.set_level(logging.INFO, "padded_dispatch")
    for _ in range(2):
        through(layers, tokens(20).requires_grad_()).sum().backward()
    dispatcher, many = layers[0].token_dispatcher, torch.empty(2**20, 16, device="meta")
    dispatcher._announce(dispatcher.configs.current, many)
    said, later = caplog.messages
    # A row of fp32: 2 F values, its probability and home.
    size = 3 * (4 * 2 * 24 + 12) / 2**10
    assert f"share a store of {3 * 2**20} rows, {size:.2f} GiB" in later and size > 0.1
    assert said == (
        "padded dispatch: 3 layers at 20 tokens per rank share a store of 60 rows, 0.00 GiB for "
        "each micro-batch in flight, and keep 0.00 GiB of tokens that arrived and 0.00 GiB "
        "of their plans; what is dropped: nothing"
    )
    wide = {"num_ranks": 16, "num_experts": 128, "top_k": 8}
    config = dataclasses.replace(dispatcher.configs.current, **wide)
    dispatcher._announce(dataclasses.replace(config, capacity_factor=0.25), many)
    assert caplog.messages[-1].endswith(f"dropped: rows of a layer past {3 * 2**20}")
    cells = dataclasses.replace(config, capacity_factor=0.25, capacity_pool="cells")
    dispatcher._announce(cells, many)
    assert caplog.messages[-1].endswith("dropped: rows of a rank for an expert past 16384")
    counters = [made.token_dispatcher.counters for made in layers]
    assert [int(one.kept_E.sum()) for one in counters] == [2 * 20 * K] * 3
    assert [int(one.num_again) for one in counters] == [0, 20 * K, 2 * 20 * K]
    assert layers[0].token_dispatcher.store is layers[2].token_dispatcher.store
    assert layers[0].token_dispatcher.store.num_shares(20) == 3 * 20 * K
    said = len(caplog.messages)
    for num_tokens, news in ((7, 0), (21, 1), (20, 1)):  # What fewer tokens need is none.
        through(layers, tokens(num_tokens).requires_grad_()).sum().backward()
        assert len(caplog.messages) == said + news


def test_a_layer_may_run_several_times_in_a_pass():
    """As repeated layers of multi-token prediction do: each of its calls keeps rows."""
    settings = {"num_layers": 1, "mtp_num_layers": 3, "mtp_use_repeated_layer": True}
    found = {}
    for pool in ("store", "cells"):
        decoder, repeated = chain(2, 1.0 if pool == "store" else None, pool, **settings)
        decoder.token_dispatcher.configs.hooks = object  # Nothing resets the counters.
        given = tokens(9).requires_grad_()
        through([decoder, repeated, repeated, repeated], given).square().sum().backward()
        found[pool] = [given.grad, *grads([decoder, repeated])]
        counters = repeated.token_dispatcher.counters
        assert counters.kept_E.tolist() == counters.demand_E.tolist()
        if pool == "store":
            assert repeated.token_dispatcher.shares_per_token == 4 * K
            assert counters.max_need == 4 * 9 * K
    for one, other in zip(found["store"], found["cells"], strict=True):
        assert torch.equal(one, other)


def _in_rooms(made: Any, how: str, given: Tensor) -> None:
    if "recompute" in how:
        counters = made.token_dispatcher.counters
        output = checkpoint(lambda x: made(x)[0], given, use_reentrant=how == "recompute")
        assert not counters.totals.any()
        output.sum().backward()
        counted = [counters.num_passes, counters.demand_E.sum(), counters.kept_E.sum()]
        counted.append(made.router.local_tokens_per_expert.sum())
        assert torch.stack(counted).tolist() == [1, 6 * K, 6 * K, 6 * K]
    elif how == "no gradient":
        with torch.no_grad():
            made(given)
    elif how == "frozen":
        made.requires_grad_(False)
        made(given.detach())
    elif how == "evaluation":
        made.eval()(given)
    elif how == "repeated":
        configs = made.token_dispatcher.configs
        configs.training = type(configs.training)(num_experts=E, top_k=K, capacity_factor=FIT)
        made(given)[0].sum().backward()
    else:
        made(given)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("training", ["take"]),
        ("recompute", ["scratch", "scratch"]),
        ("other recompute", ["scratch", "scratch"]),
        ("no gradient", ["scratch"]),
        ("frozen", ["scratch"]),
        ("evaluation", ["fitting"]),
        ("repeated", ["fitting"]),
    ],
)
def test_where_the_rows_of_a_pass_lie(rooms_of, how, expected):
    made = layer("store", 1.0, **tiny.EXPERT_BIAS)
    _in_rooms(made, how, tokens(6).requires_grad_())
    assert rooms_of == expected


def test_evaluation_takes_its_own_rooms_where_it_has_a_factor(rooms_of, monkeypatch):
    layer("store", 1.0, eval_factor=2.0).eval()(tokens(6))
    monkeypatch.setattr("megatron.core.transformer.cuda_graphs._IS_GRAPH_CAPTURING", True)
    layer("store", 1.0).eval()(tokens(6))
    assert rooms_of == ["scratch", "scratch"]


@pytest.mark.parametrize("adds", [False, True], ids=["returned", "added"])
def test_ddp_hears_of_a_gradient_once_and_when_it_is_there(adds):
    """In bf16, with an fp32 buffer, into which backward adds, or DDP's hook."""
    made = layer("store", 1.0, bf16=True, params_dtype=torch.bfloat16)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    ddp = DistributedDataParallel(made.config, config, made)
    weight, ready = made.experts.linear_fc1.weight, []
    if not adds:
        made.experts.linear_fc1.sums = lambda adds: None
    group = ddp.param_to_bucket_group[weight]
    hear = group.register_grad_ready

    def heard(parameter: Any, *args: Any) -> None:
        if parameter is weight:
            ready.append(weight.main_grad.clone())
        hear(parameter, *args)

    group.register_grad_ready = heard
    for seed in range(2):
        ddp.zero_grad_buffer()
        given = tokens(15, seed=seed).bfloat16().requires_grad_()
        ddp(given)[0].float().square().sum().backward()
        assert weight.grad is None and weight.grad_added_to_main_grad == adds
        ddp.finish_grad_sync()
        assert len(ready) == seed + 1
        assert torch.equal(ready[-1], weight.main_grad) and weight.main_grad.any()


def test_weights_are_read_when_ddp_has_gathered_them():
    """With `overlap_param_gather` DDP waits in the call of the module that has a parameter."""
    made, other = layer("store", 1.0), layer("store", 1.0)
    names = "use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"
    config = DistributedDataParallelConfig(**dict.fromkeys(names, True), bucket_size=1)
    ddp = DistributedDataParallel(made.config, config, made)
    for linear in (other.experts.linear_fc1, other.experts.linear_fc2):
        torch.nn.init.normal_(linear.weight)
    theirs = dict(other.named_parameters())
    for name, parameter in made.named_parameters():

        def arrive(parameter: Any = parameter, given: Tensor = theirs[name], **how: Any) -> None:
            parameter.data.copy_(given)

        ddp.param_to_bucket_group[parameter].finish_param_sync = arrive
    assert torch.equal(ddp(tokens(15))[0], other(tokens(15))[0])


def test_the_first_gradient_of_a_step_is_stored():
    """Of any number of micro-batches, unless DDP has added one before; NaN stands for zeros.

    Nothing is installed here.
    """
    made = layer("store", 1.0)
    ddp = DistributedDataParallel(made.config, DistributedDataParallelConfig(), made)
    linears = made.experts.linear_fc1, made.experts.linear_fc2
    found = []
    for num_passes, by_ddp in ((1, False), (2, False), (1, True)):
        ddp.zero_grad_buffer()
        for linear in linears:
            linear.weight.main_grad.fill_(5 if by_ddp else torch.nan)
            if by_ddp:
                assert linear.sums(adds=False) is None
        for _ in range(num_passes):
            counts = dispatcher.Copies(dispatcher.counting_tensors(made))  # The sums stay.
            ddp(tokens(15))[0].square().sum().backward()
            counts.restore()
        found.append([linear.weight.main_grad.clone() for linear in linears])
    for once, twice, added in zip(*found, strict=True):
        assert once.any() and once.isfinite().all()
        assert torch.equal(twice, 2 * once) and torch.equal(added, 5 + once)


def test_gradients_may_be_zeroed_between_forward_and_backward():
    """As in many loops of PyTorch; NaN stands for the memory that autograd gets."""
    found = []
    for zeroes_last in (False, True):
        made = layer("store", 1.0)
        ddp = DistributedDataParallel(made.config, DistributedDataParallelConfig(), made)
        linears = made.experts.linear_fc1, made.experts.linear_fc2
        ddp.zero_grad_buffer()
        loss = ddp(tokens(15))[0].square().sum()
        for linear in linears:
            linear.spare().fill_(torch.nan)
            if zeroes_last:  # Of an earlier step.
                linear.weight.main_grad.fill_(5)
        if zeroes_last:
            ddp.zero_grad_buffer()
        loss.backward()
        found.append([linear.weight.main_grad.clone() for linear in linears])
    for wanted, given in zip(*found, strict=True):
        assert wanted.any() and torch.equal(given, wanted)


def test_ddp_adds_a_gradient_behind_a_pass_that_added_its_own(monkeypatch):
    """As in a graph that Megatron does not know, captured behind eager passes of the step."""
    made = layer("store", 1.0)
    ddp = DistributedDataParallel(made.config, DistributedDataParallelConfig(), made)
    found = []
    for of_passes in ((True, True), (True, False), (False, True)):
        ddp.zero_grad_buffer()
        for adds in of_passes:
            monkeypatch.setattr(experts, "adds_gradients", lambda config, adds=adds: adds)
            ddp(tokens(15))[0].square().sum().backward()
        found.append(made.experts.linear_fc1.weight.main_grad.clone())
    assert found[0].any() and all(torch.equal(found[0], one) for one in found)


def _over_two_ranks(work: Callable[..., Any], *args: Any) -> Any:
    with megatron("cpu", expert_model_parallel_size=2):
        return work(*args)


def _counts_of_a_pass(factor: float) -> dict[str, Any]:
    made = layer("store", factor, moe_router_topk=1, moe_router_pre_softmax=True)
    made(tokens(15).requires_grad_())[0].sum().backward()
    counters = made.token_dispatcher.counters
    names = ("demand_E", "kept_E", "num_again", "max_need")
    assert made.token_dispatcher.shares_per_token == 1
    return {name: getattr(counters, name).tolist() for name in names}


@pytest.mark.parametrize("factor", [0.25, 1.0, 2.0])
def test_two_ranks_drop_nothing(pool2, factor):
    """With one expert a token, and fewer slots for it in balance than tokens."""
    first, second = pool2.run(_over_two_ranks, _counts_of_a_pass, factor)
    assert first["kept_E"][2:] == second["kept_E"][:2] == [0, 0]  # Receivers count.
    for r, counts in ((0, first), (2, second)):
        asked = sum(first["demand_E"][r : r + 2]) + sum(second["demand_E"][r : r + 2])
        assert sum(counts["kept_E"]) == asked == counts["max_need"]
        assert counts["num_again"] == 0  # A store has room for a layer.


def _evaluation_fits(pool: str) -> Any:
    made, whole = layer(pool, 0.25), layer("cells", None, eval_factor=NO_DROP)
    whole.load_state_dict(made.state_dict())
    with torch.no_grad():
        for seed, length in enumerate((12, 10, 12)):
            given = tokens(length, seed=seed)
            # With few rows, products of a CPU round in other ways.
            torch.testing.assert_close(made.eval()(given)[0], whole.eval()(given)[0])
    counters = made.token_dispatcher.eval_counters
    assert not made.token_dispatcher.counters.totals.any()
    return torch.stack([counters.demand_E, counters.kept_E]).tolist()


@pytest.mark.parametrize("pool", ["cells", "store"])
def test_evaluation_drops_nothing_and_equals_a_dropless_one(pool2, pool):
    both = torch.tensor(pool2.run(_over_two_ranks, _evaluation_fits, pool)).sum(0)
    assert torch.equal(*both) and both[0].sum() == 2 * (12 + 10 + 12) * K


def test_an_eager_evaluation_inside_a_capture_raises(monkeypatch):
    made = layer("store", 1.0, eval_factor=FIT).eval()
    monkeypatch.setattr("megatron.core.transformer.cuda_graphs._IS_GRAPH_CAPTURING", True)
    message = (
        r"^capacity_factor must be a number in a CUDA graph, because .*, got 'fit'; set a number "
        "or no-drop where graphs are captured"
    )
    with pytest.raises(ValueError, match=message):
        made(tokens(4))


def test_a_store_for_experts_that_cannot_be_packed_is_refused_by_name():
    settings = {"moe_apply_probs_on_input": True, "moe_router_pre_softmax": True}
    with pytest.raises(ValueError) as error:
        tiny.padded_layer(experts="auto", capacity_pool="store", moe_router_topk=1, **settings)
    assert str(error.value).startswith(
        "capacity_pool must be cells or auto, because a store needs packed experts, got 'store'; "
        "packed experts do not support moe_apply_probs_on_input=True: "
    )


def _said_on(machines: str, pool: str) -> list[str]:
    """Return what a layer of ranks on these machines logs until its first pass has run."""
    records: list[logging.LogRecord] = []
    log = logging.getLogger("padded_dispatch")
    log_once.cache_clear()
    with (
        ranks_on(machines),
        megatron("cpu", expert_model_parallel_size=4),
        patch.object(log, "handle", records.append),
        patch.object(log, "level", logging.INFO),
    ):
        log.manager._clear_cache()  # pyright: ignore
        layer(pool, 1.0)(tokens(2**12).requires_grad_())
    log.manager._clear_cache()  # pyright: ignore
    return [record.getMessage() for record in records]


@pytest.mark.parametrize(
    ("machines", "pool", "hosts", "blocks"),
    [
        ("aabb", "store", "2 hosts of 2 ranks", 1),
        ("aaab", "store", "4 hosts of 1 rank", 1),
        ("aabb", "cells", "2 hosts of 2 ranks", 2),
    ],
)
def test_a_layer_on_several_hosts_says_what_crosses_the_network(
    pool4, machines, pool, hosts, blocks
):
    said, *others = pool4.run(_said_on, machines, pool, timeout_s=60)
    assert others == [[]] * 3
    first, *later = said
    assert first.endswith(
        f"exchange=alltoall ({hosts}; direct writes need tokens on GPUs, got cpu)"
    )
    slots = 2**12 if pool == "store" else 2**12 * K // 4  # Of factor 1 and four ranks.
    mib = blocks * slots * tiny.HIDDEN * 4 / 2**20
    words = f"padded dispatch: {mib:.1f} MiB of tokens come to each rank from other hosts in each"
    assert any(line.startswith(words) for line in later)
