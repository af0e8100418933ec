"""Mutants of a small module, and what counts as caught."""

from pathlib import Path

import padded_dispatch
from tests import mutate
from tests.mutate import EQUIVALENT, Copies, files_for, modules_of, mutants

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

TESTS = """
from padded_dispatch.a import f

def test_f():
    assert f(1) == 2
"""


def test_mutants_are_small_changes_that_tests_catch_or_not(tmp_path, monkeypatch):
    assert [f"{mutant.line}: {mutant.change}" for mutant in mutants(SOURCE)] == [
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
    for module, reasons in EQUIVALENT.items():
        changes = {mutant.change for mutant in mutants((PACKAGE / module).read_text())}
        assert reasons.keys() <= changes, module
    assert modules_of(["routing/select.py"]) == [Path("routing/select.py")]
    assert "tests/routing/test_select.py" in files_for(Path("routing/select.py"))
    root = tmp_path / "root"
    for name, text in {
        "padded_dispatch/__init__.py": "",
        "padded_dispatch/a.py": "def f(x): return x + 1",
        "tests/test_a.py": TESTS,
        "pyproject.toml": "",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(mutate, "ROOT", root)
    monkeypatch.setattr(mutate, "files_for", lambda module: ["tests/test_a.py"])
    copies = Copies(2, tmp_path / "copies")
    sources = ["def f(x): return x + 1", "def f(x): return x - 1", "does not compile"]
    assert copies.run(Path("a.py"), sources, 600) == [True, False, False]
    assert (tmp_path / "copies" / "0" / "padded_dispatch" / "a.py").read_text() == sources[0]
    assert copies.run(Path("a.py"), ["import time; time.sleep(600)"], 1.0) == [False]
