"""`notebooks/rivals.py` compares with fp64, and its rows say what is wrong or missing."""

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from notebooks import rivals
from padded_dispatch.bench import measure


class OffByAThousandth(rivals.Torch):
    def forward(self, *given: Any) -> Any:
        return super().forward(*given) * 1.001


def test_rows_have_errors_or_a_reason(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(rivals.CONTENDERS, "off", OffByAThousandth)
    monkeypatch.setattr(rivals.Liger, "module", "not_installed")
    out = tmp_path / "rivals.json"
    rivals.main(["--cpu", "--out", str(out), "--only", "torch", "ours", "liger", "off"])
    (run,) = json.loads(out.read_text())["runs"]
    assert [row["routing"] for row in run["rows"]] == ["uniform"] * 4 + ["recorded"] * 4
    for torchs, ours, missing, off in (run["rows"][:4], run["rows"][4:]):
        names = ["output", "tokens", "prob", "weights"]
        for row in (torchs, ours):
            assert max(row["eager"]["errors"][name] for name in names) < 1e-6
            assert row["eager"]["wrong"] == []
        assert missing["reason"] == "ModuleNotFoundError(\"No module named 'not_installed'\")"
        assert off["eager"]["wrong"] == names
        assert all(0.9e-3 < off["eager"]["errors"][name] < 1.1e-3 for name in names)
    with pytest.raises(SystemExit):
        rivals.main(["--out", "/proc/out.json"])
    assert "error: --out must be a path in a writable folder" in capsys.readouterr().err


@pytest.mark.parametrize("contender, ep, times", [("ours", 1, 2), ("ours", 2, 1), ("torch", 2, 1)])
def test_each_row_has_processes_and_none_starts_late(contender: str, ep: int, times: int):
    case = {"contender": contender, "model": "tiny", "tokens": 64, "routing": "uniform", "ep": ep}
    (row,) = rivals.in_processes([case] * times, seconds=0)
    assert case.items() <= row.items() and max(row["eager"]["errors"].values()) < 1e-6


def test_kernels_are_of_one_pass_and_longest_first(monkeypatch):
    def event(name: str, us: float, device: str = "CUDA", annotation: bool = False) -> Any:
        kind, took = SimpleNamespace(name=device), SimpleNamespace(elapsed_us=lambda: us)
        where: dict[str, Any] = {"device_type": kind, "time_range": took}
        return SimpleNamespace(name=name, is_user_annotation=annotation, **where)

    one = [event("small", 3), event("small", 2), event("product", 40), event("launch", 9, "CPU")]
    one.append(event("tiny", 4.9))
    events = one * rivals.PROFILED + [event("range", 99, annotation=True)]
    profiler = SimpleNamespace(events=lambda: events)
    monkeypatch.setattr(measure, "profile", lambda activities: nullcontext(profiler))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    passes: list[int] = []
    assert rivals.kernels(lambda: passes.append(1)) == [
        {"name": "product", "count": 1, "us": 40},
        {"name": "small", "count": 2, "us": 5},
    ]
    assert len(passes) == rivals.PROFILED
