"""Everything that Megatron's config has no field for, in one frozen value.

Set `config.padded_dispatch = PaddedOptions(...)` on a TransformerConfig, or give the options for
all configs to `install(options=...)`. Command-line flags and the README's table come from here.
"""

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Experts = Literal["module", "packed"]


@dataclass(frozen=True, kw_only=True)
class PaddedOptions:
    """Options of the padded dispatcher beside Megatron's own `moe_*` fields."""

    min_capacity: int = field(
        default=1, metadata={"help": "least slots per (source rank, expert), whatever the factor"}
    )
    alignment: int = field(
        default=1, metadata={"help": "rows of an expert's buffer are a multiple of this"}
    )
    experts: Experts = field(
        default="module",
        metadata={
            "help": "module: the experts of the layer's spec, on padded rows; packed: ours, which "
            "compute real rows only",
            "choices": get_args(Experts),
        },
    )

    def __post_init__(self) -> None:
        if self.experts not in get_args(Experts):
            raise ValueError(
                f"experts={self.experts!r} is not possible: choose one of "
                f"{', '.join(get_args(Experts))}"
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag per option, `--padded-...`, to `parser`."""
    group = parser.add_argument_group("padded dispatch")
    for option in dataclasses.fields(PaddedOptions):
        group.add_argument(
            _flag(option),
            type=type(option.default),
            default=option.default,
            choices=option.metadata.get("choices"),
            help=f"{option.metadata['help']} (default: {option.default})",
        )


def from_arguments(arguments: argparse.Namespace) -> PaddedOptions:
    """The options that `add_arguments`' flags were set to."""
    values = {
        option.name: getattr(arguments, f"padded_{option.name}")
        for option in dataclasses.fields(PaddedOptions)
    }
    return PaddedOptions(**values)


def markdown_table() -> str:
    """All options as a Markdown table: name, flag, default, meaning."""
    rows = [
        f"| `{option.name}` | `{_flag(option)}` | {option.default} | {option.metadata['help']} |"
        for option in dataclasses.fields(PaddedOptions)
    ]
    return "\n".join(["| option | flag | default | meaning |", "|---|---|---|---|", *rows])


def _flag(option: dataclasses.Field[Any]) -> str:
    return f"--padded-{option.name.replace('_', '-')}"
