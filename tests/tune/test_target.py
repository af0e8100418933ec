"""Targets: which are refused, and how they read."""

import pytest

from padded_dispatch.tune.target import Target, percent


def test_the_default():
    target = Target()
    assert (target.drop, target.steps_share, target.confidence) == (0.05, 0.99, 0.95)
    assert str(target) == "at most 5 % of rows dropped in 99 % of steps"
    assert str(Target(drop=0.0, steps_share=0.5)) == "no row dropped in 50 % of steps"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("drop", 1.0),
        ("drop", 1.5),
        ("drop", -0.1),
        ("drop", float("nan")),
        ("steps_share", 0.0),
        ("steps_share", 1.0),
        ("steps_share", 1.5),
        ("confidence", 0.5),
        ("confidence", 1.0),
    ],
)
def test_wrong_targets(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a share .*, got {value}"):
        Target(**{name: value})


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"),
        (1e-7, "< 0.0001 %"),
        (1.5e-6, "0.00015 %"),
        (0.001, "0.1 %"),
        (0.01, "1 %"),
        (0.37456, "37.46 %"),
        (0.99, "99 %"),
        (0.995, "99.5 %"),
        (0.999999, "99.99 %"),
    ],
)
def test_percent(share, text):
    assert percent(share) == text
