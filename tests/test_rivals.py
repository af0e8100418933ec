"""`notebooks/rivals.py` compares with fp64, and its rows say what is wrong or missing."""

import json
from typing import Any

import pytest

from notebooks import rivals


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


@pytest.mark.parametrize("contender, ep", [("ours", 1), ("ours", 2), ("torch", 2)])
def test_each_row_has_processes_and_none_starts_late(contender: str, ep: int):
    case = {"contender": contender, "model": "tiny", "tokens": 64, "routing": "uniform", "ep": ep}
    (row,) = rivals.in_processes([case, case], seconds=0)
    assert case.items() <= row.items() and max(row["eager"]["errors"].values()) < 1e-6
