"""`notebooks/examples`: each program runs, or is started, as a user would."""

import json
import os
import re
import runpy
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch.distributed as dist

from padded_dispatch.megatron import PaddedOptions
from tests.support.pool import WorkerPool

EXAMPLES = Path(__file__).parents[1] / "notebooks" / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def trained(folder: Path, *given: str) -> tuple[list[float], list[int]]:
    """Run the program on two processes; return the losses that it prints, and its tokens."""
    command = [*TORCHRUN, "--nproc-per-node", "2", str(EXAMPLES / "gpt_moe.py"), *given]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and "DEPRECATED" not in done.stderr, done.stderr
    return found(done.stdout)


def found(printed: str) -> tuple[list[float], list[int]]:
    (text,) = re.findall(r"^generated \[(.*)\]", printed, re.MULTILINE)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)$", printed, re.MULTILINE)]
    return losses, [int(token) for token in text.split(", ")]


def gone_on(folder: Path, *given: str) -> list[float]:
    """Run the program in two workers, which have imported Megatron; return the losses."""
    with WorkerPool(2) as pool:
        return found(pool.run(_program, folder, given, timeout_s=300)[0])[0]


def _program(folder: Path, given: tuple[str, ...]) -> str:
    dist.destroy_process_group()
    program, printed = str(EXAMPLES / "gpt_moe.py"), StringIO()
    with chdir(folder), patch.object(sys, "argv", [program, *given]), redirect_stdout(printed):
        runpy.run_path(program, run_name="__main__")
    return printed.getvalue()


def test_the_gpt_learns_goes_on_and_goes_back_to_stock(tmp_path):
    first, text = trained(tmp_path, "--save", "checkpoint")
    assert len(first) == 4 and first[-1] < 0.05 < 0.5 < first[0]  # The last is held out.
    assert all(after == (5 * token + 7) % 64 for token, after in pairwise(text))
    ours = gone_on(tmp_path, "--load", "checkpoint")
    stock = gone_on(tmp_path, "--load", "checkpoint", "--dispatcher", "stock")
    assert len(ours) == 2 and ours[0] < first[-1] and ours == pytest.approx(stock, abs=2e-4)


SCRIPT = """
import os, sys
from megatron.core.transformer.transformer_config import TransformerConfig

given = dict(zip(sys.argv[1:], sys.argv[2:]))
config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1,
    num_moe_experts=int(given["--num-experts"]),
    moe_token_dispatcher_type=given["--moe-token-dispatcher-type"])
if os.environ["RANK"] == "0":
    size = given["--expert-model-parallel-size"], os.environ["WORLD_SIZE"]
    print(config.padded_dispatch.on_overflow, *size, given["--train-iters"])
"""


def test_the_launcher_starts_on_one_host(tmp_path):
    (tmp_path / "pretrain_gpt.py").write_text(SCRIPT)
    flags = "--train-iters", "7", "--padded-on-overflow", "error"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # Has torchrun.
    done = subprocess.run(
        [str(EXAMPLES / "one_host.sh"), *flags],
        cwd=tmp_path,
        env=os.environ | {"EP": "2", "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "error 2 2 7"


def test_bridges_recipe_has_our_dispatcher_and_the_saved_options(tmp_path, monkeypatch):
    """Bridge and YAML are not among the packages of the tests: `test_bridge_run` runs Bridge."""
    calls, model = MagicMock(), SimpleNamespace(moe_flex_dispatcher_backend="deepep")
    calls.qwen3_30b_a3b_pretrain_config.return_value = SimpleNamespace(model=model)
    calls.safe_load = json.loads
    for name in ("recipes.qwen", "training.gpt_step", "training.pretrain"):
        monkeypatch.setitem(sys.modules, f"megatron.bridge.{name}", calls)
    monkeypatch.setitem(sys.modules, "yaml", calls)
    monkeypatch.setattr("padded_dispatch.megatron.install", calls.install)
    saved = tmp_path / "run_config.yaml"
    saved.write_text(json.dumps({"model": {"padded_dispatch": {"on_overflow": "error"}}}))
    names = runpy.run_path(str(EXAMPLES / "bridge_pretrain.py"))
    for given, options in (
        ((), PaddedOptions()),
        ((str(saved),), PaddedOptions(on_overflow="error")),
    ):
        calls.reset_mock()
        names["main"](*given)
        order = [name for name, *_ in calls.mock_calls]
        assert order == ["install", "qwen3_30b_a3b_pretrain_config", "pretrain"]
        calls.install.assert_called_once_with(options)
    assert vars(model) == {
        "moe_token_dispatcher_type": "padded_alltoall",
        "moe_flex_dispatcher_backend": None,
        "moe_expert_capacity_factor": 1.25,
    }


def test_the_gpt_fits_on_two_screens():
    assert len((EXAMPLES / "gpt_moe.py").read_text().splitlines()) <= 135
