"""Settings to paste: each block runs as it is printed."""

import subprocess
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from padded_dispatch.megatron import PaddedOptions, run
from padded_dispatch.tune.demand import demand_of
from padded_dispatch.tune.recommend import Study, study
from padded_dispatch.tune.report import blocks, options
from tests.support.traces import synthetic_trace

MODEL: dict[str, Any] = dict(
    num_layers=2,
    hidden_size=8,
    num_attention_heads=1,
    num_moe_experts=8,
    moe_router_topk=2,
    moe_aux_loss_coeff=0.0,
)
TRACE = synthetic_trace("lognormal", num_experts=8, seed=1)
STUDIES = {
    pool: study(demand_of(TRACE), name="lognormal", pools=(pool,)) for pool in ("cells", "store")
}
EACH = pytest.mark.parametrize("per_layer", [False, True])
EACH_POOL = pytest.mark.parametrize("found", STUDIES.values(), ids=STUDIES)


def text_for(target: str, found: Study, per_layer: bool) -> str:
    made = blocks(found, per_layer=per_layer)
    return next(text for title, text in made.items() if title.startswith(target))


def wanted(found: Study, per_layer: bool) -> tuple[float, PaddedOptions]:
    given = PaddedOptions(**options(found, per_layer=per_layer))
    return found.chosen.overall.factor, given


def test_options_are_those_of_the_answer():
    assert options(STUDIES["cells"], per_layer=False) == {"capacity_pool": "cells"}
    assert options(STUDIES["store"], per_layer=False) == {"capacity_pool": "store"}
    assert options(STUDIES["store"], per_layer=True) == {"capacity_pool": "store"}
    layers = STUDIES["cells"].chosen.layers
    factors = {1: layers[1].factor, 2: layers[2].factor}
    given = options(STUDIES["cells"], per_layer=True)
    assert given == {"capacity_pool": "cells", "layer_factors": factors}


@EACH
@EACH_POOL
def test_bash_and_the_launcher_take_the_block_of_megatron_lm(found, per_layer):
    """In place of torchrun, a function prints the words that it is given."""
    text = text_for("Megatron-LM", found, per_layer)
    script = f"torchrun() {{ printf '%s\\n' \"$@\"; }}\nARGS=(--num-layers 2)\n{text}"
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    start, words = done.stdout.splitlines()[:4], done.stdout.splitlines()[4:]
    assert start == ["--nproc-per-node", "auto", "-m", "padded_dispatch.megatron.run"]
    factor, given = wanted(found, per_layer)
    model = ["--num-layers", "2", "--moe-token-dispatcher-type", "padded_alltoall"]
    rest = [*model, "--moe-expert-capacity-factor", f"{factor:g}"]
    assert run.read(words) == (given, "pretrain_gpt.py", rest)


@EACH
@EACH_POOL
def test_the_block_of_python_makes_the_config(found, per_layer):
    names: dict[str, Any] = {}
    exec(text_for("Python", found, per_layer), names)
    config: Any = TransformerConfig(**MODEL | names["moe"])
    found_there = config.moe_expert_capacity_factor, config.padded_dispatch
    assert found_there == wanted(found, per_layer)
