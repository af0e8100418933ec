"""Imports point down only, and the core never imports Megatron or Transformer Engine."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1] / "padded_dispatch"
LAYERS = (  # Low to high; modules on one line do not see each other.
    "config",
    "utils",
    "reference kernels",
    "ops",
    "exchange experts telemetry",
    "dispatcher",
    "megatron tune",
    "bench train",
    "cli",
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names.split()}
HOSTS = {"megatron", "transformer_engine"}
HOST_USERS = {"megatron", "bench", "train"}


def imports(path: Path) -> set[str]:
    """Dotted names of everything that `path` imports; a relative import starts with '.'."""
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


def test_this_test_can_fail(tmp_path):
    (tmp_path / "reference.py").write_text("from padded_dispatch.ops import kept_map")
    (tmp_path / "kernels.py").write_text(
        "import megatron.core\nfrom padded_dispatch import ops\nfrom . import config\n"
        "def late():\n    import transformer_engine\n"
        "from padded_dispatch.config import Policy\nimport torch\n"
    )
    (tmp_path / "exchange").mkdir()
    (tmp_path / "exchange" / "nccl.py").write_text(
        "from padded_dispatch.exchange import Slots\nfrom padded_dispatch.dispatcher import check\n"
    )
    (tmp_path / "train.py").write_text("import megatron.core\nfrom padded_dispatch.bench import x")
    assert violations(tmp_path) == [
        "exchange -> padded_dispatch.dispatcher.check",
        "kernels -> .config",
        "kernels -> megatron.core",
        "kernels -> padded_dispatch.ops",
        "kernels -> transformer_engine",
        "reference -> padded_dispatch.ops.kept_map",
        "train -> padded_dispatch.bench.x",
    ]


def test_every_module_has_a_place():
    modules = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert modules - {"__init__", "__main__", "__pycache__"} <= set(LEVEL)
