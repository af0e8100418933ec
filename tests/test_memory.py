"""Bytes by hand: of buffers, of what is kept, of temporaries.

`tests/experts/test_packed.py` compares them with what a pass keeps and allocates, and
`tests/exchange/test_direct.py` with allocations.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from padded_dispatch.config import NO_DROP, DispatchConfig, StoreSizes
from padded_dispatch.exchange.collectives import Collectives
from padded_dispatch.memory import LayerMemory, aligned, gib
from padded_dispatch.routing import make_plan
from padded_dispatch.utils.shapes import SHAPES

# D = 2,048, F = 768, in bf16: a row of a store, and a token.
ROW, TOKEN, T, K = 2 * 2 * 768 + 12, 2 * 2048, 4096, 8


def qwen3(factor: Any = 1.25, **changes: Any) -> LayerMemory:
    how = {name: changes.pop(name) for name in ("direct", "num_hosts") if name in changes}
    sizes: Any = {"num_experts": 128, "top_k": K, "num_ranks": 8, "capacity_pool": "store"}
    config = DispatchConfig(**sizes | {"capacity_factor": factor} | changes)
    given = {"num_tokens": T, "hidden_size": 2048, "direct": True} | how
    return LayerMemory(config=config, fc1_width=2 * 768 // config.etp_size, **given)


def test_a_number_of_bytes_is_aligned_and_shown():
    assert [aligned(size) for size in (0, 1, 256, 257)] == [0, 256, 256, 512]
    assert gib(3 * 2**29) == "1.50"


def test_buffers_of_direct_stores():
    """Of 8 ranks, of the 8 ranks of a host, and where tokens arrive again."""
    one = qwen3().buffers
    assert one is not None
    assert (one.landing, one.second_landing) == (7 * T * TOKEN, 0)
    assert one.plans == 12 * 8 * T * K + 4 * 8 * 16
    assert one.arriving == one.landing + one.plans
    assert one.coming == T * K * (TOKEN + 4)
    hosts = qwen3(num_ranks=32, num_hosts=4).buffers
    assert hosts is not None
    assert hosts.landing == hosts.second_landing == 7 * 4 * T * TOKEN
    assert hosts.arriving == 2 * hosts.landing + 12 * 8 * 4 * T * K + 4 * 8 * 4
    assert hosts.coming == 4 * one.coming
    # Each token has a slot, also with cells, which have room for 4 experts of 320.
    cells = qwen3(num_ranks=32, capacity_pool="cells").buffers
    assert cells is not None and cells.landing == 31 * T * TOKEN
    assert qwen3(direct=False).buffers is None
    assert qwen3(num_ranks=1).buffers is None


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"num_ranks": 1}, 0),
        ({"num_ranks": 1, "direct": False}, 0),
        ({}, 7),
        ({"direct": False}, 8),
        ({"num_ranks": 16}, 15),  # No more than 1.5 * 8 * 1.25.
        ({"num_ranks": 32}, 0),
        ({"num_ranks": 32, "direct": False}, 0),
        # Cells with less slots than tokens, of which fewer arrive: 4 experts of 320.
        ({"num_ranks": 32, "direct": False, "capacity_pool": "cells"}, 32 * 4 * 320 / T),
        # A rail keeps what it has gathered, its own tokens among it.
        ({"num_ranks": 16, "num_hosts": 2}, 2),
        ({"num_ranks": 16, "num_hosts": 2, "direct": False}, 2),
        ({"num_ranks": 32, "num_hosts": 4}, 4),
        ({"num_ranks": 64, "num_hosts": 8, "direct": False}, 8),
    ],
    ids=str,
)
def test_kept_tokens(changes: dict[str, Any], tokens: float):
    assert qwen3(**changes).kept_tokens == tokens * T * TOKEN


@pytest.mark.parametrize("factor", [0.05, 1.25])
def test_ranks_that_split_all_experts_have_a_slot_for_each_token(factor: float):
    """As on the wire, whose tokens go by an all-gather, also where cells have room for fewer."""
    split = qwen3(factor, num_ranks=1, etp_size=2, direct=False, capacity_pool="cells")
    plan = make_plan(torch.zeros(T, 128, dtype=torch.bool), top_k=K)
    exchange = Collectives(128)
    exchange.num_sources = 2
    slots = split.config.wire_slots(T)
    assert (slots < T) == (factor < 1)
    given = plan, torch.zeros(T, 1), slots
    wire = exchange.start(*given, sends_again=split.config.sends_again())
    assert (split.num_slots, split.sends_again) == (wire._num_slots, wire.sends_again)
    assert split.kept_tokens == (0 if factor < 1 else 2 * T * TOKEN)


def test_kept_numbers():
    """A row for each choice of 4 bytes, a slot, and experts; probabilities of what is overwritten.

    Collectives keep 12 bytes more of each choice at home, and rails as much as collectives.
    """
    listed, own = 8 * T * (4 * K + 4), 4 * T * K
    assert qwen3().kept_numbers(overwritten=False) == listed + own
    assert qwen3().kept_numbers(overwritten=True) == listed + own + 8 * T * K * 4
    assert qwen3(direct=False).kept_numbers(overwritten=False) == listed + 4 * own
    assert qwen3(num_ranks=1, direct=False).kept_numbers(overwritten=False) == 2 * own
    railed = qwen3(num_ranks=16, num_hosts=2).kept_numbers(overwritten=False)
    assert railed == 2 * listed + 2 * own + 4 * own
    cells = qwen3(num_ranks=32, direct=False, capacity_pool="cells")
    slots = 32 * 4 * 320
    assert cells.kept_numbers(overwritten=False) == slots * (4 * K + 4) + 4 * own + 8 * slots


def test_what_layers_keep():
    """A store has at least five shares; a lone layer is never overwritten."""
    layer = qwen3()
    numbers = [layer.kept_numbers(overwritten=one) for one in (False, True)]
    for num_layers, rows in ((1, 5 * T * K), (4, 5 * T * K), (12, 12 * 40960)):
        kept = rows * ROW + num_layers * (7 * T * TOKEN + numbers[1]) - numbers[1] + numbers[0]
        assert layer.kept(num_layers) == kept
    # Without drops each token may have all of its experts on one rank.
    kept = 8 * T * K * ROW + 7 * T * TOKEN + numbers[0]
    assert qwen3(NO_DROP).kept(1) == kept
    split = qwen3(capacity_pool="cells", etp_size=2, direct=False)
    rows = StoreSizes.of([split.config], T).num_rows
    tokens, numbers = split.kept_tokens, split.kept_numbers(overwritten=False)
    assert split.kept(1) == rows * (ROW - 2 * 768) + tokens + numbers


def test_temporaries():
    """Rows of D + 2 F columns and a number; in collectives what arrives, and sums, twice."""
    rows, token = 1000 * (2 * (2048 + 2 * 768) + 4), T * TOKEN
    assert qwen3().temporaries(1000, 768) == rows
    assert qwen3(direct=False).temporaries(100_000, 768) == 100 * rows + 8 * token
    assert qwen3(direct=False).temporaries(1000, 768) == 3 * 8 * token
    again = qwen3(direct=False, num_ranks=32)
    assert again.temporaries(10**6, 768) == 1000 * rows + 2 * 32 * token
    assert again.temporaries(1000, 768) == 4 * 32 * token
    railed = qwen3(num_ranks=16, num_hosts=2)
    assert railed.temporaries(100_000, 768) == 100 * rows + 2 * token
    assert railed.temporaries(1000, 768) == 3 * 2 * token
    inside = qwen3(num_ranks=16, num_hosts=2, direct=False)
    assert inside.temporaries(1000, 768) == (4 * 16 + 2) * token


def measured() -> list[dict[str, Any]]:
    """Return measured peaks of one layer over direct writes, with weights that are few."""
    path = Path(__file__).parents[1] / "notebooks" / "results" / "ranks.json"
    rows = json.loads(path.read_text())["runs"][-1]["rows"]
    return [row for row in rows if row["wire"] == "direct" and row["ranks"] >= 8]


@pytest.mark.parametrize(
    "row", measured(), ids=lambda row: f"{row['model']} {row['ranks']} {row['tokens']}"
)
def test_peaks_that_a_gpu_measured(row: dict[str, Any]):
    """To 0.01 GiB, of `notebooks/ranks.py`: it makes up the tokens and plans of all sources."""
    shape, ranks, num_tokens = SHAPES[row["model"]], row["ranks"], row["tokens"]
    config = DispatchConfig(
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        capacity_factor=1.25,
        capacity_pool="store",
        num_ranks=ranks,
    )
    layer = LayerMemory(
        config=config,
        num_tokens=num_tokens,
        hidden_size=shape.hidden_size,
        fc1_width=2 * shape.ffn_size,
        direct=True,
    )
    buffers, num_rows = layer.buffers, StoreSizes.of([config], num_tokens).num_rows
    assert buffers is not None and layer.sends_again == row["sends_again"]
    weights = 3 * config.num_local_experts * shape.hidden_size * shape.ffn_size * 2
    # Tokens of all sources; this rank's input, output and gradient; rows at home.
    made = (ranks + 3) * num_tokens * layer.token_bytes + buffers.plans + buffers.home_rows
    # With many weights the most is where tokens are spread for the second of their gradients.
    last = num_rows * layer.token_bytes + weights
    most = max(layer.temporaries(num_rows, shape.ffn_size), last)
    found = weights + made + layer.kept(1) + most
    assert abs(found / 2**30 - row["gib"]) < 0.015
