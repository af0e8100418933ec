"""Everything that Megatron's config has no field for, in one frozen value.

Set `config.padded_dispatch = PaddedOptions(...)` on a TransformerConfig, or give the options for
all configs to `install(options=...)`. Command-line flags and the README's table come from here.

Capacity factors as text, as they stand in options and on command lines.

`1.25` is a factor; `no-drop` gives every token a slot with every expert (C = T). Several of them
stand as `1.5,2,no-drop`, and with what they hold for as `3:1.5,7:no-drop`.
"""

import argparse
import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from padded_dispatch.config import POLICIES, REMEDIES, Policy, Remedy, require
from padded_dispatch.dispatcher import ExchangeKind

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


Alignment = int | Literal["auto"]
Experts = Literal["module", "packed", "batched", "auto"]
OnOverflow = Literal["drop", "warn", "error", "grow"]


def _rows_or_auto(text: str) -> Alignment:
    return "auto" if text == "auto" else int(text)


@dataclass(frozen=True, kw_only=True)
class PaddedOptions:
    """Options of the padded dispatcher beside Megatron's own `moe_*` fields."""

    min_capacity: int = field(
        default=1, metadata={"help": "least slots per (source rank, expert), whatever the factor"}
    )
    alignment: Alignment = field(
        default="auto",
        metadata={
            "read": _rows_or_auto,
            "help": "rows of an expert's buffer are a multiple of this; auto: what the config's "
            "fp8 or fp4 recipe needs, else 1",
        },
    )
    policy: Policy | Literal["megatron"] = field(
        default="megatron",
        metadata={
            "help": "who keeps a slot: megatron: moe_token_drop_policy says; probs: the most "
            "probable; position: the first; random: a draw; priority: first choices, sure tokens",
            "cost": "probs 32 us, position 21, random 31, priority 75",
            "choices": ("megatron", *POLICIES),
        },
    )
    seed: int = field(default=0, metadata={"help": "of the draws of policy random"})
    remedy: Remedy = field(
        default="none",
        metadata={
            "help": "for dropped rows: none; renormalize: what a token keeps weighs as much as all "
            "it asked for; reroute: to its next-best expert with a free slot on this rank",
            "cost": "renormalize 30 us, reroute 141 per round",
            "choices": REMEDIES,
        },
    )
    reroute_rounds: int = field(
        default=1, metadata={"help": "how often reroute tries for rows that found no slot"}
    )
    layer_factors: str = field(
        default="",
        metadata={
            "help": "layers with a capacity factor of their own, such as 3:1.5,7:no-drop, by "
            "Megatron's layer number, which starts at 1; multi-token prediction's come last"
        },
    )
    eval_factor: str = field(
        default="",
        metadata={"help": "capacity factor in evaluation, or no-drop; without it as in training"},
    )
    schedule: str = field(
        default="",
        metadata={
            "help": "capacity factors over the steps, such as 0:2,200:1.25: the second holds once "
            "200 steps are done; each change captures CUDA graphs again, and layers with a factor "
            "of their own keep it"
        },
    )
    on_overflow: OnOverflow = field(
        default="drop",
        metadata={
            "help": "when telemetry finds that a layer has dropped more than the threshold: "
            "drop: go on; warn: say so; error: end the run; grow: give the layer a larger factor",
            "choices": get_args(OnOverflow),
        },
    )
    overflow_threshold: float = field(
        default=0.0, metadata={"help": "share of a layer's rows that may be dropped"}
    )
    grow_factors: str = field(
        default="1.5,2,3,4,no-drop",
        metadata={"help": "capacity factors that grow may choose, the next larger one each time"},
    )
    grow_after: int = field(
        default=3,
        metadata={"help": "reads in a row above the threshold after which a layer grows"},
    )
    telemetry_every: int = field(
        default=10,
        metadata={
            "help": "steps between two reads of what was dropped",
            "cost": "19 us for counting, always",
        },
    )
    experts: Experts = field(
        default="module",
        metadata={
            "help": "module: the experts of the layer's spec, on padded rows; packed: ours, which "
            "compute real rows only; batched: ours, all slots in one product per linear; auto: "
            "packed or batched, by the factor, where the config allows it",
            "cost": "less time, see above",
            "choices": get_args(Experts),
        },
    )
    exchange: ExchangeKind = field(
        default="alltoall",
        metadata={
            "help": "alltoall: an all-to-all of all slots, by any backend; direct: stores of real rows "
            "between the GPUs of one host, for packed experts",
            "cost": "less time, see above",
            "choices": get_args(ExchangeKind),
        },
    )
    microbatches_in_flight: int = field(
        default=1,
        metadata={
            "help": "with direct, the most forward passes of a layer that wait for their backward "
            "pass, such as the number of pipeline stages; each has a buffer of its own",
            "cost": "E * C * D elements each",
        },
    )

    def __post_init__(self) -> None:
        for name, names in (
            ("experts", get_args(Experts)),
            ("exchange", get_args(ExchangeKind)),
            ("on_overflow", get_args(OnOverflow)),
            ("policy", ("megatron", *POLICIES)),
            ("remedy", REMEDIES),
        ):
            value = getattr(self, name)
            require(value in names, name, value, f"choose one of {', '.join(names)}")
        fits = self.exchange == "alltoall" or self.experts == "packed"
        require(fits, "exchange", self.exchange, "it needs experts='packed'")
        rows = self.alignment
        aligned = rows == "auto" or (isinstance(rows, int) and rows >= 1)
        require(aligned, "alignment", rows, "give a whole number of at least 1, or 'auto'")
        share = self.overflow_threshold
        require(0 <= share < 1, "overflow_threshold", share, "give a share from 0 to below 1")
        counts = "grow_after", "telemetry_every", "reroute_rounds", "microbatches_in_flight"
        for name in counts:
            value = getattr(self, name)
            require(value >= 1, name, value, "give a whole number of at least 1")
        # Read once here, so that mistakes are found where they are made.
        _ = self.factor_of_layer, self.eval_factors, self.factor_of_step, self.factors_to_grow

    @property
    def factor_of_layer(self) -> dict[int, Factor]:
        """`layer_factors`, by layer number."""
        return read_factor_table("layer_factors", self.layer_factors, 1)

    @property
    def eval_factors(self) -> tuple[Factor, ...]:
        """`eval_factor`, or nothing where evaluation is like training."""
        return (read_factor("eval_factor", self.eval_factor),) if self.eval_factor else ()

    @property
    def factor_of_step(self) -> dict[int, Factor]:
        """`schedule`, by the number of steps done."""
        return read_factor_table("schedule", self.schedule, 0)

    @property
    def to_control(self) -> dict[str, str]:
        """The options that nothing follows unless a training loop has a `CapacityControl`."""
        given = {"on_overflow": self.on_overflow, "schedule": self.schedule}
        idle = {
            "on_overflow": self.on_overflow == "drop",
            "schedule": not self.factor_of_step.keys() - {0},
        }
        return {name: value for name, value in given.items() if not idle[name]}

    @property
    def factors_to_grow(self) -> tuple[Factor, ...]:
        """`grow_factors`, rising."""
        return read_factors("grow_factors", self.grow_factors)


def add_arguments(parser: argparse.ArgumentParser, *, bare: tuple[str, ...] = ()) -> None:
    """Add one flag per option, `--padded-...`, to `parser`; those in `bare` also by their name."""
    group = parser.add_argument_group("padded dispatch")
    for option in dataclasses.fields(PaddedOptions):
        group.add_argument(
            _flag(option),
            *([f"--{option.name}"] if option.name in bare else []),
            type=option.metadata.get("read", type(option.default)),
            default=option.default,
            choices=option.metadata.get("choices"),
            help=f"{option.metadata['help']} (default: {_default(option)})",
        )


def from_arguments(arguments: argparse.Namespace) -> PaddedOptions:
    """The options that `add_arguments`' flags were set to."""
    values = {
        option.name: getattr(arguments, f"padded_{option.name}")
        for option in dataclasses.fields(PaddedOptions)
    }
    return PaddedOptions(**values)


def markdown_table() -> str:
    """All options as a Markdown table: name, flag, default, meaning, cost.

    Times are those of one layer's forward pass at T = 4096, E = 128, K = 8 on an H200
    (notebooks/results/capacity_control.json).
    """
    rows = [
        f"| `{option.name}` | `{_flag(option)}` | {_default(option)} | {option.metadata['help']} | "
        f"{option.metadata.get('cost', '')} |"
        for option in dataclasses.fields(PaddedOptions)
    ]
    heading = ["| option | flag | default | meaning | cost |", "|---|---|---|---|---|"]
    return "\n".join([*heading, *rows])


def _flag(option: dataclasses.Field[Any]) -> str:
    return f"--padded-{option.name.replace('_', '-')}"


def _default(option: dataclasses.Field[Any]) -> str:
    return "none" if option.default == "" else str(option.default)
