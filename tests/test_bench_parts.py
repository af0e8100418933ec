"""Kernels and experts by themselves: every part runs, and its bytes and FLOPs are the task's."""

import json

import pytest
import torch

from padded_dispatch.bench.cases import MODELS
from padded_dispatch.bench.parts import _config, _parts, main

CPU = torch.device("cpu")
POLICIES = ("probs", "position", "random", "priority")
SELECTIONS = (*POLICIES, "probs, renormalize", "probs, reroute", "probs, protected")
KERNELS = ("select and plan", "side", "gather", "gather, packed", "combine", "pack", "unpack")


def test_bytes_and_flops_are_those_of_real_rows():
    shape = MODELS["tiny"]
    config = _config(shape, ep=2, factor=4.0)  # C = T: all rows are kept.
    parts = {(part.name, part.fill): part for part in _parts(shape, config, 10, CPU)}
    row, num_kept = shape.hidden_size * 4, 10 * shape.top_k
    fill = num_kept / (shape.num_experts * 10)
    for name in ("gather", "gather, packed", "combine"):
        assert parts[name, fill].bytes == (10 + num_kept) * row
    assert parts["pack", fill].bytes == parts["unpack", fill].bytes == 2 * num_kept * row
    slots = 2 * 10 * shape.num_experts // 2
    full = 18 * slots * shape.hidden_size * shape.ffn_size
    experts = {fill: part.flops for (name, fill), part in parts.items() if "packed" in name}
    assert parts["batched experts", 1.0].flops == full
    assert experts == {1.0: full, 0.75: 3 * full // 4, 0.5: full // 2, 0.25: full // 4}


@pytest.mark.parametrize("ep", [1, 4])
def test_rows_are_kept(tmp_path, capsys, ep):
    out = tmp_path / "parts.json"
    argv = ["--ep", str(ep), "--tokens", "9", "--repeats", "3", "--out", str(out), "--commit", "c"]
    assert main(argv) == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert run["about"]["command"] == " ".join(["padded-dispatch parts", *argv])
    assert [row["part"] for row in run["rows"]] == [
        "copy",
        *(f"select {name}" for name in SELECTIONS),
        "telemetry",
        *KERNELS,
        "batched experts",
        *["packed experts"] * 4,
    ]
    assert all(row["us"] == sorted(row["samples_us"])[1] > 0 for row in run["rows"])
    assert len(capsys.readouterr().out.splitlines()) == len(run["rows"])
