"""Mutants of a small module, and what counts as caught."""

from contextlib import closing
from pathlib import Path

import pytest

import padded_dispatch
from tests import mutate
from tests.mutate import Copies, files_for, modules_of, mutants
from tests.support.equivalent import EQUIVALENT

PACKAGE = Path(padded_dispatch.__file__).parent

SOURCE = '''\
"""Text 1."""
LIMIT: int = 3

@register_kernel("cuda")
def gpu(x): return x + 1

def f(a, b=True):
    """Text 2."""
    assert a > 1
    if not a or a <= 2:
        print(f"{a + 1}", *zip(a, b, strict=True))
        return -a * 2.5
    return b
'''


def test_all_mutants_of_a_module():
    assert [str(mutant) for mutant in mutants(SOURCE)] == [
        "2: LIMIT: int = 3 -> LIMIT: int = 4",
        "7: def f(a, b=True): -> def f(a, b=False):",
        "10: if not a or a <= 2: -> if not (not a or a <= 2):",
        "11: print(f'{a + 1}', *zip(a, b, strict=True)) -> pass",
        "10: if not a or a <= 2: -> if not a and a <= 2:",
        "10: if not a or a <= 2: -> if a or a <= 2:",
        "10: if not a or a <= 2: -> if not a or a < 2:",
        "10: if not a or a <= 2: -> if not a or a <= 3:",
        "12: return -a * 2.5 -> return -a / 2.5",
        "12: return -a * 2.5 -> return a * 2.5",
        "12: return -a * 2.5 -> return -a * 5.0",
    ]


def test_a_mutant_is_one_change():
    for mutant in mutants(SOURCE):
        lines = mutant.source.splitlines()
        same = [line for line in mutants(SOURCE)[0].source.splitlines() if line in lines]
        assert len(same) >= len(lines) - 2
        compile(mutant.source, "mutant", "exec")


def tree(root: Path, names: list[str]) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    return root


def test_modules_and_their_tests(tmp_path):
    files = ["ops/rows.py", "ops/rows_packed.py", "ops/__init__.py", "ops/bare.py", "config.py"]
    tests = [f"ops/test_rows{aspect}.py" for aspect in ("", "_odd", "_packed")] + ["test_config.py"]
    root = tree(tmp_path, [f"padded_dispatch/{f}" for f in files] + [f"tests/{t}" for t in tests])
    found = modules_of(["ops", "config.py"], root)
    assert found == [Path("ops/rows.py"), Path("ops/rows_packed.py"), Path("config.py")]
    assert files_for(found[0], root) == ["tests/ops/test_rows.py", "tests/ops/test_rows_odd.py"]
    assert files_for(found[1], root) == ["tests/ops/test_rows_packed.py"]
    for wrong in ("ops/bare.py", "ops/none.py"):
        with pytest.raises(ValueError, match="must be in padded_dispatch and have tests, got ops/"):
            modules_of([wrong], root)


TESTS = """
from padded_dispatch.a import f

def test_f():
    assert f(1) == 2
"""


def test_a_source_passes_fails_or_takes_too_long(tmp_path, monkeypatch):
    root = tree(tmp_path / "root", ["padded_dispatch/__init__.py", "tests/__init__.py"])
    (root / "padded_dispatch/a.py").write_text("def f(x): return x + 1")
    (root / "tests/test_a.py").write_text(TESTS)
    (root / "pyproject.toml").write_text("")
    monkeypatch.setattr(mutate, "ROOT", root)
    monkeypatch.setattr(mutate, "_IMPORTED", ())
    monkeypatch.setattr(mutate, "files_for", lambda module: ["tests/test_a.py"])
    sources = [
        "def f(x): return x + 1",
        "def f(x): return x - 1",
        "def f(x): return 2 * x",
        "does not compile",
    ]
    endless = "def f(x):\n    while True: pass"
    with closing(Copies(2, tmp_path / "copies")) as copies:
        assert copies.run(Path("a.py"), sources, 600) == [True, False, True, False]
        assert (root / "padded_dispatch/a.py").read_text() == "def f(x): return x + 1"
        assert copies.run(Path("a.py"), [endless], 0.0) == [False]


def test_survivors_are_those_of_the_newest_row():
    rows = [
        {"check": "mutants", "module": "a.py", "survivors": ["3: x: int = 1 -> x: int = 2"]},
        {"check": "fault"},
        {"check": "mutants", "module": "b.py", "survivors": ["4: x -> y", "5: y -> x"]},
        {"check": "mutants", "module": "b.py", "survivors": ["14: x -> y"]},
    ]
    expected = {"a.py": ["x: int = 1 -> x: int = 2"], "b.py": ["x -> y"]}
    assert mutate.survivors_in(rows) == expected


def test_equivalent_changes_are_changes_of_their_modules():
    for module, reasons in EQUIVALENT.items():
        changes = {mutant.change for mutant in mutants((PACKAGE / module).read_text())}
        assert reasons.keys() <= changes, module
