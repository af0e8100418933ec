"""A step that dropped rows runs again, and nothing shows that it ran before.

Then its parts: microbatches are read again as they were, random states come back, and captured
layers run eagerly for a while.
"""

import contextlib
import dataclasses
import math
import random
import re
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.transformer.module import GraphableMegatronModule

from padded_dispatch.config import NO_DROP
from padded_dispatch.megatron import PaddedOptions, Passes, StepHooks, compat, retry
from padded_dispatch.megatron.cpu import megatron_on_cpu
from padded_dispatch.megatron.dispatcher import device_of
from padded_dispatch.megatron.retry import (
    Retry,
    dropping_nothing,
    generator_states,
    record,
    replay,
    set_generators,
    without_graphs,
)
from padded_dispatch.trace import load_traces
from tests.megatron.test_steps import model
from tests.support import tiny
from tests.support.training import RETRIED, Training, differing_names, ways_agree, world


def test_drops_on_one_rank_repeat_the_step_on_all(pool2):
    """Of two stages of a pipeline, the first has room for all rows."""
    options = {"layer_factors": {1: NO_DROP}}
    case = dataclasses.replace(RETRIED, ranks=2, pp=2, microbatches=2, options=options)
    ways = {"never": {"never_drops": True}, "repeated": {"options": {"on_overflow": "retry"}}}
    assert pool2.run(ways_agree, case, ways) == [[], []]


def test_a_layer_in_evaluation_inside_a_step_counts_and_logs_show_what_was_dropped(alone):
    """The layer drops by its `eval_factor`; after the step, counters hold the first run's rows."""
    case = dataclasses.replace(RETRIED, factor=4.0, options={"eval_factor": 0.5})
    with world(case):
        never, retried = Training(case), Training(case, on_overflow="retry")
        for training in (never, retried):
            dict(training.moe)[2].eval()
        with dropping_nothing([layer for _, layer in never.moe]):
            wanted = never.step(0)
        read = StepHooks(retried.chunks).read
        assert differing_names(wanted, retried.step(0)) == []
        assert retried.retry.num_retried == 1
        found = read()
    assert found.training.dropped_share[0] == 0
    assert found.evaluation.dropped_share[1] >= 0.5
    assert found.evaluation.counts["num_passes"].tolist() == [0, case.microbatches]


def test_qk_clip_sees_the_largest_logit_of_the_run_that_stands(alone):
    """Transformer Engine's attention keeps it as an attribute, a new tensor in each pass."""
    found = []
    for changes in ({"never_drops": True}, {"options": {"on_overflow": "retry"}}):
        case = dataclasses.replace(RETRIED, draws=False, dropout=0.0, **changes)
        with world(case):
            training = Training(case)
            (chunk,) = training.chunks
            attentions = [
                layer.self_attention.core_attention for layer in chunk.module.decoder.layers
            ]
            for attention in attentions:
                attention.current_max_attn_logits = None
                attention.register_forward_hook(_note_max)
            training.step(0)
            assert training.retry is None or training.retry.num_retried == 1
            found.append([attention.current_max_attn_logits for attention in attentions])
    never, retried = found
    assert len(never) == 2 and never == retried


def _note_max(attention: Any, given: Any, output: Any) -> None:
    largest = attention.current_max_attn_logits
    attention.current_max_attn_logits = max(output.max().item(), largest or -math.inf)


def test_a_trace_has_the_run_that_stands_also_of_a_step_with_fewer_micro_batches(alone, tmp_path):
    options = {"on_overflow": "retry", "trace": str(tmp_path)}
    case = dataclasses.replace(RETRIED, options=options)  # Each step has one micro-batch.
    num_tokens = case.batch * case.seq
    with world(case):
        training, asked = Training(case), []
        passes = Passes(num_microbatches=3, num_tokens=num_tokens, num_steps=2)
        hooks = StepHooks(training.chunks, passes=passes)
        for _, layer in training.moe:
            layer.token_dispatcher.observers.append(
                SimpleNamespace(observe=lambda asked_TE, *_: asked.append(asked_TE.clone()))
            )
        for number in range(2):
            training.step(number)
            hooks.after_step()
        hooks.recorder.close()
    found, num_layers = load_traces([tmp_path]), len(training.moe)
    assert training.retry.num_retried == 2 and len(asked) == 4 * num_layers
    assert found.steps.tolist() == [1] * num_layers + [2] * num_layers
    for ids_TK, map_TE in zip(found.ids_NTK, asked[num_layers : 2 * num_layers], strict=False):
        assert ids_TK.tolist() == [row.nonzero().flatten().tolist() for row in map_TE]


def test_a_second_drop_raises(alone):
    with world(RETRIED):
        training = Training(RETRIED, on_overflow="retry")
        with (
            patch.object(retry, "dropping_nothing", lambda layers: contextlib.nullcontext()),
            pytest.raises(RuntimeError, match=r"must drop no row, got \d+ dropped rows after"),
        ):
            training.passes()


def test_evaluation_passes_through_and_retries_are_logged_more_and_more_rarely(alone, caplog):
    calls = []
    with world(RETRIED):
        training = Training(RETRIED, on_overflow="retry")
        wrapper = Retry(lambda **kwargs: calls.append(kwargs) or ["result"], training.chunks)
        assert wrapper(forward_only=True, data_iterator="anything") == ["result"]
        for number in range(5):
            training.step(number)
        with dropping_nothing([layer for _, layer in training.moe]):
            training.step(5)
        assert (training.retry.num_retried, training.retry.num_steps) == (5, 6)
    assert calls == [{"forward_only": True, "data_iterator": "anything"}]
    assert wrapper.num_steps == 0
    messages = [record.getMessage() for record in caplog.records]
    retries = [text for text in messages if text.startswith("retried steps")]
    assert [text.partition(";")[0] for text in retries] == [
        f"retried steps: {n} of {n}" for n in (1, 2, 4)
    ]
    # No step's number: a resumed run has done some before, and others may be left out.
    words = r".*; this one dropped \d+ rows and ran again without dropping"
    assert all(re.fullmatch(words, text) for text in retries)


def test_sums_of_packed_sequences_are_restored(monkeypatch):
    loop = SimpleNamespace(_seqlen_stats_in_iteration=(sums := torch.ones(2)))
    monkeypatch.setitem(sys.modules, "megatron.training.training", loop)
    kept = {name: tensor.clone() for name, tensor in compat.logged_tensors().items()}
    sums += 1
    compat.put_logged_back(kept)
    assert sums.tolist() == [1, 1]


def test_a_stage_may_have_no_experts_and_no_parameters(alone):
    with world(RETRIED):
        training = Training(RETRIED, on_overflow="retry")
        del training.config.padded_dispatch  # As if it were older than `install`.
        ddp: Any = training.chunks[0]
        assert device_of([torch.nn.Identity()]) == device_of([ddp])
        retry.check_retry([type(ddp)(training.config, ddp.ddp_config, torch.nn.Linear(1, 1))])


def test_a_loop_without_retry_is_refused():
    words = (
        r"have StepHooks to follow on_overflow='retry', got none; make .* passes by its wrap\(\)"
    )
    with tiny.one_process():
        chunk = model(1, on_overflow="retry")
        with pytest.raises(ValueError, match=words):
            chunk[0](torch.randn(13, 1, tiny.HIDDEN))
    with tiny.default_group(), world(RETRIED):
        training = Training(RETRIED, on_overflow="retry")
        training.step(0)
        training.schedule, training.retry = training.retry.forward_backward_func, None
        with pytest.raises(ValueError, match=words):  # Nothing repeats this one.
            training.step(1)


# By the setting that is refused: the words of the error, and the change that brings it about.
REFUSED: dict[str, tuple[str, Callable[[Training], object]]] = {
    "chunks": (
        "chunks must be in Megatron's DistributedDataParallel, whose gradients can be taken back, "
        "got 'Linear'; wrap them",
        lambda training: training.chunks.append(torch.nn.Linear(1, 1)),
    ),
    "on_overflow": (
        "on_overflow must be 'retry', got 'warn'; set it",
        lambda training: vars(training.config).update(padded_dispatch=PaddedOptions()),
    ),
    "finalize_model_grads_func": (
        "finalize_model_grads_func must be set with on_overflow='retry'",
        lambda training: vars(training.config).update(finalize_model_grads_func=None),
    ),
    "fp8_recipe": (
        "fp8_recipe must keep no history of earlier passes with on_overflow='retry', got "
        "'delayed'; set 'tensorwise'",
        lambda training: vars(training.config).update(fp8="e4m3", fp8_recipe="delayed"),
    ),
    "reuse_grad_buf_for_mxfp8_param_ag": (
        "reuse_grad_buf_for_mxfp8_param_ag must be False with on_overflow='retry'",
        lambda training: vars(training.chunks[0].ddp_config).update(
            reuse_grad_buf_for_mxfp8_param_ag=True
        ),
    ),
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_cannot_be_taken_back_is_refused_before_training(alone, setting):
    words, change = REFUSED[setting]
    with world(RETRIED):
        training = Training(RETRIED, on_overflow="retry")
        change(training)
        with pytest.raises(ValueError) as error:
            Retry(lambda **kwargs: [], training.chunks)
    assert words in str(error.value)


@pytest.fixture
def on_cpu() -> Iterator[None]:
    with megatron_on_cpu():
        yield


ON_CPU = pytest.mark.usefixtures("on_cpu")


@ON_CPU
def test_every_form_that_schedules_take_is_recorded_as_far_as_it_is_read():
    assert record(None) is None and replay(None) is None
    assert record(SimpleNamespace(epoch=3)).epoch == 3  # Other attributes are the source's.
    first, second, absent = recorded = record([iter("abc"), iter("xyz"), None])
    assert (next(second), next(first), next(second)) == ("x", "a", "y")
    assert absent is None
    assert [list(one) for one in replay(recorded)[:2]] == [["a"], ["x", "y"]]
    assert replay(recorded)[2] is None
    # The sources are where reading left them.
    assert (next(first), next(second)) == ("b", "z")


@ON_CPU
@pytest.mark.parametrize("reuses", [True, False], ids=["loader", "forward step"])
def test_memory_that_is_written_later_does_not_matter(reuses):
    """Either the loader fills the same memory again, or the forward step changes its batch."""
    memory = torch.zeros(2, dtype=torch.int64)

    def loader() -> Iterator[dict[str, Any]]:
        for number in range(3):
            ids = memory if reuses else torch.zeros_like(memory)
            ids.fill_(number)
            yield {"ids": ids, "more": [ids.numpy()]}

    recorded = record(loader())
    for batch in recorded:
        if not reuses:
            batch["ids"].fill_(100)
            batch["more"].append("changed")
            del batch["ids"]
    again = [(batch["ids"].tolist(), *map(list, batch["more"])) for batch in replay(recorded)]
    assert again == [([number] * 2, [number] * 2) for number in range(3)]


def test_a_step_without_its_graph_has_batches_as_megatrons_wrapper_reads_them():
    wrapper: Any = object.__new__(FullCudaGraphWrapper)
    wrapper.data_read = lambda *given: given
    wrapper.forward_backward_func = lambda **given: given
    given = {"data_iterator": 1, "model": 2, "num_microbatches": 3}
    around = type("PagedStashRunner", (), {"forward_backward_func": wrapper})()
    for one in (wrapper, around):
        assert retry.uncaptured(one)(**given) == given | {"data_iterator": (1, 2, True, 3)}


def test_groups_are_kept_and_what_cannot_be_copied_is_refused():
    with tiny.one_process():
        group, ids = dist.group.WORLD, torch.ones(1)
        recorded = record(iter([SimpleNamespace(group=group, ids=ids)]))
        next(recorded)
        ids.zero_()
        (again,) = replay(recorded)
        assert again.group is group and again.ids.item() == 1
        result = ids.requires_grad_() * 1
        for part, why in (((n for n in "a"), ".*generator"), (result, "Only Tensors created")):
            words = rf"^a microbatch must be what copy.deepcopy copies .*, got dict \({why}"
            with pytest.raises(ValueError, match=words):
                next(record(iter([{"ids": group, "more": part}])))


DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "python, the second of a pair": lambda: random.gauss(0, 1),
    "numpy": lambda: np.random.rand(),
    "numpy, the second of a pair": lambda: np.random.randn(),
    "torch": lambda: torch.rand(()).item(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_repeats(on_cpu, name):
    before = generator_states()
    values = [DRAWS[name]() for _ in range(3)]
    set_generators(before)
    assert [DRAWS[name]() for _ in range(3)] == values


class Layer(GraphableMegatronModule):
    def __init__(self, impl: str) -> None:
        config = tiny.config("alltoall")
        config.cuda_graph_impl = impl
        super().__init__(config)

    def forward(self, hidden_states: Any) -> Any:
        return hidden_states + 1


def test_captured_layers_run_eagerly_inside_the_block_only():
    graphed, bare, zero = Layer("transformer_engine"), Layer("none"), torch.zeros(())
    graphs: list[Any] = [lambda hidden, **kwargs: hidden + 10]
    graphed.cuda_graphs = graphs
    chunk = torch.nn.Sequential(graphed, bare)
    assert chunk(zero) == 11
    with without_graphs([torch.nn.Linear(1, 1), chunk]):
        assert chunk(zero) == 2
    assert graphed.cuda_graphs is graphs
    assert chunk(zero) == 11
