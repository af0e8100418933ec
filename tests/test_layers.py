"""The layout: imports point down only, and every test file has the name of its source file.

The core never imports Megatron or Transformer Engine. `pytest tests/kernels/test_rows*.py` runs all
tests of padded_dispatch/kernels/rows.py.
"""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent / "padded_dispatch"
LAYERS = (  # Low to high; modules on one line do not import each other.
    "config",
    "memory utils",
    "kernels",
    "routing",
    "exchange counters trace",
    "experts recorder",
    "dispatcher",
    "tune",
    "megatron",
    "bench train",
    "cli",
    "__main__",
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names.split()}
HOSTS = {"megatron", "transformer_engine"}
HOST_USERS = {"megatron", "bench", "train"}
# Tests of the package as a whole, of the repository, or of Megatron's side of a contract; files of
# tests/gpu are named after what they measure.
REPOSITORY = (
    "bridge_run build compile devices examples import language layers notebooks readme real_run "
    "recipes rivals upstream why_ahead"
)
NOT_MIRRORED = {*REPOSITORY.split(), "contract", "defects"}


def violations(path: Path, source: str) -> list[str]:
    """Return what a module, by its path in the package, imports that is not below it."""
    name, found = path.parts[0].removesuffix(".py"), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = f"{node.module}." if not node.level else "."
            found += [prefix + alias.name for alias in node.names]

    def points_down(module: str) -> bool:
        head, *rest = module.split(".")
        if head != "padded_dispatch":
            return bool(head) and (head not in HOSTS or name in HOST_USERS)
        return rest[0] == name or LEVEL.get(rest[0], len(LAYERS)) < LEVEL[name]

    return [module for module in found if not points_down(module)]


def test_imports_point_down():
    names = {path.relative_to(ROOT): path.read_text() for path in ROOT.rglob("*.py")}
    assert {path.parts[0].removesuffix(".py") for path in names} == {*LEVEL, "__init__"}
    del names[Path("__init__.py")]
    found = {path: violations(path, source) for path, source in names.items()}
    assert {path: modules for path, modules in found.items() if modules} == {}


def mirrors(path: Path) -> bool:
    """Return whether a test FOLDER/test_STEM[_ASPECT].py has its source FOLDER/STEM.py.

    The source may also be a package, FOLDER/STEM/__init__.py.
    """
    words = path.stem.removeprefix("test_").split("_")
    stems = ("_".join(words[:end]) for end in range(1, len(words) + 1))
    sources = [ROOT / path.parent / stem for stem in stems]
    return any(s.with_suffix(".py").exists() or (s / "__init__.py").exists() for s in sources)


def test_every_test_file_mirrors_a_source_file():
    files = [path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")]
    others = {path for path in files if not mirrors(path) and path.parts[0] != "gpu"}
    assert {path.stem.removeprefix("test_") for path in others} == NOT_MIRRORED


def test_maintainers_read_each_file_once_and_the_first_room_in_an_afternoon():
    page = (ROOT / "megatron" / "MAINTAINERS.md").read_text()
    table = page.split("## In what order to read `megatron/`")[1].split("\n## ")[0]
    rooms = [
        re.findall(r"`(\w+\.py)`", room)
        for room in re.split(r"^\| \w.*?(?= \|)", table, flags=re.M)
    ]
    named = [name for room in rooms for name in room]
    assert sorted(named) == sorted(path.name for path in (ROOT / "megatron").glob("[!_]*.py"))
    layer = next(room for room in rooms if room)
    assert layer[0] == "layer.py"
    lines = [len((ROOT / "megatron" / name).read_text().splitlines()) for name in layer]
    assert sum(lines) <= 2_200
