"""Capacity factors as text."""

import pytest

from padded_dispatch.megatron.options import (
    read_factor,
    read_factor_table,
    read_factors,
    show_factor,
)


@pytest.mark.parametrize(("text", "factor"), [("1.25", 1.25), ("3", 3.0), ("no-drop", None)])
def test_a_factor_and_back(text, factor):
    assert read_factor("f", text) == factor
    assert show_factor(factor) == text


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "much", "none"])
def test_what_is_no_factor(text):
    with pytest.raises(ValueError, match=f"f={text!r} is not possible: give a number above 0, or"):
        read_factor("f", text)


def test_rising_factors():
    assert read_factors("f", "1.5,2,no-drop") == (1.5, 2.0, None)
    assert read_factors("f", "") == ()
    for text in ("2,1", "1,1", "no-drop,2"):
        with pytest.raises(ValueError, match="give rising factors"):
            read_factors("f", text)


def test_a_table():
    assert read_factor_table("f", "3:1.5,10:no-drop", 1) == {3: 1.5, 10: None}
    assert read_factor_table("f", "", 1) == {}
    assert read_factor_table("f", "0:2", 0) == {0: 2.0}
    for text in ("0:2", "3:1,3:2", "x:1", ":1", "1.5", "-1:2"):
        with pytest.raises(ValueError, match=f"f={text!r} is not possible: give NUMBER:FACTOR"):
            read_factor_table("f", text, 1)
    with pytest.raises(ValueError, match="f='' is not possible"):
        read_factor_table("f", "3:", 1)
