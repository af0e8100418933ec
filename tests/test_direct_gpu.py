"""Direct stores between two GPUs against the all-to-all, bit by bit, in eager and replayed."""

from collections.abc import Iterator

import pytest
from direct_parity import eager_differences, replay_differences
from gpu_direct import EAGER, ENVIRONMENT, IN_FLIGHT

from padded_dispatch.launch import WorkerPool

pytestmark = pytest.mark.multi_gpu


@pytest.fixture(scope="module")
def gpus() -> Iterator[WorkerPool]:
    with pytest.MonkeyPatch.context() as patch, WorkerPool(2, backend="nccl") as pool:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield pool


@pytest.mark.parametrize("name", EAGER)
def test_eager_equals_the_all_to_all(gpus, name):
    assert gpus.run(eager_differences, EAGER[name]) == [[], []]


def test_replays_equal_the_all_to_all(gpus):
    assert gpus.run(replay_differences, IN_FLIGHT, 50) == [[], []]
