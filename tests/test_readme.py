"""README and pages against the code: snippets run, commands parse, links lead somewhere.

    python -m tests.test_readme

writes the tables that code generates into the pages: options, and the figures of the README.
"""

import argparse
import ast
import dataclasses
import importlib
import importlib.util
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import padded_dispatch
from padded_dispatch import cli
from padded_dispatch.megatron import options, run

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PACKAGE_PAGE = ROOT / "padded_dispatch" / "README.md"
MEGATRON_PAGE = ROOT / "padded_dispatch" / "megatron" / "README.md"
FOLDERS = (".github", "padded_dispatch", "notebooks", "tests")
PAGES = (README, *sorted(page for name in FOLDERS for page in (ROOT / name).rglob("*.md")))
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def without_code(text: str) -> str:
    """Return the text without fenced and inline code."""
    return re.sub(
        r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    )


# Tables that code generates.


def readme_figures() -> ModuleType:
    """Import notebooks/readme_figures.py, which is in no package."""
    path = ROOT / "notebooks" / "readme_figures.py"
    spec = importlib.util.spec_from_file_location("readme_figures", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options_table() -> str:
    """Return all options as a Markdown table."""
    lines = ["| option | flag | default | meaning |", "|---|---|---|---|"]
    defaults = options.PaddedOptions()
    for option in dataclasses.fields(options.PaddedOptions):
        name, told = option.name, option.metadata
        flag = f"--padded-{name.replace('_', '-')}"
        default = options.show(getattr(defaults, name))
        lines.append(f"| `{name}` | `{flag}` | {default} | {told['help']} |")
    return "\n".join(lines)


def generated() -> dict[tuple[Path, str], str]:
    """Return the text between `<!-- NAME: ... -->` and `<!-- NAME: end -->`, by page and name."""
    return {
        (MEGATRON_PAGE, "options"): options_table(),
    }


def with_table(text: str, name: str, table: str) -> str:
    """Return a page's text with another table between the markers of a name."""
    begin, end = re.escape(f"<!-- {name}: "), re.escape(f"<!-- {name}: end -->")
    (marker,) = re.findall(rf"^({begin}(?!end).*)$", text, re.MULTILINE)
    region = rf"^{re.escape(marker)}\n.*?^{end}$"
    new = f"{marker}\n\n{table}\n\n<!-- {name}: end -->"
    return re.sub(region, lambda _: new, text, flags=re.MULTILINE | re.DOTALL)


def write_tables() -> None:
    """Write all generated tables into their pages."""
    for (page, name), table in generated().items():
        page.write_text(with_table(page.read_text(), name, table))


def test_tables_are_generated():
    for (page, name), table in generated().items():
        text = page.read_text()
        assert with_table(text, name, table) == text, "run python -m tests.test_readme"


def test_plot_shows_the_figures_of_the_results_file():
    """Matplotlib writes the text of each label into the file, as a comment."""
    figures = readme_figures()
    labels = set(re.findall("<!-- (.*?) -->", (figures.IMAGES / "layer_time.svg").read_text()))
    shown = {
        f"{ms:.2f}"
        for (_, name, factor), ms in figures.layer_times().items()
        if (name, factor) != (figures.PACKED, 1.0)
    }
    assert shown <= labels, "run python notebooks/readme_figures.py"


# The README.


def test_quick_start_has_two_blocks():
    """.ci/run takes the second one as the test command."""
    section = README.read_text().split("## Quick start")[1].split("\n## ")[0]
    assert len(re.findall("^```bash$", section, re.MULTILINE)) == 2


def test_readme_is_short():
    text = README.read_text()
    assert len(text.splitlines()) <= 200
    hashes = re.findall(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,}\b", text)
    assert hashes == [], "commits belong to notebooks/results/README.md"


def test_figures_of_the_first_screen_are_measured():
    table, _ = README.read_text().split("## Quick start")
    text = "".join(line for line in table.splitlines() if not line.startswith("| **Versions**"))
    figures = set(re.findall(r"\d+\.\d+", text))
    pages = ROOT / "notebooks" / "results", ROOT / "padded_dispatch" / "tune"
    measured = "".join((folder / "README.md").read_text() for folder in pages)
    assert len(figures) > 10
    assert figures - set(re.findall(r"\d+\.\d+", measured)) == set()


def test_pages_are_reached_from_the_readme_and_lead_back():
    reached, ahead = set(), [README]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        linked = {path for path, _ in links(page) if path.suffix == ".md"}
        ahead += linked - reached
        assert page == README or page.name == "FIELDS.md" or README in linked
    assert reached == set(PAGES)


def test_python_of_the_readme_runs():
    """One block: install, then a config that has the options."""
    (example,) = blocks(README.read_text(), "python")
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["config"].moe_token_dispatcher_type == "padded_alltoall"
    assert names["config"].padded_dispatch.policy == "priority"


def test_installation_names_the_versions_of_the_project():
    page = (ROOT / ".github" / "INSTALL.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["te"]]
    assert [package for package in wanted if f"`{package}`" not in page] == []
    assert project["requires-python"] == ">=3.11" and "| Python | 3.11 or later |" in page
    extras = {name for name in project["optional-dependencies"] if f"`{name}`" not in page}
    assert extras == set()


# The page of the package.


def test_example_without_megatron_runs():
    (example,) = [
        block
        for block in blocks(PACKAGE_PAGE.read_text(), "python")
        if "PaddedDispatcher(" in block
    ]
    names: dict[str, Any] = {}
    exec(example, names)
    kept_TE = names["sent"].selection.kept_TE
    tokens_TD, probs_TE = names["tokens_TD"], names["probs_TE"]
    weights_T1 = torch.where(kept_TE, probs_TE, 0).sum(1, keepdim=True)
    torch.testing.assert_close(names["out_TD"], torch.tanh(tokens_TD) * weights_T1)


def test_tree_lists_every_module():
    (tree,) = re.findall(
        r"^```\n(padded_dispatch/\n.*?)^```", PACKAGE_PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    listed, folders = set(), [ROOT]
    for line in tree.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders = [*folders[: depth + 1], folders[depth] / name]
        listed.add(folders[-1])
    package = ROOT / "padded_dispatch"
    modules = {path for path in package.rglob("*.py") if path.name != "__init__.py"}
    listed = {path for path in listed if path.suffix == ".py"}
    missing = sorted(str(path.relative_to(ROOT)) for path in modules - listed)
    gone = sorted(str(path.relative_to(ROOT)) for path in listed - modules)
    assert (missing, gone) == ([], [])


@pytest.mark.parametrize("module", ["padded_dispatch", "padded_dispatch.megatron"])
def test_public_names_are_listed(module):
    section = PACKAGE_PAGE.read_text().split("## Public names")[1].split("\n## ")[0]
    (table,) = re.findall(rf"^From `{re.escape(module)}`,.*?(?=^From|\Z)", section, re.M | re.S)
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(listed) == sorted(importlib.import_module(module).__all__)


# The page of Megatron.


def test_differences_name_their_tests():
    """Every defect of the table has a test, and every test of a defect its row."""
    table = set(re.findall(r"^\| (D\d+b?) \|", MEGATRON_PAGE.read_text(), re.MULTILINE))
    files = [
        path
        for folder in ("megatron", "gpu")
        for path in (ROOT / "tests" / folder).glob("**/test_*.py")
    ]
    tests = "".join(path.read_text() for path in files)
    assert table == {
        name.upper().replace("B", "b") for name in re.findall(r"def test_(d\d+b?)_", tests)
    }


# All pages: links, Python, command lines.


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield target and anchor of each relative link; the anchor is '' where there is none."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if not re.match(r"\w+:", target):
            path, _, anchor = target.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@EACH_PAGE
def test_links_lead_somewhere(page):
    for path, anchor in links(page):
        assert path.is_relative_to(ROOT)
        assert path.exists(), path
        assert not anchor or anchor in anchors(path), f"{path}#{anchor}"


# Megatron-Bridge and what comes with it: not among the packages of the tests.
NOT_HERE = ("megatron.bridge", "yaml")


@EACH_PAGE
def test_python_compiles_and_its_imports_resolve(page):
    for block in blocks(page.read_text(), "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if not alias.name.startswith(NOT_HERE):
                        importlib.import_module(alias.name)
            elif isinstance(node, ast.ImportFrom):
                assert node.module is not None
                if node.module.startswith(NOT_HERE):
                    continue
                module = importlib.import_module(node.module)
                assert [a.name for a in node.names if not hasattr(module, a.name)] == []


def commands(text: str) -> Iterator[str]:
    """Yield the command lines of a text: lines of code, and inline code that has flags."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^ {4}(.*)$", prose.replace("\\\n", " "), re.MULTILINE)
    fenced = "".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    for line in (*indented, *fenced):
        yield " ".join(re.sub(r" #.*", "", line).split())
    yield from (inline for inline in re.findall(r"`([^`\n]+)`", prose) if " -" in inline)


class _ParsedError(Exception):
    """A command line that its parser took; nothing after that is wanted."""


@pytest.fixture
def parsers_only(monkeypatch) -> None:
    """Stop each command once its arguments are parsed."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        parse_args(self, *args, **kwargs)
        raise _ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setenv("PYTHONWARNINGS", "")  # The command changes it.


def contenders(words: list[str]) -> Iterator[list[str]]:
    """Yield one command per `--vs` of `padded-dispatch compare`, since each is parsed by itself."""
    groups = [
        list(group) for vs, group in itertools.groupby(words, lambda word: word == "--vs") if not vs
    ]
    shared, *own = groups
    yield from ([*shared, "--vs", *flags] for flags in own) if own else [shared]


@EACH_PAGE
def test_commands_parse(page, parsers_only):
    for command in commands(page.read_text()):
        if not re.match(r"padded-dispatch |python |pytest |torchrun |-m ", command):
            continue
        words = shlex.split(command)
        if command.startswith("padded-dispatch ") and words[1] != "...":
            for argv in contenders(words[1:]):
                with pytest.raises(_ParsedError):
                    cli.main(argv)
        if (before := "padded_dispatch.megatron.run") in words and words[-1] != before:
            assert run.read(words[words.index(before) + 1 :])[1].endswith((".py", "..."))
        check_paths(words)


def check_paths(words: list[str]) -> None:
    """Check that modules, files and flags of `python` and `pytest` commands exist."""
    while words and words[0] != "python" and words[0] != "pytest":
        words = words[1:]
    match words:
        case ["python", "-m", module, *flags] if module.startswith("tests."):
            spec = importlib.util.find_spec(module)
            assert spec is not None and spec.origin is not None, module
            source = Path(spec.origin).read_text()
            source += (ROOT / "tests" / "support" / "gpu_rows.py").read_text()
            assert [f for f in flags if f.startswith("--") and f'"{f}"' not in source] == []
        case ["python", script, *_] if script.endswith(".py"):
            assert (ROOT / script).exists(), script
        case ["pytest", *arguments]:
            paths = [word for word in arguments if word.startswith("tests")]
            assert [path for path in paths if not (ROOT / path).exists()] == []


def test_commands_are_found():
    """These tests can fail: a wrong flag, file or module is noticed."""
    lines = "    padded-dispatch tune a \\\n      --drop 0.1\n    pytest tests/none"
    text = f"x\n\n{lines}\n\nas `pytest -m gpu`"
    found = list(commands(text))
    assert found == ["padded-dispatch tune a --drop 0.1", "pytest tests/none", "pytest -m gpu"]
    with pytest.raises(AssertionError):
        check_paths(shlex.split(found[1]))
    with pytest.raises(AssertionError):
        check_paths(["python", "-m", "tests.gpu.direct", "--no-such-flag"])
    with pytest.raises(AssertionError):
        check_paths(["python", "-m", "tests.gpu.absent"])


def test_wrong_flags_are_noticed(parsers_only, capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--no-such-flag"])
    assert "--no-such-flag" in capsys.readouterr().err


def test_version_is_the_one_of_the_project():
    version = padded_dispatch.__version__
    assert metadata.version("padded-dispatch") == version
    assert f"\n## {version}" in (ROOT / ".github" / "CHANGELOG.md").read_text()


if __name__ == "__main__":
    write_tables()
