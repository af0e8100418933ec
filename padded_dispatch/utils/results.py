"""Results files: what was measured, where, with what, written by the command that measured it.

`{"runs": [{"about": {...}, "rows": [...]}, ...]}`; one run is one command on one machine.
"""

import datetime
import fcntl
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from padded_dispatch.config import require

_PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine")


def about(*, num_gpus: int, command: str, commit: str | None) -> dict[str, Any]:
    """Where, with what and how the rows of a run come about.

    Args:
        num_gpus: that the run uses; 0 stands for the CPU.
        command: as it was typed.
        commit: of the code, with "dirty" in it where the tree was; None where nobody knows.
    """
    cpu = f"{os.cpu_count()} CPU cores, {platform.machine()}"
    return {
        "machine": f"{num_gpus} x {torch.cuda.get_device_name()}" if num_gpus else cpu,
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in _PACKAGES},
        "command": command,
        "commit": commit,
        "date": datetime.date.today().isoformat(),
    }


def read_runs(option: str, path: Path) -> list[dict[str, Any]]:
    """The runs of a results file; none where there is no file.

    Raises:
        ValueError: names the option that gave the path, the path and what to give.
    """
    try:
        results = json.loads(path.read_text())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ValueError(f"{option}={path} is not possible: {error}; name a results file") from None
    match results:
        case {"runs": list(runs)}:
            return runs
    raise ValueError(f"{option}={path} is not possible: it holds no runs; name a results file")


def require_results(option: str, path: Path) -> None:
    """Refuse a path that runs cannot be added to, before anything is measured for it.

    To be called by all ranks; where torchrun has started several, the first alone will write.

    Raises:
        ValueError: names the option that gave the path, the path and what to give.
    """
    if os.environ.get("RANK", "0") == "0":
        require_folder(option, path.parent)
        read_runs(option, path)


def require_folder(option: str, folder: Path) -> None:
    """Refuse a folder that can neither be made nor written to.

    Raises:
        ValueError: names the option that gave the folder, the folder and what to give.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    require(
        there.is_dir() and os.access(there, os.W_OK),
        option,
        str(folder),
        f"{there} is no folder that can be written to; name another",
    )


def append_run(path: Path, run_about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Add rows to the file at `path`, which is whole at any moment.

    They join the last run that is about the same; without one they are a new one. Several
    processes may add at the same time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _only_writer(path.parent):
        runs = read_runs("results", path)
        same = [run for run in runs if run["about"] == run_about]
        if not same:
            same = [{"about": run_about, "rows": []}]
            runs += same
        same[-1]["rows"] += rows
        unfinished = path.with_name(f"{path.name}.unfinished")
        unfinished.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
        unfinished.replace(path)


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Wait for other processes that write into `folder`."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
