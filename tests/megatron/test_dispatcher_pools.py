"""Capacity pools in Megatron's layer: rows that share slots, on one rank and on two."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.config import FIT, NO_DROP, POLICIES
from padded_dispatch.megatron import PaddedOptions
from padded_dispatch.megatron.telemetry import Telemetry
from tests.support import tiny
from tests.support.parity import megatron

E, K = tiny.NUM_EXPERTS, tiny.TOP_K


def layer(pool: str, factor: float | None, *, eval_factor: Any = None, **settings: Any) -> Any:
    options = PaddedOptions(experts="packed", capacity_pool=pool, eval_factor=eval_factor)
    made = tiny.padded_layer(options, moe_expert_capacity_factor=factor, **settings)
    with torch.no_grad():
        made.router.weight[0] += 3 * made.router.weight[1]  # Expert 0 is busy, and so is rank 0.
    return made


def tokens(num_tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + seed)
    return torch.randn(num_tokens, 1, tiny.HIDDEN, generator=generator)


def run(made: Any, hidden: Tensor) -> dict[str, Tensor]:
    """Return the output, and the gradients of the tokens and of every parameter."""
    hidden = hidden.clone().requires_grad_()
    made.zero_grad()
    output, _ = made(hidden)
    output.backward(torch.ones_like(output).cumsum(0) / 10)
    grads = {name: parameter.grad.clone() for name, parameter in made.named_parameters()}
    return {"output": output.detach(), "tokens": hidden.grad, **grads}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("num_tokens", [1, 7, 30])
def test_one_rank_with_a_factor_of_one_drops_nothing(monkeypatch, num_tokens):
    pooled, whole = layer("rank", 1.0), layer("expert", None)
    expected = run(whole, tokens(num_tokens))
    for name in ("kept_map", "kept_map_in_torch"):
        monkeypatch.setattr(f"padded_dispatch.routing.select.{name}", None)  # Nothing is selected.
    assert same(run(pooled, tokens(num_tokens)), expected) == []
    counters = pooled.token_dispatcher.counters
    assert counters.kept_E.tolist() == counters.demand_E.tolist()
    assert counters.num_slots == num_tokens * K
    assert counters.num_unplaced == 0


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_pool_drops_only_when_it_is_full(policy):
    made = layer("rank", 0.5, moe_token_drop_policy=policy)
    run(made, tokens(20))
    counters = made.token_dispatcher.counters
    assert counters.demand_E.sum() == 20 * K
    assert counters.kept_E.sum() == counters.num_slots == 20 * K // 2
    assert (counters.max_demand.item(), counters.num_unplaced.item()) == (20 * K, 0)


def _over_two_ranks(work: Callable[..., Any], *args: Any) -> Any:
    with megatron("cpu", expert_model_parallel_size=2):
        return work(*args)


def _kept_rows(factor: float, recompute: dict[str, Any]) -> Any:
    made, whole = layer("rank", factor, **recompute), layer("expert", None)
    whole.load_state_dict(made.state_dict())
    telemetry = Telemetry([_chunk(made)])
    found = run(made, tokens(15))
    counters = made.token_dispatcher.counters
    counts = {name: getattr(counters, name).tolist() for name in ("demand_E", "kept_E")}
    counts |= {"num_unplaced": counters.num_unplaced.item(), "slots": counters.num_slots.item()}
    snapshot = telemetry.read().training
    whole.router = made.router  # Rows that it keeps, in a layer that has slots for all of them.
    return counts, same(found, run(whole, tokens(15))), snapshot


def _chunk(made: Any) -> Any:
    chunk: Any = torch.nn.Sequential(made)
    chunk.config = made.config
    return chunk


RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


@pytest.mark.parametrize("recompute", [{}, RECOMPUTE], ids=["kept", "recomputed"])
@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0])
def test_two_ranks_keep_what_their_pools_hold(pool2, factor, recompute):
    (first, differs, seen), (second, differs_too, seen_too) = pool2.run(
        _over_two_ranks, _kept_rows, factor, recompute
    )
    assert differs == differs_too == []
    demand_SR = np.array([first["demand_E"], second["demand_E"]]).reshape(2, 2, 2).sum(2)
    kept_SR = np.array([first["kept_E"], second["kept_E"]]).reshape(2, 2, 2).sum(2)
    slots = int(np.ceil(15 * K / E * factor)) * 2
    assert kept_SR.tolist() == np.minimum(demand_SR, slots).tolist()
    assert (first["num_unplaced"], second["num_unplaced"]) == (0, 0)
    assert first["slots"] == second["slots"] == 2 * slots
    assert np.array_equal(seen.kept_YE, seen_too.kept_YE)
    dropped_E = seen.demand_YE[0] - seen.kept_YE[0]
    assert dropped_E.reshape(2, 2).sum(1).tolist() == (demand_SR - kept_SR).sum(0).tolist()
    assert seen.max_demand_Y[0] == demand_SR.max()
    assert seen.needed_factor[0] == pytest.approx(demand_SR.max() / (15 * K / 2))
    assert seen.fill[0] == kept_SR.sum() / (4 * slots)


def _evaluation_fits(pool: str) -> Any:
    made, whole = layer(pool, 0.25), layer("expert", None, eval_factor=NO_DROP)
    whole.load_state_dict(made.state_dict())
    results = []
    with torch.no_grad():
        for one in (made.eval(), whole.eval()):
            results.append(
                [one(tokens(length, seed))[0] for seed, length in enumerate((12, 10, 12))]
            )
    counters, dispatcher = made.token_dispatcher.eval_counters, made.token_dispatcher
    assert not dispatcher.counters.totals.any()
    for ours, expected in zip(*results, strict=True):
        # With few rows, products of a CPU round in other ways.
        torch.testing.assert_close(ours, expected)
    of_all = torch.stack([counters.demand_E, counters.kept_E])
    return of_all.tolist(), dispatcher.configs.fitted


@pytest.mark.parametrize("pool", ["expert", "rank"])
def test_evaluation_drops_nothing_and_equals_a_dropless_one(pool2, pool):
    first, second = pool2.run(_over_two_ranks, _evaluation_fits, pool)
    for (demand_E, kept_E), fitted in (first, second):
        assert demand_E == kept_E and sum(kept_E) == (12 + 10 + 12) * K
        assert fitted.num_pools == 2  # Those of "rank" need least room.
    assert first[1] == second[1]


@pytest.mark.usefixtures("one_process")
def test_evaluation_is_that_of_a_dropless_stock_layer():
    """Bit by bit: Megatron's own experts compute the same rows, in products of many rows."""
    stock = tiny.layer(tiny.config("allgather")).eval()
    options = PaddedOptions(experts="module")
    ours = tiny.padded_layer(options, moe_expert_capacity_factor=0.5).eval()
    ours.load_state_dict(stock.state_dict())
    with torch.no_grad():
        output, expected = (one(tokens(64))[0] for one in (ours, stock))
    assert torch.equal(output, expected)
    counters = ours.token_dispatcher.eval_counters
    assert E * counters.max_demand <= counters.num_slots < E * 64
    assert counters.max_demand > 64 * K / E * 0.5  # Training would have dropped.


@pytest.mark.usefixtures("one_process")
def test_an_eager_evaluation_inside_a_capture_raises(monkeypatch):
    made = layer("rank", 1.0, eval_factor=FIT).eval()
    monkeypatch.setattr("megatron.core.transformer.cuda_graphs._IS_GRAPH_CAPTURING", True)
    message = (
        r"^capacity_factor must be a number in a CUDA graph, because .*, got 'fit'; set a number "
        "or no-drop where graphs are captured"
    )
    with pytest.raises(ValueError, match=message):
        made(tokens(4))


@pytest.mark.usefixtures("one_process")
def test_experts_that_cannot_be_packed_are_named():
    options = PaddedOptions(capacity_pool="rank")
    settings = {"moe_apply_probs_on_input": True, "moe_router_pre_softmax": True}
    settings["moe_router_topk"] = 1
    with pytest.raises(ValueError) as error:
        tiny.padded_layer(options, **settings)
    lines = str(error.value).splitlines()
    assert lines[0] == (
        "capacity_pool must be expert, because experts that share slots are packed, which do not "
        "support"
    )
    assert lines[1].startswith("  moe_apply_probs_on_input=True: ")
    assert lines[2].startswith("got 'rank'; set it to expert")
    assert dataclasses.replace(options, capacity_pool="expert").experts == "auto"
