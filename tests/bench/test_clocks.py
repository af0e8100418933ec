"""Clocks of a GPU; a CPU has none."""

import pytest
import torch

from padded_dispatch.bench.clocks import max_sm_mhz, sm_mhz


def test_there_is_no_clock_without_a_gpu():
    assert sm_mhz(torch.device("cpu")) is None
    assert max_sm_mhz(torch.device("cpu")) is None


@pytest.mark.gpu
def test_the_clock_of_a_gpu_is_one_that_it_has():
    device = torch.device("cuda")
    mhz, highest = sm_mhz(device), max_sm_mhz(device)
    assert mhz is not None
    assert highest is not None
    assert 100 < mhz <= highest < 5000
