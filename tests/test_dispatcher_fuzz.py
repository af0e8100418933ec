"""The fuzzer of the dispatcher: some of its examples, and that it finds mistakes."""

import dataclasses
from collections import Counter

import pytest
import torch

from padded_dispatch.ops import overflow, rows
from tests import fuzz
from tests.support import fuzz_oracle
from tests.support.fuzz_cases import Case, Source


def test_some_examples():
    ran, failure = fuzz.fuzz(40, 20261122, Counter())
    assert (ran, failure) == (40, None)


CASE = Case(
    num_ranks=1,
    etp_size=1,
    num_local=2,
    top_k=1,
    factor=0.5,
    alignment=1,
    pool="expert",
    policy="probs",
    remedy="none",
    rounds=1,
    packed=False,
    dtype="bfloat16",
    probs_dtype="float32",
    draw=0,
    num_tokens=3,
    hidden=1,
    weights=[[2, -1]],
    sources=[
        Source(
            asked=[[0], [0], [1]],
            probs=[[2, 0], [4, 0], [0, 8]],
            scores=[[2, 1], [4, 0], [0, 8]],
            mask=None,
            protected=[True, False, False],
            tokens=[[1], [2], [-2]],
            grad=[[1], [1], [2]],
        )
    ],
)


def test_an_example_by_hand():
    """C = 1: token 0 is protected, so token 1, which is more probable, is dropped."""
    (answer,) = fuzz_oracle.answers(CASE)
    assert answer.kept == {(0, 0), (2, 1)}
    assert answer.demand == [2, 1]
    assert answer.protected_dropped == [0, 0]
    assert answer.out == [[2 * 0.25 * 1], [0.0], [-1 * 1.0 * -2]]
    assert answer.grad_tokens == [[2 * 0.25 * 1], [0.0], [-1 * 1.0 * 2]]
    assert answer.grad_probs == [[2 * 1 * 1, 0.0], [0.0, 0.0], [0.0, -1 * -2 * 2]]
    fuzz.check(CASE)


def test_an_example_of_rerouting_by_hand():
    """Token 1 lost expert 0 and finds expert 1, whose slot token 2 did not ask for."""
    source = dataclasses.replace(
        CASE.sources[0], asked=[[0], [0], []], scores=[[2, 1], [4, 3], [0, 8]]
    )
    case = dataclasses.replace(CASE, remedy="reroute", sources=[source])
    (answer,) = fuzz_oracle.answers(case)
    assert answer.kept == {(0, 0), (1, 1)}
    assert answer.probs[1] == [0.0, 0.375]
    assert answer.rerouted == [0, 1]
    assert answer.grad_scores[1] == [0.0, -1 * 2 * 1]
    fuzz.check(case)


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        (overflow, "_has_room", lambda rows, pools, slots: torch.ones(rows.shape[1]).bool()),
        (rows, "_take", lambda source, index, *, zeros=True: source[index.clamp(min=0)]),
    ],
)
def test_a_mistake_is_found(monkeypatch, module, name, wrong):
    monkeypatch.setattr(module, name, wrong)
    ran, failure = fuzz.fuzz(300, 1, Counter())
    assert ran <= 300 and failure is not None
    assert "Case(" in failure
