"""The fuzzer of the dispatcher: some of its examples, and that it finds mistakes."""

from collections import Counter

import pytest

from padded_dispatch.experts import padded, plain
from padded_dispatch.routing import select
from tests import fuzz


def test_some_examples():
    seen: Counter[str] = Counter()
    assert fuzz.fuzz(20261123, 60, seen) == (60, None)
    assert {"store", "expert", "padded", "probs", "position", "factor fit"} <= seen.keys()


RIGHT_ROWS, RIGHT_SUMS = plain.rows_of_choices, plain.add


def one_more_row(expert, place, offsets, level, num_experts):
    return RIGHT_ROWS(expert, place, offsets, level + 1, num_experts)


def twice(rows, *given):
    return RIGHT_SUMS(2 * rows, *given)


@pytest.mark.parametrize(
    ("module", "name", "wrong"),
    [
        (select, "kept_map_in_torch", lambda asked_TE, *_: (asked_TE, asked_TE.sum(0))),
        (plain, "rows_of_choices", one_more_row),
        (plain, "release", lambda top, offsets, before: None),
        (
            padded,
            "add",
            lambda rows, slot, sources, slots: plain.add(2 * rows, slot, sources, slots),
        ),
    ],
)
def test_a_mistake_is_found(monkeypatch, module, name, wrong):
    monkeypatch.setattr(module, name, wrong)
    ran, failure = fuzz.fuzz(1, 300, Counter())
    assert ran <= 300 and failure is not None
    assert "DispatchConfig(" in failure
