"""`notebooks/examples`: each program runs, or is started, as a user would."""

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "notebooks" / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def trained(folder: Path, *given: str) -> tuple[list[float], list[int]]:
    """Run the program on two processes; return the losses that it prints, and its tokens."""
    command = [*TORCHRUN, "--nproc-per-node", "2", str(EXAMPLES / "gpt_moe.py"), *given]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (text,) = re.findall(r"^generated \[(.*)\]", done.stdout, re.MULTILINE)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)$", done.stdout, re.MULTILINE)]
    return losses, [int(token) for token in text.split(", ")]


def test_the_gpt_learns_goes_on_and_goes_back_to_stock(tmp_path):
    first, text = trained(tmp_path, "--save", "checkpoint")
    assert len(first) == 4 and first[-1] < 0.05 < 0.5 < first[0]  # The last is held out.
    assert all(after == (5 * token + 7) % 64 for token, after in pairwise(text))
    ours, _ = trained(tmp_path, "--load", "checkpoint")
    stock, _ = trained(tmp_path, "--load", "checkpoint", "--dispatcher", "stock")
    assert ours[0] < first[-1] and ours == pytest.approx(stock, abs=2e-4)


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


def test_the_gpt_fits_on_two_screens():
    assert len((EXAMPLES / "gpt_moe.py").read_text().splitlines()) <= 130
