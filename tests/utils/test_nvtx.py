"""NVTX ranges of the stages: shown in eager steps and captures, not in replays."""

from collections.abc import Iterator

import pytest
import torch

from padded_dispatch import DispatchConfig, PaddedDispatcher
from padded_dispatch.exchange.alltoall import AllToAllExchange
from padded_dispatch.ops.plan import make_plan
from padded_dispatch.utils import nvtx
from padded_dispatch.utils.nvtx import nvtx_range
from tests.megatron.graphs.test_capture import Training, graphs
from tests.support import tiny
from tests.support.pools import pools


@pytest.fixture
def shown(monkeypatch) -> list[str]:
    """Record the name of each range as it opens and "-" as it ends, as if PyTorch had NVTX."""
    events: list[str] = []
    monkeypatch.setattr(nvtx, "_HAS_NVTX", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", events.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: events.append("-"))
    return events


@pytest.fixture
def megatron() -> Iterator[None]:
    with tiny.one_process(), graphs():
        yield


def step(packed: bool) -> None:
    dispatcher = PaddedDispatcher(DispatchConfig(num_experts=2, top_k=1), packed=packed)
    tokens_TD = torch.ones(3, 2, requires_grad=True)
    map_TE = torch.eye(2, dtype=torch.bool)[[0, 1, 1]]
    sent = dispatcher.dispatch(tokens_TD, torch.ones(3, 2), map_TE)
    dispatcher.combine(sent.expert_input.rows_ND, sent).sum().backward()


@pytest.mark.parametrize(
    ("packed", "between"),
    [(False, ["exchange", "regroup", "regroup", "exchange"]), (True, ["regroup"])],
)
def test_every_stage_has_a_name_in_order(shown, packed, between):
    """One rank: packed rows need no exchange, and only probabilities are regrouped."""
    step(packed)
    names = [name.removeprefix("padded_dispatch.") for name in shown if name != "-"]
    forward = ["select", "plan", "gather", *between, "combine"]
    assert names == [*forward, "combine backward", "gather backward"]
    assert shown.count("-") == len(names)


def test_packed_rows_regroup_in_a_backward_pass_too(shown):
    """The all-to-all, here over one rank, regroups packed rows."""
    exchange = AllToAllExchange(2, packed=True)
    tokens_TD = torch.ones(3, 2, requires_grad=True)
    kept_TE = torch.eye(2, dtype=torch.bool)[[0, 1, 1]]
    plan = make_plan(kept_TE, top_k=1, sizes=pools(2, 2))
    outgoing = exchange.prepare(tokens_TD, torch.ones(3, 2), plan, 4)
    given = exchange.arrange(exchange.move(outgoing))
    back = exchange.move_back(exchange.disarrange(given.rows_ND, given.offsets_LS))
    shown.clear()
    exchange.combine(back, plan, given.offsets_LS).sum().backward()
    names = [name.removeprefix("padded_dispatch.") for name in shown if name != "-"]
    regroups = ["regroup backward"] * 2
    assert names == ["combine", "combine backward", *regroups, "gather backward"]


def test_a_range_ends_with_an_error(shown):
    @nvtx_range("select")
    def fails() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert shown == ["padded_dispatch.select", "-"]


def test_without_nvtx_there_are_no_ranges(shown, monkeypatch):
    monkeypatch.setattr(nvtx, "_HAS_NVTX", False)
    step(packed=False)
    assert shown == []


def test_a_compiled_program_has_no_ranges(shown):
    config = DispatchConfig(num_experts=2, top_k=1)
    dispatcher = PaddedDispatcher(config)

    def there_and_back(tokens_TD: torch.Tensor) -> torch.Tensor:
        map_TE = torch.eye(2, dtype=torch.bool)[[0, 1, 1]]
        sent = dispatcher.dispatch(tokens_TD, torch.ones(3, 2), map_TE)
        return dispatcher.combine(sent.expert_input.rows_ND, sent)

    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
    tokens_TD = torch.ones(3, 2, requires_grad=True)
    compiled(tokens_TD)  # torch 2.11 runs our backward in Python once, to trace it.
    shown.clear()
    out_TD = compiled(tokens_TD)
    out_TD.sum().backward()
    assert torch.equal(out_TD, tokens_TD)
    assert shown == []


def test_a_megatron_layer_shows_its_stages_in_captures_and_not_in_replays(megatron, shown):
    training = Training(("attn", "moe"))
    training.step(0)
    shown.clear()
    training.capture()
    wanted = ("select", "plan", "gather", "exchange", "regroup", "experts", "combine")
    assert set(shown) > {f"padded_dispatch.{name}" for name in wanted}
    shown.clear()
    training.step(1)
    assert shown == []
