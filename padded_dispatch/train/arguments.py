"""The command lines of `padded-dispatch train` and `compare`: flags from the fields of `Settings`.

Options of the padded dispatcher bring their own flags, texts and defaults (`PaddedOptions`). torch
is imported only after the flags are parsed, so `--help` and a typo need not wait for it.
"""

import argparse
import dataclasses
import itertools
import math
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from padded_dispatch.config import require
from padded_dispatch.megatron.options import add_arguments, from_arguments
from padded_dispatch.train.settings import (
    DROPPING,
    PRESETS,
    Dispatch,
    Layout,
    Output,
    Preset,
    Recipe,
    Settings,
)
from padded_dispatch.utils.flags import Parser, flag, read_factor
from padded_dispatch.utils.logs import torchrun_ranks

_SEPARATOR = "--vs"
_ABOUT_COMPARE = (
    " Each --vs starts a contender with flags of its own, trained one after another in the same "
    "processes; flags before the first --vs hold for all. A flag with several values behind a "
    "--vs, such as --seed 0 1 2, makes a contender of each."
)
_GROUPS = (Recipe, Dispatch, Layout, Output)


def read(argv: list[str], command: str = "train") -> argparse.Namespace:
    """Return the flags of `padded-dispatch train` that were given, and every padded option.

    Errors name `command`.
    """
    usage = f"padded-dispatch {command} [FLAGS]"
    parser = Parser(
        prog=f"padded-dispatch {command}",
        usage=usage if command == "train" else f"{usage} --vs [FLAGS] ...",
        description="Train a byte-level Mixture-of-Experts GPT on the source of Python's standard "
        "library, with Megatron-Core." + (_ABOUT_COMPARE if command == "compare" else ""),
    )
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        default="tiny",
        help="; ".join(f"{name}: {preset.about}" for name, preset in PRESETS.items()),
    )
    for cls in _GROUPS:
        group = parser.add_argument_group(cls.__name__.lower(), (cls.__doc__ or "").split("\n")[0])
        hints = get_type_hints(cls)
        for option in dataclasses.fields(cls):
            if "help" in option.metadata:
                _add(group, option, hints[option.name])
    add_arguments(parser, bare=("experts", "exchange", "trace"))
    return parser.parse_args(argv)


def resolve(arguments: argparse.Namespace) -> Settings:
    """Return the settings of flags that `read` returned; this imports torch, to count GPUs.

    Raises:
        ValueError: names the flag, its rule, its value and what to set.
    """
    flags = vars(arguments)
    preset = PRESETS[arguments.preset]
    layout = Layout(**_layout_defaults(preset, flags) | _pick(Layout, flags))
    drops = flags.get("dispatcher", DROPPING[0]) in DROPPING
    dispatch: dict[str, Any] = {"capacity_factor": 1.25 if drops else None}
    values = vars(preset) | flags
    recipe = {"global_batch": values["micro_batch"] * max(1, layout.dp) * layout.pp}
    return Settings(
        preset=arguments.preset,
        model=preset.model,
        recipe=Recipe(**recipe | _pick(Recipe, values)),
        dispatch=Dispatch(**dispatch | _pick(Dispatch, flags), padded=from_arguments(arguments)),
        layout=layout,
        output=Output(**_pick(Output, values)),
    )


def _layout_defaults(preset: Preset, flags: dict[str, Any]) -> dict[str, Any]:
    import torch

    device = flags.get("device", "cuda" if torch.cuda.is_available() else "cpu")
    for name in ("workers", "tp", "pp", "etp"):  # Checked before anything is divided by them.
        require(flags.get(name, 1) > 0, flag(name), flags.get(name), "be above 0")
    num_gpus = torch.cuda.device_count()
    name = flags["preset"]
    fits = device == "cuda" or name == "tiny"
    require(fits, "--preset", name, "be tiny on a CPU", "run on a GPU")
    require(device == "cpu" or num_gpus, "--device", device, "be cpu where PyTorch sees no GPU")
    # Under torchrun the processes exist already, and some may be on other machines.
    _, started = torchrun_ranks()
    workers = flags.get("workers", started or (num_gpus if device == "cuda" else 2))
    rule = f"be {started}, the processes that torchrun started"
    require(started in (0, workers), "--workers", workers, rule, "leave it out")
    rule = f"be at most {num_gpus}, the GPUs that PyTorch sees"
    fits = started or device == "cpu" or workers <= num_gpus
    require(fits, "--workers", workers, rule)
    most = max(1, workers // (flags.get("etp", 1) * flags.get("pp", 1)))
    ep = math.gcd(most, preset.model.num_experts)
    return {"device": device, "workers": workers, "ep": ep}


def _pick(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    names = {option.name for option in dataclasses.fields(cls)}
    return {name: value for name, value in values.items() if name in names}


def _add(group: Any, option: dataclasses.Field[Any], hint: Any) -> None:
    """Add the flag of one field: a bool, a Literal, or a type that reads text, maybe optional."""
    text = option.metadata["help"]
    if option.default not in (dataclasses.MISSING, None, False):
        text += f" (default: {option.default})"
    elif option.default is dataclasses.MISSING and "default" not in text:
        text += " (default: the preset's)"
    common = {"help": text, "default": argparse.SUPPRESS}
    if hint is bool:
        group.add_argument(flag(option.name), action=argparse.BooleanOptionalAction, **common)
    elif get_origin(hint) is Literal:
        group.add_argument(flag(option.name), choices=get_args(hint), **common)
    else:
        (kind,) = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
        if option.name == "capacity_factor":
            common |= {"type": read_factor, "metavar": "X"}
        group.add_argument(flag(option.name), **{"type": kind} | common)


def read_compare(argv: list[str]) -> list[tuple[str, argparse.Namespace]]:
    """Return each contender's own flags as text, and all its flags parsed.

    A flag with several values behind a `--vs` makes a contender of each value. Several such flags
    make one of every combination, the last flag varying fastest.

    Example: `--steps 9 --vs --graph layer --vs --seed 0 1` are the contenders `--graph layer`,
    `--seed 0` and `--seed 1`, each with `--steps 9`.

    Raises:
        ValueError: names the flag, its rule, its value and what to set.
        SystemExit: for `--help` and for flags that argparse refuses.
    """
    parts: list[list[str]] = [[]]
    for word in argv:
        if word == _SEPARATOR:
            parts.append([])
        else:
            parts[-1].append(word)
    common, *lists = parts
    read(common, "compare")  # It exits for --help.
    fix = "add one, such as --vs --dispatcher allgather"
    require(lists, _SEPARATOR, len(lists), "be given at least once", fix)
    own = [flags for words in lists for flags in _every_combination(words)]
    return [(" ".join(flags), read(common + flags, "compare")) for flags in own]


def _every_combination(words: list[str]) -> list[list[str]]:
    """Return the flags of each contender that the words behind one `--vs` make."""
    flags: list[list[str]] = []  # each with its values
    for word in words:
        if word.startswith("--") or not flags:
            flags.append([word])
        else:
            flags[-1].append(word)
    choices = [[[name, value] for value in values] or [[name]] for name, *values in flags]
    return [list(itertools.chain(*chosen)) for chosen in itertools.product(*choices)]
