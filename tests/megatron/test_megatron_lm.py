"""Megatron-LM's loop is followed: its three functions, for models with our layers only."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from padded_dispatch.megatron import PaddedOptions, Retry, install, uninstall
from tests.support.megatron_lm_loop import MODULE, stand_in
from tests.support.retried_training import RetriedCase, Training, draws, forward, world

CASE = RetriedCase(name="Megatron-LM's loop", microbatches=2)
NAMES = "train", "train_step", "training_log"


@pytest.fixture
def training_loop(monkeypatch) -> Iterator[Any]:
    """Provide a stand-in for Megatron-LM's module."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield stand_in(monkeypatch, CASE)
    dist.destroy_process_group()
    uninstall()


def step(loop: Any, training: Training, number: int = 0) -> Any:
    loop.get_args().curr_iteration = number
    schedule = training.schedule
    return loop.train_step(
        forward,
        draws(CASE),
        training.chunks,
        None,
        None,
        training.config,
        forward_backward_func=schedule,
    )


def test_steps_are_repeated_and_retries_shown(training_loop):
    stock = [getattr(training_loop, name) for name in NAMES]
    with world(CASE):
        install(PaddedOptions(on_overflow="retry"))
        training = Training(CASE, on_overflow="retry")
        for number in (7, 8):
            step(training_loop, training, number)
        training_loop.training_log({}, {}, 8, 0)
        uninstall()
    first, second = training_loop.calls
    assert isinstance(first, Retry) and first is second
    assert (first.num_retried, first.num_steps) == (2, 2)
    for writer in (training_loop.tensorboard, training_loop.wandb):
        assert writer.scalars["moe/retried_steps"] == [(8, 1.0), (9, 2.0)]
    assert training_loop.lines == [(8, {"moe/retried_steps": 2.0})]
    assert [getattr(training_loop, name) for name in NAMES] == stock


def test_another_model_is_another_run(training_loop):
    with world(CASE):
        install(PaddedOptions(on_overflow="retry"))
        for _ in range(2):
            step(training_loop, Training(CASE, on_overflow="retry"))
    first, second = training_loop.calls
    assert first is not second and first.chunks is not second.chunks


def test_without_retry_the_schedule_is_megatrons(training_loop):
    with world(CASE):
        install()
        training = Training(CASE)
        step(training_loop, training)
    assert training_loop.calls == [training.schedule]


@pytest.mark.parametrize("kind", ["stock", "dense"])
def test_other_models_train_as_before(training_loop, monkeypatch, kind):
    with world(CASE):
        install()
        training = Training(CASE)
        if kind == "stock":
            del training.config.padded_dispatch
        else:
            training.config.num_moe_experts = None
            training.schedule = lambda **given: []
        monkeypatch.setattr("padded_dispatch.megatron.megatron_lm._Run", None)  # Would raise.
        step(training_loop, training)
        training_loop.training_log({}, {}, 2, 0)
    assert training_loop.calls == [training.schedule] and training_loop.lines == [(2, {})]


def test_a_loop_that_is_imported_later_is_followed_once_a_config_is_made(
    training_loop, monkeypatch
):
    monkeypatch.delitem(sys.modules, MODULE)
    with world(CASE):
        install()
        assert MODULE not in sys.modules
        monkeypatch.setitem(sys.modules, MODULE, training_loop)
        stock = training_loop.train_step
        Training(CASE)
        followed = training_loop.train_step
        assert followed.__wrapped__ is stock
        Training(CASE)
        assert training_loop.train_step is followed
        uninstall()
    assert training_loop.train_step is stock


def test_a_module_without_a_loop_is_left_alone(training_loop):
    for name in NAMES:
        delattr(training_loop, name)
    install()
    assert not any(hasattr(training_loop, name) for name in NAMES)
