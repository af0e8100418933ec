"""The cases of `tests.gpu.inference` as tests on GPUs; one in a small size on a CPU.

The CPU's other cases are in tests/megatron/test_dispatcher_generation.py.
"""

import pytest
import torch

from tests.gpu.inference import CHECK, cases, on_cpu
from tests.support.generation import contiguous_attention, generates_as_stock
from tests.support.gpu_cases import ENVIRONMENT, run_case

__all__ = ["ENVIRONMENT"]

CASES = {case.name: case for case in cases()}


def test_every_case_has_its_own_name():
    assert len(CASES) == len(list(cases()))


def test_on_cpus(pool2):
    row = run_case(pool2, CHECK, generates_as_stock, on_cpu(CASES["packed, EP2, other T per rank"]))
    assert (row["failures"], row["passed"]) == ([], True)
    assert row["facts"]["dropped"] == 0


def test_attention_gets_contiguous_queries_keys_and_values():
    """A cache for three requests of which two are there, and a fused projection."""
    query, _, _ = torch.arange(4 * 2 * 2 * 24.0).view(4, 2, 2, 24).split(8, dim=-1)
    cache = torch.arange(6 * 3 * 2 * 8.0).view(6, 3, 2, 8)
    given = (query, cache[:4, :2], cache[:4, 1:])
    assert [tensor.is_contiguous() for tensor in given] == [False] * 3
    forward = contiguous_attention(lambda attention, *tensors, **options: (tensors, options))
    (*found, mask), options = forward(None, *given, None, attn_mask_type="causal")
    assert all(tensor.is_contiguous() for tensor in found)
    assert all(map(torch.equal, found, given))
    assert mask is None and options == {"attn_mask_type": "causal"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ranks == 1])
def test_on_one_gpu(gpu_pools, name):
    row = run_case(gpu_pools[1], CHECK, generates_as_stock, CASES[name])
    assert row["failures"] == []
    assert (row["facts"]["graphs"] > 0) == CASES[name].local_graphs


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ranks == 2])
def test_on_two_gpus(gpu_pools, name):
    row = run_case(gpu_pools[2], CHECK, generates_as_stock, CASES[name])
    assert row["failures"] == []
    assert (row["facts"]["graphs"] > 0) == CASES[name].local_graphs
