"""The cases of `tests.gpu.fp8` as tests: all on GPUs, some in small sizes on a CPU."""

import pytest

from tests.gpu.fp8 import checks, on_cpu
from tests.support.gpu_cases import ENVIRONMENT, run_case

__all__ = ["ENVIRONMENT"]

CASES = {case.name: (check, run, case) for check, run, case in checks()}


def test_every_case_has_its_own_name():
    assert len(CASES) == len(list(checks())) == 9 + 3 + 9 + 9 + 3 + 5


@pytest.mark.parametrize(
    "name", ["fp8 delayed, EP2, parity", "fp8 tensorwise, EP2, time of module-graphed"]
)
def test_on_cpus(pool2, name):
    check, run, case = CASES[name]
    row = run_case(pool2, check, run, on_cpu(case))
    assert (row["failures"], row["passed"]) == ([], True)
    assert row["facts"]["errors" if "parity" in name else "samples_ms"]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", CASES)
def test_on_gpus(gpu_pools, name):
    check, run, case = CASES[name]
    assert run_case(gpu_pools[case.ranks], check, run, case)["failures"] == []
