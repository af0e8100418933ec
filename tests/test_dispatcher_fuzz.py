"""The fuzzer of the dispatcher: some of its examples, and that it finds mistakes."""

import dataclasses
from collections import Counter

import pytest

from padded_dispatch.routing import rows, select
from tests import fuzz
from tests.support import fuzz_oracle
from tests.support.fuzz_oracle import Case, Source


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
    packed=False,
    dtype="bfloat16",
    probs_dtype="float32",
    num_tokens=3,
    hidden=1,
    weights=[[2, -1]],
    sources=[
        Source(
            asked=[[0], [0], [1]],
            probs=[[2, 0], [4, 0], [0, 8]],
            mask=None,
            tokens=[[1], [2], [-2]],
            grad=[[1], [1], [2]],
        )
    ],
)


def test_an_example_by_hand():
    """C = 1: token 0 is dropped, because token 1 is more probable."""
    (answer,) = fuzz_oracle.answers(CASE)
    assert answer.kept == {(1, 0), (2, 1)}
    assert answer.demand == [2, 1]
    assert answer.out == [[0.0], [2 * 0.5 * 2], [-1 * 1.0 * -2]]
    assert answer.grad_tokens == [[0.0], [2 * 0.5 * 1], [-1 * 1.0 * 2]]
    assert answer.grad_probs == [[0.0, 0.0], [2 * 1 * 2, 0.0], [0.0, -1 * -2 * 2]]
    fuzz.check(CASE)
    (answer,) = fuzz_oracle.answers(dataclasses.replace(CASE, policy="position"))
    assert answer.kept == {(0, 0), (2, 1)}


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        (select, "kept_map", lambda asked_TE, *_: (asked_TE, asked_TE.sum(0))),
        (rows, "_take", lambda source, index, *, zeros=True: source[index.clamp(min=0)]),
    ],
)
def test_a_mistake_is_found(monkeypatch, module, name, wrong):
    monkeypatch.setattr(module, name, wrong)
    ran, failure = fuzz.fuzz(300, 1, Counter())
    assert ran <= 300 and failure is not None
    assert "Case(" in failure
