"""Import Megatron-Bridge where packages are missing that a plain pretraining does not use.

Bridge imports ModelOpt, Energon and the resiliency extension at the top of modules that any
training needs. `importable()` stands in for those that are missing, and for Transformer Engine
where it does not import. What is read from a stand-in is a class that does nothing, or a function
that returns None if its name begins with "get_".
"""

import importlib
import sys
from abc import ABCMeta
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

# By package: the module of it that must import, so that the package is used as it is installed.
NEEDED = {
    "modelopt": "modelopt",
    "megatron.energon": "megatron.energon",
    "nvidia_resiliency_ext": "nvidia_resiliency_ext",
    "transformer_engine": "transformer_engine.pytorch",
}


class _AnyClass(ABCMeta):
    """A class whose attributes are such classes, too; as a decorator it changes nothing."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _made(name)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        decorated = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if decorated else super().__call__(*args, **kwargs)


def _made(name: str) -> Any:
    def call(made: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else made

    return _AnyClass(name, (), {"__init__": lambda *args, **kwargs: None, "__call__": call})


class _StandIn(ModuleType):
    __path__: ClassVar[list[str]] = []
    __version__ = "2.20.2"  # of Transformer Engine, which Megatron compares

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return (lambda *args, **kwargs: None) if name.startswith("get_") else _made(name)


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of these packages, and all below them."""

    def __init__(self, packages: list[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not any(_is_of(one, fullname) for one in self._packages):
            return None
        if fullname == "transformer_engine.pytorch.optimizers":  # Megatron then takes torch's.
            raise ImportError(fullname)
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: attributes are made when they are read."""


def _is_of(package: str, module: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _is_missing(needed: str) -> bool:
    try:
        importlib.import_module(needed)
    except (ImportError, OSError):
        return True
    return False


@contextmanager
def importable() -> Iterator[None]:
    """Let Megatron-Bridge be imported inside a `with` block."""
    missing = [package for package, needed in NEEDED.items() if _is_missing(needed)]
    for package in missing:
        for name in [one for one in sys.modules if _is_of(package, one)]:
            del sys.modules[name]  # Parts that were imported before one failed.
    if missing:
        print("stood in for:", ", ".join(missing), flush=True)
    sys.meta_path.insert(0, finder := _Finder(missing))
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
