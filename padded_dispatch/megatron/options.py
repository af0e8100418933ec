"""Everything that Megatron's config has no field for, in one frozen value.

Set `config.padded_dispatch = PaddedOptions(...)` on a TransformerConfig, or give the options for
all configs to `install(options=...)`. Command-line flags and the table of options in
`padded_dispatch/megatron/README.md` are made from the fields here.

Options are typed values. Text is parsed in one place, for command lines: `1.25` is a capacity
factor, `no-drop` is `NO_DROP` and `fit` is `FIT`; factors of layers or steps are
`3:1.5,7:no-drop`.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from padded_dispatch.config import (
    CAPACITY_POOLS,
    FIT,
    NO_DROP,
    CapacityFactor,
    CapacityPool,
    ExchangeKind,
    require,
)

Experts = Literal["auto", "module", "packed"]
OnOverflow = Literal["drop", "warn", "error", "grow", "retry"]

_NO_DROP_TEXT = "no-drop"


def read_factor(text: str) -> CapacityFactor:
    """Parse a capacity factor: a number above 0, `no-drop`, or `fit`.

    Raises:
        ValueError: shows the text and what to give.
    """
    return FIT if text == FIT else _read_number(text, f", '{_NO_DROP_TEXT}' or '{FIT}'")


def read_factors(text: str) -> tuple[float, ...]:
    """Parse `1.5,2,no-drop`; `none` and empty text are no factor.

    Raises:
        ValueError: shows the text and what to give.
    """
    return tuple(map(_read_number, _parts(text)))


def read_factor_table(text: str) -> dict[int, CapacityFactor]:
    """Parse `3:1.5,7:no-drop`; `none` and empty text are an empty table.

    Raises:
        ValueError: shows the text and what to give.
    """
    table: dict[int, CapacityFactor] = {}
    for part in _parts(text):
        key, colon, factor = part.partition(":")
        number = _number(int, key)
        if not colon or number is None or number in table:
            raise ValueError(f"must be NUMBER:FACTOR,... with each number once, got {text!r}")
        table[number] = read_factor(factor)
    return table


def show_factor(factor: CapacityFactor) -> str:
    """Return the text of a factor."""
    if isinstance(factor, str):
        return factor
    return _NO_DROP_TEXT if factor == NO_DROP else f"{factor:g}"


def _read_number(text: str, or_words: str = f" or '{_NO_DROP_TEXT}'") -> float:
    if text == _NO_DROP_TEXT:
        return NO_DROP
    factor = _number(float, text)
    if factor is None or not math.isfinite(factor) or factor <= 0:
        raise ValueError(f"must be a number above 0{or_words}, got {text!r}")
    return factor


def _parts(text: str) -> list[str]:
    return [] if text in ("", "none") else text.split(",")


def _read_optional_factor(text: str) -> CapacityFactor | None:
    return read_factor(text) if _parts(text) else None


def _read_optional_text(text: str) -> str | None:
    return None if text in ("", "none") else text


def _read_schedule(text: str) -> tuple[tuple[int, CapacityFactor], ...]:
    return tuple(read_factor_table(text).items())


def _read_auto_or_count(text: str) -> int | Literal["auto"]:
    number = _number(int, text)
    if text != "auto" and number is None:
        raise ValueError(f"must be a whole number or 'auto', got {text!r}")
    return "auto" if number is None else number


def _number(kind: type[int] | type[float], text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        return None


def _show(value: Any) -> str:
    """Return the text that a flag takes for a value; "none" for an empty one."""
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if isinstance(value, tuple):
        pairs = [
            f"{item[0]}:{show_factor(item[1])}" if isinstance(item, tuple) else show_factor(item)
            for item in value
        ]
        return ",".join(pairs) or "none"
    if isinstance(value, float):
        return show_factor(value)
    return "none" if value is None else str(value)


def _option(default: Any, help: str, **metadata: Any) -> Any:
    """Return a dataclass field with what its flag and its row in the table need."""
    metadata |= {"help": help}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedOptions:
    """Options of the padded dispatcher beside Megatron's own `moe_*` fields.

    It has slots, and so no `__dict__`: Megatron-Bridge copies a config before it goes to other
    ranks, and sets each attribute of each value with a `__dict__`, which a frozen value refuses.

    Raises:
        ValueError: names the option, its value and what to set.
    """

    capacity_pool: CapacityPool = _option(
        "expert",
        "which rows share slots: expert: a cell of C slots for each (source rank, expert); rank: "
        "one pool for each (source, destination rank). Both have as many slots; rank needs packed "
        "experts",
        choices=CAPACITY_POOLS,
    )
    layer_factors: Mapping[int, CapacityFactor] = _option(
        {},
        "capacity factors of single layers, such as 3:1.5,7:no-drop, by Megatron's layer number, "
        "which starts at 1; layers of multi-token prediction come last",
        read=read_factor_table,
    )
    eval_factor: CapacityFactor | None = _option(
        None,
        "capacity factor in evaluation, no-drop, or fit: sizes of each pass as its routing needs, "
        "nothing dropped; none: fit where evaluation is eager, else as in training, and text "
        "generation drops nothing",
        read=_read_optional_factor,
    )
    schedule: tuple[tuple[int, CapacityFactor], ...] = _option(
        (),
        "capacity factors over the steps, such as 0:2,200:1.25: the second holds once 200 steps "
        "are done; each change captures CUDA graphs again, and layers with a factor of their own "
        "keep it; 0:fit trains eagerly without drops",
        read=_read_schedule,
    )
    on_overflow: OnOverflow = _option(
        "drop",
        "what to do when telemetry finds that a layer dropped more than the threshold: drop: go "
        "on; warn: log it; error: end the run; grow: give the layer a larger factor; or, with "
        "retry, after every step that dropped anything: repeat it without dropping, before the "
        "optimizer",
        cost="retry: a wait of the host per step, and the repeated steps",
        choices=get_args(OnOverflow),
    )
    overflow_threshold: float = _option(0.0, "share of a layer's rows that may be dropped")
    grow_factors: tuple[float, ...] = _option(
        (1.5, 2.0, 3.0, 4.0, NO_DROP),
        "capacity factors that grow may choose, the next larger one each time",
        read=read_factors,
    )
    grow_after: int = _option(3, "reads in a row above the threshold after which a layer grows")
    telemetry_every: int = _option(
        10, "steps between two reads of what was dropped", cost="19 us for counting, always"
    )
    trace: str | None = _option(
        None,
        "folder for routing traces in Megatron-LM's own loop, one file per rank, for "
        "padded-dispatch tune: a hundred steps or more, 1 GiB per rank at most",
        read=_read_optional_text,
    )
    experts: Experts = _option(
        "auto",
        "auto: our own, by shape, where the config allows it, else module; module: the experts of "
        "the layer's spec, on padded rows; packed: ours, which compute real rows only",
        choices=get_args(Experts),
    )
    exchange: ExchangeKind = _option(
        "auto",
        "auto: direct where it can work, else alltoall; alltoall: all slots, by any backend; "
        "direct: stores of real rows between the GPUs of one host, for packed experts; results are "
        "those of alltoall, bit by bit. With overlap_moe_expert_parallel_comm and pipeline stages "
        "auto takes alltoall",
        choices=get_args(ExchangeKind),
    )
    microbatches_in_flight: int | Literal["auto"] = _option(
        "auto",
        "with direct, the most forward passes of a layer that wait for their backward pass; each "
        "has a buffer; auto: what the pipeline schedule needs",
        read=_read_auto_or_count,
        cost="E * C * D elements each",
    )

    def __post_init__(self) -> None:
        # YAML and JSON have lists only.
        if isinstance(self.schedule, list):
            object.__setattr__(self, "schedule", tuple(map(tuple, self.schedule)))
        if isinstance(self.grow_factors, list):
            object.__setattr__(self, "grow_factors", tuple(self.grow_factors))
        for option in dataclasses.fields(self):
            choices, value = option.metadata.get("choices"), getattr(self, option.name)
            if choices:
                require(value in choices, option.name, value, f"be one of {', '.join(choices)}")
        require(
            self.exchange != "direct" or self.experts in ("auto", "packed"),
            "exchange",
            self.exchange,
            f"be auto or alltoall with experts={self.experts!r}",
            "set experts='packed' to use direct stores",
        )
        require(
            self.on_overflow != "retry" or self.overflow_threshold == 0,
            "overflow_threshold",
            self.overflow_threshold,
            "be 0.0 with on_overflow='retry', which leaves no row dropped",
            "leave out one of the two",
        )
        require(
            self.capacity_pool == "expert" or self.experts in ("auto", "packed"),
            "capacity_pool",
            self.capacity_pool,
            f"be expert with experts={self.experts!r}, which read padded rows",
            "set experts='packed', or leave it to 'auto'",
        )
        folder = self.trace
        require(
            folder is None or (isinstance(folder, str) and folder != ""),
            "trace",
            folder,
            "be the name of a folder, or None",
        )
        share = self.overflow_threshold
        require(0 <= share < 1, "overflow_threshold", share, "be a share from 0 to below 1")
        for name in ("grow_after", "telemetry_every"):
            value = getattr(self, name)
            require(_is_count(value), name, value, "be a whole number of at least 1")
        name, value = "microbatches_in_flight", self.microbatches_in_flight
        rule = "be a whole number of at least 1, or 'auto'"
        require(value == "auto" or _is_count(value), name, value, rule)
        for name, first, example in (
            ("layer_factors", 1, "{3: 1.5, 7: NO_DROP}"),
            ("schedule", 0, "((0, 2.0), (200, 1.25))"),
        ):
            value = getattr(self, name)
            pairs = _pairs(value)
            require(
                pairs is not None and all(n >= first and _is_factor(f) for n, f in pairs),
                name,
                value,
                f"map whole numbers from {first} on to factors above 0, each number once",
                f"write, for example, {example}",
            )
        factor = self.eval_factor
        require(
            factor is None or _is_factor(factor),
            "eval_factor",
            factor,
            "be a number above 0, NO_DROP, FIT or None",
        )
        factors = self.grow_factors
        require(
            isinstance(factors, tuple)
            and all(map(_is_number, factors))
            and list(factors) == sorted(set(factors)),
            "grow_factors",
            factors,
            "be a tuple of rising factors above 0",
        )

    @property
    def factor_of_step(self) -> dict[int, CapacityFactor]:
        """`schedule` as a dict: the factor that holds once so many steps are done."""
        return dict(self.schedule)

    @property
    def to_control(self) -> dict[str, Any]:
        """The options that have no effect unless a training loop has a `CapacityControl`."""
        controlled = {}
        if self.on_overflow not in ("drop", "retry"):
            controlled["on_overflow"] = self.on_overflow
        if self.factor_of_step.keys() - {0}:
            controlled["schedule"] = self.schedule
        return controlled


def require_options(name: str, value: Any) -> None:
    """Raise if `value` is no `PaddedOptions`: a dict of a YAML file, for example.

    Raises:
        ValueError: names the value as `name`.
    """
    fix = "write PaddedOptions(**...)" if isinstance(value, Mapping) else "make one"
    require(isinstance(value, PaddedOptions), name, value, "be PaddedOptions", fix)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_factor(value: Any) -> bool:
    return value == FIT or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _pairs(value: Any) -> list[tuple[int, Any]] | None:
    """Return the pairs of a mapping or a tuple of pairs with whole, distinct numbers, else None."""
    try:
        pairs = [(number, factor) for number, factor in dict(value).items()]
    except (TypeError, ValueError):
        return None
    whole = all(isinstance(number, int) for number, _ in pairs)
    return pairs if whole and len(pairs) == len(value) else None


def add_arguments(
    parser: argparse.ArgumentParser, *, bare: tuple[str, ...] = (), without: tuple[str, ...] = ()
) -> None:
    """Add one flag per option, `--padded-...`, to `parser`.

    Args:
        parser: the parser.
        bare: options that have a flag by their name as well.
        without: options that get no flag.
    """
    group = parser.add_argument_group("padded dispatch")
    for option in dataclasses.fields(PaddedOptions):
        if option.name in without:
            continue
        default = getattr(_DEFAULTS, option.name)
        group.add_argument(
            _flag(option),
            *([f"--{option.name}"] if option.name in bare else []),
            type=_parser(option.metadata.get("read", type(default))),
            default=default,
            choices=option.metadata.get("choices"),
            metavar=None if "choices" in option.metadata else option.name.upper(),
            help=f"{option.metadata['help']} (default: {_show(default)})",
        )


def from_arguments(arguments: argparse.Namespace) -> PaddedOptions:
    """Return the options that `add_arguments`' flags were set to."""
    values = {
        option.name: getattr(arguments, f"padded_{option.name}")
        for option in dataclasses.fields(PaddedOptions)
        if hasattr(arguments, f"padded_{option.name}")
    }
    return PaddedOptions(**values)


def to_json(options: PaddedOptions) -> dict[str, Any]:
    """Return the options as JSON values; factors stand as the text of their flags."""
    plain = (str, int)
    return {name: v if isinstance(v, plain) else _show(v) for name, v in by_name(options).items()}


def to_plain(options: PaddedOptions) -> dict[str, Any]:
    """Return the options as values that YAML holds, and that `PaddedOptions(**...)` reads back."""
    return {name: _plain(value) for name, value in by_name(options).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def by_name(options: PaddedOptions) -> dict[str, Any]:
    """Return the options' values by name."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}


def _parser(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return `read` for argparse, which then shows the error's own words beside the flag."""

    def parse(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            words = str(error)
            if not words.startswith("must"):
                words = f"must be of type {read.__name__}, got {text!r}"
            raise argparse.ArgumentTypeError(words) from None

    return parse


def _flag(option: dataclasses.Field[Any]) -> str:
    return f"--padded-{option.name.replace('_', '-')}"


_DEFAULTS = PaddedOptions()
