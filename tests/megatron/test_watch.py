"""Drops are said in a training loop that has no `Telemetry`, and the loop waits for nothing."""

import functools
import gc
import logging
import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn
from torch.utils.checkpoint import checkpoint

from padded_dispatch.megatron import Telemetry, megatron_on_cpu, padded_spec, watch
from padded_dispatch.megatron.retry import dropping_nothing
from padded_dispatch.megatron.telemetry import Reader, overflow_words
from padded_dispatch.utils.patches import PATCHED
from tests.support import tiny
from tests.support.parity import megatron
from tests.support.training import Model, Training, with_changes, world

HALF = Model(factor=0.5, microbatches=3)


def said(caplog: Any) -> list[str]:
    return [text for text in caplog.messages if "found no room" in text]


def test_the_1st_2nd_4th_step_that_drops_is_said_with_its_number(alone, caplog):
    """The first of them is the 13th step, and the fourth the last one."""
    with world(HALF):
        training = Training(HALF)
        for number in range(16):
            drops = number >= 12
            with dropping_nothing([] if drops else [layer for _, layer in training.moe]):
                training.step(number)
            assert bool(said(caplog)) == drops
    words = said(caplog)
    assert [text.rpartition("(")[2] for text in words] == [f"warning {n})" for n in (1, 2, 4)]
    for step, text in zip((13, 14, 16), words, strict=True):
        assert f"found no room at step {step} (" in text
        assert "; moe_expert_capacity_factor=" in text and "would have held all layers" in text


def test_what_is_said_is_what_telemetry_reads(alone, caplog):
    with world(HALF):
        training, read = Training(HALF), []
        start = Reader.start

        def noted(reader: Reader, step: int) -> Any:
            read.append(step)
            return start(reader, step)

        with patch.object(Reader, "start", noted):
            for number in range(3):
                training.passes(number=number)
        assert read == [1, 2, 3]
        first = said(caplog)[0]
        caplog.clear()
        twin = Training(HALF)
        telemetry = Telemetry(twin.chunks)
        for number in range(3):
            twin.passes(number=number)
            if number == 0:
                words = overflow_words(telemetry.read(), telemetry._reader.settings)
        assert first == f"{words.replace('step 0', 'step 1')} (warning 1)"
        assert len(said(caplog)) == 1  # Telemetry's: a loop that has one is not watched.


def test_the_layer_that_drops_is_named(alone, caplog):
    with world(HALF):
        training = Training(HALF)
        (_, first), (index, _) = training.moe
        with dropping_nothing([first]):
            training.step(0)
    (words,) = said(caplog)
    assert f"of the rows of layer {index} found no room at step 1 (" in words


def test_a_pass_that_is_announced_twice_counts_once(alone):
    """HALF's steps have three passes."""
    with world(HALF):
        _, layer = Training(HALF).moe[0]
        steps = []
        with patch.object(watch, "capturing", lambda: True):
            watch.see_pass(layer, torch.zeros(1))  # No pass of a step.
        for _ in range(4):
            hidden_states = torch.zeros(1)
            for _ in range(2):
                watch.see_pass(layer, hidden_states)
            steps.append(layer.token_dispatcher.watch.num_steps)
    assert steps == [0, 0, 0, 1]


def test_steps_of_one_input_are_all_seen():
    with tiny.one_process():
        layer = tiny.padded_layer(moe_expert_capacity_factor=0.5)
        tokens = torch.randn(8, 1, tiny.HIDDEN, requires_grad=True)
        for _ in range(3):
            layer(tokens)[0].sum().backward()
        assert layer.token_dispatcher.watch.num_steps == 3


def test_steps_that_a_retry_repeats_are_not_read(alone):
    model = with_changes(HALF, {"options": {"on_overflow": "retry"}})
    with world(model), patch.object(Reader, "start") as start:
        Training(model).step(0)
    start.assert_not_called()


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
def test_replays_recompute_and_evaluation_are_no_steps(alone, caplog, changes):
    model = with_changes(HALF, {"options": {"experts": "module"}, **changes})
    if "fields" in changes:
        model = with_changes(model, {"fields": {"recompute_num_layers": 1}})
    with world(model):
        training = Training(model)
        training.step(0)
        training.capture()
        for number in (1, 2, 3):
            training.step(number)
        training.end()
        steps = training.moe[0][1].token_dispatcher.watch.num_steps
    assert steps == 4 and len(said(caplog)) == 3


def test_a_step_whose_input_gets_no_gradient_ends_with_the_next(alone, caplog, monkeypatch):
    with world(HALF):
        training = Training(HALF)
        monkeypatch.setattr(torch.Tensor, "register_hook", lambda *_: None)
        for number in range(3):
            training.passes(number=number)
            assert len(said(caplog)) == number
    assert "at step 1 (" in said(caplog)[0] and "at step 2 (" in said(caplog)[1]


@pytest.mark.parametrize("end", ["the process", "the model", "a pass"])
def test_a_reading_waits_for_its_copy_and_the_loop_does_not(alone, caplog, end):
    """The last one is looked at in a later pass, or where the process or the model ends."""
    with world(HALF):
        training, arrived = Training(HALF), [False]
        start = Reader.start

        class Event:
            def query(self) -> bool:
                return arrived[0]

            def synchronize(self) -> None:
                assert arrived[0]

        def started(reader: Reader, step: int) -> Any:
            copy = start(reader, step)
            object.__setattr__(copy, "arrived", Event())
            return copy

        with patch.object(Reader, "start", started):
            for number in range(4):
                training.step(number)
            assert said(caplog) == []
            arrived[0] = True
            if end == "the model":
                del training
                gc.collect()
            elif end == "a pass":
                watch.see_pass(training.moe[0][1], torch.zeros(1))
            else:
                watch._log_last()
    assert [text.rpartition("(")[2] for text in said(caplog)] == [
        f"warning {n})" for n in (1, 2, 4)
    ]


def _words_of_ranks(model: Model) -> list[str]:
    records: list[logging.LogRecord] = []
    log = logging.getLogger("padded_dispatch")
    with patch.object(log, "handle", records.append), world(model):
        training = Training(model)
        for number in range(3):
            training.step(number)
    messages = [record.getMessage() for record in records]
    return [text for text in messages if "found no room" in text]


@pytest.mark.parametrize("experts", ["module", "packed"])
def test_one_rank_says_what_all_have_dropped(pool2, experts):
    options = {"experts": experts, "capacity_pool": "expert"}
    one = {"top_k": 1, "fields": {"moe_router_pre_softmax": True}}
    changes = {"ranks": 2, "ep": 2, "options": options, **one}
    first, second = pool2.run(_words_of_ranks, with_changes(HALF, changes))
    assert len(first) == 2 and second == []
    for words in first:
        assert " would have held all layers: set it" in words


def test_each_stage_of_a_pipeline_says_what_its_layers_drop(pool2):
    stages = with_changes(HALF, {"ranks": 2, "pp": 2, "microbatches": 4})
    first, second = pool2.run(_words_of_ranks, stages)
    assert "of layer 1 found" in first[0] and "of layer 2 found" in second[0]


def test_a_layer_by_padded_spec_says_what_it_drops_without_a_patch(caplog):
    with tiny.one_process():
        layer = tiny.padded_layer(moe_expert_capacity_factor=0.5)
        for _ in range(2):
            layer(torch.randn(8, 1, tiny.HIDDEN, requires_grad=True))[0].sum().backward()
        assert not PATCHED._saved
    assert ["found no room at step 1 (" in text for text in said(caplog)] == [True, False]


def test_a_layer_with_groups_of_its_own_says_what_it_drops_without_megatrons(caplog):
    names = "tp", "cp", "ep", "expt_tp", "expt_dp", "tp_ep", "tp_cp", "tp_dp_cp"
    with tiny.default_group(), megatron_on_cpu():
        groups = ProcessGroupCollection(**dict.fromkeys(names, dist.group.WORLD))
        config = tiny.config(moe_expert_capacity_factor=0.5, experts="module")
        spec = padded_spec(tiny.layer_spec()).submodules.mlp
        layer = tiny.build(functools.partial(spec, pg_collection=groups), config)
        layer.set_layer_number(1)
        layer(torch.randn(8, 1, tiny.HIDDEN, requires_grad=True))[0].sum().backward()
    assert len(said(caplog)) == 1


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("modules", [None, ["layernorm"]])
def test_one_pass_of_recompute_counts_and_none_without_gradients(reentrant, modules):
    granularity = None if modules is None else "selective"
    fields: Any = {"recompute_granularity": granularity, "recompute_modules": modules}
    with tiny.one_process():
        layer = tiny.padded_layer(moe_expert_capacity_factor=0.5, **fields)
        for _ in range(3):
            with torch.no_grad():  # As for log-probabilities before an update.
                layer(torch.randn(8, 1, tiny.HIDDEN))
            tokens = torch.randn(8, 1, tiny.HIDDEN, requires_grad=True)
            again: Any = checkpoint(layer, tokens, use_reentrant=reentrant)
            again[0].sum().backward()
        assert layer.token_dispatcher.watch.num_steps == 3


@pytest.mark.parametrize("experts", ["module", "packed"])
def test_a_layer_ends_with_its_graph(experts):
    """A layer holds its CUDA graph, and that the input and the output of a pass."""
    with tiny.one_process():
        layer = tiny.padded_layer(experts=experts)
        tokens = torch.randn(8, 1, tiny.HIDDEN, requires_grad=True)
        layer.graph = tokens, layer(tokens)[0]
        layer.graph[1].sum().backward()
        assert layer.token_dispatcher.watch.num_steps == 1  # The hook has been called.
        alive = weakref.ref(layer)
        del layer, tokens
        gc.collect()
        assert alive() is None


def test_a_replay_is_read_in_one_order_by_all_ranks_and_of_its_model_alone(monkeypatch):
    """Reading is collective. Another model may have been deleted, and collected on some ranks."""
    ended: list[Any] = []
    monkeypatch.setattr(watch.Watch, "end_step", lambda self: ended.append(self))
    monkeypatch.setattr(watch, "captures_iteration", lambda config: True)
    with tiny.one_process():
        layers = [tiny.padded_layer(number, num_layers=8) for number in range(1, 9)]
        for layer in reversed(layers):
            layer(torch.randn(8, 1, tiny.HIDDEN))
        watch.see_iteration([nn.ModuleList(layers[:5]), nn.ModuleList([*layers[5:7], nn.Tanh()])])
        watch.see_iteration(layers[7])
    assert ended == [layer.token_dispatcher.watch for layer in layers]


def test_a_model_after_one_of_its_config_that_had_no_whole_step_is_watched_by_itself():
    """Else ranks that have collected the earlier one would read alone."""
    with tiny.one_process():
        config = tiny.config(moe_expert_capacity_factor=0.5, experts="module", num_layers=2)
        trial, *layers = [tiny.layer(config, number, padded=True) for number in (1, 1, 2)]
        for layer in (trial, *layers):  # The trial has no backward.
            hidden = layer(torch.randn(8, 1, tiny.HIDDEN, requires_grad=True))[0]
        hidden.sum().backward()
        first, second = (layer.token_dispatcher.watch for layer in layers)
        assert first is second and first.layers == layers and trial.token_dispatcher.watch != first


def test_the_last_step_before_a_replay_counts_where_its_input_gets_no_gradient(caplog, monkeypatch):
    with tiny.one_process():
        layer = tiny.padded_layer(moe_expert_capacity_factor=0.5)
        monkeypatch.setattr(watch, "captures_iteration", lambda config: config is layer.config)
        layer(torch.randn(8, 1, tiny.HIDDEN))
        watch.see_iteration(layer)
    assert "found no room in steps 1 to 2 (" in said(caplog)[0]


def test_a_microbatch_calculator_is_not_needed():
    config: Any = SimpleNamespace(cuda_graph_impl="none", num_layers=4)
    router = SimpleNamespace(config=config, layer_number=1, layer_name="")
    layer = SimpleNamespace(config=config, router=router)
    with patch.object(watch, "get_num_microbatches", lambda: (_ for _ in ()).throw(AttributeError)):
        assert watch._num_passes(layer) == 1
    with patch.object(watch, "get_num_microbatches", lambda: 2):
        config.mtp_use_repeated_layer, config.mtp_num_layers = True, 5
        assert watch._num_passes(layer) == 2
        router.is_mtp_layer = True  # A stage's first layer with experts may be this one.
        assert watch._num_passes(layer) == 10
        config.mlp_chunks_for_training = 3
        assert watch._num_passes(layer) == 30
        config.cuda_graph_impl = "local"
        assert watch._num_passes(layer) == 10


def _in_a_loop_of_its_own() -> int:
    """Take two micro-batches a step, or one, and reduce gradients over the replicas."""
    with megatron("cpu"):
        layer = tiny.padded_layer(moe_expert_capacity_factor=0.5)
        replicas = parallel_state.get_expert_data_parallel_group()
        for _ in range(2):
            for _ in range(2 - dist.get_rank()):
                layer(torch.randn(6, 1, tiny.HIDDEN).requires_grad_())[0].sum().backward()
            for parameter in layer.parameters():
                dist.all_reduce(parameter.grad, group=replicas)
        return layer.token_dispatcher.watch.num_steps


def test_replicas_may_take_other_numbers_of_micro_batches(pool2):
    assert pool2.run(_in_a_loop_of_its_own) == [4, 2]
