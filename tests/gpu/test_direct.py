"""Direct stores between two GPUs equal the all-to-all bit by bit, in eager and replayed."""

import pytest

from tests.gpu import direct as gpu_direct
from tests.gpu.direct import EAGER, IN_FLIGHT
from tests.support.direct_parity import eager_differences, replay_differences

pytestmark = pytest.mark.multi_gpu

ENVIRONMENT = gpu_direct.ENVIRONMENT  # for `gpu_pools`


@pytest.mark.parametrize("name", EAGER)
def test_eager_equals_the_all_to_all(gpu_pools, name):
    assert gpu_pools[2].run(eager_differences, EAGER[name]) == [[], []]


@pytest.mark.parametrize("name", IN_FLIGHT)
def test_replays_equal_the_all_to_all(gpu_pools, name):
    assert gpu_pools[2].run(replay_differences, IN_FLIGHT[name], 50) == [[], []]
