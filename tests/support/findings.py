"""What a check of the table finds on one rank."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Findings of one rank: tensors that differ, in how many steps; facts; other failures."""

    differing: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    broken: tuple[str, ...] = ()

    def failures(self) -> list[str]:
        """Return all failures as text."""
        differing = (f"{name} differs in {n} steps" for name, n in self.differing.items())
        return [*differing, *self.broken]
