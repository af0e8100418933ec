"""The cases of `tests.gpu.inference` as tests on GPUs; one in a small size on a CPU.

The CPU's other cases are in tests/megatron/test_dispatcher_generation.py.
"""

import pytest

from tests.gpu.inference import CHECK, cases, on_cpu
from tests.support.generation import generates_as_stock
from tests.support.gpu_cases import ENVIRONMENT, run_case

__all__ = ["ENVIRONMENT"]

CASES = {case.name: case for case in cases()}


def test_every_case_has_its_own_name():
    assert len(CASES) == len(list(cases()))


def test_on_cpus(pool2):
    row = run_case(pool2, CHECK, generates_as_stock, on_cpu(CASES["packed, EP2, other T per rank"]))
    assert (row["failures"], row["passed"]) == ([], True)
    assert row["facts"]["dropped"] == 0


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
