"""Find a broken checkpoint before a worker starts, and an older one that is whole.

A copy that was cut off, a full disk or a deleted file would otherwise show as a traceback of torch
in every worker. Checked are `run.json`, and by `.metadata` the names and sizes of all data files.

torch unpickles `.metadata`, which runs whatever code the file asks for. Here it is read first, with
an unpickler that knows only the classes that torch and Megatron write. This protects from a file in
the wrong place, not from an attacker: the data files hold pickled objects as well. Resume only from
checkpoints that you trust.
"""

import enum
import importlib
import json
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from padded_dispatch.config import require

_DCP = "torch.distributed.checkpoint"
_CLASSES = {
    f"{_DCP}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
    # Megatron keeps its plans.
    f"{_DCP}.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
}


class _FaultError(Exception):
    """A broken file of a checkpoint, in words that begin with its name."""


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints in a run's folder, the oldest first."""
    found = (run_dir / "checkpoints").glob("step-*")
    return sorted(path for path in found if re.fullmatch(r"step-\d{8,}", path.name))


def require_whole(checkpoint: Path) -> dict[str, Any]:
    """Return what `run.json` of a checkpoint holds.

    Raises:
        ValueError: the checkpoint is broken. The error names the file, and the newest older
            checkpoint that is whole.
    """
    try:
        return _read(checkpoint)
    except _FaultError as fault:
        older = [path for path in checkpoints(checkpoint.parents[1]) if path < checkpoint]
        whole = next((path for path in reversed(older) if _is_whole(path)), None)
        fix = "no older checkpoint is whole: start again in another folder"
        if whole is not None:
            broken = [path.name for path in older if path > whole] + [checkpoint.name]
            fix = f"delete {' and '.join(broken)} to continue from {whole.name}, which is whole"
        require(False, "--resume", f"{checkpoint}: {fault}", "have a whole checkpoint", fix)
        raise AssertionError from None


def _is_whole(checkpoint: Path) -> bool:
    try:
        _read(checkpoint)
    except _FaultError:
        return False
    return True


def _read(checkpoint: Path) -> dict[str, Any]:
    """Check all files of a checkpoint; return what its `run.json` holds."""
    run = _run(checkpoint)
    sizes = _data_sizes(checkpoint)
    for name, expected in sorted(sizes.items()):
        path = checkpoint / name
        if not path.is_file():
            raise _FaultError(f"{name} is missing")
        if path.stat().st_size < expected:
            raise _FaultError(f"{name} is cut off after {path.stat().st_size} of {expected} bytes")
    return run


def _run(checkpoint: Path) -> dict[str, Any]:
    try:
        run = json.loads((checkpoint / "run.json").read_text())
    except FileNotFoundError:
        raise _FaultError("run.json is missing") from None
    except (OSError, ValueError) as error:
        raise _FaultError(f"run.json cannot be read ({error})") from None
    match run:
        case {
            "step": int(),
            "first_loss": float(),
            "settings": {"model": {}, "recipe": {}, "dispatch": {}, "layout": {}},
        }:
            return run
    raise _FaultError("run.json does not hold step, first_loss and settings")


def _data_sizes(checkpoint: Path) -> dict[str, int]:
    """Return the least size of every data file, by name, from `.metadata`."""
    try:
        with (checkpoint / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise _FaultError(f".metadata holds {type(metadata).__name__}, not Metadata")
        sizes: dict[str, int] = {}
        for place in (metadata.storage_data or {}).values():
            name, end = place.relative_path, place.offset + place.length
            if Path(name).name != name:
                raise _FaultError(f".metadata names {name}, which lies outside of the folder")
            sizes[name] = max(sizes.get(name, 0), end)
    except FileNotFoundError:
        raise _FaultError(".metadata is missing") from None
    except _FaultError:
        raise
    # A cut-off pickle raises many types of exception.
    except Exception as error:
        raise _FaultError(f".metadata cannot be read ({type(error).__name__}: {error})") from None
    if not sizes:
        raise _FaultError(".metadata names no data")
    return sizes


def _member(cls: Any, name: str) -> Any:
    """Return a member of an enum, and nothing else that a class or an object has."""
    if isinstance(cls, enum.EnumMeta) and name in cls.__members__:
        return cls.__members__[name]
    raise _FaultError(f".metadata asks for {name!r} of {cls!r}: it may carry code")


class _Unpickler(pickle.Unpickler):
    """An unpickler of the classes that torch and Megatron write to `.metadata`, and no others."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name in _CLASSES.get(module_name, ()):
            return getattr(importlib.import_module(module_name), global_name)
        if (module_name, global_name) == ("builtins", "getattr"):
            return _member  # How some versions of Python 3.11 pickle the members of an enum.
        dtype = getattr(torch, global_name, None) if module_name == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise _FaultError(
            f".metadata asks for {module_name}.{global_name}, which no checkpoint needs: it may "
            "carry code"
        )
