"""`notebooks/real_run.py` starts each contender with its switches, and keeps what a run says."""

import json
import sys
from contextlib import nullcontext
from datetime import datetime, timedelta
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset

from notebooks import real_run

LINE = (
    " [2026-11-24 12:42:01] iteration {step:8d}/      22 | consumed samples:  4 | elapsed time per "
    "iteration (ms): {ms} | learning rate: 3.0E-05 |{ours} lm loss: 1.25E+00 | grad norm: 74.035 |"
)
SCRIPT = f"""
import fused_weight_gradient_mlp_cuda, os, sys
words = " ".join(sys.argv)
assert "--num-experts 32" in words and "--expert-model-parallel-size 1 --train-iters 22" in words
assert words.index("--seed 5") > words.index("--seed 1234")  # The later one counts.
assert ("fsdp" in words) != (os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1")
ours = " moe/dropped: 5.0E-01 | moe/expert_overload: 7.5E+00 |" if "padded" in words else ""
for step in range(1, 23):
    print({LINE!r}.format(step=step, ms=100.5 + step, ours=ours))
sys.exit(3 * ("factor" not in words))
"""


def test_rows_hold_what_each_run_says(tmp_path, monkeypatch):
    (tmp_path / "pretrain_gpt.py").write_text(SCRIPT)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho $* >> {tmp_path}/asked\necho 512, 300.5\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{real_run.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(real_run, "FUSED", "")
    monkeypatch.setattr(real_run, "about", lambda **given: given)
    out = tmp_path / "out.json"
    given = f"--megatron-lm {tmp_path} --out {out} --folder {tmp_path} --text {tmp_path}"
    only = ["--only", "ours", "stock dropless", "--more", "--seed 5"]
    real_run.main([*given.split(), "--models", "gpt-oss-20b", "--iterations", "22", *only])
    assert all(line.endswith(" -i 3") for line in (tmp_path / "asked").read_text().splitlines())
    (run,) = json.loads(out.read_text())["runs"]
    ours, dropless = run["rows"]
    for row in run["rows"]:
        assert row["model"] == "gpt-oss-20b, 6 layers" and row["iterations"] == 22
        assert row["ms"][0] == 101.5 and row["median_ms"] == 122 and row["loss"] == [1.25] * 22
        assert row["peak_mib"] == 0 and row["joules"] is None  # No second of steps was seen.
    assert ours["dropped"] == [0.5] * 22 and ours["expert_overload"] == [7.5] * 22
    assert "dropped" not in dropless
    assert [row["capacity_factor"] for row in run["rows"]] == [1.25, None]
    assert [row["exit_code"] for row in run["rows"]] == [0, 1]  # torchrun's, of a run that failed
    # Tight runs hook into the stand-in for APEX.
    setting = "os.environ['PYTORCH_CUDA_ALLOC_CONF']"
    of_allocator = f"import os\nassert {setting} == 'expandable_segments:True'"
    monkeypatch.setattr(real_run, "ADAM_IN_PARTS", of_allocator)
    only = ["--only", "stock drop-and-pad, eager", "--more", "--seed 5", "--tight"]
    again = [*given.split()[:-2], "--models", "gpt-oss-20b", "--iterations", "22"]
    real_run.main([*again, *only])
    (row,) = json.loads(out.read_text())["runs"][1]["rows"]
    assert (row["exit_code"], "graph" in row["flags"]) == (0, False)
    assert "graph" not in real_run.CONTENDERS["ours, eager"]
    # Where APEX is installed its product is taken.
    stand_in = tmp_path / f"{real_run.FUSED_MODULE}.py"
    assert stand_in.read_text() == of_allocator
    stand_in.write_text("")
    apex = tmp_path / "apex"
    apex.mkdir()
    stand_in.rename(apex / stand_in.name)
    monkeypatch.syspath_prepend(apex)
    with pytest.raises(SystemExit):
        real_run.main([*again, *only])
    fsdp = ["--more", "--seed 5 --use-megatron-fsdp"]
    real_run.main([*again, "--only", "stock drop-and-pad", *fsdp])
    (row,) = json.loads(out.read_text())["runs"][2]["rows"]
    assert (row["model"], row["exit_code"]) == ("gpt-oss-20b, 6 layers, Megatron-FSDP", 0)
    assert not stand_in.exists()
    assert real_run.shape_flags("qwen3-30b-a3b").endswith("-size 768 --swiglu --qk-layernorm")
    assert "swiglu" not in real_run.shape_flags("nemotron-3-super")


def test_energy_is_that_of_seconds_with_kept_steps():
    """Three seconds have kept steps alone: neither that in which they begin, nor the end."""
    clock = datetime(2026, 11, 24, 12, 42)
    ends = [f"2026-11-24 12:42:{1 if step < 21 else step - 19:02}.5" for step in range(1, 25)]
    log = "\n".join(f" [{end}] iteration {step:8d}/ 24 |" for step, end in enumerate(ends, 1))
    watts = [80.0, 100.0, 400.0, 690.0, 710.0, 700.0, 90.0]
    samples = [
        real_run.Sample(clock + timedelta(seconds=second), 0, of_second)
        for second, of_second in enumerate(watts)
    ]
    assert real_run.joules_of(log, 1000.0, samples) == 700.0
    assert real_run.joules_of(log, 1000.0, samples[:3]) is None
    assert real_run.joules_of("", None, samples) is None


def test_ranks_that_share_a_gpu_are_on_hosts(tmp_path, monkeypatch):
    (tmp_path / "pretrain_gpt.py").write_text(f"""
import fused_weight_gradient_mlp_cuda, os
from padded_dispatch.exchange.hosts import machine
names = "NCCL_HOSTID", "LOCAL_RANK", "NCCL_MULTI_RANK_GPU_ENABLE"
said = [machine(), *(os.environ[name] for name in names), os.path.isdir(os.environ["TMPDIR"])]
open("{tmp_path}/said" + os.environ["RANK"], "w").write(str(said))
""")
    monkeypatch.setattr(real_run, "FUSED", "")
    monkeypatch.setattr(real_run, "about", lambda **given: given)
    sample = real_run.Sample(datetime.now(), 0, 0)
    monkeypatch.setattr(real_run, "gpu_samples", lambda: nullcontext([sample]))
    out = tmp_path / "out.json"
    given = f"--megatron-lm {tmp_path} --out {out} --folder {tmp_path} --text {tmp_path}"
    for only, host_of in (("stock dropless", [0, 0, 1, 1]), ("ours", [0, 1])):
        shape = f"--models small --ep {len(host_of)} --hosts 2 --only".split()
        real_run.main([*given.split()[: -2 if only == "ours" else None], *shape, only])
        for rank, host in enumerate(f"machine{number}" for number in host_of):
            said = tmp_path / f"said{rank}"
            assert said.read_text() == str([host, host, "0", "1", True])
            said.unlink()
    first, second = json.loads(out.read_text())["runs"]
    assert first["about"]["num_gpus"] == 1
    assert [run["rows"][0]["hosts"] for run in (first, second)] == [2, 2]
    assert [run["rows"][0]["exit_code"] for run in (first, second)] == [0, 0]


def test_adam_in_parts_steps_every_parameter_once(monkeypatch):
    class Adam:
        def __init__(self):
            params = [torch.zeros(2**size, device="meta") for size in (26, 26, 28, 3)]
            self.param_groups = [{"params": params, "lr": 2}, {"params": params[:1], "step": 4}]
            self.calls = []

        def step(self):
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
                sizes = [param.numel().bit_length() - 1 for param in group["params"]]
                self.calls.append((group["step"], group.get("lr"), sizes))

        def _apply_scale(self, name, moment, stored, scale):
            self.calls.append((name, moment.tolist(), stored, scale))

    module = ModuleType("fused_adam")
    module.FusedAdam, module.Float8Quantizer = Adam, dict
    package = "transformer_engine.pytorch.optimizers"
    monkeypatch.setitem(sys.modules, package, SimpleNamespace(fused_adam=module))
    exec(real_run.ADAM_IN_PARTS, {})
    adam = Adam()
    for step in (1, 2):
        adam.step()
        first, of_one = (step, 2), (4 + step, None, [26])
        assert adam.calls == [(*first, [26, 26]), (*first, [28]), (*first, [3]), of_one]
        adam.calls.clear()
    assert [len(group["params"]) for group in adam.param_groups] == [4, 1]
    adam._apply_scale("exp_avg", torch.zeros(1, 2), "to", "by")
    assert adam.calls == [("exp_avg", [[torch.tensor(1e-30).item(), 0]], "to", "by")]
    assert module.Float8Quantizer(scale=1) == {"scale": 1, "columnwise": False}


def test_losses_that_are_no_numbers_keep_their_steps():
    lines = [LINE.format(step=step, ms=1.0, ours="") for step in (1, 2, 3)]
    lines[1:] = [
        line.replace("1.25E+00", word)
        for line, word in zip(lines[1:], ("NAN", "-INF"), strict=True)
    ]
    assert str(real_run.row_of("\n".join(lines))["loss"]) == "[1.25, nan, -inf]"


def test_a_wrong_path_leaves_neither_rows_nor_an_empty_text(tmp_path, capsys):
    """A text stays in the folder, and a later run takes it."""
    with pytest.raises(SystemExit):
        real_run.main(["--megatron-lm", str(tmp_path), "--out", "/proc/out.json"])
    assert "error: --out must be a path in a writable folder" in capsys.readouterr().err
    paths = ["--out", f"{tmp_path}/out.json", "--folder", f"{tmp_path}/run"]
    with pytest.raises(SystemExit):
        real_run.main(["--megatron-lm", str(tmp_path), *paths])
    assert f"--megatron-lm must hold pretrain_gpt.py, got {tmp_path}" in capsys.readouterr().err
    (tmp_path / "pretrain_gpt.py").touch()
    with pytest.raises(SystemExit):
        nowhere = ["--text", f"{tmp_path}/nowhere", "--models", "gpt-oss-20b", "--only", "ours"]
        real_run.main(["--megatron-lm", str(tmp_path), *paths, *nowhere])
    assert "--text must be a folder with Python files, got " in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists() and not any((tmp_path / "run").iterdir())


def test_text_is_a_token_for_each_word(tmp_path):
    (tmp_path / "a.py").write_text("a = a1\n")
    real_run.write_text(tmp_path / "text", tmp_path)
    dataset = IndexedDataset(str(tmp_path / "text"))
    (document,) = dataset  # A view of the dataset's memory.
    # By frequency: "a" and " " come twice, "=", "1" and the end of the line once.
    assert document.tolist() == [1, 2, 3, 2, 1, 4, 5, 32_767]
    assert document.dtype == np.uint16
