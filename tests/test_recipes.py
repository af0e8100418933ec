"""Recipes, on their page and in files: shell syntax, our flags, Megatron's flags and fields."""

import ast
import dataclasses
import re
import subprocess
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.run import get_args_parser

from padded_dispatch.megatron import LayerGraphs, install
from padded_dispatch.megatron.compat import captures_moe
from padded_dispatch.megatron.config import REFUSED
from padded_dispatch.megatron.run import read
from tests.test_readme import blocks

PAGE = Path(__file__).parents[1] / "padded_dispatch" / "megatron" / "RECIPES.md"
LAUNCHER = ["-m", "padded_dispatch.megatron.run"]
EXAMPLES = Path(__file__).parents[1] / "notebooks" / "examples"
SCRIPTS = {path.stem: path for path in EXAMPLES.glob("*.sh") if path.stem not in ("args", "models")}
GRAPHS_016 = "graphs of 0.16 and 0.17"

# Commands of a cluster; `torchrun` prints its words, one a line, after an empty line.
_STAND_INS = """set -eu
torchrun() { printf '\\n'; printf '%s\\n' "$@"; }
padded-dispatch() { :; }
srun() { shift; "$@"; }
scontrol() { printf 'host0\\nhost1\\n'; }
NODE_RANK=1 MASTER_ADDR=host0 SLURM_JOB_NODELIST='host[0-1]' SLURM_NNODES=2 SLURM_JOB_ID=7
. ./args.sh
"""


def recipes() -> dict[str, str]:
    """Return the page's bash blocks by the names in the comments before them."""
    found = re.findall(
        r"^<!-- recipe: (.*?) -->\n\n```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    return dict(found)


def expand(
    name: str, folder: Path, *, graphs: str | None = None, model: str = "QWEN3"
) -> tuple[list[str], list[str]]:
    """Run a block or a script in bash with stand-ins for its programs, and other flags of graphs.

    Return what torchrun would get: its own words, and those behind the launcher.
    """
    args, models = ((EXAMPLES / file).read_text() for file in ("args.sh", "models.sh"))
    (folder / "args.sh").write_text(args + (recipes()[graphs] if graphs else ""))
    (folder / "models.sh").write_text(models.replace("QWEN3[@]", f"{model}[@]"))
    block = SCRIPTS[name].read_text() if name in SCRIPTS else f". ./models.sh\n{recipes()[name]}"
    done = subprocess.run(
        ["bash", "-c", f"{_STAND_INS}{block}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.split("\n\n")[-1].strip("\n").split("\n")
    start = words.index(LAUNCHER[0])
    assert words[start : start + 2] == LAUNCHER
    return words[:start], words[start + 2 :]


# Flags of Megatron-LM that are named otherwise than the field of the config.
NAMES = {"num_experts": "num_moe_experts", "te_rng_tracker": "use_te_rng_tracker"}


def test_every_block_is_named_and_bash_can_read_it():
    text = PAGE.read_text()
    assert [block for block in blocks(text, "bash") if block not in recipes().values()] == []
    for block in (*recipes().values(), *(path.read_text() for path in EXAMPLES.glob("*.sh"))):
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


COMMANDS = [*(name for name in recipes() if name != GRAPHS_016), *SCRIPTS]


def flags_of(arguments: list[str]) -> dict[str, list[str]]:
    """Return the values of each flag, by name; the last one counts, as in argparse."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in arguments:
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            found[name] = []
        else:
            found[name].append(word)
    return found


def value_of(words: list[str]) -> Any:
    """Return the value of a flag: True without words, a list of several, a number if it is one."""
    if len(words) != 1:
        return words or True
    try:
        return ast.literal_eval(words[0])
    except ValueError:
        return words[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_torchrun_and_the_launcher_take_their_words(name, tmp_path):
    torchrun, launcher = expand(name, tmp_path)
    wanted = "pretrain_hybrid.py" if name == "hybrid" else "pretrain_gpt.py"
    given = get_args_parser().parse_args([*torchrun, wanted])
    options, script, arguments = read(launcher)
    assert script == wanted
    assert options.trace == ("traces" if name == "trace" else None)
    flags = flags_of(arguments)
    assert flags["moe_token_dispatcher_type"] == ["padded_alltoall"]
    num_gpus = int(given.nnodes.split(":")[0]) * int(given.nproc_per_node)
    ep = int(flags.get("expert_model_parallel_size", ["1"])[0])
    assert num_gpus % ep == 0 and int(flags["num_experts"][0]) % ep == 0
    (micro,), (batch,) = flags["micro_batch_size"], flags["global_batch_size"]
    assert int(batch) % (int(micro) * num_gpus) == 0
    refuses = {row.name: row.refuses for row in REFUSED}
    refused = flags.keys() & refuses.keys()
    assert [flag for flag in refused if refuses[flag](value_of(flags[flag]))] == []


@pytest.mark.parametrize(
    ("name", "model", "experts"),
    [
        ("one_host", "QWEN3", (32, 4)),
        ("several hosts", "QWEN3", (128, 8)),
        ("several hosts", "GPT_OSS", (128, 4)),
    ],
)
def test_megatrons_config_accepts_the_flags(tmp_path, name, model, experts):
    """Of the installed version, with the graphs of the recipe for it."""
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    graphs = None if "cuda_graph_modules" in fields else GRAPHS_016
    _, _, arguments = read(expand(name, tmp_path, graphs=graphs, model=model)[1])
    flags = {NAMES.get(flag, flag): words for flag, words in flags_of(arguments).items()}
    install()
    config: Any = TransformerConfig(
        **{name: value_of(words) for name, words in flags.items() if name in fields}
    )
    assert config.moe_token_dispatcher_type == "padded_alltoall"
    assert config.moe_expert_capacity_factor == 1.25
    assert (config.num_moe_experts, config.moe_router_topk) == experts
    assert config.expert_model_parallel_size == (8 if name == "one_host" else 16)
    assert config.cuda_graph_impl == "transformer_engine" and config.use_te_rng_tracker
    assert captures_moe(config)


def test_the_loop_captures_after_eager_steps_and_deletes_the_graphs():
    (loop,) = [block for block in blocks(PAGE.read_text(), "python") if "LayerGraphs(" in block]
    names: dict[str, Any] = {}
    exec(loop, names)
    calls = MagicMock()
    passes = {"num_microbatches": 2, "seq_length": 64, "micro_batch_size": 3}
    chunks = [calls.chunk]
    with patch.dict(
        names, LayerGraphs=calls.LayerGraphs, get_forward_backward_func=lambda: calls.passes
    ):
        names["train"](chunks, calls.optimizer, "forward", "batches", num_steps=5, passes=passes)
    assert calls.LayerGraphs.call_args.args == (chunks,)
    assert calls.LayerGraphs.call_args.kwargs.keys() < signature(LayerGraphs).parameters.keys()
    order = [name for name, *_ in calls.mock_calls]
    step = ["chunk.zero_grad_buffer", "optimizer.zero_grad", "passes", "optimizer.step"]
    capture, delete = "LayerGraphs().capture", "LayerGraphs().delete"
    assert order == ["LayerGraphs", *step * 3, capture, *step * 2, delete]
    parameters = signature(forward_backward_no_pipelining).parameters
    assert calls.passes.call_args.kwargs.keys() <= parameters.keys()
