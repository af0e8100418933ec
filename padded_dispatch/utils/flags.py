"""Flags in errors and in help.

Errors name the flag that sets a field, not the field. An error about an unknown flag offers the
most similar flag. Help shows defaults, and short names of values: `--tokens N [N ...]`.
"""

import argparse
import difflib
import re
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn


class HelpFormatter(argparse.HelpFormatter):
    """Help with the defaults of flags, except those that are off or that the text explains."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        off = default is None or default is False or default == argparse.SUPPRESS
        if text is None or off or not action.option_strings or "default:" in text:
            return text
        values = default if isinstance(default, list | tuple) else [default]
        return f"{text} (default: {' '.join(str(value) for value in values)})"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        known: dict[Any, str] = {int: "N", float: "X", Path: "PATH", str: "TEXT", None: "TEXT"}
        return known.get(action.type, super()._get_default_metavar_for_optional(action))


class Parser(argparse.ArgumentParser):
    """A parser with `HelpFormatter` that offers a known flag for an unknown one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Print the message and end the process with exit code 2."""
        _, unrecognized, unknown = message.partition("unrecognized arguments: ")
        if unrecognized:
            flag = re.split("[ =]", unknown)[0]  # Empty if the word is.
            message += "; " + similar(flag, self._option_string_actions, "--help lists the flags")
        super().error(message)


def similar(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return `did you mean ...?` with the known word that is most similar, or `otherwise`."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {found[0]}?" if found else otherwise


def read_factor(text: str) -> float | None:
    """Return a capacity factor of a command line, None for `none` and `no-drop`."""
    if text in ("none", "no-drop"):
        return None
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a number above 0, or 'none' to drop nothing, got {text!r}"
        ) from None


def flag(field: str) -> str:
    """Return the flag of a field: `--num-layers` for `num_layers`."""
    return f"--{field.replace('_', '-')}"


@contextmanager
def errors_name_flags(names: Container[str], *, prefix: str = "") -> Iterator[None]:
    """Replace the field at the start of an error, "FIELD must ...", by the flag that sets it.

    `names`: the fields that have a flag, without "num_", which the error may have in front. A
    flag's name is `prefix` and the field.
    """
    try:
        yield
    except ValueError as error:
        field, must, rest = str(error).partition(" must ")
        name = field.removeprefix("num_")
        if must and name in names:
            raise ValueError(f"{flag(prefix + name)} must {rest}") from error
        raise
