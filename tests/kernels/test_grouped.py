"""Kernels of a bias per expert against plain torch, bit by bit."""

import pytest
import torch
from torch import Tensor

from padded_dispatch.kernels import grouped
from tests.support.device import equal, here, here_if_tensor, in_store, operand, real, segments_of


@pytest.mark.parametrize("width", [5, 1030])
@pytest.mark.parametrize(
    ("counts", "base", "num_sources"),
    [([0, 140, 0, 33, 1, 0], 9, 2), ([3], 0, 1), ([0, 0], 4, 8)],
    ids=["some", "one expert", "none"],
)
def test_biases(counts, base, num_sources, width):
    """Small multiples of a quarter, whose sums and products are exact in any order."""
    generator = torch.Generator().manual_seed(width)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-8, 9, shape, generator=generator) / 4

    segments = segments_of(counts, base=base, num_sources=num_sources)
    num_rows = sum(counts)
    rows_nO, bias_LO, prob_n = draw(num_rows, width), draw(len(counts), width), draw(num_rows)
    bias_nO = bias_LO.repeat_interleave(torch.tensor(counts), 0)
    prob_M, loose_NO = here(in_store(prob_n, base)), operand(rows_nO, segments, stored=False)

    for weights_M, weighted_nO in ((None, rows_nO), (prob_M, rows_nO * prob_n[:, None])):
        expected_LO = torch.stack([rows.sum(0) for rows in weighted_nO.split(counts)])
        for stored in (True, False):
            given = operand(rows_nO, segments, stored), here_if_tensor(weights_M), segments
            equal((grouped.sum_rows(*given, stored=stored), expected_LO))
    dots_N = grouped.dot_rows(loose_NO, here(bias_LO), segments)
    assert len(dots_N) == segments.num_rows
    equal((real(dots_N, segments, False), (rows_nO * bias_nO).sum(1)))


def test_examples():
    nan, three = torch.nan, segments_of([1, 0, 2], base=1)
    weights_M = here([nan, 1, 1, 0.5])
    sums_LO = grouped.sum_rows(here([[1.0], [2], [3]]), weights_M, three, stored=False)
    assert sums_LO.tolist() == [[1], [0], [3.5]]
    vectors_LO = here([[1.0, 0], [0, 2]])
    dots_N = grouped.dot_rows(here([[1.0, 2], [3, 4]]), vectors_LO, segments_of([1, 1], base=5))
    assert dots_N[:2].tolist() == [1, 8]
