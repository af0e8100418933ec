"""README and pages against the code: snippets run, commands parse, links lead somewhere.

    python -m tests.test_readme

writes the table of options into its page.
"""

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
from typing import Any

import torch

import padded_dispatch
from notebooks import readme_figures as figures
from padded_dispatch import cli
from padded_dispatch.bench import report
from padded_dispatch.megatron import config, options, run

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PACKAGE_PAGE = ROOT / "padded_dispatch" / "README.md"
MEGATRON_PAGE = ROOT / "padded_dispatch" / "megatron" / "README.md"
FIELDS_PAGE = MEGATRON_PAGE.with_name("FIELDS.md")
FOLDERS = (".github", "padded_dispatch", "notebooks", "tests")
PAGES = (README, *sorted(page for name in FOLDERS for page in (ROOT / name).rglob("*.md")))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def num_words(page: Path) -> int:
    """Count the words of a page; lines and bars of tables are none."""
    return sum(re.search(r"\w", word) is not None for word in page.read_text().split())


def without_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def options_table() -> str:
    lines = []
    defaults = options.PaddedOptions()
    for option in dataclasses.fields(options.PaddedOptions):
        name, told = option.name, option.metadata
        flag = f"--padded-{name.replace('_', '-')}"
        default = options.show(getattr(defaults, name))
        lines.append([f"`{name}`", f"`{flag}`", default, told["help"]])
    return report.markdown(["option", "flag", "default", "meaning"], lines)


def refused_table() -> str:
    lines = [[f"`{row.name}`", row.note, row.remedy] for row in config.REFUSED]
    return report.markdown(["setting", "reason", "instead"], lines)


def replaced_table() -> str:
    """Return a row for each note of what replaces fields; `KEPT` ones have a mark."""
    fields: dict[str, list[str]] = {}
    for name, note in config.REPLACED.items():
        fields.setdefault(note, []).append(f"`{name}`" + " \\*" * (name in config.KEPT))
    lines = [[", ".join(names), note] for note, names in fields.items()]
    return report.markdown(["setting", "instead"], lines)


# By page: the tables that are written, by the names in the comments around them.
WRITTEN = {
    MEGATRON_PAGE: {"options": options_table},
    FIELDS_PAGE: {"refused": refused_table, "replaced": replaced_table},
}


def with_written(page: Path) -> str:
    """Return a page with its written tables as they are now."""
    text = page.read_text()
    for name, table in WRITTEN[page].items():
        marker = f"<!-- {name}: written by `python -m tests.test_readme` -->"
        begin, rest = text.split(f"{marker}\n")
        _, end = rest.split(f"<!-- {name}: end -->")
        text = f"{begin}{marker}\n\n{table()}\n\n<!-- {name}: end -->{end}"
    return text


def test_names_of_options_functions_and_versions_on_pages_are_those_of_the_code():
    for page in WRITTEN:
        assert with_written(page) == page.read_text(), "run python -m tests.test_readme"
    section = PACKAGE_PAGE.read_text().split("## Public names")[1].split("\n## ")[0]
    for module in ("padded_dispatch", "padded_dispatch.megatron"):
        (table,) = re.findall(rf"^From `{re.escape(module)}`,.*?(?=^From|\Z)", section, re.M | re.S)
        listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
        assert sorted(listed) == sorted(importlib.import_module(module).__all__)
    page = (ROOT / ".github" / "INSTALL.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["te"]]
    wanted += project["optional-dependencies"]
    assert [package for package in wanted if f"`{package}`" not in page] == []
    assert metadata.version("padded-dispatch") == padded_dispatch.__version__
    # Every defect of stock in the table has a test, and every test of a defect its row.
    page = (ROOT / "padded_dispatch" / "megatron" / "MAINTAINERS.md").read_text()
    table = set(re.findall(r"^\| (D\d+b?) \|", page, re.MULTILINE))
    files = [p for name in ("megatron", "gpu") for p in (ROOT / "tests" / name).rglob("test_*.py")]
    tests = re.findall(r"def test_(d\d+b?)_", "".join(path.read_text() for path in files))
    assert table == {name.upper().replace("B", "b") for name in tests}


def _imported(program: Path) -> set[str]:
    """Return the packages that a program imports, itself or by programs beside it."""
    nodes = list(ast.walk(ast.parse(program.read_text())))
    names = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    found = {name.split(".")[0] for name in names}
    beside = [program.with_name(f"{name}.py") for name in found]
    return found.union(*(_imported(other) for other in beside if other.exists()))


def test_programs_of_the_results_page_find_what_they_import():
    """A program that is not run as a module does not find the folders of a checkout."""
    page = (ROOT / "notebooks" / "results" / "README.md").read_text()
    programs = {Path(name) for name in re.findall(r"python\s+(notebooks/\w+\.py)", page)}
    assert {program.stem for program in programs} >= {"real_run", "rivals", "bridge_run"}
    imported = {program.stem: _imported(ROOT / program) for program in programs}
    assert {name for name, of in imported.items() if of & {"tests", "notebooks"}} == set()


def test_runs_that_failed_or_have_another_seed_are_no_figures(monkeypatch):
    good, runs = figures.real_runs(), figures.runs_in("store")
    rows = [row | {"ms": []} for run in runs for row in run["rows"]]
    failed = runs[0] | {"rows": [row | {"exit_code": 1} for row in rows]}
    seeded = runs[0] | {"rows": rows, "about": runs[0]["about"] | {"command": "--more --seed 12"}}
    monkeypatch.setattr(figures, "runs_in", lambda name: [*runs, failed, seeded])
    assert figures.real_runs() == good
    usual = seeded | {"about": seeded["about"] | {"command": "--more --seed 1234"}}
    monkeypatch.setattr(figures, "runs_in", lambda name: [*runs, usual])
    assert figures.real_runs() != good


def test_figures_of_the_readme_are_measured():
    """Matplotlib writes the text of each label into a picture, as a comment."""
    labels = set(re.findall("<!-- *(.*?) *-->", (figures.IMAGES / "real_run.svg").read_text()))
    runs = figures.real_runs()
    ms = {
        key: {name: runs[key][name]["median_ms"] for name in figures.TIMED if name in runs[key]}
        for key in figures.SHOWN
    }
    for times in ms.values():
        for name, time in times.items():
            ratio = "" if name == figures.OURS else f"  {time / times[figures.OURS]:.1f}x"
            assert f"{time:,.0f}{ratio}" in labels, "run python notebooks/readme_figures.py"
    first_screen = " ".join(README.read_text().split("## Quick start")[0].split())
    _, many, _, _ = figures.SHOWN
    ours, padded, dropless = (ms[many][name] for name in figures.TIMED)
    says = "{:.1f}x faster than drop-and-pad, {:.1f}x faster than dropless"
    assert says.format(padded / ours, dropless / ours) in first_screen
    says = "takes {:.0f} ms (stock drop-and-pad {:.0f}, stock dropless {:,.0f})"
    assert says.format(ours, padded, dropless) in first_screen
    of_ours = {key: runs[key][figures.OURS] for key in figures.SHOWN}
    assert [key for key, row in of_ours.items() if any(row["dropped"])] == []
    assert figures.with_tables(README.read_text()) == README.read_text(), (
        "run python notebooks/readme_figures.py"
    )
    old = {"about": {"commit": "abc", "kernels": ""}}
    assert figures.commits([old | {"contender": figures.PADDED}]) == "abc"
    assert figures.commits([old | {"contender": figures.OURS}]) == "abc, older kernels"
    _, about = figures.newest_table()
    assert {"machine": about["machine"], **about["versions"]} == report.README_CONDITIONS


def test_blocks_run():
    """.ci/run takes the second block of Quick start as the test command."""
    section = README.read_text().split("## Quick start")[1].split("\n## ")[0]
    _, test = blocks(section, "bash")
    assert test.splitlines()[-1] == "pytest" and len(test.splitlines()) == 4
    assert num_words(README) <= 900
    (example,) = blocks(README.read_text(), "python")
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["config"].moe_token_dispatcher_type == "padded_alltoall"
    (example,) = [b for b in blocks(PACKAGE_PAGE.read_text(), "python") if "PaddedDispatcher(" in b]
    names = {}
    exec(example, names)
    kept_TE = names["sent"].selection.kept_TE
    tokens_TD, probs_TE = names["tokens_TD"], names["probs_TE"]
    weights_T1 = torch.where(kept_TE, probs_TE, 0).sum(1, keepdim=True)
    torch.testing.assert_close(names["out_TD"], torch.tanh(tokens_TD) * weights_T1)


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield target and anchor of each relative link; the anchor is '' where there is none."""
    prose = re.sub(r"`[^`\n]*`", "", without_blocks(page))
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not re.match(r"\w+:", target):
            path, _, anchor = target.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere_and_pages_are_reached():
    reached, waiting = set(), [README]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        for path, anchor in links(page):
            assert path.is_relative_to(ROOT) and path.exists(), f"{page}: {path}"
            assert not anchor or anchor in anchors(path), f"{page}: {path}#{anchor}"
        linked = {path for path, _ in links(page) if path.suffix == ".md"}
        waiting += linked - reached
    template = ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md"  # The host shows it.
    assert reached == set(PAGES) - {template}


def test_python_on_pages_compiles_and_its_imports_resolve():
    for block in (block for page in PAGES for block in blocks(page.read_text(), "python")):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(str(node.module))
                assert [a.name for a in node.names if not hasattr(module, a.name)] == []


def commands(page: Path) -> Iterator[str]:
    """Yield the command lines of a page: lines of code, and inline code that has flags."""
    text, prose = page.read_text(), without_blocks(page)
    indented = re.findall(r"^ {4}(.*)$", prose.replace("\\\n", " "), re.MULTILINE)
    fenced = "".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    for line in (*indented, *fenced):
        yield " ".join(re.sub(r" #.*", "", line).split())
    yield from (inline for inline in re.findall(r"`([^`\n]+)`", prose) if " -" in inline)


def test_commands_on_pages_parse_and_git_ignores_what_they_write(monkeypatch):
    named = cli.resolve_name  # Read a command's line, and run nothing.
    monkeypatch.setattr(cli, "resolve_name", lambda p: named(p) if ":read" in p else lambda _: 0)
    monkeypatch.setenv("PYTHONWARNINGS", "")  # The command changes it.
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "/tune.html" in ignored
    for command in (command for page in PAGES for command in commands(page)):
        if not re.match(r"padded-dispatch |python |pytest |torchrun |-m ", command):
            continue
        words = shlex.split(command)
        if command.startswith("padded-dispatch ") and words[1] != "...":
            assert cli.main(words[1:]) == 0
        if (before := "padded_dispatch.megatron.run") in words and words[-1] != before:
            assert run.read(words[words.index(before) + 1 :])[1].endswith((".py", "..."))
        check_paths(words)
        for flag, folder in itertools.pairwise(words):
            assert not flag.endswith("-trace") or f"/{folder}/" in ignored


def check_paths(words: list[str]) -> None:
    """Check that modules, files and flags of `python` and `pytest` commands exist."""
    while words and words[0] != "python" and words[0] != "pytest":
        words = words[1:]
    match words:
        case ["python", "-m", module, *flags] if module.startswith("tests."):
            spec = importlib.util.find_spec(module) or importlib.util.find_spec("tests")
            if spec is not None and spec.submodule_search_locations:
                spec = importlib.util.find_spec(f"{module}.__main__")
            assert spec is not None and spec.origin is not None, module
            source = Path(spec.origin).read_text()
            assert [f for f in flags if f.startswith("--") and f'"{f}"' not in source] == []
        case ["python", script, *_] if script.endswith(".py"):
            assert (ROOT / script).exists(), script
        case ["pytest", *arguments]:
            paths = [word for word in arguments if word.startswith("tests")]
            assert [path for path in paths if not (ROOT / path).exists()] == []


if __name__ == "__main__":
    for written in WRITTEN:
        written.write_text(with_written(written))
