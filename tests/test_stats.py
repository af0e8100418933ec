"""Counters add up, in place, and start again at zero."""

import torch

from padded_dispatch.ops import select
from padded_dispatch.stats import Counters


def test_counts_add_up_and_reset():
    counters = Counters(3, "cpu")
    before = [tensor.data_ptr() for tensor in counters.tensors()]
    map_TE = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 0]], dtype=torch.bool)
    for capacity in (2, 1):
        selection = select(map_TE, torch.ones(3, 3), capacity=capacity)
        counters.add(selection, num_slots=3 * capacity)
        counters.add_overflow(torch.tensor(capacity, dtype=torch.int32))
    assert [tensor.tolist() for tensor in counters.tensors()] == [[6, 2, 0], [3, 2, 0], 3, 9]
    assert {tensor.dtype for tensor in counters.tensors()} == {torch.int64}
    counters.reset()
    assert [tensor.tolist() for tensor in counters.tensors()] == [[0, 0, 0], [0, 0, 0], 0, 0]
    # A captured graph adds to the memory that it saw.
    assert [tensor.data_ptr() for tensor in counters.tensors()] == before
