"""A step that dropped rows runs again, and nothing shows that it ran before."""

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from padded_dispatch.megatron import PaddedOptions, Retry, retry
from padded_dispatch.megatron.retry import dropping_nothing
from padded_dispatch.megatron.telemetry import padded_moe_layers
from tests.megatron.test_telemetry import model
from tests.support import tiny
from tests.support.gpt import LOSS_SCALE
from tests.support.graph_training import Findings
from tests.support.retried_training import (
    RetriedCase,
    Training,
    differing_names,
    draws,
    fitting,
    retried_equals_never_dropping,
    world,
)

CASES = [
    RetriedCase(name="one microbatch"),
    RetriedCase(name="three microbatches", microbatches=3),
    RetriedCase(name="EP2", ranks=2, ep=2, microbatches=3, policy="random", expert_bias=True),
    RetriedCase(name="PP2", ranks=2, pp=2, microbatches=3),
    RetriedCase(name="PP2/VPP2", ranks=2, pp=2, vpp=2, num_layers=4, microbatches=4),
    RetriedCase(name="overlapped reduction", ranks=2, microbatches=3, overlap_grad_reduce=True),
    RetriedCase(
        name="overlapped gathering",
        ranks=2,
        microbatches=3,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    ),
    RetriedCase(name="recompute", recompute=True),
    RetriedCase(name="multi-token prediction", mtp=True),
    RetriedCase(name="fp16", fp16=True),
    RetriedCase(name="TP2/EP2", ranks=2, tp=2, ep=2, microbatches=2),
    RetriedCase(name="TP2, fp16", ranks=2, tp=2, microbatches=2, fp16=True),
    RetriedCase(name="graphs of layers", ranks=2, ep=2, graph="layer", dropout=0.0),
]


@pytest.fixture
def alone() -> Iterator[None]:
    """Provide a default group of this process alone, without Megatron's groups."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def cases_of(num_ranks: int) -> pytest.MarkDecorator:
    cases = [case for case in CASES if case.ranks == num_ranks]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def check(findings: Findings, case: RetriedCase) -> None:
    assert findings.failures() == []
    assert (findings.facts["steps"], findings.facts["retried"]) == (case.steps, case.steps)


@cases_of(1)
def test_bits_are_those_of_a_training_that_never_drops(alone, case):
    check(retried_equals_never_dropping(case), case)


@cases_of(2)
def test_bits_are_those_of_a_training_that_never_drops_on_two_ranks(pool2, case):
    for findings in pool2.run(retried_equals_never_dropping, case):
        check(findings, case)


def test_an_overflow_in_the_run_that_is_taken_back_leaves_the_loss_scale_alone(alone):
    case = RetriedCase(name="fp16", fp16=True, steps=6)
    with world(case):
        never = Training(case, layer_factors=fitting(case))
        retried = Training(case, on_overflow="retry")
        assert retried.retry is not None
        schedule = retried.retry.forward_backward_func

        def overflowing(**kwargs: Any) -> list[Any]:
            results = schedule(**kwargs)
            for chunk in retried.chunks:
                for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                    buffer.grad_data.fill_(torch.inf)
            return results

        retried.retry.forward_backward_func = overflowing
        found, scales = [], [LOSS_SCALE]
        for number in range(case.steps):
            wanted, given = never.step(number), retried.step(number)
            assert differing_names(wanted, given) == []
            found.append(bool(given["found_inf 0"]))
            scales.append(given["loss scale 0"].item())
        assert retried.retry.num_retried == case.steps
    assert set(found) == {True, False}
    factors = [after / before for before, after in itertools.pairwise(scales)]
    assert factors == [0.5 if overflowed else 2 for overflowed in found]


PARTS = [SimpleNamespace(name="moe")]
ONE_MICROBATCH, THREE_MICROBATCHES = CASES[:2]
SPARE = RetriedCase(name="a slot for each token", factor=2.0, steps=3, microbatches=2)


class DropCount:
    """An observer that counts dropped rows of each pass."""

    def __init__(self) -> None:
        self.dropped: list[int] = []

    def observe(self, asked_TE, probs_TE, selection, sizes):
        self.dropped.append(int((asked_TE & ~selection.kept_TE).sum()))


def count_drops(training: Training) -> dict[int, DropCount]:
    counts = {number: DropCount() for number in padded_moe_layers(training.chunks)}
    for number, layer in padded_moe_layers(training.chunks).items():
        layer.router.selector.observers.append(counts[number])
    return counts


def _drop_in_layer_2_of_the_last_rank(training: Training, skewed: list[bool]) -> None:
    """Replace layer 2's logits: even demand, or all tokens want experts 0 and 1."""
    layer = padded_moe_layers(training.chunks)[2]
    original = layer.router.gating

    def gating(hidden: Any) -> Any:
        logits = original(hidden)
        num_experts = logits.shape[-1]
        tokens = torch.arange(logits.shape[:-1].numel()).view(*logits.shape[:-1], 1)
        first = tokens * 0 if skewed[-1] else tokens
        place = (torch.arange(num_experts) - first) % num_experts
        return logits * 0.01 - place.to(logits.dtype)

    layer.router.gating = gating


def _one_drop(case: RetriedCase) -> tuple[list[str], dict[int, list[int]], tuple[int, int]]:
    """Train with drops in step 2, in one layer of one rank; see the test."""
    with world(case):
        options = {"layer_factors": {2: 1.5}}
        never = Training(case, **options)
        retried = Training(case, on_overflow="retry", **options)
        counts, skewed = count_drops(retried), [False]
        for training in (never, retried):
            _drop_in_layer_2_of_the_last_rank(training, skewed)
        differing = []
        for number in range(case.steps):
            skewed.append(number == 1 and dist.get_rank() == case.ranks - 1)
            layers = list(padded_moe_layers(never.chunks).values())
            with dropping_nothing(layers) if number == 1 else contextlib.nullcontext():
                wanted = never.step(number)
            differing += differing_names(wanted, retried.step(number))
        assert retried.retry is not None
        dropped = {number: count.dropped for number, count in counts.items()}
        return differing, dropped, (retried.retry.num_retried, retried.retry.num_steps)


def test_a_drop_in_one_layer_of_one_rank_repeats_the_step_on_all(pool2):
    case = RetriedCase(name="one drop", ranks=2, ep=2, factor=2.0, steps=3)
    first, second = pool2.run(_one_drop, case)
    # Two microbatches of ten tokens: 20 want an expert, ceil(10 * 1.5) slots are there.
    assert first == ([], {1: [0, 0, 0, 0], 2: [0, 0, 0, 0]}, (1, 3))
    assert second == ([], {1: [0, 0, 0, 0], 2: [0, 10, 0, 0]}, (1, 3))


def test_without_drops_nothing_runs_twice_and_no_bit_changes(alone):
    with world(SPARE):
        plain, retried = Training(SPARE), Training(SPARE, on_overflow="retry")
        counts = count_drops(retried)
        for number in range(SPARE.steps):
            assert differing_names(plain.step(number), retried.step(number)) == []
        assert not plain.random.generators.changed_since(retried.random.generators).states
        assert retried.retry is not None
        assert (retried.retry.num_retried, retried.retry.num_steps) == (0, 3)
        # Steps times microbatches.
        assert {number: count.dropped for number, count in counts.items()} == {
            1: [0] * 6,
            2: [0] * 6,
        }


def test_data_is_read_once_per_step_also_where_a_step_runs_twice(alone):
    case = THREE_MICROBATCHES
    with world(case):
        training = Training(case, on_overflow="retry")
        read = []
        batches = (read.append(number) or batch for number, batch in enumerate(draws(case)))
        for number in range(1, 3):
            training.passes(batches)
            assert read == list(range(3 * number))
        assert training.retry is not None and training.retry.num_retried == 2


def test_an_exhausted_iterator_raises_what_it_raises_without_retry(alone):
    case = THREE_MICROBATCHES
    with world(case):
        for training in (Training(case), Training(case, on_overflow="retry")):
            batches = itertools.islice(draws(case), 4)
            training.passes(batches)
            with pytest.raises(StopIteration):
                training.passes(batches)
        assert training.retry is not None
        assert (training.retry.num_retried, training.retry.num_steps) == (1, 1)


def test_a_second_drop_raises(alone):
    with world(ONE_MICROBATCH):
        training = Training(ONE_MICROBATCH, on_overflow="retry")
        with (
            patch.object(retry, "dropping_nothing", lambda layers: contextlib.nullcontext()),
            pytest.raises(RuntimeError, match=r"must drop no row, got \d+ dropped rows in step 1"),
        ):
            training.passes()


def test_evaluation_passes_through(alone):
    calls = []
    with world(ONE_MICROBATCH):
        training = Training(ONE_MICROBATCH, on_overflow="retry")
        wrapper = Retry(lambda **kwargs: calls.append(kwargs) or ["result"], training.chunks)
        assert wrapper(forward_only=True, data_iterator="anything") == ["result"]
    assert calls == [{"forward_only": True, "data_iterator": "anything"}]
    assert wrapper.num_steps == 0


def test_retries_are_logged_more_and_more_rarely(alone, caplog):
    with world(ONE_MICROBATCH), caplog.at_level(logging.WARNING, "padded_dispatch"):
        training = Training(ONE_MICROBATCH, on_overflow="retry")
        for number in range(5):
            training.step(number)
    messages = [record.getMessage() for record in caplog.records]
    retries = [text for text in messages if text.startswith("retried steps")]
    assert [text.partition(";")[0] for text in retries] == [
        f"retried steps: {n} of {n}" for n in (1, 2, 4)
    ]
    assert retries[0].endswith("rows and ran again without dropping")


def test_a_loop_without_retry_is_refused():
    words = r"got one without padded_dispatch.megatron.Retry; wrap"
    with tiny.one_process():
        chunk = model(1, on_overflow="retry")
        with pytest.raises(ValueError, match=words):
            chunk[0](torch.randn(13, 1, tiny.HIDDEN))


# By the setting that is refused: the words of the error, and the change that brings it about.
REFUSED: dict[str, tuple[str, Callable[[Training], object]]] = {
    "chunks": (
        "chunks must be in Megatron's DistributedDataParallel, whose gradients can be taken back, "
        "got 'Linear'; wrap them",
        lambda training: training.chunks.append(torch.nn.Linear(1, 1)),
    ),
    "on_overflow": (
        "on_overflow must be 'retry', got 'drop'; set it",
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
    "local graphs of parts": (
        "be empty with cuda_graph_impl='local' and on_overflow='retry', which runs layers eagerly, "
        "got ['moe']",
        lambda training: vars(training.config).update(
            cuda_graph_impl="local", cuda_graph_scope=PARTS, cuda_graph_modules=PARTS
        ),
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
    with world(ONE_MICROBATCH):
        training = Training(ONE_MICROBATCH, on_overflow="retry")
        change(training)
        with pytest.raises(ValueError) as error:
            Retry(lambda **kwargs: [], training.chunks)
    assert words in str(error.value)
