"""The lines of terminal output, and the roofline, worked out by hand."""

from itertools import product

import pytest
import torch

from padded_dispatch.bench.cases import README_FLAGS
from padded_dispatch.bench.report import (
    README_CONDITIONS,
    differences,
    line,
    readme_table,
    roofline,
    table,
)
from padded_dispatch.utils.shapes import SHAPES, LayerShape

STOCK = {
    "model": "tiny",
    "ep": 2,
    "tokens": 64,
    "skew": "uniform",
    "capacity_factor": 1.25,
    "contender": "stock-drop-pad",
    "variant": None,
    "graph": "layer",
    "main_grad": "none",
    "flags": {},
    "dropped": 0.22,
    "ms": 5.0,
    "floor_ms": 2.5,
    "host_ms": 0.5,
    "sustained_ms": 5.5,
    "joules": 2.75,
    "allocated_gib": 1.5,
    "error": None,
    "seconds": 4.2,
}
NO_GPU = dict.fromkeys(("sustained_ms", "joules", "allocated_gib"))
OURS = STOCK | {"contender": "ours", "variant": "module", "ms": 4.0} | NO_GPU
OTHER_FACTOR = OURS | {"capacity_factor": 2.0, "floor_ms": None}
BROKEN = OURS | {"graph": "none", "error": "ValueError: no"}
FP8 = {"flags": {"fp8": "hybrid", "fp8_recipe": "tensorwise"}}
FUSED = OURS | {"main_grad": "fused"}
DROPLESS = STOCK | {"contender": "stock-dropless", "capacity_factor": None, "graph": "none"}


def test_line():
    expected = "tiny EP2 T64 uniform CF1.25 stock-drop-pad graphed: 5.000 ms, host 0.500 (4 s)"
    assert line(STOCK) == expected
    assert line(BROKEN) == "tiny EP2 T64 uniform CF1.25 ours module: FAILED: ValueError: no (4 s)"
    assert line(DROPLESS).startswith("tiny EP2 T64 uniform stock-dropless: ")


def test_table_compares_with_stock_of_the_same_factor_and_graph():
    given = [STOCK, OURS, OTHER_FACTOR, BROKEN, DROPLESS, FUSED, OURS | FP8]
    given += [STOCK | FP8 | {"ms": 8.0}, STOCK | {"ep": 1, "host_ms": 4.1}]
    lines = [" ".join(row.split()) for row in table(given).splitlines() if row]
    assert lines == [
        "tiny, EP 2, 64 tokens per rank, uniform",
        "contender CF dropped ms / stock / roofline sustained ms joules host ms GiB",
        "stock-drop-pad graphed 1.25 22.0% 5.000 1.000 2.00 5.500 2.75 0.500 1.50",
        "ours module graphed 1.25 22.0% 4.000 0.800 1.60 - - 0.500 -",
        "ours module graphed 2 22.0% 4.000 - - - - 0.500 -",
        "ours module 1.25 failed - - - - - - -",
        "stock-dropless - 22.0% 5.000 - 2.00 5.500 2.75 0.500 1.50",
        "ours module graphed main_grad fused 1.25 22.0% 4.000 - 1.60 - - 0.500 -",
        "ours module fp8 tensorwise graphed 1.25 22.0% 4.000 0.500 1.60 - - 0.500 -",
        "stock-drop-pad fp8 tensorwise graphed 1.25 22.0% 8.000 1.000 3.20 5.500 2.75 0.500 1.50",
        "tiny, EP 1, 64 tokens per rank, uniform",
        "contender CF dropped ms / stock / roofline sustained ms joules host ms GiB",
        "stock-drop-pad graphed 1.25 22.0% 5.000 (host) 1.000 2.00 5.500 2.75 4.100 1.50",
    ]


H200 = "NVIDIA H200"


def test_the_example_of_the_roofline():
    found = roofline(torch.full((8, 128), 256), SHAPES["qwen3-30b-a3b"], H200)
    # 8 * 4,096 rows at 18 * 2048 * 768 FLOPs; 7/8 of them cross, four times, 4,096 bytes each.
    gemm_ms = 32768 * 18 * 2048 * 768 / 790e12 * 1e3
    wire_ms = 4 * 7 / 8 * 32768 * 4096 / 450e9 * 1e3
    assert found == pytest.approx(gemm_ms + wire_ms)
    assert (gemm_ms, wire_ms) == pytest.approx((1.174, 1.044), abs=0.0005)
    others = "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB"
    assert [roofline(torch.full((8, 128), 256), FEW, other) for other in others] == [None, None]


FEW = LayerShape(hidden_size=10, num_experts=4, top_k=1, ffn_size=100)


def test_the_busiest_rank_decides():
    # Rank 0 computes 7 + 1 = 8 rows and rank 1 has 6 + 3 = 9; 6 rows go from 0 to 1, 1 comes back.
    found = roofline(torch.tensor([[3, 4, 6, 0], [1, 0, 1, 2]]), FEW, H200)
    products = 2 * (9 * 210 + 4000) + 2 * (9 * 110 + 2000)
    assert found == pytest.approx((3 * products / 4.3e12 + 4 * 6 * 10 * 2 / 450e9) * 1e3)


def test_few_rows_wait_for_memory():
    rows_SE = torch.tensor([[3, 4, 6, 0]])
    # fc1: 13 rows of 10 + 200 elements and 4 weights of 2,000; fc2: of 100 + 10, and of 1,000.
    products = 2 * (13 * 210 + 8000) + 2 * (13 * 110 + 4000)
    found = roofline(rows_SE, FEW, H200)  # One rank sends nothing.
    assert found == pytest.approx(3 * products / 4.3e12 * 1e3)
    # Two of the six write gradients: 8 bytes instead of 2 for each weight.
    more = roofline(rows_SE, FEW, H200, main_grad=True) - found
    assert more == pytest.approx(6 * 12000 / 4.3e12 * 1e3)


def test_a_table_has_all_cells_of_one_command_or_is_none():
    models, contenders = README_FLAGS["models"], (("ours", "auto"), ("ours", "packed"))
    rows = [
        {"model": model, "main_grad": grad, "contender": name, "variant": variant, "ms": 1.0 + i}
        for i, (model, grad, (name, variant)) in enumerate(
            product(models, README_FLAGS["main_grad"], (*contenders, ("stock-drop-pad", None)))
        )
    ]
    same = {"tokens": 4096, "skew": "uniform", "capacity_factor": 1.25, "graph": "layer"}
    same |= {"error": None, "flags": {}}
    rows = [row | same for row in rows]
    lines = (readme_table(rows) or "").splitlines()
    assert lines[0] == (
        "| milliseconds, forward and backward | ours | ours over NCCL | stock drop-and-pad |"
    )
    assert lines[2] == "| MoE layer of Qwen3-30B-A3B | 1.00 | 2.00 | 3.00 |"
    assert lines[5] == "| with gradients added to fp32 buffers | 10.00 | 11.00 | 12.00 |"
    alone = (readme_table([row | {"ep": 1} for row in rows]) or "").splitlines()
    assert alone[2] == "| MoE layer of Qwen3-30B-A3B | 1.00 | 3.00 |"
    for change in ({"error": "no"}, FP8, {"tokens": 512}, {"graph": "none"}):
        assert readme_table([*rows[:-1], rows[-1] | change]) is None


def test_what_differs_from_the_readmes_run():
    versions = {name: value for name, value in README_CONDITIONS.items() if name != "machine"}
    about = {"machine": README_CONDITIONS["machine"], "versions": versions}
    assert differences(about) == "Different from the README's run: nothing."
    about |= {"machine": "8 x NVIDIA B200", "versions": versions | {"triton": "3.9.0"}}
    assert differences(about) == (
        "Different from the README's run: machine 8 x NVIDIA B200, there 2 x NVIDIA H200; "
        "triton 3.9.0, there 3.6.0."
    )
