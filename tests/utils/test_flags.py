"""Errors begin with the flag that the user gave; help shows defaults and short values."""

from argparse import ArgumentParser
from pathlib import Path

import pytest

from padded_dispatch.utils.flags import HelpFormatter, errors_name_flags


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("num_tokens must be 1, got 3", "--our-tokens must be 1, got 3"),
        ("min_capacity must be 1; x must go", "--our-min-capacity must be 1; x must go"),
        ("other must be 1", "other must be 1"),
        ("tokens are few", "tokens are few"),
    ],
)
def test_fields_become_flags(error, shown):
    with (
        pytest.raises(ValueError, match=f"^{shown}$"),
        errors_name_flags(("tokens", "min_capacity"), prefix="our_"),
    ):
        raise ValueError(error)


def test_help_shows_defaults_that_are_set_and_not_explained():
    parser = ArgumentParser(usage="x", formatter_class=HelpFormatter, add_help=False)
    parser.add_argument("--seed", type=int, default=0, help="a seed")
    parser.add_argument("--factors", nargs="+", type=float, default=[1.0, 2.0], help="2 %% more")
    parser.add_argument("--path", type=Path, help="a file (default: none)")
    parser.add_argument("--name", default="a", help="text (default: the first)")
    parser.add_argument("--off", action="store_true", help="a switch")
    shown = " ".join(parser.format_help().split())
    assert shown == (
        "usage: x options: --seed N a seed (default: 0) "
        "--factors X [X ...] 2 % more (default: 1.0 2.0) --path PATH a file (default: none) "
        "--name TEXT text (default: the first) --off a switch"
    )
