"""Kernels and experts by themselves: every part runs; bytes and FLOPs are those of real rows."""

import json

import pytest
import torch

from padded_dispatch import cli
from padded_dispatch.bench import parts
from padded_dispatch.bench.cases import MODELS
from padded_dispatch.bench.parts import _direct_stores, _parts, _routing, main

CPU = torch.device("cpu")
POLICIES = ("probs", "position", "random", "priority")
SELECTIONS = (*POLICIES, "probs, renormalize", "probs, reroute", "probs, protected")
ROUTERS = [
    f"router {function}{ways}{whose}"
    for function in ("softmax", "chosen", "sigmoid")
    for whose in ("", ", torch")
    for ways in ("", " both ways")
]
PRODUCTS = ["tiles of rows"]
PRODUCTS += [
    f"{linear}{product}"
    for linear in ("fc1", "fc2")
    for product in (
        *("", ", torch", " dgrad", " dgrad, torch"),
        *(" wgrad", " wgrad, torch", " wgrad added", " wgrad added, torch"),
    )
]
KERNELS = ("select and plan", "meta", "gather", "gather, packed", "combine", "pack", "unpack")


def test_bytes_and_flops_are_those_of_real_rows():
    shape = MODELS["tiny"]
    config = shape.dispatch_config(4.0, num_ranks=2)  # C = T: all rows are kept.
    found = {(part.name, part.fill): part for part in _parts(shape, config, 10, CPU)}
    row, num_kept = shape.hidden_size * 4, 10 * shape.top_k
    fill = num_kept / (shape.num_experts * 10)
    for name in ("gather", "gather, packed", "combine"):
        assert found[name, fill].bytes == (10 + num_kept) * row
    assert found["pack", fill].bytes == found["unpack", fill].bytes == 2 * num_kept * row
    # Two ranks' tokens, of which each brings top_k rows, to half of the experts each.
    (num_rows,) = {part.flops for part in found.values() if "fc2" in part.name}
    assert 0 < num_rows <= 2 * 20 * shape.top_k * shape.hidden_size * shape.ffn_size
    slots = 2 * 10 * shape.num_experts // 2
    full = 18 * slots * shape.hidden_size * shape.ffn_size
    experts = {fill: part.flops for (name, fill), part in found.items() if "packed" in name}
    assert found["batched experts", 1.0].flops == full
    assert experts == {1.0: full, 0.75: 3 * full // 4, 0.5: full // 2, 0.25: full // 4}


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels would not be interpreted")
def test_direct_stores_move_the_rows_of_one_rank():
    """Rank 0 of 2 has tokens 0 to 9, and gets as many from rank 1, for experts 0 to 3 of 8."""
    shape = MODELS["tiny"]
    config = shape.dispatch_config(4.0, num_ranks=2)
    found = {}
    for part in _direct_stores(shape, config, 10, CPU):
        part.run()
        found[part.name] = part.bytes
    here = _routing(config, 10, CPU)[1][:, :4].sum(1).tolist()  # of each token's two experts
    assert sorted(set(here)) == [0, 1, 2]
    stored = sum(here) + sum(num < 2 for num in here)
    row = shape.hidden_size * 4
    assert {name: num_bytes // row for name, num_bytes in found.items()} == {
        "push each": 10 + 20,
        "push once": 10 + stored,
        "copies": 2 * sum(num == 2 for num in here),
        "return": 2 * 2 * sum(here),
        "return sums": 2 * sum(here) + 2 * sum(num > 0 for num in here),
    }


@pytest.mark.parametrize("ep", [1, 4])
def test_rows_are_kept(tmp_path, capsys, ep):
    out = tmp_path / "parts.json"
    argv = ["--ep", str(ep), "--tokens", "9", "--repeats", "3", "--out", str(out), "--commit", "c"]
    assert main(argv) == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert run["about"]["command"] == " ".join(["padded-dispatch parts", *argv])
    assert [row["part"] for row in run["rows"]] == [
        "copy",
        *ROUTERS,
        *(f"select {name}" for name in SELECTIONS),
        "telemetry",
        *KERNELS,
        *PRODUCTS,
        "batched experts",
        *["packed experts"] * 4,
    ]
    assert all(row["us"] == sorted(row["samples_us"])[1] > 0 for row in run["rows"])
    assert len(capsys.readouterr().out.splitlines()) == len(run["rows"])


def test_groups_of_parts_run_alone(tmp_path, capsys):
    out = tmp_path / "parts.json"
    argv = ["--only", "products", "router", "--tokens", "9", "--repeats", "1", "--out", str(out)]
    assert main(argv) == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert [row["part"] for row in run["rows"]] == [*ROUTERS, *PRODUCTS]
    assert "max_sm_mhz" in run["about"]
    capsys.readouterr()


def test_selection_runs_alone_for_numbers_of_experts(tmp_path, capsys):
    out = tmp_path / "select.json"
    argv = ["--select-experts", "16", "--tokens", "9", "--repeats", "3", "--out", str(out)]
    assert main(argv) == 0
    (run,) = json.loads(out.read_text())["runs"]
    found = {(row["ep"], row["capacity"]): [] for row in run["rows"]}
    for row in run["rows"]:
        found[row["ep"], row["capacity"]].append(row["part"])
        assert row["model"] == "16 experts" and row["us"] > 0
    # K = 2, so that 18 rows go to 16, 8 or 2 pools.
    assert found == {
        (ranks, slots): [
            *(f"select {policy}, X {width}" for policy in POLICIES),
            *(["select probs, limits", "select probs, torch", "accept, 8 sources"] * (width == 1)),
            f"select probs, hot, X {width}",
        ]
        for ranks, slots, width in ((1, 1, 1), (8, 2, 2), (2, 9, 8))
    }
    assert len(capsys.readouterr().out.splitlines()) == len(run["rows"])


def test_an_interrupted_run_keeps_its_rows(monkeypatch, tmp_path, capsys):
    measured = iter([[3.0, 1.0, 2.0], [5.0]])

    def microseconds(*args):
        for samples in measured:
            return samples
        raise KeyboardInterrupt

    monkeypatch.setattr(parts, "microseconds", microseconds)
    monkeypatch.setenv("PYTHONWARNINGS", "")
    out = tmp_path / "parts.json"
    assert cli.main(["parts", "--models", "tiny", "--tokens", "9", "--out", str(out)]) == 130
    assert capsys.readouterr().err == "padded-dispatch parts: interrupted\n"
    (run,) = json.loads(out.read_text())["runs"]
    assert [(row["part"], row["us"]) for row in run["rows"]] == [("copy", 2), ("router softmax", 5)]


def test_mistakes_are_found_before_anything_is_measured(tmp_path):
    with pytest.raises(ValueError, match=r"^--repeats must be at least 1, got 0$"):
        main(["--repeats", "0"])
    with pytest.raises(ValueError, match=r"^--select-experts must be a multiple of 8, got 12$"):
        main(["--select-experts", "12"])
    (tmp_path / "r.json").write_text("{}")
    with pytest.raises(ValueError, match=r"out.*r\.json.*runs"):
        main(["--out", str(tmp_path / "r.json")])
