"""The program that writes parity results: its rows and its file; on GPUs its cases as tests."""

import json

import pytest

from tests.gpu import foundation
from tests.gpu.foundation import ENVIRONMENT, layer_cases, pipeline_cases, run_case
from tests.support.inline_pool import InlinePool
from tests.support.layer_parity import LayerCase, layer_parity
from tests.support.parity import Errors, Parity
from tests.support.pipeline_parity import PipelineCase, pipeline_parity


def _stub(case: LayerCase) -> Parity:
    """Pass for E = 4, fail for E = 8, raise for any other."""
    allowed = {4: 1.0, 8: 0.9}[case.num_experts]
    found = Errors(ours=1.0, stock=0.5, difference=1.5, largest=2.0, allowed=allowed)
    return Parity(errors={"output": found}, repeats=True)


def test_a_row_holds_the_outcome(pool2):
    def row(num_experts):
        case = LayerCase(name="stub", num_experts=num_experts)
        return run_case(pool2, "a check", _stub, case)

    right, wrong, broken = row(4), row(8), row(1)
    assert (right["check"], right["passed"], right["failures"]) == ("a check", True, [])
    assert (right["name"], right["dtype"], right["num_experts"]) == ("stub", "float32", 4)
    assert right["errors"]["output"]["difference"] == 1.5
    assert not wrong["passed"]
    assert wrong["failures"][0].startswith("output: ")
    assert not broken["passed"]
    assert broken["errors"] is None
    assert "KeyError" in broken["failures"][0]
    assert right.keys() == wrong.keys() == broken.keys()
    json.dumps([right, wrong, broken])


def test_runs_are_appended(tmp_path, monkeypatch):
    cases = iter([LayerCase(name="a", num_experts=4), LayerCase(name="b", num_experts=8)])
    monkeypatch.setattr(foundation, "WorkerPool", InlinePool)
    monkeypatch.setattr(foundation, "layer_parity", _stub)
    monkeypatch.setattr(foundation, "layer_cases", lambda device, ranks: [next(cases)])
    monkeypatch.setattr(foundation, "pipeline_cases", lambda device, ranks: [])
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")  # restored after the test; main() sets it
    out = tmp_path / "results" / "foundation.json"
    codes = []
    for _ in range(2):
        argv = ["foundation.py", "--out", str(out), "--commit", "abc", "--cpu", "1"]
        monkeypatch.setattr("sys.argv", argv)
        codes.append(foundation.main())
    assert codes == [0, 1]
    runs = json.loads(out.read_text())["runs"]
    assert [row["passed"] for run in runs for row in run["rows"]] == [True, False]
    assert runs[0]["about"]["commit"] == "abc"
    assert runs[0]["about"]["versions"]["megatron-core"]


def _id(case: LayerCase | PipelineCase) -> str:
    return f"{case.name}, {case.dtype}"


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(layer_cases("cuda", 1)), ids=_id)
def test_layer_on_one_gpu(gpu_pools, case):
    assert [parity.failures() for parity in gpu_pools[1].run(layer_parity, case)] == [[]]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("case", list(layer_cases("cuda", 2)), ids=_id)
def test_layer_on_two_gpus(gpu_pools, case):
    assert [parity.failures() for parity in gpu_pools[2].run(layer_parity, case)] == [[], []]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("case", list(pipeline_cases("cuda", 2)), ids=_id)
def test_pipeline_on_two_gpus(gpu_pools, case):
    assert [parity.failures() for parity in gpu_pools[2].run(pipeline_parity, case)] == [[], []]
