"""Capacity factors that changed in a run, in a file beside Megatron-LM's checkpoints.

`padded_dispatch.json` in the folder of `--save` holds the factors of all layers after each change,
by the number of steps done:

    {"factors": {"40": {"1": "1.5", "2": "1.25"}, "200": {"1": "no-drop", "2": "1.25"}}}

A run that resumes at some step takes the factors after the last change up to it. So the format of
the checkpoint does not matter, nor whether it was written later (`--async-save`) or elsewhere
(non-persistent checkpoints). Changes after that step are forgotten: the resumed run makes its own.

Megatron's checkpoints have no place for this: state dicts of models keep their keys, and the saved
arguments are compared, not restored.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from padded_dispatch.config import CapacityFactor
from padded_dispatch.megatron.options import read_factor, show_factor
from padded_dispatch.utils.results import replace_file

NAME = "padded_dispatch.json"

Factors = dict[int, CapacityFactor]

_log = logging.getLogger("padded_dispatch")


class FactorFile:
    """The changes of a run. All ranks must call all methods; rank 0 reads and writes.

    Attributes:
        factors: the factors with which the run goes on, by layer number; empty if none has changed.

    Args:
        load: folder from which the run resumes, or None.
        save: folder of its checkpoints, or None; then nothing is written.
        step: steps done.

    Raises:
        ValueError: on all ranks, if the file is broken; names it.
    """

    def __init__(self, load: str | None, save: str | None, *, step: int) -> None:
        self._path = None if save is None else Path(save) / NAME
        # What rank 0 found, for all: the folder may be on its own disk.
        found: list[Any] = [_changes(load, step) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found)
        if isinstance(found[0], str):
            raise ValueError(found[0])
        self._changes: dict[int, Factors] = found[0]
        self.factors: Factors = self._changes[max(self._changes)] if self._changes else {}
        if self._changes or (self._path is not None and self._path.is_file()):
            self._write()  # Without what came after this step, or from another run.

    def add(self, step: int, factors: Mapping[int, CapacityFactor]) -> None:
        """Store the factors of all layers, which have changed after `step` steps."""
        self._changes[step] = dict(factors)
        self._write()

    def _write(self) -> None:
        if self._path is None or dist.get_rank() != 0:
            return
        shown = {
            step: {number: show_factor(factor) for number, factor in factors.items()}
            for step, factors in self._changes.items()
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, json.dumps({"factors": shown}, indent=1) + "\n")
        except OSError as error:  # Not worth the run.
            _log.warning("%s: %s; a resumed run will not know it", self._path, error.strerror)


def _changes(load: str | None, step: int) -> dict[int, Factors] | str:
    """Return the changes of a folder's file up to a step, or what is wrong with it."""
    if load is None or not (path := Path(load) / NAME).is_file():
        return {}
    try:
        shown = json.loads(path.read_text())["factors"]
        return {
            int(after): {int(number): read_factor(text) for number, text in factors.items()}
            for after, factors in shown.items()
            if int(after) <= step
        }
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return (
            f"{path} must hold the capacity factors of the run to resume, got something else; "
            "delete it to go on with the factors that the flags give"
        )
