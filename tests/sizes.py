"""The size of the repository: a report to read before a release.

    python -m tests.sizes

Nothing fails when a number grows. A change that adds an idea should take one away; that is a rule
of CONTRIBUTING, and a reader judges it.
"""

import dataclasses
import json
import re
from pathlib import Path

import padded_dispatch
import padded_dispatch.megatron
from padded_dispatch.megatron.options import PaddedOptions
from padded_dispatch.utils.results import code_lines
from tests.support.processes import python
from tests.test_readme import PAGES, ROOT, num_words

COMMANDS = ("train", "tune", "bench")
# For those who change the package, or judge its code; every other page is for its users.
MAINTAINERS = (
    *("/LOG.md", "MAINTAINERS.md", "CONTRIBUTING.md", "SECURITY.md", "TEMPLATE.md"),
    *("upstream/", "tests/", "padded_dispatch/README.md"),
)


def for_users(page: Path) -> bool:
    """Return whether a page is for users."""
    return not any(word in str(page.relative_to(ROOT)) for word in MAINTAINERS)


def num_flags(command: str) -> int:
    """Count the flags in a command's help; `--x, --no-x` is one."""
    text = python("-m", "padded_dispatch.cli", command, "--help")
    return len(re.findall(r"^ +(?:-\w, )?--(?!help\b)\w", text, re.MULTILINE))


def measured() -> dict[str, int]:
    """Return each number of the tree, by its name."""
    package, tests = (
        [path.read_text() for path in (ROOT / folder).rglob("*.py")]
        for folder in ("padded_dispatch", "tests")
    )
    words = {path: num_words(path) for path in PAGES}
    notebooks = [json.loads(path.read_text()) for path in (ROOT / "notebooks").glob("*.ipynb")]
    public = padded_dispatch.__all__ + padded_dispatch.megatron.__all__
    return {
        "package lines": sum(len(source.splitlines()) for source in package),
        "package files": len(package),
        "package code lines": sum(len(code_lines(source)) for source in package),
        "test lines": sum(len(source.splitlines()) for source in tests),
        "words for users": sum(words[page] for page in PAGES if for_users(page)),
        **{f"words of {page.relative_to(ROOT)}": words[page] for page in PAGES},
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


if __name__ == "__main__":
    for name, size in measured().items():
        print(f"{size:8,}  {name}")  # noqa: T201
