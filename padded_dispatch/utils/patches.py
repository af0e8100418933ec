"""Replace attributes of other objects, and put them back.

    with Patches() as patches:  # or, without a block, until patches.undo()
        patches.set(module, "function", stand_in)

`unittest.mock.patch` does the same, but a package should not import a test library for it.
"""

from typing import Any

_MISSING = object()


class Patches:
    """Attributes that are replaced until `undo`, or until the `with` block ends.

    True while at least one attribute is replaced.
    """

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name` by `value`.

        Args:
            owner: a module, class or instance. An attribute that it inherits or lacks is deleted
                from it by `undo`, so that the inherited one shows again.
            name: the attribute's name.
            value: the new value.
        """
        try:
            before = vars(owner).get(name, _MISSING)
        except TypeError:  # An instance with __slots__ has no __dict__.
            before = getattr(owner, name, _MISSING)
        setattr(owner, name, value)
        self._saved.append((owner, name, before))

    def replaces(self, owner: Any, name: str) -> bool:
        """Return whether `owner.name` is replaced."""
        return any(known is owner and named == name for known, named, _ in self._saved)

    def undo(self) -> None:
        """Put every attribute back, the last one first; do nothing if none is replaced."""
        while self._saved:
            owner, name, before = self._saved.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def __bool__(self) -> bool:
        return bool(self._saved)

    def __enter__(self) -> "Patches":
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()
