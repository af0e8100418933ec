"""Layers' factors change by schedule and by growth; warnings and errors name what was dropped."""

import logging
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from padded_dispatch.config import FIT, NO_DROP
from padded_dispatch.megatron.control import CapacityControl
from padded_dispatch.megatron.cpu import megatron_on_cpu
from padded_dispatch.megatron.options import PaddedOptions
from padded_dispatch.megatron.telemetry import Snapshots
from padded_dispatch.ops.counters import Snapshot
from tests.megatron.test_telemetry import model, run
from tests.support import tiny

NOTHING = np.zeros(2, dtype=np.int64)


def snapshot(*dropped: int) -> Snapshot:
    """Make a snapshot of layers 1 and 2, each with 50 tokens, 2 choices per token and 4 experts.

    `dropped`: rows that each layer dropped. The largest demand for one expert was 50 rows.
    """
    return Snapshot(
        layers_Y=np.array([1, 2]),
        top_k=2,
        demand_YE=np.array([[25] * 4] * 2),
        kept_YE=np.array([[25 - count, 25, 25, 25] for count in dropped]),
        asked_mass_Y=NOTHING,
        dropped_mass_Y=NOTHING,
        num_tokens_Y=NOTHING + 50,
        lost_tokens_Y=NOTHING,
        num_positions_Y=NOTHING + 50,
        num_passes_Y=NOTHING + 1,
        num_slots_Y=NOTHING + 100,
        num_unplaced_Y=NOTHING,
        max_demand_Y=NOTHING + 50,
        idle_passes_YR=np.zeros((2, 1), dtype=np.int64),
    )


def snapshots(*dropped: int, step: int = 1000) -> Snapshots:
    training, evaluation = snapshot(*dropped), snapshot(0, 0)
    return Snapshots(step=step, num_steps=1, training=training, evaluation=evaluation)


def control(**options: Any) -> tuple[CapacityControl, Any]:
    chunk = model(1, 2)  # with factor 0.5
    return CapacityControl([chunk], PaddedOptions(**options)), chunk


def factors(chunk: Any) -> list[float]:
    return [layer.token_dispatcher.dispatch_config.capacity_factor for layer in chunk]


def test_dropping_changes_nothing_by_itself(caplog):
    with tiny.one_process():
        capacity, chunk = control()
        assert [capacity.step(snapshots(20, 20)) for _ in range(5)] == [[]] * 5
        assert factors(chunk) == [0.5, 0.5] and capacity.factors == {1: 0.5, 2: 0.5}
        assert not caplog.records


def test_warnings_are_rarer_and_rarer(caplog):
    with tiny.one_process(), caplog.at_level(logging.WARNING):
        capacity, _ = control(on_overflow="warn", overflow_threshold=0.1)
        for _ in range(9):
            assert capacity.step(snapshots(10, 11)) == []
        assert capacity.step(snapshots(10, 10)) == [] and capacity.step(None) == []
        messages = [record.getMessage() for record in caplog.records]
        assert messages[0] == (
            "layer 2 dropped 11.00% of its rows in steps 1000 to 1000 and needed factor 2 "
            "(warning 1)"
        )
        assert [text.rpartition("(")[2] for text in messages] == [
            f"warning {n})" for n in (1, 2, 4, 8)
        ]


def test_an_error_names_layers_and_factors():
    with tiny.one_process():
        capacity, _ = control(on_overflow="error")
        assert capacity.step(snapshots(0, 0)) == []
        with pytest.raises(RuntimeError, match=r"^on_overflow='error': layer 1 dropped 5\.00% of"):
            capacity.step(snapshots(5, 0))


def test_growth_takes_reads_in_a_row_and_the_next_factor(caplog):
    with tiny.one_process(), caplog.at_level(logging.WARNING):
        capacity, chunk = control(
            on_overflow="grow", grow_after=2, grow_factors=(0.25, 1.0, NO_DROP)
        )
        assert capacity.step(snapshots(5, 1)) == []
        assert capacity.step(snapshots(5, 0)) == [
            "capacity factor 0.5 -> 1: layer 1 dropped 5.00% of its rows in steps 1000 to 1000 and "
            "needed factor 2"
        ]
        assert factors(chunk) == [1.0, 0.5]
        assert capacity.reads_above == {1: 0, 2: 0}
        assert capacity.step(snapshots(0, 1)) == []
        [change] = capacity.step(snapshots(1, 1))
        assert change.startswith("capacity factor 0.5 -> 1: layer 2")
        [change] = capacity.step(snapshots(1, 0))
        assert change.startswith("capacity factor 1 -> no-drop: layer 1")
        assert factors(chunk) == [NO_DROP, 1.0] and capacity.factors == {1: NO_DROP, 2: 1.0}
        assert not caplog.records


def test_counts_of_steps_with_the_old_factor_do_not_grow_a_layer():
    with tiny.one_process():
        capacity, _ = control(on_overflow="grow", grow_after=1, grow_factors=(1.0, 2.0))
        assert len(capacity.step(snapshots(5, 0, step=1))) == 1
        assert capacity.step(snapshots(5, 0, step=1)) == []
        assert len(capacity.step(snapshots(5, 0, step=2))) == 1


def test_layers_that_cannot_grow_are_logged(caplog):
    with tiny.one_process(), caplog.at_level(logging.WARNING):
        capacity, chunk = control(on_overflow="grow", grow_after=1, grow_factors=(0.5,))
        assert capacity.step(snapshots(5, 0)) == []
        assert "; grow_factors has no larger factor" in caplog.text
        assert factors(chunk) == [0.5, 0.5]


def test_a_schedule_is_followed_and_evaluation_keeps_its_own_factor():
    with tiny.one_process():
        capacity, chunk = control(schedule=((0, 0.5), (2, 2.0), (3, 2.0)), layer_factors={2: 0.5})
        assert capacity.step(None) == []
        assert capacity.step(None) == ["capacity factor 2 by schedule: layers 1"]
        assert capacity.step(None) == []
        assert factors(chunk) == [2.0, 0.5]
        chunk.eval()
        assert factors(chunk) == [NO_DROP, NO_DROP]  # `eval_factor` of the model's options


def test_a_resumed_run_continues_its_schedule():
    with tiny.one_process():
        chunk = model(1, 2)
        options = PaddedOptions(schedule=((10, 2.0), (20, 3.0), (30, 4.0)))
        assert CapacityControl([chunk], options, step=9).factors == {1: 0.5, 2: 0.5}
        assert CapacityControl([chunk], options, step=10).factors == {1: 2.0, 2: 2.0}
        assert CapacityControl([chunk], options, step=29).factors == {1: 3.0, 2: 3.0}
        assert factors(chunk) == [3.0, 3.0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"on_overflow": "warn"}, "on_overflow='warn'"),
        (
            {"schedule": ((0, 1.0), (5, 2.0)), "on_overflow": "grow"},
            r"on_overflow='grow', schedule=\(\(0, 1\.0\), \(5, 2\.0\)\)",
        ),
    ],
)
def test_training_without_control_is_refused(options, named):
    with tiny.one_process():
        chunk = model(1, **options)
        with pytest.raises(
            ValueError,
            match=f"^a training loop must have a CapacityControl to follow {named}, got none",
        ):
            run(chunk[0], 1)
        run(chunk[0], 1, training=False)
        CapacityControl([chunk], PaddedOptions(**options))
        run(chunk[0], 1)


def test_options_that_need_no_control():
    assert PaddedOptions(schedule=((0, 2.0),), on_overflow="drop").to_control == {}


def _other_stage() -> dict[int, float]:
    with megatron_on_cpu():
        parallel_state.initialize_model_parallel()
        try:
            options = PaddedOptions(on_overflow="grow", grow_after=1)
            capacity = CapacityControl([model(dist.get_rank() + 1)], options)
            assert len(capacity.step(snapshots(0, 7))) == 1
            return capacity.factors
        finally:
            parallel_state.destroy_model_parallel()


def test_ranks_decide_alike_for_layers_that_they_do_not_have(pool2):
    assert pool2.run(_other_stage) == [{1: 0.5, 2: 1.5}] * 2


def test_a_layer_that_fits_does_not_grow():
    with tiny.one_process():
        controlled, chunk = control(on_overflow="grow", grow_after=1, grow_factors=(1.0, 2.0))
        controlled.set_factors({1: FIT})
        changes = [controlled.step(snapshots(1, 1, step=step)) for step in (1000, 1001)]
        assert [len(change) for change in changes] == [1, 1]
        assert factors(chunk) == [FIT, 2.0]
