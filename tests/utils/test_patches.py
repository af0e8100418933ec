"""Attributes are replaced, and put back exactly as they were."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from padded_dispatch.utils.patches import Patches


class Base:
    def inherited(self) -> str:
        return "base"

    @staticmethod
    def static() -> str:
        return "static"


class Child(Base):
    pass


def test_attributes_are_replaced_until_undo():
    owner, patches = SimpleNamespace(value=1), Patches()
    assert not patches
    patches.set(owner, "value", 2)
    assert owner.value == 2 and patches
    patches.undo()
    assert owner.value == 1 and not patches
    patches.undo()
    assert owner.value == 1


def test_what_is_replaced_is_known_until_undo():
    owner, alike, patches = SimpleNamespace(value=1), SimpleNamespace(value=1), Patches()
    assert not patches.replaces(owner, "value")
    patches.set(owner, "value", 2)
    assert patches.replaces(owner, "value")
    assert not patches.replaces(owner, "other") and not patches.replaces(alike, "value")
    patches.undo()
    assert not patches.replaces(owner, "value")


def test_a_missing_attribute_is_deleted_again():
    owner: Any = SimpleNamespace()
    with Patches() as patches:
        patches.set(owner, "value", 2)
        assert owner.value == 2
    assert vars(owner) == {}


def test_an_attribute_that_is_replaced_twice_gets_its_first_value_back():
    owner = SimpleNamespace(value=1)
    with Patches() as patches:
        patches.set(owner, "value", 2)
        patches.set(owner, "value", 3)
        assert owner.value == 3
    assert owner.value == 1


def test_the_end_of_a_block_undoes_also_after_an_error():
    owner = SimpleNamespace(value=1)
    with pytest.raises(RuntimeError, match="inside"), Patches() as patches:
        patches.set(owner, "value", 2)
        raise RuntimeError("inside")
    assert owner.value == 1


@pytest.mark.parametrize("name", ["inherited", "static"])
def test_an_inherited_attribute_shows_again(name):
    before = dict(vars(Child))
    with Patches() as patches:
        patches.set(Child, name, lambda *_: "patched")
        assert getattr(Child(), name)() == "patched"
        assert getattr(Base(), name)() != "patched"
    assert dict(vars(Child)) == before


def test_a_method_of_one_instance():
    owner = Base()
    with Patches() as patches:
        patches.set(owner, "inherited", lambda: "patched")
        assert owner.inherited() == "patched" and Base().inherited() == "base"
    assert vars(owner) == {} and owner.inherited() == "base"


def test_a_static_method_stays_static():
    with Patches() as patches:
        patches.set(Base, "static", staticmethod(lambda: "patched"))
        assert Base().static() == "patched"
    assert Base().static() == Base.static() == "static"


def test_an_owner_with_slots():
    field = dataclasses.field(default=1)
    with Patches() as patches:
        patches.set(field, "default", 2)
        assert field.default == 2
    assert field.default == 1
