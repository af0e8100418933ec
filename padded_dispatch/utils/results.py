"""Results files: measured rows, and metadata of the run that measured them.

`{"runs": [{"about": {...}, "rows": [...]}, ...]}`; one run is one command on one machine. The
command that measures writes the file.
"""

import ast
import datetime
import hashlib
import io
import json
import os
import platform
import tokenize
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from padded_dispatch.utils.logs import torchrun_ranks

_PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine")
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


def about(*, num_gpus: int, command: str, commit: str | None) -> dict[str, Any]:
    """Return the metadata of a run on `num_gpus` GPUs, or on a CPU.

    `commit` is a Git SHA, with a -dirty suffix for uncommitted changes; None if unknown. `kernels`
    tells whether two commits have the same kernels.
    """
    import torch  # Not at the top: command lines import this module.

    cpu = f"{os.cpu_count()} CPU cores, {platform.machine()}"
    return {
        "machine": f"{num_gpus} x {torch.cuda.get_device_name()}" if num_gpus else cpu,
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in _PACKAGES},
        "command": command,
        "commit": commit,
        "kernels": kernels(),
        "date": datetime.date.today().isoformat(),
    }


def kernels() -> str:
    """Return a digest of the kernels' code."""
    files = sorted((Path(__file__).parents[1] / "kernels").glob("*.py"))
    lines = [line for path in files for line in code_lines(path.read_text())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def code_lines(source: str) -> list[str]:
    """Return the lines of a module that hold code: no docstrings, comments or blanks."""
    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            numbers.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            numbers.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return [line for number, line in enumerate(source.split("\n"), start=1) if number in numbers]


def read_runs(option: str, path: Path) -> list[dict[str, Any]]:
    """Return the runs of a results file, or no runs if the file does not exist.

    Raises:
        ValueError: if the file is no results file; it names `option`, which gave the path.
    """
    try:
        match json.loads(path.read_text()):
            case {"runs": list(runs)}:
                if all(isinstance(run, dict) and {"about", "rows"} <= run.keys() for run in runs):
                    return runs
        reason = "it has no list of runs with about and rows"
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
    raise ValueError(f"{option} must be a results file, got {path} ({reason}); name another file")


def require_results(option: str, path: Path) -> None:
    """Raise if rows cannot be added to the results file `path`; call it before measuring.

    Call it on all ranks. Under torchrun only rank 0 checks, since only rank 0 writes.

    Raises:
        ValueError: on rank 0, if the file is no results file or its folder is not writable; it
            names `option`.
    """
    if torchrun_ranks()[0] == 0:
        require_folder(option, path.parent)
        read_runs(option, path)


def require_folder(option: str, folder: Path) -> None:
    """Raise if `folder` is not writable, or does not exist and cannot be created.

    Permissions do not show this: a file system may be read-only, full, or virtual, like /proc. So
    this creates a temporary folder where the first new one would be, and deletes it.

    Raises:
        ValueError: names `option`.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    try:
        with TemporaryDirectory(dir=existing):
            pass
    except OSError:
        raise ValueError(
            f"{option} must be a path in a writable folder, got {str(folder)!r}; {existing} is not "
            "a writable folder: name another"
        ) from None


def append_run(path: Path, run_about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Append rows to the results file `path`, which is complete at any moment.

    The rows join the last run with the same metadata, or start a new run. Infinity and NaN become
    null, since JSON has neither.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    runs = read_runs("results", path)
    run = next((run for run in reversed(runs) if run["about"] == run_about), None)
    if run is None:
        run = {"about": run_about, "rows": []}
        runs.append(run)
    run["rows"] += json.loads(json.dumps(rows), parse_constant=lambda name: None)
    unfinished = path.with_name(f".{os.getpid()}.unfinished")  # The longest name fits, too.
    try:
        unfinished.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
