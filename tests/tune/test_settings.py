"""Settings to paste: each block runs as it is printed."""

import ast
import contextlib
import dataclasses
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from padded_dispatch import cli
from padded_dispatch.megatron import PaddedOptions, install
from padded_dispatch.megatron.options import to_plain
from padded_dispatch.train import command
from padded_dispatch.tune.recommend import Phase
from padded_dispatch.tune.settings import Block, blocks, markdown, options
from padded_dispatch.tune.study import Question, Study, study
from padded_dispatch.tune.synthetic import TraceSizes, synthetic_trace
from padded_dispatch.tune.target import Target
from tests.support.inline_pool import only_worker
from tests.support.processes import ENVIRONMENT

MODEL: dict[str, Any] = dict(
    num_layers=2,
    hidden_size=8,
    num_attention_heads=1,
    num_moe_experts=8,
    moe_router_topk=2,
    moe_aux_loss_coeff=0.0,
)
# Megatron-LM's spelling of the flags that a block adds to the user's own.
SCRIPT = f"""
import argparse, json
from megatron.core.transformer.transformer_config import TransformerConfig
from padded_dispatch.megatron.options import to_plain

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--num-layers", type=int)
parser.add_argument("--moe-token-dispatcher-type")
parser.add_argument("--moe-expert-capacity-factor", type=float)
config = TransformerConfig(**{MODEL!r} | vars(parser.parse_args()))
print(json.dumps([config.moe_expert_capacity_factor, to_plain(config.padded_dispatch)]))
"""
SMALL = "--steps 2 --seq-length 24 --micro-batch 3 --lr-warmup 2 --device cpu --workers 1"


def studied(**question: Any) -> Study:
    """Return a study of a trace of the preset `tiny`."""
    sizes = TraceSizes(
        num_steps=60, num_layers=2, num_ranks=2, num_tokens=64, num_experts=8, top_k=2
    )
    trace = synthetic_trace("lognormal", sizes, seed=1)
    trace = dataclasses.replace(trace, layers=trace.layers - trace.layers.min() + 1)
    targets = {
        "target": Target(drop=0.05, steps_share=0.9),
        "eval_target": Target(drop=0.0, steps_share=0.9),
    }
    return study(trace, Question(**targets | question), name="lognormal")


def with_phases(found: Study) -> Study:
    phases = Phase(first_step=0, factor=2.0), Phase(first_step=40, factor=1.25)
    overall = dataclasses.replace(found.training.overall, phases=phases)
    return dataclasses.replace(found, training=dataclasses.replace(found.training, overall=overall))


STUDIES = {
    "pool": studied(pools=("rank",), policy="priority", policy_given=True),
    "aligned": studied(alignment=16, min_capacity=4),
    "schedule": with_phases(studied()),
    "plain": studied(eval_target=Target(drop=0.05, steps_share=0.9)),
}
CASES = [
    pytest.param(name, per_layer, id=f"{name}{' per layer' * per_layer}")
    for name in STUDIES
    for per_layer in (False, True)
]
EACH = pytest.mark.parametrize(("name", "per_layer"), CASES)


def block_for(target: str, name: str, per_layer: bool) -> Block:
    (block,) = [b for b in blocks(STUDIES[name], per_layer=per_layer) if b.target == target]
    return block


def wanted(name: str, per_layer: bool) -> tuple[float, PaddedOptions]:
    found = STUDIES[name]
    given = PaddedOptions(**options(found, per_layer=per_layer))
    return found.training.overall.factor, given


def test_options_are_those_of_the_question_and_the_answer():
    pool = STUDIES["pool"]
    # Eager evaluation drops nothing by default: a factor would end that.
    assert pool.evaluation.overall.factor > pool.training.overall.factor
    assert options(pool, per_layer=False) == {"capacity_pool": "rank", "policy": "priority"}
    aligned = options(STUDIES["aligned"], per_layer=False)
    assert (aligned["min_capacity"], aligned["alignment"]) == (4, 16)
    schedule = options(STUDIES["schedule"], per_layer=False)["schedule"]
    assert schedule == ((0, 2.0), (40, 1.25))
    layers = options(STUDIES["schedule"], per_layer=True)
    assert layers.keys() == {"layer_factors"}
    advice = STUDIES["schedule"].training.layers
    assert layers["layer_factors"] == {1: advice[1].factor, 2: advice[2].factor}
    assert options(STUDIES["plain"], per_layer=False) == {}


def run_in_bash(text: str, folder: Path) -> str:
    """Run a block as a user would, with a process in place of one for each GPU."""
    script = text.replace("--nproc-per-node auto", "--nproc-per-node 1")
    assert script != text
    path = os.pathsep.join([str(Path(sys.executable).parent), ENVIRONMENT["PATH"]])
    done = subprocess.run(
        ["bash", "-euc", f"ARGS=(--num-layers 2)\n{script}"],
        cwd=folder,
        env=ENVIRONMENT | {"PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "per_layer"), [("pool", True), ("schedule", False)])
def test_the_block_of_megatron_lm_runs(tmp_path, name, per_layer):
    (tmp_path / "pretrain_gpt.py").write_text(SCRIPT)
    printed = run_in_bash(block_for("Megatron-LM", name, per_layer).text, tmp_path)
    factor, given = wanted(name, per_layer)
    assert json.loads(printed.splitlines()[-1]) == [factor, to_plain(given)]


@EACH
def test_train_takes_the_flags_of_its_block(name, per_layer):
    block = block_for("padded-dispatch train", name, per_layer)
    words = shlex.split(block.text.replace("\\\n", " "))
    assert words[:2] == ["padded-dispatch", "train"]
    settings = command.resolve(command.read(words[2:]))
    factor, given = wanted(name, per_layer)
    assert settings.dispatch.capacity_factor == factor
    assert settings.dispatch.padded == given
    assert settings.recipe.num_layers == 2


@pytest.mark.parametrize(("name", "per_layer"), [("pool", True), ("schedule", False)])
def test_the_block_of_train_trains(tmp_path, capfd, name, per_layer):
    block = block_for("padded-dispatch train", name, per_layer)
    words = shlex.split(f"{block.text} {SMALL} --run-dir {tmp_path}".replace("\\\n", " "))
    with only_worker(), patch.dict(os.environ, {"PYTHONWARNINGS": ""}):
        assert cli.main(words[1:]) in (0, 1)  # 1: the loss did not fall in two steps
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (last,) = [row for row in rows if row["kind"] == "train" and row["step"] == 2]
    assert last["loss"] > 0
    assert "step 2/2" in capfd.readouterr().out


def config_of(fields: dict[str, Any]) -> tuple[float | None, PaddedOptions]:
    config: Any = TransformerConfig(**MODEL | fields)
    return config.moe_expert_capacity_factor, config.padded_dispatch


@EACH
def test_the_block_of_python_makes_the_config(name, per_layer):
    names: dict[str, Any] = {}
    exec(block_for("Python", name, per_layer).text, names)
    assert config_of(names["moe"]) == wanted(name, per_layer)


def read_yaml(text: str) -> dict[str, Any]:
    """Return YAML of two levels, with scalars and flow collections of numbers as values."""
    top: dict[str, Any] = {}
    for line in text.splitlines():
        key, _, words = line.strip().partition(":")
        value: Any = words.strip()
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(value)
        level = top["padded_dispatch"] if line.startswith(" ") else top
        level[key] = {} if value == "" else value
    return top


@EACH
def test_the_block_of_yaml_makes_the_config(name, per_layer):
    fields = read_yaml(block_for("YAML", name, per_layer).text)
    install(PaddedOptions(**fields.pop("padded_dispatch", {})))
    assert config_of(fields) == wanted(name, per_layer)


def test_text_of_the_blocks():
    pool = STUDIES["pool"]
    factor = pool.training.overall.factor
    megatron_lm, train, python, yaml = (block.text for block in blocks(pool, per_layer=False))
    flags = "--padded-capacity-pool rank --padded-policy priority"
    assert " ".join(megatron_lm.replace("\\\n", "").split()) == (
        "torchrun --nproc-per-node auto -m padded_dispatch.megatron.run pretrain_gpt.py "
        '"${ARGS[@]}" --moe-token-dispatcher-type padded_alltoall '
        f"--moe-expert-capacity-factor {factor:g} {flags}"
    )
    assert max(map(len, megatron_lm.splitlines())) <= 78
    assert " ".join(train.replace("\\\n", "").split()) == (
        f"padded-dispatch train --capacity-factor {factor:g} {flags}"
    )
    assert python.splitlines()[2:5] == [
        "install(PaddedOptions(",
        '    capacity_pool="rank",',
        '    policy="priority",',
    ]
    assert yaml.splitlines() == [
        "moe_token_dispatcher_type: padded_alltoall",
        f"moe_expert_capacity_factor: {factor:g}",
        "padded_dispatch:",
        "  capacity_pool: rank",
        "  policy: priority",
    ]


def test_the_page_has_all_blocks_and_says_when_layers_have_none():
    pool = STUDIES["pool"]
    page = markdown(pool)
    for per_layer in (False, True):
        for block in blocks(pool, per_layer=per_layer):
            assert f"```{block.language}\n{block.text}\n```" in page
    merged = markdown(dataclasses.replace(pool, layers_of_model=False))
    assert "No settings for each layer" in merged
    assert "layer-factors" not in merged and "layer_factors" not in merged
