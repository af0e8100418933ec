"""The file `metrics.jsonl`: one JSON object with a step per line, kept when a run is resumed.

Steps after the checkpoint are done again, so their lines are left out. The shorter text replaces
the file at once; a kill at any moment leaves the old lines or the new ones.
"""

import json
from pathlib import Path
from typing import TextIO

from padded_dispatch.utils.results import replace_file


def kept_rows(path: Path, step: int) -> str:
    """Return the whole lines of `path` up to `step`; "" if there is no file.

    Raises:
        ValueError: names the file and the line that is no JSON object with a step.
    """
    if not path.exists():
        return ""
    # A kill in the middle of a write leaves a last line without its end.
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    kept = []
    for number, line in enumerate(whole, 1):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"{path} must hold a JSON object with a step in each line, got {line[:40]!r} in "
                f"line {number}; delete the line"
            ) from None
    return "".join(kept)


def open_rows(path: Path, step: int) -> TextIO:
    """Open `path` to append rows after `step`; see `kept_rows`."""
    kept = kept_rows(path, step)
    if path.exists() and path.stat().st_size != len(kept.encode()):
        replace_file(path, kept)
    return path.open("a")
