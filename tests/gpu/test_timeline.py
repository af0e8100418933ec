"""Timelines of steps: what is counted and drawn, and one small case on a CPU."""

from typing import Any

import pytest

from tests.gpu.timeline import CHECK, cases, on_cpu
from tests.support.gpu_cases import ENVIRONMENT, run_case
from tests.support.spans import Span, common, union
from tests.support.timeline import draw, figures, listed, timeline

__all__ = ["ENVIRONMENT"]

CASES = {case.name: case for case in cases()}
MS = 1_000_000


def span(stream: int, kind: str, start: float, end: float) -> Span:
    return Span(stream=stream, kind=kind, start=int(start * MS), end=int(end * MS))


# An exchange from 2 to 5 on a stream of its own; products run until 3 and from 4 on.
STEP = [
    span(7, "gemm", 1, 3),
    span(20, "exchange", 2, 5),
    span(7, "other", 4, 4.5),
    span(7, "gemm", 4.5, 6),
    span(20, "exchange", 8, 9),
]


def test_the_exchange_that_ran_beside_other_kernels():
    assert figures(STEP) == {
        "span_ms": 8.0,
        "busy_ms": 6.0,
        "exchange_ms": 4.0,
        "hidden_ms": 2.0,
        "gemm_ms": 3.5,
    }
    assert set(figures([]).values()) == {0.0}


def test_streams_count_from_0_and_times_from_the_first_kernel():
    assert listed(STEP) == [
        [0, "gemm", 0.0, 2000.0],
        [1, "exchange", 1000.0, 4000.0],
        [0, "gemm", 3500.0, 5000.0],
        [1, "exchange", 7000.0, 8000.0],
    ]
    assert listed([]) == []


def row(name: str) -> dict[str, Any]:
    return {"name": name, "facts": {"ms": 8.0, **figures(STEP), "timeline": listed(STEP)}}


def test_rows_are_drawn_also_without_kernels(tmp_path):
    facts = {"ms": 0.0, **figures([]), "timeline": []}
    draw([row("one"), {"name": "nothing", "facts": facts}], tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_every_case_has_its_own_name():
    assert len(CASES) == len(list(cases()))


def test_on_cpus(pool2):
    found = run_case(pool2, CHECK, timeline, on_cpu(CASES["overlap, graphs of pieces"]))
    assert (found["failures"], found["passed"]) == ([], True)
    assert found["facts"]["timeline"] == []


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", CASES)
def test_on_two_gpus(gpu_pools, name):
    found = run_case(gpu_pools[2], CHECK, timeline, CASES[name])
    assert found["failures"] == []
    assert found["facts"]["exchange_ms"] > 0


def test_times_of_several_kernels_are_joined():
    assert union([(0, 2), (1, 1.5), (2, 3)]) == [(0, 3)]
    assert common([(0, 4), (6, 9)], [(1, 2), (3, 7), (8, 20)]) == 1 + 1 + 1 + 1
    assert common([], [(0, 1)]) == 0
