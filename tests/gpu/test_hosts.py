"""Two GPUs as two hosts: two levels equal the all-to-all bit by bit, in eager and replayed."""

import pytest

from tests.gpu import hosts
from tests.gpu.hosts import LAYERS, eager_equals, replays_equal

pytestmark = pytest.mark.multi_gpu

ENVIRONMENT = hosts.ENVIRONMENT  # for `gpu_pools`


@pytest.mark.parametrize("name", LAYERS)
def test_eager_equals_the_all_to_all(gpu_pools, name):
    assert gpu_pools[2].run(eager_equals, LAYERS[name], 1) == [[], []]


def test_replays_equal_the_all_to_all(gpu_pools):
    assert gpu_pools[2].run(replays_equal, LAYERS["bf16"], 1, 50) == [[], []]
