"""Padded cells against the oracle, with NaN wherever an expert could leave something."""

from typing import Any

import pytest
import torch

from padded_dispatch import DispatchConfig
from padded_dispatch.exchange.collectives import Collectives
from padded_dispatch.experts import padded
from padded_dispatch.routing import make_plan
from tests.support.device import INTERPRETED
from tests.support.whole_layers import check, make_case


@INTERPRETED
@pytest.mark.parametrize(("num_ranks", "etp_size"), [(1, 1), (2, 1), (1, 2)])
def test_cells_of_kernels_are_the_oracle(monkeypatch, num_ranks, etp_size):
    """Without kernels they are in `tests/test_dispatcher.py`, in all settings."""
    monkeypatch.setattr(padded, "_has_kernels", lambda values: True)
    sizes: Any = dict(num_experts=2 * num_ranks, top_k=min(3, 2 * num_ranks))
    config = DispatchConfig(**sizes, capacity_factor=0.75, num_ranks=num_ranks, etp_size=etp_size)
    check(make_case(config, ["thin", "hot"], num_tokens=5, hidden=17), "padded")


def test_a_row_beyond_the_capacity_counts_as_zero():
    plan = make_plan(torch.ones(3, 1, dtype=torch.bool), top_k=1)
    tokens_TD = torch.ones(3, 2, requires_grad=True)
    wire = Collectives(1).start(plan, tokens_TD, 3)
    config = DispatchConfig(num_experts=1, top_k=1, capacity_factor=2 / 3)
    expert_input, state = padded.dispatch(tokens_TD, torch.ones(3, 1), wire, config)
    out_TD = padded.combine(expert_input.rows_ND, state)
    assert out_TD[:, 0].tolist() == [1, 1, 0]
    out_TD.sum().backward()
    assert tokens_TD.grad is not None and tokens_TD.grad[:, 0].tolist() == [1, 1, 0]
