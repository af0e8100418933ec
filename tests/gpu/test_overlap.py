"""The cases of `tests.gpu.overlap` as tests: all on GPUs, two in small sizes on a CPU."""

import pytest

from tests.gpu.overlap import CHECK, cases, on_cpu
from tests.support.gpu_cases import ENVIRONMENT, run_case
from tests.support.overlapped_training import busy_together, overlapped_equals_plain

__all__ = ["ENVIRONMENT"]

CASES = {case.name: case for case in cases()}
ON_TWO = [name for name, case in CASES.items() if case.ranks == 2]


def test_every_case_has_its_own_name():
    assert len(CASES) == len(list(cases()))


@pytest.mark.parametrize("name", ["packed, delayed, padding mask", "module, shared experts"])
def test_on_cpus(pool2, name):
    row = run_case(pool2, CHECK, overlapped_equals_plain, on_cpu(CASES[name]))
    assert (row["failures"], row["passed"]) == ([], True)
    assert row["facts"]["tensors_per_step"] > 40


def test_the_time_in_which_several_streams_are_busy():
    spans = [(7, 0, 10), (9, 8, 12), (9, 11, 20), (7, 15, 18), (9, 16, 17), (3, 30, 31)]
    assert busy_together(spans) == 2 + 3
    assert busy_together([]) == 0
    assert busy_together([(7, 0, 5), (7, 0, 5), (9, 5, 6)]) == 0


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", ON_TWO)
def test_on_two_gpus(gpu_pools, name):
    row = run_case(gpu_pools[2], CHECK, overlapped_equals_plain, CASES[name])
    assert row["failures"] == []
    assert row["facts"]["overlapped_ms"] > 0
