"""The layout: imports point down only, and every test file has the name of its source file.

The core never imports Megatron or Transformer Engine. `pytest tests/kernels/test_rows*.py` runs all
tests of padded_dispatch/kernels/rows.py.
"""

import ast
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent / "padded_dispatch"
LAYERS = (  # Low to high; modules on one line do not import each other.
    "config",
    "utils",
    "kernels",
    "routing",
    "exchange counters trace",
    "experts recorder",
    "dispatcher",
    "tune",
    "megatron",
    "bench train",
    "cli",
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names.split()}
HOSTS = {"megatron", "transformer_engine"}
HOST_USERS = {"megatron", "bench", "train"}
# Tests of the package as a whole, of the repository, or of Megatron's side of a contract; files of
# tests/gpu are named after what they measure.
NOT_MIRRORED = {
    "test_compile.py",
    "test_import.py",
    "test_language.py",
    "test_layers.py",
    "test_mutate.py",
    "test_notebooks.py",
    "test_readme.py",
    "test_recipes.py",
    "test_sizes.py",
    "test_reference.py",
    "megatron/test_contract.py",
    "megatron/test_defects.py",
}


def imports(path: Path) -> set[str]:
    """Return the dotted names of everything that `path` imports; a relative one starts with "."."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            prefix = f"{node.module}." if not node.level else "."
            found |= {prefix + alias.name for alias in node.names}
    return found


def violations(root: Path) -> list[str]:
    found = []
    for path in root.rglob("*.py"):
        name = path.relative_to(root).parts[0].removesuffix(".py")
        if name == "__init__":
            continue
        for module in imports(path):
            head, *rest = module.split(".")
            if head == "padded_dispatch":
                target = rest[0] if rest else "__init__"
                bad = target != name and LEVEL.get(target, len(LAYERS)) >= LEVEL[name]
            else:
                bad = not head or (head in HOSTS and name not in HOST_USERS)
            if bad:
                found.append(f"{name} -> {module}")
    return sorted(found)


def test_imports_point_down():
    assert violations(ROOT) == []


def test_an_import_that_points_up_is_found(tmp_path):
    (tmp_path / "utils.py").write_text("from padded_dispatch.routing import kept_map")
    (tmp_path / "kernels.py").write_text(
        "import megatron.core\nfrom padded_dispatch import routing\nfrom . import config\n"
        "def late():\n    import transformer_engine\n"
        "from padded_dispatch.config import Policy\nimport torch\n"
    )
    (tmp_path / "exchange").mkdir()
    (tmp_path / "exchange" / "alltoall.py").write_text(
        "from padded_dispatch.exchange import Slots\nfrom padded_dispatch.dispatcher import check\n"
    )
    (tmp_path / "train.py").write_text("import megatron.core\nfrom padded_dispatch.bench import x")
    assert violations(tmp_path) == [
        "exchange -> padded_dispatch.dispatcher.check",
        "kernels -> .config",
        "kernels -> megatron.core",
        "kernels -> padded_dispatch.routing",
        "kernels -> transformer_engine",
        "train -> padded_dispatch.bench.x",
        "utils -> padded_dispatch.routing.kept_map",
    ]


def test_every_module_has_a_layer():
    modules = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert modules - {"__init__", "__main__", "__pycache__"} <= set(LEVEL)


def without_source(tests: Path, root: Path) -> list[str]:
    """Return the test files FOLDER/test_STEM[_ASPECT].py that have no source FOLDER/STEM.py."""
    found = []
    for path in tests.rglob("test_*.py"):
        name = path.relative_to(tests)
        words = path.stem.removeprefix("test_").split("_")
        stems = ("_".join(words[:end]) for end in range(1, len(words) + 1))
        mirrors = any((root / name.parent / f"{stem}.py").exists() for stem in stems)
        if not mirrors and name.parts[0] != "gpu" and name.as_posix() not in NOT_MIRRORED:
            found.append(name.as_posix())
    return sorted(found)


def test_every_test_file_mirrors_a_source_file():
    assert without_source(TESTS, ROOT) == []


def test_a_test_file_without_source_is_found(tmp_path):
    (tmp_path / "root" / "ops").mkdir(parents=True)
    (tmp_path / "root" / "ops" / "rows.py").touch()
    for name in ("ops/test_rows.py", "ops/test_rows_packed.py", "gpu/test_x.py", "test_readme.py"):
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).touch()
    assert without_source(tmp_path / "tests", tmp_path / "root") == []
    for name in ("ops/test_row.py", "ops/test_plan_rows.py", "test_rows.py"):
        (tmp_path / "tests" / name).touch()
    assert without_source(tmp_path / "tests", tmp_path / "root") == [
        "ops/test_plan_rows.py",
        "ops/test_row.py",
        "test_rows.py",
    ]
