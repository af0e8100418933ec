"""The size of the repository, as a ratchet: growth needs a commit that says what it buys.

`sizes.json` has each number, and the tree may exceed it by 2 %. Who shrinks the tree writes the
smaller number: `python -m tests.test_sizes` prints the file. LOG.md is a lab book, no page.
"""

import dataclasses
import json
import re

import padded_dispatch
import padded_dispatch.megatron
from padded_dispatch.megatron.options import PaddedOptions
from padded_dispatch.utils.results import code_lines
from tests.support.processes import python
from tests.test_readme import PAGES, README, ROOT

COMMANDS = ("train", "tune", "bench")
LOG = ROOT / "notebooks" / "results" / "LOG.md"
SLACK = 1.02


def num_flags(command: str) -> int:
    """Count the flags in a command's help; `--x, --no-x` is one."""
    text = python("-m", "padded_dispatch.cli", command, "--help")
    return len(re.findall(r"^ +(?:-\w, )?--(?!help\b)\w", text, re.MULTILINE))


def measured() -> dict[str, int]:
    """Return each number of the tree as it is, by the names in `sizes.json`."""
    package, tests = (
        [path.read_text() for path in (ROOT / folder).rglob("*.py")]
        for folder in ("padded_dispatch", "tests")
    )
    words = {path: len(path.read_text().split()) for path in PAGES}
    notebooks = [json.loads(path.read_text()) for path in (ROOT / "notebooks").glob("*.ipynb")]
    public = padded_dispatch.__all__ + padded_dispatch.megatron.__all__
    return {
        "package lines": sum(len(source.splitlines()) for source in package),
        "package files": len(package),
        "package code lines": sum(len(code_lines(source)) for source in package),
        "test lines": sum(len(source.splitlines()) for source in tests),
        "page words": sum(words.values()) - words[LOG],
        "log words": words[LOG],
        "readme lines": len(README.read_text().splitlines()),
        "options": len(dataclasses.fields(PaddedOptions)),
        "flags": sum(map(num_flags, COMMANDS)),
        "public names": len(public),
        "longest notebook, lines of code": max(
            sum(
                len("".join(cell["source"]).splitlines())
                for cell in notebook["cells"]
                if cell["cell_type"] == "code"
            )
            for notebook in notebooks
        ),
    }


def test_nothing_has_grown():
    limits = json.loads((ROOT / "tests" / "sizes.json").read_text())
    sizes = measured()
    assert sizes.keys() == limits.keys()
    grown = {name: size for name, size in sizes.items() if size > limits[name] * SLACK}
    assert grown == {}, f"at most {SLACK} times {limits} (sizes.json)"


if __name__ == "__main__":
    print(json.dumps(measured(), indent=2))  # noqa: T201
