"""Change the package in small ways, one at a time, and list the changes that no test notices.

    python -m tests.mutate routing/select.py exchange --jobs 16

Each change (a mutant) is made in a copy of the repository, in which the module's own test files run
until the first failure: `tests/routing/test_select*.py` for `routing/select.py`. A mutant is caught
if a test fails or the tests take too long. Survivors are gaps in the tests. Changes without effect
are listed with their reason in `EQUIVALENT` and not tried. Code that only a
GPU runs, annotations, asserts and texts are left out.
"""

import argparse
import ast
import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

# Changes that nothing can notice, by module, each with the reason.
EQUIVALENT: dict[str, dict[str, str]] = {
    "exchange/agreement.py": {
        "self._layer, self._caller = (-1, f'dispatcher {self._number}') -> "
        "self._layer, self._caller = (-2, f'dispatcher {self._number}')": (
            "layers have no negative numbers"
        ),
        "first, second = (int.from_bytes(half, signed=True) for half in (digest[:8], digest[8:])) "
        "-> first, second = (int.from_bytes(half, signed=True) for half in "
        "(digest[:8], digest[9:]))": "120 bits of a hash tell values apart as 128 do",
    },
    "exchange/mirror.py": {
        "if not absent or time.monotonic() >= end: -> if not absent or time.monotonic() > end:": (
            "a clock with nanoseconds; and at the very end one look more"
        ),
        "left = max(0.001, deadline - time.monotonic()) -> "
        "left = max(0.002, deadline - time.monotonic())": "a millisecond more after the limit",
        "name = blake2b(json.dumps(sorted(found)).encode(), digest_size=8).hexdigest() -> "
        "name = blake2b(json.dumps(sorted(found)).encode(), digest_size=9).hexdigest()": (
            "a name that is a byte longer, on all ranks"
        ),
    },
    "experts/packed.py": {
        "gemm.check_on_gpu(tokens_TD, weights.fc1_LGD, 8 if weights.scaled is None else 16) "
        "-> pass": "tests/kernels/test_gemm.py has it",
    },
    "experts/store.py": {
        "self._known: tuple[int, list[DispatchConfig]] = (0, []) -> "
        "self._known: tuple[int, list[DispatchConfig]] = (1, [])": "no pass has no calls",
    },
    "kernels/direct.py": {
        "PROGRAMS = 528 -> PROGRAMS = 529": "how much of the GPU is used",
        "owner = tl.where(e >= 0, e // num_local, -1) -> "
        "owner = tl.where(e >= 0, e // num_local, -2)": "no rank has a negative number",
        "target = tl.multiple_of(rows, 16) + (rank * num_slots + t) * width + column -> "
        "target = tl.multiple_of(rows, 17) + (rank * num_slots + t) * width + column": (
            "a hint to the compiler, which the interpreter does not read"
        ),
        "place = tl.load(place_of + n, mask=n < num_choices, other=-1) -> "
        "place = tl.load(place_of + n, mask=n <= num_choices, other=-1)": (
            "a place without an expert is not read"
        ),
    },
    "megatron/dispatcher.py": {
        "self.shared_overlap.wait() -> pass": "streams, which CPUs do not have",
    },
    "megatron/retry.py": {
        "totals_W, dispatcher = ((now_YW - before_YW).sum(0), self._layers[0].token_dispatcher) -> "
        "totals_W, dispatcher = ((now_YW - before_YW).sum(0), self._layers[1].token_dispatcher)": (
            "all layers have the same sizes"
        ),
    },
}

_PAIRS = (
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.And, ast.Or),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
    (ast.BitAnd, ast.BitOr),
    (ast.LShift, ast.RShift),
)
_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    **dict(_PAIRS),
    **{other: one for one, other in _PAIRS},
    **dict.fromkeys((ast.FloorDiv, ast.Mod, ast.Pow), ast.Mult),
}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A changed module: the line, and the statement's first line before and after.

    The tree is the module as it is until the next mutant is made.
    """

    line: int
    change: str
    tree: ast.Module


def mutants(source: str) -> Iterator[Mutant]:
    """Yield all mutants of a module, in the order of its lines."""
    tree = ast.parse(source)
    for node, statement in list(_nodes(tree)):
        for owner, name, place, changed in list(_changes(node)):
            kept = getattr(owner, name)
            removed = kept[place] if place >= 0 else kept
            whole = removed if isinstance(removed, ast.stmt) else statement
            line, before = getattr(whole, "lineno", 1), ast.unparse(whole).splitlines()[0]
            value = changed if place < 0 else [*kept[:place], changed, *kept[place + 1 :]]
            setattr(owner, name, value)
            after = ast.unparse(changed if whole is removed else whole).splitlines()[0]
            yield Mutant(line=line, change=f"{before} -> {after}", tree=tree)
            setattr(owner, name, kept)


def _nodes(node: ast.AST, statement: ast.AST | None = None) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield the nodes that may change, each with its statement."""
    if isinstance(node, ast.stmt) or statement is None:
        statement = node
    yield node, statement
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_left_out(child):
                yield from _nodes(child, statement)


def _is_left_out(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef):
        return any("cuda" in ast.unparse(decorator) for decorator in node.decorator_list)
    if isinstance(node, ast.keyword):  # zip(..., strict=True) asserts, too.
        return node.arg == "strict"
    return isinstance(node, ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom)


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST, str, int, Any]]:
    """Yield (owner, field, place in the field's list or -1, new value) of each change at a node."""
    match node:
        case ast.Compare():
            for place, operator in enumerate(node.ops):
                yield node, "ops", place, _SWAPPED[type(operator)]()
        case ast.BoolOp():
            yield node, "op", -1, _SWAPPED[type(node.op)]()
        case ast.BinOp() | ast.AugAssign() if type(node.op) in _SWAPPED:
            yield node, "op", -1, _SWAPPED[type(node.op)]()
        case ast.If() | ast.IfExp() | ast.While() if not isinstance(node.test, ast.UnaryOp):
            yield node, "test", -1, ast.UnaryOp(ast.Not(), node.test)
        case ast.Constant(value=bool()):
            yield node, "value", -1, not node.value
        case ast.Constant(value=int() as number):
            yield node, "value", -1, number + 1
        case ast.Constant(value=float() as number) if math.isfinite(number):
            yield node, "value", -1, number * 2 or 1.0
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for place, child in enumerate(children):
            at = place if isinstance(value, list) else -1
            if isinstance(child, ast.UnaryOp) and not isinstance(child.op, ast.UAdd):
                yield node, name, at, child.operand
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
                yield node, name, at, ast.Pass()


def modules_of(paths: list[str], root: Path = ROOT) -> list[Path]:
    """Return the modules, relative to the package, that paths in it name; folders name all theirs.

    Raises:
        ValueError: names a path that is none, or a module without tests.
    """
    package = root / "padded_dispatch"
    found = []
    for path in paths:
        folder = package / path
        files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]
        named = [file.relative_to(package) for file in files if file.name != "__init__.py"]
        tested = [file for file in named if (package / file).exists() and files_for(file, root)]
        if not tested:
            raise ValueError(f"MODULE must be in padded_dispatch and have tests, got {path}")
        found += tested
    return found


def files_for(module: Path, root: Path = ROOT) -> list[str]:
    """Return the test files of a module: `test_STEM.py` and `test_STEM_*.py` in its folder.

    Files of another module whose name is longer are not among them.
    """
    folder = root / "tests" / module.parent
    stem = module.stem
    longer = [p.stem for p in (root / "padded_dispatch" / module.parent).glob(f"{stem}_*.py")]
    files = [*folder.glob(f"test_{stem}.py"), *sorted(folder.glob(f"test_{stem}_*.py"))]
    own = [f for f in files if not any(f.stem.startswith(f"test_{name}") for name in longer)]
    return [str(file.relative_to(root)) for file in own]


class Copies:
    """Copies of the repository, one for each job, in which tests run."""

    def __init__(self, jobs: int, folder: Path) -> None:
        self._free = [folder / str(job) for job in range(jobs)]
        for copy in self._free:
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))

    def run(self, module: Path, sources: list[str], limit_s: float) -> list[bool]:
        """Return for each source of a module whether its tests pass within a time limit."""
        with ThreadPoolExecutor(len(self._free)) as threads:
            return list(threads.map(lambda source: self._passes(module, source, limit_s), sources))

    def _passes(self, module: Path, source: str, limit_s: float) -> bool:
        copy = self._free.pop()
        file = copy / "padded_dispatch" / module
        file.write_text(source)
        tests = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:warnings", *files_for(module)]
        environment = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pytest", *tests],
            cwd=copy,
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            passes = process.wait(None if limit_s == math.inf else limit_s) == 0
        except subprocess.TimeoutExpired:
            passes = False
        with suppress(ProcessLookupError):  # Tests that hang, and their workers.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.copy(ROOT / "padded_dispatch" / module, file)
        self._free.append(copy)
        return passes


def main() -> None:
    """Make and run all mutants of the modules in the arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "modules", nargs="+", metavar="MODULE", help="file or folder in the package"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--every", type=int, default=1, help="only each n-th mutant (default: 1)")
    arguments = parser.parse_args()
    try:
        modules = modules_of(arguments.modules)
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        copies = Copies(arguments.jobs, Path(folder))
        for module in modules:
            _try(copies, module, arguments.every)


def _try(copies: Copies, module: Path, every: int) -> None:
    """Try each n-th mutant of a module, and print how many were caught, and the others."""
    source = (ROOT / "padded_dispatch" / module).read_text()
    start = time.monotonic()
    [passed] = copies.run(module, [ast.unparse(ast.parse(source))], math.inf)
    took_s = time.monotonic() - start
    if not passed:
        raise SystemExit(f"the tests of {module} must pass before it is changed")
    reasons = EQUIVALENT.get(str(module), {})
    tried, changed = [], []
    for mutant in itertools.islice(mutants(source), None, None, every):
        if mutant.change not in reasons:
            tried.append(f"{mutant.line}: {mutant.change}")
            changed.append(ast.unparse(mutant.tree))
    lived = copies.run(module, changed, 60 + 5 * took_s)
    survivors = [words for words, alive in zip(tried, lived, strict=True) if alive]
    caught = len(tried) - len(survivors)
    sys.stdout.write(f"{module}: {caught} of {len(tried)} caught in {took_s:.0f} s each\n")
    sys.stdout.writelines(f"  {module}:{words}\n" for words in survivors)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
