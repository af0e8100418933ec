"""The six methods, called as Megatron calls them."""

import dataclasses
import inspect
import logging
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from torch.utils.checkpoint import checkpoint

from padded_dispatch.config import NO_DROP
from padded_dispatch.counters import Counters
from padded_dispatch.megatron import PaddedOptions, dispatcher
from padded_dispatch.megatron.compat import found, iteration_graph
from tests.support import tiny
from tests.support.parity import megatron
from tests.support.pool import WorkerError
from tests.support.whole_layers import SAVES, selective

pytestmark = pytest.mark.usefixtures("one_process")


def _no_token_on_rank_0() -> str:
    with megatron("cpu", expert_model_parallel_size=2):
        with patch.object(dispatcher, "log_once") as log:
            made = tiny.padded_layer(moe_expert_capacity_factor=0.5).eval()
        assert log.call_count == made.token_dispatcher._logs == (dist.get_rank() == 0)
        made(torch.randn(2 + 3 * dist.get_rank(), 1, tiny.HIDDEN))  # Ranks may have another T.
        try:
            made(torch.randn(5 * dist.get_rank(), 1, tiny.HIDDEN))
        except ValueError as error:
            return str(error)
    return ""


def test_a_rank_without_tokens_raises_on_all(pool2):
    first, second = pool2.run(_no_token_on_rank_0)
    assert first == second
    assert "T is 0 on rank 0, any but 0 on rank 1" in first


def test_a_layer_finds_its_factor_and_shared_experts():
    shared = {"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_overlap": True}
    for experts in ("module", "packed"):
        given = {"layer_factors": {1: 3.0}, "experts": experts, **shared}
        made = tiny.padded_layer(dispatcher="alltoall", **given)
        assert made.token_dispatcher.configs.current.capacity_factor == 3.0
        assert made.token_dispatcher.shared_experts is made.shared_experts is not None


def test_the_first_training_pass_asks_whether_weights_stay(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "padded_dispatch.megatron.dispatcher.require_weights_stay",
        lambda *given: asked.append(given),
    )
    made = tiny.padded_layer(eval_factor=NO_DROP)  # As in training: both have one config.
    assert made.token_dispatcher.configs.training == made.token_dispatcher.configs.evaluation
    for mode, times in ((False, 0), (True, 1), (True, 1)):
        made.train(mode)(torch.randn(3, 2, tiny.HIDDEN))
        assert asked == [(made.experts, made.config)] * times


@pytest.mark.parametrize("experts", ["module", "packed"])
def test_optimizers_that_would_leave_packed_weights_to_adam_are_refused(experts):
    """Megatron's Muon marks weights of experts in each version; it takes those of 2 dimensions."""
    homes = [home for name in ("optimizer", "optimizer.muon") if (home := found(name))]
    assert any("param.expert_tp = True" in inspect.getsource(home) for home in homes)
    made = tiny.padded_layer(experts=experts)
    for parameter in made.experts.parameters():  # Megatron-LM marks those of every model: False.
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    made.eval()(torch.randn(3, 2, tiny.HIDDEN))
    for parameter in made.experts.parameters():
        vars(parameter)["expert_tp"] = True
    refused = pytest.raises(
        ValueError, match=r"experts must be 'module' with Muon and.* got 'packed'"
    )
    with nullcontext() if experts == "module" else refused:
        made.train()(torch.randn(3, 2, tiny.HIDDEN))


@pytest.mark.parametrize(
    ("fields", "captured"), [({}, False), ({}, True), (iteration_graph(), False)], ids=str
)
def test_evaluation_that_drops_as_training_does_is_named_once(
    caplog, monkeypatch, fields, captured
):
    moe, drops = tiny.padded_layer(moe_expert_capacity_factor=0.5, later=fields), captured or fields
    monkeypatch.setattr("megatron.core.transformer.cuda_graphs._IS_GRAPH_CAPTURING", captured)
    with caplog.at_level(logging.INFO, logger="padded_dispatch"), torch.no_grad():
        for length, mode in ((6, True), (6, False), (9, False), (6, False)):
            moe.train(mode)(torch.randn(length, 1, tiny.HIDDEN))
    lines = [line for line in caplog.messages if "drops are as in training, because" in line]
    assert len(lines) == bool(drops)
    counters = moe.token_dispatcher.eval_counters
    assert (counters.kept_E.sum() < counters.demand_E.sum()) == bool(drops)


def _with_peers_that_send_nothing() -> None:
    sizes = {"expert_model_parallel_size": 2}
    with megatron("cpu", **sizes), patch.object(dist, "get_backend", lambda group: "fake"):
        tiny.padded_layer(**sizes)


def test_a_fake_process_group_is_refused(pool2):
    with pytest.raises(WorkerError, match="ValueError: --fake-process-group must be left out: "):
        pool2.run(_with_peers_that_send_nothing)


def _counts_kept(experts: str) -> bool:
    sizes = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    with megatron("cpu", **sizes):
        return tiny.padded_layer(experts=experts, **sizes).token_dispatcher.counts_kept


def test_ranks_that_split_experts_count_the_rows_of_a_store_once(pool2):
    """They receive the same rows. Of cells each counts those that it sends."""
    assert pool2.run(_counts_kept, "packed") == [True, False]
    assert pool2.run(_counts_kept, "module") == [True, True]


def _on_another_device() -> str:
    sizes = {"expert_model_parallel_size": 2}
    device = ["cpu", "meta"][dist.get_rank()]
    with megatron("cpu", **sizes), patch.object(torch.cuda, "current_device", lambda: device):
        with pytest.raises(ValueError) as error:
            tiny.padded_layer(**sizes)
        return str(error.value)


def test_ranks_on_other_kinds_of_devices_raise_before_they_choose_an_exchange(pool2):
    """The choice makes collective calls on GPUs alone."""
    for message in pool2.run(_on_another_device):
        assert "device is cpu on rank 0, meta on rank 1" in message


def _with_another_pool() -> str:
    pool = ["store", "cells"][dist.get_rank()]
    with megatron("cpu", expert_model_parallel_size=2), pytest.raises(ValueError) as error:
        tiny.padded_layer(experts="packed", capacity_pool=pool, expert_model_parallel_size=2)
    return str(error.value)


def test_ranks_of_other_pools_raise_before_they_choose_an_exchange(pool2):
    """For a store alone the choice makes groups of hosts and rails, and direct writes across."""
    for message in pool2.run(_with_another_pool):
        assert "capacity_pool is store on rank 0, cells on rank 1" in message


def test_options_that_come_after_the_layer_are_refused():
    made = tiny.padded_layer(on_overflow="warn")
    made.config.padded_dispatch = PaddedOptions(on_overflow="error")
    with pytest.raises(ValueError, match=r"^padded_dispatch must be set before the model is built"):
        made(tiny.tokens(3))


def test_the_price_of_dropping_nothing_is_said_once(caplog):
    for experts in ("module", "module", "packed"):  # Packed rows are as many as in balance.
        moe = tiny.padded_layer(experts=experts)
        for length in (9, 9, 10):
            moe(torch.randn(length, 2, tiny.HIDDEN))
    tiny.padded_layer(moe_expert_capacity_factor=2.0)(torch.randn(9, 2, tiny.HIDDEN))
    layer = tiny.padded_layer()
    made = layer.token_dispatcher
    made._warn_of_rows(made.configs.current, torch.empty(2**20, 2**9, device="meta"))
    said = (72, "0.00"), (80, "0.00"), (2**22, "8.00")
    for message, (num_rows, gib) in zip(caplog.messages, said, strict=True):
        assert f"room for {num_rows} rows of a layer, 2.0 times as many as in" in message
        assert f": {gib} GiB before fc1" in message
        assert "set moe_expert_capacity_factor" in message


def test_steps_of_a_dispatcher_by_themselves_need_cells():
    """Packed experts do the exchange, so its steps return no rows for other experts."""
    layer, x = tiny.padded_layer(experts="packed"), tiny.tokens(4)
    steps = layer.token_dispatcher
    probs_TE, map_TE = layer.router(x)
    given, _, _ = steps.dispatch_postprocess(
        *steps.token_dispatch(*steps.dispatch_preprocess(x, map_TE, probs_TE))
    )
    words = "^experts must be 'module' where a dispatcher's steps run without .*; packed experts do"
    with pytest.raises(ValueError, match=words):
        steps.combine_preprocess(given)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("changed", ["", "factor", "mode"])
def test_what_decides_a_pass_stays_until_it_is_recomputed(changed, reentrant):
    """Evaluation in between, which has another config, is no change; nor one before."""
    made = tiny.padded_layer(experts="packed", moe_expert_capacity_factor=1.0)
    given = tiny.tokens(8).requires_grad_()
    with torch.no_grad():
        made.eval()(tiny.tokens(8))
    made.train()
    output = checkpoint(lambda x: made(x)[0], given, use_reentrant=reentrant)
    configs = made.token_dispatcher.configs
    if changed != "mode":
        with torch.no_grad():
            made.eval()(tiny.tokens(8))
    made.train(changed != "mode")
    if changed == "factor":
        configs.training = dataclasses.replace(configs.training, capacity_factor=0.5)
    refused = pytest.raises(ValueError, match=r"^config must stay as it is until backward has")
    with refused if changed else nullcontext():
        output.sum().backward()
        assert given.grad is not None and given.grad.any()


@pytest.mark.parametrize(
    ("options", "warns"),
    [({}, True), ({"capacity_pool": "cells"}, False), ({"experts": "module"}, False)],
    ids=str,
)
@pytest.mark.parametrize("factor", [0.5, 2.0, None])  # At 2 a cell has room for all 4 tokens.
def test_a_fall_back_to_cells_that_drop_is_a_warning(caplog, options, warns, factor):
    given = {"experts": "auto", "activation_func": torch.tanh, **options}
    for _ in range(2):
        tiny.padded_layer(moe_expert_capacity_factor=factor, **given)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == (warns and factor == 0.5)
    for message in warned:
        assert message.startswith("padded dispatch: experts=module (packed experts do not support ")
        assert "Remedy" not in message and message.endswith("capacity_factor=None to drop none")


def test_options_without_effect_are_named_once(caplog):
    settings = {"experts": "packed", "moe_token_drop_policy": "position", "trace": "folder"}
    made = tiny.padded_layer(moe_expert_capacity_factor=2.0, **settings)
    for _ in range(2):
        made(tiny.tokens(4))
    trace, policy = caplog.messages
    assert trace.startswith("trace='folder' has no effect in a training loop without StepHooks; ")
    assert policy.startswith("moe_token_drop_policy='position' has no effect with a store; set ")
    followed = tiny.padded_layer(moe_expert_capacity_factor=2.0, experts="packed", trace="other")
    followed.token_dispatcher.configs.hooks = object
    followed(tiny.tokens(4))
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("experts", ["module", "packed"])
def test_the_first_pass_of_recompute_is_not_counted(experts):
    """It has no gradients; evaluation has none either, and is counted by itself."""
    moe = tiny.padded_layer(experts=experts, moe_expert_capacity_factor=0.5)
    hidden, all_masked = torch.randn(8, 1, tiny.HIDDEN), torch.ones(1, 8, dtype=torch.bool)

    def counts(counters: Counters) -> tuple[int, int]:
        return int(counters.num_passes), int(counters.demand_E.sum())

    found = []
    for gradients, training in ((False, True), (True, True), (False, False)):
        moe.train(training)
        with torch.set_grad_enabled(gradients):
            for mask_BS in (None, all_masked):
                moe(hidden, padding_mask=mask_BS)
        both = moe.token_dispatcher.counters, moe.token_dispatcher.eval_counters
        found.append([counts(one) for one in both])
    nothing, two_passes = (0, 0), (2, 16)
    assert found == [[nothing, nothing], [two_passes, nothing], [two_passes, two_passes]]


@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize("experts", ["module", "packed"])
def test_selective_recompute_counts_a_pass_once_and_has_its_gradients(experts, saves):
    """torch numbers the operations of both passes: what one of them counts is not among these."""
    found = []
    for how in ({}, {"use_reentrant": False, "context_fn": selective(saves)}):
        settings = {"moe_expert_capacity_factor": 0.5} | tiny.EXPERT_BIAS
        moe, hidden = tiny.padded_layer(experts=experts, **settings), tiny.tokens(13)
        hidden.requires_grad_()
        out = hidden
        for _ in range(2):
            out = (
                checkpoint(lambda given, moe=moe: moe(given)[0], out, **how) if how else moe(out)[0]
            )
        out.backward(out.detach().cos())
        counters = moe.token_dispatcher.counters
        assert counters.num_passes == 2
        # `max_need` is of the passes since drops were last looked for: of the other pass here.
        counted = counters.totals, moe.router.local_tokens_per_expert
        found.append([out, hidden.grad, *counted, *(one.grad for one in moe.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
