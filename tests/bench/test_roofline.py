"""The roofline, worked out by hand."""

import pytest
import torch

from padded_dispatch.bench.roofline import roofline
from padded_dispatch.utils.shapes import SHAPES, LayerShape


def test_example():
    found = roofline(torch.full((8, 128), 256), SHAPES["qwen3-30b-a3b"])
    # 8 * 4,096 rows at 18 * 2048 * 768 FLOPs; 7/8 of them cross, four times, 4,096 bytes each.
    assert found.flops == 32768 * 18 * 2048 * 768
    assert found.gemm_ms == pytest.approx(1.174, abs=0.0005)
    assert found.wire_ms == pytest.approx(1.044, abs=0.0005)
    assert found.ms == found.gemm_ms + found.wire_ms
    assert found.sustained_gemm_ms == pytest.approx(1.174 * 790 / 670, abs=0.0005)
    assert found.sustained_ms == found.sustained_gemm_ms + found.wire_ms


def test_the_busiest_rank_decides():
    shape = LayerShape(hidden_size=10, num_experts=4, top_k=1, ffn_size=100)
    # Rank 0 computes 7 + 1 = 8 rows and rank 1 has 6 + 3 = 9; 6 rows go from 0 to 1, 1 comes back.
    found = roofline(torch.tensor([[3, 4, 6, 0], [1, 0, 1, 2]]), shape)
    assert found.flops == 9 * 18 * 10 * 100
    assert found.wire_ms == pytest.approx(4 * 6 * 10 * 2 / 450e9 * 1e3)


def test_few_rows_wait_for_memory():
    shape = LayerShape(hidden_size=10, num_experts=4, top_k=1, ffn_size=100)
    rows_SE = torch.tensor([[3, 4, 6, 0]])
    # fc1: 13 rows of 10 + 200 elements and 4 weights of 2,000; fc2: of 100 + 10, and of 1,000.
    products = 2 * (13 * 210 + 8000) + 2 * (13 * 110 + 4000)
    found = roofline(rows_SE, shape)
    assert found.gemm_ms == pytest.approx(3 * products / 4.3e12 * 1e3)
    assert found.sustained_gemm_ms == found.gemm_ms
    # Two of the six write gradients: 8 bytes instead of 2 for each weight.
    more = roofline(rows_SE, shape, main_grad=True).gemm_ms - found.gemm_ms
    assert more == pytest.approx(6 * 12000 / 4.3e12 * 1e3)


def test_one_rank_sends_nothing():
    found = roofline(torch.full((1, 32), 512), SHAPES["gpt-oss-20b"])
    assert found.wire_ms == 0
    assert found.gemm_ms == pytest.approx(3.096, abs=0.0005)
