"""Replace attributes of other objects, and put them back.

    with Patches() as patches:  # or, without a block, until patches.undo()
        patches.set(module, "function", stand_in)

`unittest.mock.patch` does the same, but a package should not import a test library for it. `Wraps`
is for functions that other tools may wrap, too; `PATCHED` is what is wrapped of Megatron.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MISSING = object()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Patch:
    owner: Any
    name: str
    before: Any
    value: Any


class Patches:
    """Attributes that are replaced until `undo`, or until the `with` block ends."""

    def __init__(self) -> None:
        self._saved: list[_Patch] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name` by `value`; the owner is a module, class or instance.

        An attribute that it inherits or lacks is deleted from it by `undo`, so that the inherited
        one shows again.
        """
        before = _own(owner, name)
        setattr(owner, name, value)
        self._saved.append(_Patch(owner=owner, name=name, before=before, value=value))

    def undo(self) -> None:
        """Put every attribute back, the last one first; do nothing if none is replaced."""
        while self._saved:
            patch = self._saved.pop()
            if patch.before is _MISSING:
                delattr(patch.owner, patch.name)
            else:
                setattr(patch.owner, patch.name, patch.before)

    def __enter__(self) -> "Patches":
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


class Wraps(Patches):
    """Attributes that are wrapped once, and that another tool may wrap again."""

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Replace `owner.name` by what `wrapper` makes of it, unless that was done before."""
        if not any(patch.owner is owner and patch.name == name for patch in self._saved):
            self.set(owner, name, wrapper(getattr(owner, name)))

    def undo(self) -> None:
        """Put back what no other tool has replaced since; the rest stays until another `undo`."""
        kept = [patch for patch in self._saved if _own(patch.owner, patch.name) is not patch.value]
        self._saved = [patch for patch in self._saved if patch not in kept]
        super().undo()
        self._saved = kept


PATCHED = Wraps()


def _own(owner: Any, name: str) -> Any:
    """Return an attribute that is not inherited, as it is stored."""
    try:
        return vars(owner).get(name, _MISSING)
    except TypeError:  # An instance with __slots__ has no __dict__.
        return getattr(owner, name, _MISSING)
