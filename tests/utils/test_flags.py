"""Errors begin with the flag that the user gave."""

from argparse import Namespace

import pytest

from padded_dispatch.utils.flags import errors_name_flags

GIVEN = Namespace(tokens=3, min_capacity=2, capacity_factors=[1.0])


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("num_tokens must be 1, got 3", "--tokens must be 1, got 3"),
        ("min_capacity must be 1; x must go", "--min-capacity must be 1; x must go"),
        ("capacity_factor must be 1, got -1", "--capacity-factors must be 1, got -1"),
        ("other must be 1", "other must be 1"),
        ("tokens are few", "tokens are few"),
    ],
)
def test_fields_become_flags(error, shown):
    with (
        pytest.raises(ValueError, match=f"^{shown}$"),
        errors_name_flags(GIVEN, capacity_factor="--capacity-factors"),
    ):
        raise ValueError(error)


def test_other_errors_and_none_pass():
    with errors_name_flags(GIVEN):
        pass
    with pytest.raises(KeyError, match="tokens must"), errors_name_flags(GIVEN):
        raise KeyError("tokens must")
