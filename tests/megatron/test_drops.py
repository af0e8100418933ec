"""Each rank warns of its own drops in loops without `StepHooks`, which wait for nothing."""

import dataclasses
import functools
import gc
import logging
import os
import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.utils.checkpoint import checkpoint

from padded_dispatch.megatron import StepHooks, drops, megatron_on_cpu, padded_spec
from padded_dispatch.megatron.retry import dropping_nothing
from padded_dispatch.megatron.telemetry import Reader
from padded_dispatch.utils.patches import PATCHED
from tests.support import tiny
from tests.support.parity import megatron
from tests.support.training import Model, Training, with_changes, world

HALF = Model(factor=0.5, microbatches=3)


@pytest.fixture(autouse=True)
def no_earlier_groups(monkeypatch):
    monkeypatch.setattr(drops, "_groups", [])


def warnings(caplog: Any) -> list[str]:
    return [text for text in caplog.messages if "found no room" in text]


def passes(layer: Any, number: int) -> None:
    for _ in range(number):
        layer(torch.randn(8, 1, tiny.HIDDEN, requires_grad=True))[0].sum().backward()


def test_warns_of_the_1st_2nd_4th_round_that_drops(alone, caplog):
    """A step has three rounds; the 12 that drop begin with the 13th."""
    with world(HALF):
        training = Training(HALF)
        for number in range(8):
            dropping = number >= 4
            with dropping_nothing([] if dropping else [layer for _, layer in training.moe]):
                training.step(number)
            assert bool(warnings(caplog)) == dropping
    said = warnings(caplog)
    assert [text.rpartition("(")[2] for text in said] == [f"warning {n})" for n in (1, 2, 4, 8)]
    for text in said:
        assert "found no room on rank 0 in 1 passes (" in text
        assert "; moe_expert_capacity_factor=" in text and "would have held all layers" in text


def test_figures_are_those_of_the_counters(alone, caplog):
    with world(HALF):
        training = Training(HALF)
        training.passes()
        drops._look_last()
        counters = [layer.token_dispatcher.counters for _, layer in training.moe]
        asked, kept = (sum(getattr(c, n).sum() for c in counters) for n in ("demand_E", "kept_E"))
        shares = [1 - float(c.kept_E.sum() / c.demand_E.sum()) for c in counters]
    readings = [text.split("found no room")[1] for text in warnings(caplog)]
    assert len(readings) == 2  # The third pass is read at the end; its warning is not due.
    group = training.moe[0][1].token_dispatcher.drops
    totals = group._reader._last_sums[0].sum(0)
    assert totals[: 2 * HALF.num_experts].sum() == asked + kept
    assert max(shares) > 0 and group._reader._num_warnings == 3


def test_the_layer_that_drops_is_named(alone, caplog):
    with world(HALF):
        training = Training(HALF)
        (_, first), (index, _) = training.moe
        with dropping_nothing([first]):
            training.step(0)
    assert all(f"of the rows of layer {index} found no room" in text for text in warnings(caplog))
    assert warnings(caplog)


@pytest.mark.parametrize("options", [{}, {"on_overflow": "retry"}], ids=["hooks", "retry"])
def test_reads_nothing_where_hooks_follow_the_steps(alone, options):
    model = with_changes(HALF, {"options": options})
    with world(model):
        training = Training(model)
        hooks = StepHooks(training.chunks)
        with patch.object(Reader, "start") as start:
            training.step(0)
        assert hooks.retry is None and training.moe[0][1].token_dispatcher.drops.first
    start.assert_not_called()


def test_warns_again_once_the_hooks_have_ended(alone, caplog):
    """Not of what the hooks have followed, which the first copy reads."""
    with world(HALF):
        training = Training(HALF)
        hooks = StepHooks(training.chunks, every=10)
        training.step(0)
        del hooks
        drops._look_last()
        assert not warnings(caplog)
        training.step(1)
    assert "found no room on rank 0 in 1 passes (" in warnings(caplog)[0]


def test_does_not_say_again_what_hooks_that_came_late_have_followed(alone, caplog):
    model = dataclasses.replace(HALF, microbatches=2)
    with world(model):
        training = Training(model)
        training.step(0)
        hooks = StepHooks(training.chunks)
        training.step(1)
        hooks.read()
        del hooks
        caplog.clear()
        with dropping_nothing([layer for _, layer in training.moe]):
            training.step(2)
        drops._look_last()
        assert not warnings(caplog)
        for number in (3, 4):
            training.step(number)
    assert "found no room on rank 0 in 1 passes (" in warnings(caplog)[0]


@pytest.mark.parametrize("followed", [0, 1])
def test_hooks_of_one_model_leave_the_drops_of_another_to_be_said(caplog, followed):
    with tiny.one_process():
        config = tiny.config(moe_expert_capacity_factor=0.5, experts="module", num_layers=2)
        models = [tiny.layer(config, number, padded=True) for number in (1, 2)]
        tiny.ask_for(models[followed], 0, 1)
        hooks = StepHooks([models[followed]])
        for model in models:  # All 8 tokens of one ask for two experts.
            model(torch.ones(8, 1, tiny.HIDDEN))
        for _ in range(3):
            for model in models:
                passes(model, 1)
        assert hooks.read().training.max_need_Y.tolist() == [8]
    said = [text for text in warnings(caplog) if "on rank 0" in text]
    assert said and all(f"of the rows of layer {2 - followed} found" in text for text in said)


def test_models_of_one_config_are_read_apart_and_their_layers_named(caplog):
    """Such as an actor and a critic, in turns."""
    with tiny.one_process():
        fields: Any = {"moe_expert_capacity_factor": 2.0, "num_layers": 2}
        config = tiny.config(layer_factors={2: 0.5}, experts="module", **fields)
        models = [[tiny.layer(config, n, padded=True) for n in (1, 2)] for _ in range(2)]
        for _ in range(3):
            for layer in (layer for model in models for layer in model):
                passes(layer, 1)
        groups = [{layer.token_dispatcher.drops for layer in model} for model in models]
    assert len(groups[0]) == len(groups[1]) == 1 and groups[0] != groups[1]
    said = [text.partition(" found")[0].rpartition(" ")[2] for text in warnings(caplog)]
    assert said == ["2", "2"]  # The first round of each, read in the third.


def test_models_with_other_numbers_of_experts_are_read_apart(caplog):
    with tiny.one_process():
        fields: Any = {"moe_expert_capacity_factor": 0.5, "num_layers": 2}
        models = [tiny.padded_layer(1, **fields), tiny.padded_layer(2, num_moe_experts=8, **fields)]
        for _ in range(3):
            for model in models:
                passes(model, 1)
    for number in (1, 2):
        assert any(f"of the rows of layer {number} found" in text for text in warnings(caplog))


@pytest.mark.parametrize(
    "changes",
    [
        {"graph": "layer"},
        {"graph": "layer", "scopes": ("moe_router",)},
        {"fields": {"recompute_granularity": "full", "recompute_method": "uniform"}},
        {"evaluates": (2, 5)},
    ],
    ids=str,
)
def test_replays_count_and_captures_recompute_and_evaluation_do_not(alone, caplog, changes):
    model = with_changes(HALF, {"options": {"experts": "module"}, **changes})
    if "fields" in changes:
        model = with_changes(model, {"fields": {"recompute_num_layers": 1}})
    looks = []
    with world(model), patch.object(drops.Drops, "look", lambda group: looks.append(group)):
        training = Training(model)
        training.step(0)
        training.capture()
        for number in (1, 2, 3):
            training.step(number)
        training.end()
        groups = {layer.token_dispatcher.drops for _, layer in training.moe}
    assert len(looks) == 4 * 3 - 1 and set(looks) == groups  # The first round makes up the group.


def test_a_copy_is_read_when_it_has_arrived_and_the_loop_does_not_wait(alone, caplog):
    with world(HALF):
        training, arrived, started = Training(HALF), [False], []
        start = Reader.start

        class Event:
            def query(self) -> bool:
                return arrived[0]

            def synchronize(self) -> None:
                assert arrived[0]

        def start_slowly(reader: Reader, step: int) -> Any:
            copy = start(reader, step)
            started.append(copy)
            object.__setattr__(copy, "arrived", Event())
            return copy

        with patch.object(Reader, "start", start_slowly):
            for number in range(4):
                training.step(number)
            assert warnings(caplog) == [] and len(started) == 1
            arrived[0] = True
            drops._look_last()
    assert [text.rpartition("(")[2] for text in warnings(caplog)] == [
        f"warning {n})" for n in (1, 2)
    ]
    assert "in 11 passes" in warnings(caplog)[1]


def test_a_device_that_is_at_work_or_has_failed_is_not_asked_at_the_end(monkeypatch):
    looks = []
    with tiny.one_process():
        layer = tiny.padded_layer(moe_expert_capacity_factor=0.5)
        passes(layer, 1)
        monkeypatch.setattr(drops.Drops, "look", lambda group, now: looks.append(now))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        stream: Any = SimpleNamespace(query=lambda: False)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        drops._look_last()
        assert looks == []
        stream.query = lambda: (_ for _ in ()).throw(RuntimeError("an illegal memory access"))
        drops._look_last()
        assert looks == []
        stream.query = lambda: True
        drops._look_last()
        assert looks and layer.token_dispatcher.drops


def test_the_rank_is_named_also_once_the_process_groups_have_ended(caplog):
    with tiny.one_process():
        layer = tiny.padded_layer(moe_expert_capacity_factor=0.5)
        with patch.object(dist, "get_rank", lambda: 3):
            drops.see_pass(layer)
        passes(layer, 1)
    assert not dist.is_initialized()
    drops._look_last()
    assert all("found no room on rank 3 in " in text for text in warnings(caplog))
    assert warnings(caplog)


def _warnings_of_ranks(model: Model) -> list[str]:
    records: list[logging.LogRecord] = []
    log = logging.getLogger("padded_dispatch")
    with patch.object(log, "handle", records.append), world(model):
        training = Training(model)
        for number in range(3):
            training.step(number)
    messages = [record.getMessage() for record in records]
    return [text for text in messages if "found no room" in text]


@pytest.mark.parametrize("experts", ["module", "packed"])
def test_each_rank_warns_of_its_own_drops(pool2, experts):
    one = {"top_k": 1, "fields": {"moe_router_pre_softmax": True}}
    changes = {
        "ranks": 2,
        "ep": 2,
        "options": {"experts": experts, "capacity_pool": "cells"},
        **one,
    }
    for rank, said in enumerate(pool2.run(_warnings_of_ranks, with_changes(HALF, changes))):
        assert said and all(f"on rank {rank} in" in text for text in said)


def test_each_stage_of_a_pipeline_warns_of_its_layers(pool2):
    stages = with_changes(HALF, {"ranks": 2, "pp": 2, "microbatches": 4})
    first, second = pool2.run(_warnings_of_ranks, stages)
    assert "of layer 1 found" in first[0] and "of layer 2 found" in second[0]


def test_a_layer_by_padded_spec_warns_without_a_patch(caplog):
    with tiny.one_process():
        layer = tiny.padded_layer(moe_expert_capacity_factor=0.5)
        passes(layer, 3)
        assert not PATCHED._saved
    assert len(warnings(caplog)) == 1


def test_a_layer_with_groups_of_its_own_warns_without_megatrons(caplog):
    names = "tp", "cp", "ep", "expt_tp", "expt_dp", "tp_ep", "tp_cp", "tp_dp_cp"
    with tiny.default_group(), megatron_on_cpu():
        groups = ProcessGroupCollection(**dict.fromkeys(names, dist.group.WORLD))
        config = tiny.config(moe_expert_capacity_factor=0.5, experts="module")
        spec = padded_spec(tiny.layer_spec()).submodules.mlp
        layer = tiny.build(functools.partial(spec, pg_collection=groups), config)
        layer.set_layer_number(1)
        passes(layer, 3)
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("modules", [None, ["layernorm"]])
def test_one_run_of_a_recomputed_pass_counts_and_none_without_gradients(reentrant, modules):
    granularity = None if modules is None else "selective"
    fields: Any = {"recompute_granularity": granularity, "recompute_modules": modules}
    with tiny.one_process(), patch.object(drops.Drops, "look") as look:
        layer = tiny.padded_layer(moe_expert_capacity_factor=0.5, **fields)
        for _ in range(3):
            with torch.no_grad():  # As for log-probabilities before an update.
                layer(torch.randn(8, 1, tiny.HIDDEN))
            tokens = torch.randn(8, 1, tiny.HIDDEN, requires_grad=True)
            again: Any = checkpoint(layer, tokens, use_reentrant=reentrant)
            again[0].sum().backward()
    assert look.call_count == 2


@pytest.mark.parametrize("experts", ["module", "packed"])
def test_a_layer_ends_with_its_graph(experts):
    """A layer holds its CUDA graph, and that the input and the output of a pass."""
    with tiny.one_process():
        layer = tiny.padded_layer(experts=experts)
        passes(layer, 2)
        tokens = torch.randn(8, 1, tiny.HIDDEN, requires_grad=True)
        layer.graph = tokens, layer(tokens)[0]
        layer.graph[1].sum().backward()
        alive = weakref.ref(layer)
        del layer, tokens
        gc.collect()
        assert alive() is None


@pytest.mark.parametrize("ends", ["process", "model"])
def test_the_last_drops_of_a_deleted_model_are_said(caplog, ends):
    """At the end of the process, or as the next model begins; a loop in a function deletes its."""
    with tiny.one_process():
        layer = tiny.padded_layer(moe_expert_capacity_factor=0.5)
        passes(layer, 2)
        assert warnings(caplog) == []
        del layer
        if ends == "process":
            drops._look_last()
        else:
            following = tiny.padded_layer(moe_expert_capacity_factor=2.0)
            passes(following, 1)
            assert drops._groups == [following.token_dispatcher.drops]
    # The first round, and both.
    assert ["in 1 passes" in text or "in 2 passes" in text for text in warnings(caplog)] == [
        True
    ] * 2


def test_a_model_after_a_layer_that_ran_once_is_read_in_its_own_rounds():
    with tiny.one_process(), patch.object(drops.Drops, "look") as look:
        config = tiny.config(moe_expert_capacity_factor=0.5, experts="module", num_layers=2)
        trial, *layers = [tiny.layer(config, number, padded=True) for number in (1, 1, 2)]
        passes(trial, 1)
        for _ in range(3):
            for layer in layers:
                passes(layer, 1)
        group = layers[0].token_dispatcher.drops
    assert group.layers == layers and group.first() is layers[0]
    assert look.call_count == 2


def test_a_replay_of_a_whole_step_is_a_round_of_its_model():
    with tiny.one_process(), patch.object(drops.Drops, "look") as look:
        layer = tiny.padded_layer()
        passes(layer, 1)
        drops.see_iteration([layer])
        drops.see_iteration([])
        assert look.call_count == 1 and layer.token_dispatcher.drops.first() is layer


def _compiled() -> int:
    """Compile a layer's router, and return the number of warnings in three passes."""
    compiler: Any = torch._dynamo
    with (
        megatron("cpu"),
        torch.compiler.set_stance("default"),  # `megatron_on_cpu` compiles nothing, nor do tests.
        patch.dict(os.environ, TORCHDYNAMO_DISABLE="0"),
        compiler.config.patch(disable=False),
        patch.object(logging.getLogger("padded_dispatch"), "warning") as warning,
    ):
        layer = tiny.padded_layer(moe_expert_capacity_factor=0.5)
        run = compiler.optimize("eager")(lambda x: layer.router(2 * x)[0])
        for _ in range(3):
            run(tiny.tokens(8).requires_grad_()).sum().backward()
        assert layer.token_dispatcher.counters.num_passes == 3
    return warning.call_count


def test_a_compiled_layer_warns(pool1):
    """The compiler cannot trace what reads the counters."""
    assert pool1.run(_compiled) == [1]


def _in_a_loop_of_its_own() -> int:
    """Take two micro-batches a step, or one, and reduce gradients over the replicas."""
    with megatron("cpu"), patch.object(drops.Drops, "look") as look:
        layer = tiny.padded_layer(moe_expert_capacity_factor=0.5)
        replicas = parallel_state.get_expert_data_parallel_group()
        for _ in range(2):
            passes(layer, 2 - dist.get_rank())
            for parameter in layer.parameters():
                dist.all_reduce(parameter.grad, group=replicas)
        return look.call_count


def test_replicas_may_take_other_numbers_of_micro_batches(pool2):
    assert pool2.run(_in_a_loop_of_its_own) == [3, 1]
