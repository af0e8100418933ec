"""Training runs that repeat steps: the losses of runs that never drop, and what they show."""

import pytest

from padded_dispatch.train.loop import Outcome
from tests.train.test_loop import run

LAYOUTS = [
    "--global-batch 18",
    "--ep 1 --global-batch 6",
    "--pp 2 --global-batch 6",
    "--pp 2 --vpp 2 --num-layers 4 --global-batch 6",
    "--balancing expert-bias --global-batch 12",
    "--router-skew 1",
]


def losses(outcome: Outcome) -> list[float]:
    return [row.loss for row in outcome.rows]


@pytest.mark.ahead
@pytest.mark.parametrize("flags", LAYOUTS)
def test_losses_are_those_of_a_run_that_never_drops(pool2, flags):
    """The run that never drops takes the same sizes: on a CPU products depend on padded rows."""
    flags = f"--steps 4 {flags}"
    never = run(pool2, f"{flags} --padded-schedule 0:fit")
    retried = run(pool2, f"{flags} --capacity-factor 0.75 --padded-on-overflow retry")
    dropped = run(pool2, f"{flags} --capacity-factor 0.75")
    assert losses(retried) == losses(never) != losses(dropped)
    assert [row.retried for row in retried.rows] == [1] * 4
    assert [row.retried for row in never.rows] == [None] * 4
    for row, wanted in zip(retried.rows, never.rows, strict=True):
        assert (row.dropped, row.fill, row.unplaced) == (0, wanted.fill, 0)
