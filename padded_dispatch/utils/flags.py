"""Errors that name flags: a field that a user cannot see becomes the flag that sets it."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def errors_name_flags(given: argparse.Namespace, **flags: str) -> Iterator[None]:
    """Replace the field at the start of an error, "FIELD must ...", by the flag that sets it.

    A flag is named like its field, with "num_" left out.

    Args:
        given: what argparse has read; its names are those of the flags.
        flags: by field, flags that are named otherwise.
    """
    try:
        yield
    except ValueError as error:
        field, must, rest = str(error).partition(" must ")
        name = field.removeprefix("num_")
        flag = flags.get(field) or (f"--{name.replace('_', '-')}" if name in vars(given) else None)
        if must and flag:
            raise ValueError(f"{flag} must {rest}") from error
        raise
