"""The rows of `tests.gpu.table` as tests, on CPUs and GPUs; the harness finds faults."""

import dataclasses
import json
import re
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.gpu import __main__ as program
from tests.gpu.table import EAGER, Row, table
from tests.support import rows
from tests.support.graph_protocol import GraphedLayer
from tests.support.parity import too_far
from tests.support.pool import WorkerPool
from tests.support.rows import found_by
from tests.support.training import Model, digest, same_bits, ways_agree

TABLE = {(row.check, row.name): row for row in table()}


def of(*ranks: int, device: str = "cuda") -> pytest.MarkDecorator:
    fitting = [r for r in TABLE.values() if r.ranks in ranks and (device == "cuda" or r.cpu)]
    return pytest.mark.parametrize("row", fitting, ids=lambda row: f"{row.check}: {row.name}")


def failures(pool: WorkerPool, row: Row, device: str) -> list[str]:
    return found_by(pool, row.run, *row.on(device))["failures"]


@of(1, 2, 4, device="cpu")
def test_on_cpus(request, row):
    assert failures(request.getfixturevalue(f"pool{row.ranks}"), row, "cpu") == []


@pytest.mark.gpu
@of(1)
def test_on_one_gpu(gpu_pools, row):
    assert failures(gpu_pools[1], row, "cuda") == []


@pytest.mark.multi_gpu
@of(2)
def test_on_two_gpus(gpu_pools, row):
    assert failures(gpu_pools[2], row, "cuda") == []


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 GPUs")
@of(4)
def test_on_four_gpus(gpu_pools, row):
    assert failures(gpu_pools[4], row, "cuda") == []


def _with_a_stale_replay(model: Model, ways: dict[str, Any]) -> list[str]:
    """Let each graph's third backward replay return the gradients of the one before."""
    original, replays = GraphedLayer.replay_backward, {}

    def replay(graphed: GraphedLayer, grads: Any) -> Any:
        replays[graphed] = replays.get(graphed, 0) + 1
        if replays[graphed] == 3:
            return tuple(None if g is None else g.detach() for g in graphed._grad_inputs)
        return original(graphed, grads)

    with patch.object(GraphedLayer, "replay_backward", replay):
        return ways_agree(model, ways)


def test_a_replay_that_is_not_eager_is_found(pool1):
    row = TABLE[EAGER, "EP1, helper graphs"]
    (found,) = pool1.run(_with_a_stale_replay, *row.on("cpu"))
    assert any(re.match("graphs: the gradient of .* differs in", text) for text in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_digest_is_of_all_bits_and_their_places(dtype):
    tensor = (torch.arange(27).view(3, 9) % 2).to(dtype)
    assert digest(tensor) == digest(tensor.clone()) == digest(tensor.flatten())
    for place in range(27):
        changed = tensor.flatten().clone()
        changed[place] = changed[place] == 0
        assert digest(changed) != digest(tensor)
    swapped = tensor.flatten()[[0, 1, 3, 2, *range(4, 27)]]
    assert digest(swapped) != digest(tensor)
    a, b = ({"x": digest(tensor), "y": digest(one)} for one in (tensor, tensor.flip(0)[:2]))
    assert same_bits([a, a, b], [a, b, a]) == {"y": 2}
    assert digest(torch.tensor([-0.0])) != digest(torch.tensor([0.0]))


def _stub(case: Model) -> list[str]:
    """Right for one microbatch, wrong for two; any other raises."""
    return {1: [], 2: ["the loss differs in 3 steps"]}[case.microbatches]


def test_the_file_is_written_row_by_row_and_a_failure_does_not_end_it(tmp_path, monkeypatch):
    out, counts = tmp_path / "results" / "gpu.json", []
    stubs = [
        Row(check="a check", name=str(n), run=_stub, case=Model(microbatches=n)) for n in (3, 2, 1)
    ]
    stubs.append(dataclasses.replace(stubs[0], name="left out"))

    def count_rows(line: str) -> None:
        counts.append(len(json.loads(out.read_text())["runs"][0]["rows"]))

    monkeypatch.setattr(program, "table", lambda replays: stubs)
    monkeypatch.setattr(rows, "print_line", count_rows)
    for name in rows.ENVIRONMENT:
        monkeypatch.setenv(name, "")  # restored after the test; main() sets it
    only = [word for n in "321" for word in ("--only", f": {n}")]
    monkeypatch.setattr(
        sys, "argv", ["gpu", "--out", str(out), "--commit", "abc", "--cpu", "1", *only]
    )
    assert program.main() == 1
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-6], "--only", "none has this name"])
    assert program.main() == 1  # A typo in `--only` is no success.
    assert counts[0] == 1
    (run,) = json.loads(out.read_text())["runs"]
    assert [row["passed"] for row in run["rows"]] == [False, False, True]
    assert "KeyError" in run["rows"][0]["failures"][0]
    assert run["rows"][1]["failures"] == ["rank 0: the loss differs in 3 steps"]
    named = {"check": "a check", "name": "1", "ranks": 1, "passed": True, "failures": []}
    assert named.items() <= run["rows"][2].items()
    assert run["about"]["commit"] == "abc" and run["about"]["versions"]["megatron-core"]
    part = ["--only", ": 3", "--only", ": 1", "--part", "1", "2"]
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-2], *part])
    assert program.main() == 0  # The second of these two passes.
    assert [row["name"] for row in json.loads(out.read_text())["runs"][1]["rows"]] == ["1"]


def _compared(ours: float) -> list[str]:
    """Compare `ours` with stock, which is off by 0.25 where the exact value is 5."""
    values = {"ours": ours, "stock": 5.25, "exact": 5.0}
    found = {who: {"x": torch.tensor([1.0, value])} for who, value in values.items()}
    return too_far(**found, dtype=torch.float32)


def test_the_rule_of_parity_can_fail(pool2):
    ulp_of_5 = 2.0**-21
    for ours in (5.0, 5.5, 4.5, 5.5 + ulp_of_5):
        assert pool2.run(_compared, ours) == [[], []]
    for ours in (5.5 + 2 * ulp_of_5, 4.49, torch.nan, torch.inf):
        assert all(text.startswith("x: ") for (text,) in pool2.run(_compared, ours))
