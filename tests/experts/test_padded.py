"""Padded cells on CPUs against the oracle, with NaN wherever an expert could leave something."""

from typing import Any

import pytest
import torch
from torch import Tensor

from padded_dispatch import DispatchConfig
from padded_dispatch.config import FIT, NO_DROP
from padded_dispatch.exchange.collectives import Collectives
from padded_dispatch.experts import padded
from padded_dispatch.experts.padded import ExpertInput, Sent
from padded_dispatch.routing.plan import choice_probs, make_plan
from padded_dispatch.routing.select import select
from tests.support import reference
from tests.support.whole_layers import (
    ROUTINGS,
    Case,
    Found,
    OneRank,
    assert_found,
    expected,
    groups_of,
    make_case,
    on_all_ranks,
    padded_experts,
    rows_on_the_wire,
)

RANKS = pytest.mark.parametrize(
    ("num_ranks", "etp_size"),
    [(1, 1), (1, 2), (4, 1), (2, 2), (8, 1)],
    ids=lambda value: str(value),
)


def config_of(num_ranks: int, etp_size: int = 1, **changes: Any) -> DispatchConfig:
    sizes = dict(num_experts=2 * num_ranks, top_k=min(3, 2 * num_ranks), capacity_factor=0.75)
    return DispatchConfig(**{**sizes, **changes}, num_ranks=num_ranks, etp_size=etp_size)


def check_input(case: Case, layer: int, source: int, tokens_TD: Any, given: ExpertInput) -> None:
    """Compare what the experts read, bit by bit; tokens of other ranks are those of layer 0."""
    config, rank = case.config, source % case.config.num_ranks
    rows_STE = rows_on_the_wire(case, case.layers[layer])
    count_SL = reference.counts(rows_STE, rank, config.num_ranks)
    assert given.count_SL.dtype == torch.int32 and given.count_SL.tolist() == count_SL.tolist()
    capacity = given.capacity
    if config.fits:
        assert capacity - max(1, count_SL.max()) in range(config.alignment)
        assert capacity * config.num_sources % config.alignment == 0
    else:
        assert capacity == config.capacity(len(tokens_TD))
    where = dict(capacity=capacity, rank=rank, num_ranks=config.num_ranks)
    cells = reference.cells(case.tokens_STD, case.layers[layer].probs_STE, rows_STE, **where)
    if layer == 0:
        rows_ND = torch.from_numpy(cells.rows_LSCD).flatten(0, 2)
        assert torch.equal(given.rows_ND, rows_ND)
    assert torch.equal(given.probs_N, torch.from_numpy(cells.probs_LSC).flatten())
    is_real_N = torch.from_numpy(cells.source_LSC >= 0).flatten()
    assert not given.rows_ND[~is_real_N].any()


def layers(case: Case) -> Found:
    config, rank = case.config, OneRank(case)
    local = config.num_local_experts
    exchange = Collectives(local, *groups_of(config), policy=config.policy)

    def sent(layer: int, tokens_TD: Tensor) -> tuple[ExpertInput, Sent]:
        num_tokens, slots = len(tokens_TD), config.wire_slots(len(tokens_TD))
        capacity = None if config.fits else config.capacity(num_tokens)
        given = dict(policy=config.policy, mask_T=rank.masks_YT[layer])
        selection = select(
            rank.maps_YTE[layer], rank.probs_YTE[layer], capacity=capacity or num_tokens, **given
        )
        map_TE, struck = exchange.strike(selection.kept_TE, selection.probs_TE, slots)
        assert struck is None or not struck.any(), "cells leave nothing to strike"
        plan = make_plan(map_TE, top_k=config.top_k)
        return padded.dispatch(
            tokens_TD,
            choice_probs(selection.probs_TE, plan.expert_TK),
            exchange.start(plan, tokens_TD, slots),
            capacity=capacity,
            alignment=config.alignment,
        )

    tokens_TD = rank.tokens_TD
    for layer, weights in enumerate(rank.weights_Y):
        given, kept = sent(layer, tokens_TD)
        check_input(case, layer, rank.source, tokens_TD, given)
        out_ND = padded_experts(given, weights, case.activation)
        tokens_TD = tokens_TD + padded.combine(out_ND, kept)
    return rank.found(tokens_TD)


def check(case: Case) -> None:
    assert_found(on_all_ranks(case.config, layers, case), expected(case))


@RANKS
@pytest.mark.parametrize("routing", ROUTINGS)
def test_cells_are_the_oracle(num_ranks, etp_size, routing):
    check(make_case(config_of(num_ranks, etp_size), [routing, "full"]))


@pytest.mark.parametrize(
    ("changes", "num_tokens"),
    [
        ({"capacity_factor": 0.01}, 7),
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
    check(case)


@pytest.mark.parametrize(("num_ranks", "etp_size"), [(1, 1), (2, 1), (1, 2)])
def test_kernels_are_the_oracle(monkeypatch, num_ranks, etp_size):
    """The functions of GPUs, in Triton's interpreter."""
    monkeypatch.setattr(padded, "_has_kernels", lambda values: True)
    check(make_case(config_of(num_ranks, etp_size), ["thin", "hot"], num_tokens=5, hidden=17))


def test_a_row_beyond_the_capacity_counts_as_zero():
    plan = make_plan(torch.ones(3, 1, dtype=torch.bool), top_k=1)
    tokens_TD = torch.ones(3, 2, requires_grad=True)
    wire = Collectives(1).start(plan, tokens_TD, 3)
    given, sent = padded.dispatch(tokens_TD, torch.ones(3, 1), wire, capacity=2)
    out_TD = padded.combine(given.rows_ND, sent)
    assert out_TD[:, 0].tolist() == [1, 1, 0]
    out_TD.sum().backward()
    assert tokens_TD.grad is not None and tokens_TD.grad[:, 0].tolist() == [1, 1, 0]
