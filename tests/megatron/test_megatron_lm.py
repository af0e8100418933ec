"""Megatron-LM's `train_step` repeats steps that dropped, if the model's options ask for it."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from padded_dispatch.megatron import PaddedOptions, Retry, install, uninstall
from tests.support.retried_training import RetriedCase, Training, draws, forward, world

CASE = RetriedCase(name="Megatron-LM's loop", microbatches=2)
MODULE = "megatron.training.training"


@pytest.fixture
def training_loop(monkeypatch) -> Iterator[Any]:
    """Provide a stand-in for Megatron-LM's module: a step, its arguments, a TensorBoard writer."""
    module: Any = ModuleType(MODULE)
    module.scalars = []
    module.calls = []
    add_scalar = lambda name, value, step: module.scalars.append((name, value, step))  # noqa: E731
    module.get_tensorboard_writer = lambda: SimpleNamespace(add_scalar=add_scalar)
    module.get_args = lambda: SimpleNamespace(curr_iteration=7)

    def train_step(forward_step_func, data_iterator, model, config, forward_backward_func, more=0):
        module.calls.append(forward_backward_func)
        for chunk in model:
            chunk.zero_grad_buffer()
        return forward_backward_func(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=CASE.microbatches,
            seq_length=CASE.seq,
            micro_batch_size=CASE.batch,
            forward_only=False,
        )

    module.train_step = train_step
    monkeypatch.setitem(sys.modules, MODULE, module)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield module
    dist.destroy_process_group()
    uninstall()


def step(loop: Any, training: Training) -> Any:
    schedule = training.schedule
    return loop.train_step(
        forward, draws(CASE), training.chunks, training.config, forward_backward_func=schedule
    )


def test_steps_are_repeated_and_retries_written(training_loop):
    stock = training_loop.train_step
    with world(CASE):
        install(PaddedOptions(on_overflow="retry"))
        training = Training(CASE, on_overflow="retry")
        for _ in range(2):
            assert len(step(training_loop, training)) == CASE.microbatches
        uninstall()
    first, second = training_loop.calls
    assert isinstance(first, Retry) and first is second
    assert (first.num_retried, first.num_steps) == (2, 2)
    assert training_loop.scalars == [("moe/retried_steps", n, 7) for n in (1, 2)]
    assert training_loop.train_step is stock


def test_another_model_gets_a_retry_of_its_own(training_loop):
    with world(CASE):
        install(PaddedOptions(on_overflow="retry"))
        for _ in range(2):
            step(training_loop, Training(CASE, on_overflow="retry"))
    first, second = training_loop.calls
    assert first is not second and first.chunks is not second.chunks


def test_models_without_retry_train_as_before(training_loop):
    stock = training_loop.train_step
    with world(CASE):
        install()
        assert training_loop.train_step is stock
        install(PaddedOptions(on_overflow="retry"))
        training = Training(CASE)
        step(training_loop, training)
    assert training_loop.calls == [training.schedule]


def test_without_megatron_lm_nothing_is_wrapped(monkeypatch):
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    install(PaddedOptions(on_overflow="retry"))
    assert MODULE not in sys.modules
    uninstall()
