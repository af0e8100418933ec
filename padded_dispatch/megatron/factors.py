"""Capacity factors as text, as they stand in options and on command lines.

`1.25` is a factor; `no-drop` gives every token a slot with every expert (C = T). Several of them
stand as `1.5,2,no-drop`, and with what they hold for as `3:1.5,7:no-drop`.
"""

import math
from typing import Any

# Slots per (source rank, expert) relative to perfect balance; None drops nothing.
Factor = float | None
NO_DROP = "no-drop"


def read_factor(option: str, text: str) -> Factor:
    """A factor.

    Raises:
        ValueError: names the option, its value and what to give.
    """
    if text == NO_DROP:
        return None
    factor = _number(float, text)
    if factor is None or not math.isfinite(factor) or factor <= 0:
        raise ValueError(
            f"{option}={text!r} is not possible: give a number above 0, or '{NO_DROP}'"
        )
    return factor


def read_factors(option: str, text: str) -> tuple[Factor, ...]:
    """Factors, the next always larger than the one before; without text none.

    Raises:
        ValueError: names the option, its value and what to give.
    """
    factors = tuple(read_factor(option, part) for part in text.split(",") if text)
    sizes = [math.inf if factor is None else factor for factor in factors]
    if sizes != sorted(set(sizes)):
        raise ValueError(f"{option}={text!r} is not possible: give rising factors")
    return factors


def read_factor_table(option: str, text: str, first: int) -> dict[int, Factor]:
    """What holds for each number, which are `first` or above; without text nothing.

    Raises:
        ValueError: names the option, its value and what to give.
    """
    table: dict[int, Factor] = {}
    for part in text.split(",") if text else ():
        key, colon, factor = part.partition(":")
        number = _number(int, key)
        if not colon or number is None or number < first or number in table:
            raise ValueError(
                f"{option}={text!r} is not possible: give NUMBER:FACTOR,... with each number once, "
                f"from {first} on"
            )
        table[number] = read_factor(option, factor)
    return table


def show_factor(factor: Factor) -> str:
    """The text of a factor."""
    return NO_DROP if factor is None else f"{factor:g}"


def _number(kind: type[int] | type[float], text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        return None
