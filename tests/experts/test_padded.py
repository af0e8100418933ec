"""Padded cells against the oracle, with NaN wherever an expert could leave something."""

from typing import Any

import pytest
import torch
from torch import Tensor

from padded_dispatch import DispatchConfig
from padded_dispatch.config import FIT
from padded_dispatch.exchange.collectives import Collectives
from padded_dispatch.experts import padded
from padded_dispatch.routing import make_plan
from tests.support.device import INTERPRETED
from tests.support.threads import grid, run_on_threads
from tests.support.whole_layers import check, make_case


@INTERPRETED
@pytest.mark.parametrize(("num_ranks", "etp_size"), [(1, 1), (2, 1), (1, 2)])
def test_cells_of_kernels_are_the_oracle(monkeypatch, num_ranks, etp_size):
    """Without kernels they are in `tests/test_dispatcher.py`, in all settings."""
    monkeypatch.setattr(padded, "_has_kernels", lambda values: True)
    sizes: Any = dict(num_experts=2 * num_ranks, top_k=min(3, 2 * num_ranks))
    config = DispatchConfig(**sizes, capacity_factor=0.75, num_ranks=num_ranks, etp_size=etp_size)
    check(make_case(config, ["thin", "hot"], num_tokens=5, hidden=17), "padded")


KERNELS = pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=INTERPRETED)])


def _sum_of_shards() -> Tensor:
    """Two shards of two experts: 2048 and 1, 1 and 0, whose sum in fp16 is 2050, or 2048."""
    _, etp_group, shard = grid(1, 2)
    plan = make_plan(torch.ones(1, 2, dtype=torch.bool), top_k=2)
    tokens_TD = torch.ones(1, 4, dtype=torch.float16)
    wire = Collectives(2, None, etp_group).start(plan, tokens_TD, 1)
    config = DispatchConfig(num_experts=2, top_k=2, etp_size=2)
    _, state = padded.dispatch(tokens_TD, torch.ones(1, 2), wire, config)
    # The rows of both sources for one expert, then those for the other.
    numbers = torch.tensor([[2048, 2048, 1, 1], [1, 1, 0, 0]][shard], dtype=torch.float16)
    return padded.combine(numbers[:, None].expand(4, 4), state)


@KERNELS
def test_parts_of_split_experts_are_rounded_once(monkeypatch, kernels):
    monkeypatch.setattr(padded, "_has_kernels", lambda values: kernels)
    for summed in run_on_threads(2, _sum_of_shards):
        assert summed.dtype == torch.float16 and summed.tolist() == [[2050.0] * 4]


@KERNELS
def test_a_fitting_pass_without_rows_has_one_in_each_cell(monkeypatch, kernels):
    """No kernel and no product gets a tensor without elements."""
    monkeypatch.setattr(padded, "_has_kernels", lambda values: kernels)
    plan, tokens_TD = make_plan(torch.zeros(3, 2, dtype=torch.bool), top_k=2), torch.ones(3, 4)
    wire = Collectives(2).start(plan, tokens_TD, 3)
    config = DispatchConfig(num_experts=2, top_k=2, capacity_factor=FIT)
    given, state = padded.dispatch(tokens_TD, torch.ones(3, 2), wire, config)
    assert given.rows_ND.tolist() == [[0.0] * 4] * 2 and given.probs_N.tolist() == [0.0, 0.0]
    assert not padded.combine(torch.full((2, 4), torch.nan), state).any()


@KERNELS
def test_a_row_beyond_the_capacity_counts_as_zero(monkeypatch, kernels):
    """Also where another cell follows. Gradients of sums are not contiguous."""
    monkeypatch.setattr(padded, "_has_kernels", lambda values: kernels)
    plan = make_plan(torch.ones(3, 2, dtype=torch.bool), top_k=2)
    tokens_TD = torch.ones(3, 2, requires_grad=True)
    wire = Collectives(2).start(plan, tokens_TD, 3)
    config = DispatchConfig(num_experts=2, top_k=2, capacity_factor=2 / 3)
    prob_TK = torch.ones(3, 2, requires_grad=True)
    expert_input, state = padded.dispatch(tokens_TD, prob_TK, wire, config)
    out_TD = padded.combine(expert_input.rows_ND, state)
    assert out_TD[:, 0].tolist() == [2, 2, 0]
    rows_ND, probs_N = expert_input.rows_ND, expert_input.probs_N
    for result in (out_TD, rows_ND):
        (grad_TD,) = torch.autograd.grad(result.sum(), tokens_TD, retain_graph=True)
        assert grad_TD[:, 0].tolist() == [2, 2, 0]
    (grad_TK,) = torch.autograd.grad(probs_N.sum(), prob_TK, retain_graph=True)
    assert grad_TK.tolist() == [[1, 1], [1, 1], [0, 0]]
    if kernels:
        for result, given in ((out_TD, rows_ND), (rows_ND, tokens_TD)):
            with pytest.raises(ValueError, match=r"^create_graph must be False"):
                torch.autograd.grad(result.sum(), given, create_graph=True)


@KERNELS
@pytest.mark.parametrize(
    ("out_ND", "got"),
    [
        (torch.zeros(3, 2), "((3, 2), torch.float32, 'cpu')"),
        (torch.zeros(4, 3), "((4, 3), torch.float32, 'cpu')"),
        (torch.zeros(4), "((4,), torch.float32, 'cpu')"),
        (torch.zeros(4, 2, 1), "((4, 2, 1), torch.float32, 'cpu')"),
        (torch.zeros(4, 2, dtype=torch.int32), "((4, 2), torch.int32, 'cpu')"),
        (torch.zeros(4, 2, device="meta"), "((4, 2), torch.float32, 'meta')"),
        (torch.zeros(4, 2).to_sparse(), "'torch.sparse_coo tensor'"),
        (torch.zeros(4, 2).numpy(), "'ndarray'"),
        (None, "'NoneType'"),
    ],
    ids=str,
)
def test_what_is_no_output_of_the_rows_is_refused(monkeypatch, kernels, out_ND, got):
    monkeypatch.setattr(padded, "_has_kernels", lambda values: kernels)
    plan, tokens_TD = make_plan(torch.ones(2, 2, dtype=torch.bool), top_k=2), torch.ones(2, 2)
    wire = Collectives(2).start(plan, tokens_TD, 2)
    config = DispatchConfig(num_experts=2, top_k=2)
    expert_input, state = padded.dispatch(tokens_TD, torch.ones(2, 2), wire, config)
    with pytest.raises(ValueError, match=r"^out_ND must ") as error:
        padded.combine(out_ND, state)
    rule = "be floating point of shape (4, 2) on cpu, as the rows of dispatch"
    assert str(error.value) == f"out_ND must {rule}, got {got}"
    assert padded.combine(expert_input.rows_ND.double(), state).tolist() == [[2.0, 2.0]] * 2
