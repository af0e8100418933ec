"""The cases of `tests.gpu.retry` as tests: all on GPUs, a few in small sizes on a CPU."""

import pytest

from tests.gpu.retry import CHECK, cases, on_cpu
from tests.support.gpu_cases import ENVIRONMENT, run_case
from tests.support.pool import WorkerPool
from tests.support.retried_training import retried_equals_never_dropping

__all__ = ["ENVIRONMENT"]

CASES = {case.name: case for case in cases()}
ON_ONE, ON_TWO = ([name for name, c in CASES.items() if c.ranks == ranks] for ranks in (1, 2))


def test_every_case_has_its_own_name():
    assert len(CASES) == len(list(cases()))


@pytest.mark.parametrize("name", ["EP2, graph layer", "PP2/VPP2, graph layer"])
def test_on_cpus(pool2, name):
    case = on_cpu(CASES[name])
    assert case is not None
    row = run_case(pool2, CHECK, retried_equals_never_dropping, case)
    assert (row["failures"], row["passed"]) == ([], True)
    assert row["facts"]["retried"] == row["facts"]["steps"]


def failures(pools: dict[int, WorkerPool], name: str) -> list[str]:
    case = CASES[name]
    return run_case(pools[case.ranks], CHECK, retried_equals_never_dropping, case)["failures"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_ONE)
def test_on_one_gpu(gpu_pools, name):
    assert failures(gpu_pools, name) == []


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", ON_TWO)
def test_on_two_gpus(gpu_pools, name):
    assert failures(gpu_pools, name) == []
