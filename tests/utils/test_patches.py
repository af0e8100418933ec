"""Attributes are replaced, and put back exactly as they were."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from padded_dispatch.utils.patches import Patches, Wraps


class Base:
    def inherited(self) -> str:
        return "base"

    @staticmethod
    def static() -> str:
        return "static"


class Child(Base):
    pass


def has(owner: Any, name: str) -> tuple[Any, Any]:
    try:
        own = vars(owner).get(name)
    except TypeError:  # A field has slots.
        own = None
    return getattr(owner, name, None), own


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (SimpleNamespace(value=1), "value"),
        (SimpleNamespace(), "missing"),
        (Child, "inherited"),
        (Child, "static"),
        (Base, "static"),  # It stays static.
        (Base(), "inherited"),
        (dataclasses.field(default=1), "default"),
    ],
)
def test_attributes_are_replaced_until_the_end_of_a_block(owner, name):
    before = has(owner, name)
    with pytest.raises(RuntimeError, match="inside"), Patches() as patches:
        for value in ("one", "other"):
            patches.set(owner, name, value)
            assert getattr(owner, name) == value
        raise RuntimeError("inside")
    assert has(owner, name)[1] is before[1] and has(owner, name)[0] == before[0]


def test_a_function_is_wrapped_once_and_what_another_tool_put_on_top_stays():
    owner, wraps = SimpleNamespace(one=1, other=2), Wraps()
    for _ in range(2):
        wraps.wrap(owner, "one", lambda value: [value])
        wraps.wrap(owner, "other", lambda value: [value])
    assert (owner.one, owner.other) == ([1], [2])
    ours, owner.other = owner.other, "theirs"
    wraps.undo()
    assert (owner.one, owner.other) == (1, "theirs")
    wraps.wrap(owner, "other", lambda value: [value])  # Ours is still below theirs.
    wraps.wrap(owner, "one", lambda value: [value])
    assert (owner.one, owner.other) == ([1], "theirs")
    owner.other = ours
    wraps.undo()
    assert (owner.one, owner.other) == (1, 2)
