"""The text for the terminal: tables that say what the replay says, and settings that run."""

import dataclasses
import subprocess
from typing import Any

import numpy as np
import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from padded_dispatch.megatron import PaddedOptions, install, run
from padded_dispatch.tune.cost import LayerSizes, balanced_drop, kept_bytes
from padded_dispatch.tune.recommend import Study, Target, percent, study
from padded_dispatch.tune.report import (
    bash,
    factor_table,
    layer_table,
    pool_table,
    python,
    summary,
)
from tests.support.traces import made_up

ASKED = made_up(num_steps=40, num_layers=3, num_ranks=2, num_tokens=64, num_experts=16, top_k=2)
LAYER = LayerSizes(hidden_size=64, ffn_size=48, num_layers=3)
STORE = study(ASKED, Target())
CELLS = dataclasses.replace(STORE, chosen=STORE.answers[0])
EACH_POOL = pytest.mark.parametrize("found", [CELLS, STORE], ids=["expert", "store"])


def rows(table: str) -> list[list[str]]:
    """Return the cells of a table, its mark in front of them; at least two blanks separate them."""
    lines = (line.replace("  ", "\t") for line in table.splitlines())
    cells = [[cell.strip() for cell in line.split("\t") if cell.strip()] for line in lines]
    return cells


@EACH_POOL
def test_cells_of_factors(found):
    replay = found.chosen.replay
    headers, *lines = rows(factor_table(found.chosen, LAYER))
    of_cells = replay.pool == "expert"
    room, *balance = ("slots", "balanced") if of_cells else ("rows",)
    assert headers == ["factor", room, "dropped", "99 % of steps", *balance, "GiB"]
    shown = [line[line[0] == ">" :][0].removeprefix("> ") for line in lines]
    marked = [i for i, line in enumerate(lines) if line[0].startswith(">")]
    assert [shown[i] for i in marked] == [f"{found.chosen.overall.factor:g}"]
    for share in (0.3, 0.1, 0.05, 0.01, 0.001, 0.0):
        smallest = replay.factors[np.flatnonzero(replay.dropped_share <= share)[0]]
        assert f"{smallest:g}" in shown
    for factor, line in zip(shown, lines, strict=True):
        i = [f"{factor:g}" for factor in replay.factors].index(factor)
        by_step = np.sort(replay.dropped[i].sum(0) / replay.asked.sum(0))
        expected = [
            f"{replay.room[i]:,}",
            percent(replay.dropped[i].sum() / replay.asked.sum()),
            f"<= {percent(by_step[39])}",
        ]
        if of_cells:
            sizes = dict(num_tokens=64, top_k=2, num_experts=16, capacity=int(replay.room[i]))
            expected.append(percent(balanced_drop(**sizes)))
        expected.append(f"{kept_bytes(replay.configs[i], 64, LAYER) / 2**30:.3g}")
        assert line[-len(expected) :] == expected
    assert "GiB" not in factor_table(found.chosen)


def test_cells_of_pools_and_layers():
    headers, *lines = rows(pool_table(STORE))
    assert headers == ["pool", "factor", "dropped", "steps with drops", "drops nothing at"]
    assert [line[0] for line in lines] == ["expert", ">  store"] or lines[1][0] == ">"
    for line, answer in zip(lines, STORE.answers, strict=True):
        pool, factor, dropped, retried, needed = line[-5:]
        assert (pool, factor) == (answer.replay.pool, f"{answer.overall.factor:g}")
        assert (dropped, retried) == (percent(answer.overall.dropped), percent(answer.retried))
        assert answer.replay.needed.max() <= float(needed) < answer.replay.needed.max() + 0.01
    headers, *lines = rows(layer_table(CELLS.chosen))
    assert headers[4:] == ["factor", "slots"]
    for number, (layer, advice) in enumerate(CELLS.chosen.layers.items()):
        assert lines[number] == [
            str(layer),
            f"{CELLS.chosen.replay.needed_alone[number]:.3g}",
            percent(advice.dropped),
            percent(advice.worst),
            f"{advice.factor:g}",
            f"{advice.room:,}",
        ]
    assert rows(layer_table(STORE.chosen))[0][-1] == "worst step"


@EACH_POOL
def test_the_text_holds_the_answer_its_tables_and_its_settings(found):
    text = summary(found, LAYER)
    assert " ".join(text.split()).startswith(found.chosen.sentence())
    assert max(map(len, text.splitlines())) <= 80
    answer = found.chosen
    parts = [pool_table(found), factor_table(answer, LAYER), layer_table(answer)]
    assert all(part in text for part in [*parts, bash(answer), python(answer)])
    factors = ",".join(f"{layer}:{one.factor:g}" for layer, one in answer.layers.items())
    assert text.endswith(f"\n--padded-layer-factors {factors}") == (found is CELLS)
    alone = summary(study(ASKED, Target(), pools=(answer.replay.pool,)))
    assert "drops nothing at" not in alone and "GiB" not in alone


def test_a_warning_is_in_the_text():
    sizes = dict(num_steps=40, num_layers=1, num_ranks=2, num_tokens=64, num_experts=16, top_k=2)
    young = study(made_up(spread=2.0, drift=True, **sizes), Target(), pools=("expert",))
    (warning,) = young.chosen.warnings()
    assert warning in " ".join(summary(young).split())


@EACH_POOL
def test_bash_and_the_launcher_take_the_block_of_megatron_lm(found: Study):
    """In place of torchrun, a function prints the words that it is given."""
    script = f"torchrun() {{ printf '%s\\n' \"$@\"; }}\nARGS=(--num-layers 2)\n{bash(found.chosen)}"
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    start, words = done.stdout.splitlines()[:4], done.stdout.splitlines()[4:]
    assert start == ["--nproc-per-node", "auto", "-m", "padded_dispatch.megatron.run"]
    model = ["--num-layers", "2", "--moe-token-dispatcher-type", "padded_alltoall"]
    rest = [*model, "--moe-expert-capacity-factor", f"{found.chosen.overall.factor:g}"]
    options = PaddedOptions(capacity_pool=found.chosen.replay.pool)
    assert run.read(words) == (options, "pretrain_gpt.py", rest)


@EACH_POOL
def test_the_block_of_python_makes_the_config(found: Study):
    names: dict[str, Any] = {}
    exec(python(found.chosen), names)
    model = dict(num_layers=2, hidden_size=8, num_attention_heads=1, num_moe_experts=8)
    config: Any = TransformerConfig(moe_router_topk=2, **model, **names["moe"])
    install()
    assert config.moe_expert_capacity_factor == found.chosen.overall.factor
    assert config.padded_dispatch == PaddedOptions(capacity_pool=found.chosen.replay.pool)
