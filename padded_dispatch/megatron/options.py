"""Everything that Megatron's config has no field for, in one frozen value.

Set `config.padded_dispatch = PaddedOptions(...)` on a TransformerConfig, or give the options for
all configs to `install(options=...)`. Command-line flags and the table of options in
`padded_dispatch/megatron/README.md` are made from the fields here.

Options are typed values. Text is parsed in one place, for command lines: `1.25` is a capacity
factor, `no-drop` is `NO_DROP`, `fit` is `FIT`, and factors of layers are `3:1.5,7:no-drop`.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from padded_dispatch.config import (
    FIT,
    NO_DROP,
    CapacityFactor,
    ExchangeKind,
    is_positive,
    pool_named,
    require,
)
from padded_dispatch.utils.flags import errors_name_flags, flag, similar

CapacityPool = Literal["auto", "store", "cells"]
Experts = Literal["auto", "module", "packed"]
OnOverflow = Literal["warn", "error", "retry"]

_NO_DROP_TEXT = "no-drop"


def read_factor(text: str) -> CapacityFactor:
    """Parse a capacity factor: a number above 0, `no-drop`, or `fit`.

    Raises:
        ArgumentTypeError: shows the text and what to give; argparse adds the flag.
    """
    if text in (FIT, _NO_DROP_TEXT):
        return FIT if text == FIT else NO_DROP
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        rule = f"must be a number above 0 or '{_NO_DROP_TEXT}'"
        raise argparse.ArgumentTypeError(f"{rule}, got {text!r}")
    return factor


def read_factor_table(text: str) -> dict[int, CapacityFactor]:
    """Parse `3:1.5,7:no-drop`; `none` and empty text are an empty table.

    Raises:
        ArgumentTypeError: shows the text and what to give; argparse adds the flag.
    """
    table: dict[int, CapacityFactor] = {}
    for part in [] if text in ("", "none") else text.split(","):
        key, colon, factor = part.partition(":")
        number = int(key) if key.strip().isdecimal() else 0
        if not colon or number < 1 or number in table:
            rule = "must be LAYER:FACTOR,... from layer 1 on, each once"
            raise argparse.ArgumentTypeError(f"{rule}, got {text!r}")
        table[number] = read_factor(factor)
    return table


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text in ("", "none") else read(text)


def _option(default: object, help: str, **metadata: Any) -> Any:
    """Return a dataclass field with what its flag and its row in the table need."""
    metadata |= {"help": help}
    if default == {}:
        return field(default_factory=dict, hash=False, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedOptions:
    """Options of the padded dispatcher beside Megatron's own `moe_*` fields.

    `dataclasses.asdict` gives values that YAML holds, and that `PaddedOptions(**...)` reads back.

    It has slots, and so no `__dict__`. Megatron-Bridge copies a config before it sends it to other
    ranks, and sets all attributes of values with a `__dict__`, which a frozen dataclass refuses.

    Raises:
        ValueError: names the option, its value and what to set.
    """

    capacity_pool: CapacityPool = _option(
        "auto",
        "which rows share room: store: the rows of all layers, for packed experts; cells: the rows "
        "of one (source rank, expert), which have a fixed number of slots; auto: store for packed "
        "experts, else cells",
        choices=get_args(CapacityPool),
        read=pool_named,
    )
    experts: Experts = _option(
        "auto",
        "auto: packed where the config allows it, else module; module: experts of the layer's "
        "spec, on padded rows; packed: this package's, on real rows",
        choices=get_args(Experts),
    )
    exchange: ExchangeKind = _option(
        "auto",
        "auto: direct where it can work, else alltoall; alltoall: collectives, by any backend; "
        "direct: writes between the GPUs of a host, for packed experts",
        choices=get_args(ExchangeKind),
    )
    layer_factors: Mapping[int, CapacityFactor] = _option(
        {},
        "factors of single layers, such as 3:1.5,7:no-drop; Megatron numbers layers from 1, those "
        "of multi-token prediction come last",
        read=read_factor_table,
        metavar="LAYER:FACTOR,...",
    )
    eval_factor: CapacityFactor | None = _option(
        None,
        "factor in evaluation; none: eager evaluation and text generation drop nothing, evaluation "
        "in a CUDA graph is as training",
        read=_or_none(read_factor),
        metavar="FACTOR",
    )
    on_overflow: OnOverflow = _option(
        "warn",
        "when a layer dropped more than the threshold: warn: log it the 1st, 2nd, 4th, 8th ... "
        "time; error: end the run; retry: repeat, without dropping, each step that dropped "
        "rows, before the optimizer runs",
        choices=get_args(OnOverflow),
    )
    overflow_threshold: float = _option(
        0.0, "share of a layer's rows that may be dropped", metavar="SHARE"
    )
    trace: str | None = _option(
        None,
        "folder for routing traces, for padded-dispatch tune: one file per rank, about 1 GiB at "
        "most; a loop of your own gives StepHooks `passes`",
        read=_or_none(str),
        metavar="FOLDER",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "capacity_pool", pool_named(self.capacity_pool))
        for option in dataclasses.fields(self):
            choices, value = option.metadata.get("choices"), getattr(self, option.name)
            if choices:
                require(value in choices, option.name, value, f"be one of {', '.join(choices)}")
        packs = self.experts in ("auto", "packed")
        rule = f"be auto or alltoall with experts={self.experts!r}"
        fix = "set experts='packed' to use direct writes"
        require(packs or self.exchange != "direct", "exchange", self.exchange, rule, fix)
        rule = f"be auto or cells with experts={self.experts!r}, which read padded rows"
        fix = "set experts='packed', or leave it to 'auto'"
        require(
            packs or self.capacity_pool != "store", "capacity_pool", self.capacity_pool, rule, fix
        )
        table = self.layer_factors
        valid = isinstance(table, Mapping) and all(
            type(number) is int and number >= 1 and is_positive(factor)
            for number, factor in table.items()
        )
        rule = "map whole numbers from 1 on to factors above 0, each number once"
        fix = "write, for example, {3: 1.5, 7: NO_DROP}"
        require(valid, "layer_factors", table, rule, fix)
        object.__setattr__(self, "layer_factors", dict(table))
        factor = self.eval_factor
        valid = factor in (None, FIT) or is_positive(factor)
        require(valid, "eval_factor", factor, "be a number above 0, NO_DROP or None")
        share = self.overflow_threshold
        valid = share == 0 or (is_positive(share) and share < 1)
        require(valid, "overflow_threshold", share, "be a share from 0 to below 1")
        rule = "be 0.0 with on_overflow='retry', which leaves no row dropped"
        fix = "leave out one of the two"
        require(self.on_overflow != "retry" or share == 0, "overflow_threshold", share, rule, fix)
        folder = self.trace
        valid = folder is None or (isinstance(folder, str) and folder != "")
        require(valid, "trace", folder, "be the name of a folder, or None")


def _naming_unknown(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def checked(self: PaddedOptions, **given: object) -> None:
        for name in given.keys() - {*_NAMES}:
            fix = similar(name, _NAMES, f"they are {', '.join(_NAMES)}")
            require(False, "PaddedOptions", name, "get options that it has", fix)
        init(self, **given)

    return checked


def require_options(name: str, value: object) -> None:
    """Raise if `value` is no `PaddedOptions`: a dict of a YAML file, for example.

    Raises:
        ValueError: names the value as `name`.
    """
    fix = "write PaddedOptions(**...)" if isinstance(value, Mapping) else "make one"
    require(isinstance(value, PaddedOptions), name, value, "be PaddedOptions", fix)


def show(default: object) -> str:
    """Return a default as help texts and the README's table show it."""
    return "none" if default is None or default == {} else str(default)


def add_arguments(parser: argparse.ArgumentParser, *, bare: tuple[str, ...] = ()) -> None:
    """Add one flag per option, `--padded-...`, to `parser`; those in `bare` by name as well."""
    group = parser.add_argument_group("padded dispatch")
    for option in dataclasses.fields(PaddedOptions):
        default = getattr(_DEFAULTS, option.name)
        group.add_argument(
            flag(f"padded_{option.name}"),
            *([f"--{option.name}"] if option.name in bare else []),
            type=option.metadata.get("read", type(default)),
            default=default,
            choices=option.metadata.get("choices"),
            metavar=option.metadata.get("metavar"),
            help=f"{option.metadata['help']} (default: {show(default)})",
        )


def from_arguments(arguments: argparse.Namespace) -> PaddedOptions:
    """Return the options that `add_arguments`' flags were set to; errors name the flag."""
    with padded_flags():
        return PaddedOptions(**{name: getattr(arguments, f"padded_{name}") for name in _NAMES})


def padded_flags() -> AbstractContextManager[None]:
    """Let errors name the flag of an option in place of the option."""
    return errors_name_flags(_NAMES, prefix="padded_")


_DEFAULTS = PaddedOptions()
_NAMES = tuple(dataclasses.asdict(_DEFAULTS))
PaddedOptions.__init__ = _naming_unknown(PaddedOptions.__init__)
