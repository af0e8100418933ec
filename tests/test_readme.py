"""The README says what is so: its example runs, its tree and tables are the real ones."""

import re
from pathlib import Path
from typing import Any

import torch

from padded_dispatch.megatron import fields, options

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_example_without_megatron_runs():
    (example,) = [block for block in blocks("python") if "PaddedDispatcher(" in block]
    names: dict[str, Any] = {}
    exec(example, names)
    kept_TE = names["sent"].selection.kept_TE
    tokens_TD, probs_TE = names["tokens_TD"], names["probs_TE"]
    weights_T1 = torch.where(kept_TE, probs_TE, 0).sum(1, keepdim=True)
    torch.testing.assert_close(names["out_TD"], torch.tanh(tokens_TD) * weights_T1)


def test_quick_start_has_two_blocks():
    section = TEXT.split("## Quick start")[1].split("\n## ")[0]
    assert len(re.findall("^```bash$", section, re.MULTILINE)) == 2


def test_tree_lists_every_module():
    (tree,) = re.findall(r"^```\n(padded_dispatch/\n.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    listed, folders = set(), [ROOT]
    for line in tree.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders = [*folders[: depth + 1], folders[depth] / name]
        listed.add(folders[-1])
    package = ROOT / "padded_dispatch"
    modules = {path for path in package.rglob("*.py") if path.name != "__init__.py"}
    assert {path for path in listed if path.suffix == ".py"} == modules


def test_tables_are_generated():
    assert options.markdown_table() in TEXT
    text = (ROOT / "padded_dispatch" / "megatron" / "FIELDS.md").read_text()
    for rows in (fields.MOE_FIELDS, fields.OTHER_FIELDS):
        assert f"\n{fields.markdown_table(rows)}\n" in text


def test_differences_name_their_tests():
    """Every defect of the table has a test, and every test of a defect its row."""
    table = set(re.findall(r"^\| (D\d+b?) \|", TEXT, re.MULTILINE))
    files = (ROOT / "tests").glob("megatron/**/test_*.py")
    tests = "".join(path.read_text() for path in files)
    assert table == {
        name.upper().replace("B", "b") for name in re.findall(r"def test_(d\d+b?)_", tests)
    }


def test_readme_is_short():
    assert len(TEXT.splitlines()) < 400
