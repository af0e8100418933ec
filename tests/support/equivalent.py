"""Changes of `tests.mutate` that nothing can notice, by module, each with the reason."""

EQUIVALENT: dict[str, dict[str, str]] = {}
