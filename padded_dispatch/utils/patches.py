"""Replace attributes of other objects, and put them back.

    with Patches() as patches:
        patches.set(module, "function", stand_in)

`unittest.mock.patch` does the same, but a package should not import a test library for it. `Wraps`
is for functions that other tools may wrap, too; `PATCHED` has the wrapped functions of Megatron.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

_MISSING = object()


class Patches(ExitStack):
    """Attributes that are replaced until the `with` block ends."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name` by `value`; the owner is a module, class or instance.

        If the owner inherits or lacks the attribute, it is deleted from the owner at the end, so
        that an inherited one shows again.
        """
        before = _own(owner, name)
        setattr(owner, name, value)
        self.callback(_put_back, owner, name, before)


class Wraps:
    """Attributes that are wrapped once, and that another tool may wrap again."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any, Any]] = []  # owner, name, before, wrapped

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Replace `owner.name` by `wrapper(owner.name)`, unless it was wrapped before."""
        if not any(o is owner and n == name for o, n, _, _ in self._saved):
            before, wrapped = _own(owner, name), wrapper(getattr(owner, name))
            setattr(owner, name, wrapped)
            self._saved.append((owner, name, before, wrapped))

    def undo(self) -> None:
        """Put back the attributes that no other tool has replaced since; the others stay saved."""
        kept = []
        for owner, name, before, wrapped in self._saved:
            if _own(owner, name) is wrapped:
                _put_back(owner, name, before)
            else:
                kept.append((owner, name, before, wrapped))
        self._saved = kept


PATCHED = Wraps()


def _own(owner: Any, name: str) -> Any:
    """Return an attribute that is not inherited, as it is stored."""
    try:
        return vars(owner).get(name, _MISSING)
    except TypeError:  # An instance with __slots__ has no __dict__.
        return getattr(owner, name, _MISSING)


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, before)
