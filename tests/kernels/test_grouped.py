"""Kernels of a bias per expert against the plain torch that specifies them, bit by bit.

Without a GPU they run in Triton's interpreter, which shows their logic; with one, as they are.
"""

import pytest
import torch
from torch import Tensor

from padded_dispatch.kernels import grouped
from padded_dispatch.routing import grouped as ops
from tests.support.device import equal, here, here_if_tensor


@pytest.mark.parametrize("width", [5, 1030])
@pytest.mark.parametrize("counts", [[0, 140, 0, 33, 1, 0], [3], [0, 0]], ids=str)
def test_biases(counts, width):
    """Small multiples of a quarter, whose sums and products are exact in any order."""
    generator = torch.Generator().manual_seed(width)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-8, 9, shape, generator=generator) / 4

    num_rows = sum(counts)
    rows_NO, bias_LO, probs_N = (
        draw(num_rows + 5, width),
        draw(len(counts), width),
        draw(num_rows + 5),
    )
    rows_NO[num_rows:] = probs_N[num_rows:] = torch.nan
    offsets_L = torch.tensor(counts).cumsum(0).int()
    bias_NO = bias_LO[ops.experts_of_rows(offsets_L)]

    biased_NO = here(rows_NO).clone()
    grouped.add_bias(biased_NO, here(bias_LO), here(probs_N), here(offsets_L))
    assert biased_NO[num_rows:].isnan().all()
    expected_NO = rows_NO[:num_rows] + probs_N[:num_rows, None] * bias_NO
    equal((biased_NO[:num_rows], expected_NO))
    for weights_N in (None, probs_N):
        given = rows_NO, weights_N, offsets_L
        equal((grouped.sum_rows(*map(here_if_tensor, given)), ops.sum_rows(*given)))
    dots_N = grouped.dot_rows(*map(here, (rows_NO, bias_LO, offsets_L)))
    expected_N = ops._dot_rows(rows_NO, bias_LO, probs_N, offsets_L)
    equal((dots_N[:num_rows], expected_N[:num_rows]))
