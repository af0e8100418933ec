"""The command line: flags from the fields of `Settings`, and settings from flags."""

import argparse
import dataclasses
import os
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from padded_dispatch.config import require
from padded_dispatch.megatron.options import NO_DROP, add_arguments, from_arguments
from padded_dispatch.train.settings import (
    DROPPING,
    PRESETS,
    Device,
    Dispatch,
    Layout,
    Output,
    Preset,
    Recipe,
    Settings,
)

_GROUPS = (Recipe, Dispatch, Layout, Output)


def parser() -> argparse.ArgumentParser:
    """The parser of `padded-dispatch train`; only flags that were given are in its namespace."""
    made = argparse.ArgumentParser(
        prog="padded-dispatch train",
        usage="padded-dispatch train [FLAGS]",
        description="Train a byte-level Mixture-of-Experts GPT on the source of Python's standard "
        "library, with Megatron-Core.",
    )
    made.add_argument(
        "--preset",
        choices=PRESETS,
        default="tiny",
        help="; ".join(f"{name}: {preset.about}" for name, preset in PRESETS.items()),
    )
    for cls in _GROUPS:
        group = made.add_argument_group(cls.__name__.lower(), (cls.__doc__ or "").split("\n")[0])
        hints = get_type_hints(cls)
        for option in dataclasses.fields(cls):
            if "help" in option.metadata:
                _add(group, option, hints[option.name])
    add_arguments(made, bare=("experts", "exchange"))
    return made


def parse(argv: list[str]) -> Settings:
    """Settings from a command line.

    Raises:
        ValueError: names what is not possible and what to change.
        SystemExit: for `--help` and for what argparse itself refuses.
    """
    arguments = parser().parse_args(argv)
    given = vars(arguments)
    preset = PRESETS[arguments.preset]
    layout = Layout(**_layout_defaults(preset, given) | _of(Layout, given))
    dispatch = Dispatch(
        **_dispatch_defaults(given) | _of(Dispatch, given), padded=from_arguments(arguments)
    )
    steps = given.get("steps", preset.steps)
    micro_batch = given.get("micro_batch", preset.micro_batch)
    defaults = {
        "num_layers": preset.num_layers,
        "seq_length": preset.seq_length,
        "micro_batch": micro_batch,
        "global_batch": micro_batch * layout.dp * layout.pp,
        "lr": preset.lr,
        "lr_decay": steps,
    }
    return Settings(
        preset=arguments.preset,
        model=preset.model,
        recipe=Recipe(**defaults | _of(Recipe, given)),
        dispatch=dispatch,
        layout=layout,
        output=Output(**{"steps": steps} | _of(Output, given)),
    )


def _layout_defaults(preset: Preset, given: dict[str, Any]) -> dict[str, Any]:
    device: Device = given.get("device", "cuda" if torch.cuda.is_available() else "cpu")
    for name in ("workers", "tp", "pp", "etp"):  # Before anything is divided by them.
        require(given.get(name, 1) > 0, name, given.get(name), "give a number above 0")
    num_gpus = torch.cuda.device_count()
    if preset.device not in (None, device):
        raise ValueError(
            f"preset={given['preset']} is not possible on device={device}: choose --preset tiny"
        )
    if device == "cuda" and num_gpus == 0:
        raise ValueError("device=cuda is not possible: PyTorch sees no GPU; give --device cpu")
    # Under torchrun the processes exist already, and some may be on other machines.
    started = int(os.environ.get("WORLD_SIZE", 0))
    workers = given.get("workers", started or (num_gpus if device == "cuda" else 2))
    if started not in (0, workers):
        raise ValueError(f"workers={workers} is not possible: torchrun started {started}")
    if not started and device == "cuda" and workers > num_gpus:
        raise ValueError(f"workers={workers} is not possible: PyTorch sees {num_gpus} GPUs")
    ep = max(1, workers // (given.get("etp", 1) * given.get("pp", 1)))
    return {"device": device, "workers": workers, "ep": ep}


def _dispatch_defaults(given: dict[str, Any]) -> dict[str, Any]:
    drops = given.get("dispatcher", DROPPING[0]) in DROPPING
    return {"capacity_factor": 1.25 if drops else None}


def _of(cls: type, given: dict[str, Any]) -> dict[str, Any]:
    names = {option.name for option in dataclasses.fields(cls)}
    return {name: value for name, value in given.items() if name in names}


def _add(group: Any, option: dataclasses.Field[Any], hint: Any) -> None:
    """One flag for one field: bool, Literal, or a type that reads its text, maybe optional."""
    flag = f"--{option.name.replace('_', '-')}"
    text = option.metadata["help"]
    if option.default not in (dataclasses.MISSING, None, False):
        text += f" (default: {option.default})"
    elif option.default is dataclasses.MISSING and "default" not in text:
        text += " (default: the preset's)"
    common = {"help": text, "default": argparse.SUPPRESS}
    if hint is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif get_origin(hint) is Literal:
        group.add_argument(flag, choices=get_args(hint), **common)
    else:
        (read,) = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
        if read is float and NoneType in get_args(hint):
            read = _factor
        metavar = {int: "N", Path: "PATH", str: "TEXT"}.get(read, "X")
        group.add_argument(flag, type=read, metavar=metavar, **common)


def _factor(text: str) -> float | None:
    return None if text in ("none", NO_DROP) else float(text)
