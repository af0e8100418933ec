"""Capacity factors as text."""

import pytest

from padded_dispatch.config import FIT, NO_DROP
from padded_dispatch.megatron.options import (
    read_factor,
    read_factor_table,
    read_factors,
    show_factor,
)


@pytest.mark.parametrize(
    ("text", "factor"), [("1.25", 1.25), ("3", 3.0), ("no-drop", NO_DROP), ("fit", FIT)]
)
def test_a_factor_and_back(text, factor):
    assert read_factor(text) == factor
    assert show_factor(factor) == text


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "much", "none"])
def test_what_is_no_factor(text):
    with pytest.raises(
        ValueError, match=f"^must be a number above 0, 'no-drop' or 'fit', got {text!r}$"
    ):
        read_factor(text)


def test_several_factors():
    assert read_factors("1.5,2,no-drop") == (1.5, 2.0, NO_DROP)
    assert read_factors("") == read_factors("none") == ()
    with pytest.raises(ValueError, match=r"^must be a number above 0 or 'no-drop', got 'fit'$"):
        read_factors("2,fit")


def test_a_table():
    assert read_factor_table("3:1.5,10:no-drop") == {3: 1.5, 10: NO_DROP}
    assert read_factor_table("") == read_factor_table("none") == {}
    for text in ("3:1,3:2", "x:1", ":1", "1.5"):
        with pytest.raises(ValueError, match=f"^must be NUMBER:FACTOR,.* got {text!r}$"):
            read_factor_table(text)
    with pytest.raises(ValueError, match="got ''"):
        read_factor_table("3:")
