"""Padded cells on CPUs against the oracle, with NaN wherever an expert could leave something."""

from typing import Any

import pytest
import torch

from padded_dispatch import DispatchConfig
from padded_dispatch.config import FIT, NO_DROP
from padded_dispatch.exchange.collectives import Collectives
from padded_dispatch.experts import padded
from padded_dispatch.routing.plan import make_plan
from tests.support.whole_layers import ROUTINGS, check, make_case

RANKS = pytest.mark.parametrize(
    ("num_ranks", "etp_size"),
    [(1, 1), (1, 2), (4, 1), (2, 2), (8, 1)],
    ids=lambda value: str(value),
)


def config_of(num_ranks: int, etp_size: int = 1, **changes: Any) -> DispatchConfig:
    sizes = dict(num_experts=2 * num_ranks, top_k=min(3, 2 * num_ranks), capacity_factor=0.75)
    return DispatchConfig(**{**sizes, **changes}, num_ranks=num_ranks, etp_size=etp_size)


@RANKS
@pytest.mark.parametrize("routing", ROUTINGS)
def test_cells_are_the_oracle(num_ranks, etp_size, routing):
    check(make_case(config_of(num_ranks, etp_size), [routing, "full"]), "padded")


@pytest.mark.parametrize(
    ("changes", "num_tokens"),
    [
        ({"capacity_factor": 0.01}, 7),
        ({"policy": "position"}, 7),
        ({"capacity_factor": 0.3}, 9),
        ({"capacity_factor": 0.3, "policy": "position"}, 9),
        ({"capacity_factor": NO_DROP}, 7),
        ({"capacity_factor": FIT}, 7),
        ({"capacity_factor": FIT, "alignment": 16}, 9),
        ({"alignment": 16}, 7),
        ({"top_k": 1}, 1),
        ({"num_experts": 4, "top_k": 4}, 70),
    ],
    ids=str,
)
def test_every_setting_is_the_oracle(changes, num_tokens):
    case = make_case(config_of(4, **changes), ["thin", "hot", "one rank"], num_tokens=num_tokens)
    check(case, "padded")


@pytest.mark.parametrize(("num_ranks", "etp_size"), [(1, 1), (2, 1), (1, 2)])
def test_kernels_are_the_oracle(monkeypatch, num_ranks, etp_size):
    """The functions of GPUs, in Triton's interpreter."""
    monkeypatch.setattr(padded, "_has_kernels", lambda values: True)
    case = make_case(config_of(num_ranks, etp_size), ["thin", "hot"], num_tokens=5, hidden=17)
    check(case, "padded")


def test_a_row_beyond_the_capacity_counts_as_zero():
    plan = make_plan(torch.ones(3, 1, dtype=torch.bool), top_k=1)
    tokens_TD = torch.ones(3, 2, requires_grad=True)
    wire = Collectives(1).start(plan, tokens_TD, 3)
    given, sent = padded.dispatch(tokens_TD, torch.ones(3, 1), wire, capacity=2)
    out_TD = padded.combine(given.rows_ND, sent)
    assert out_TD[:, 0].tolist() == [1, 1, 0]
    out_TD.sum().backward()
    assert tokens_TD.grad is not None and tokens_TD.grad[:, 0].tolist() == [1, 1, 0]
