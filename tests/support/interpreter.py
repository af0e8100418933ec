"""Triton's interpreter, without what it does again and again.

At every call of a device function, also of `tl.sum`, it searches Triton's language for all that it
has to replace, and after the first call finds it replaced: 60 % of the time of our kernels' tests.
Here it does so once for each module that has such functions, and replaced it stays.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from triton.runtime import interpreter


def patch_once() -> None:
    """To be called after TRITON_INTERPRET is set, before a kernel runs."""
    patch: Callable[[Callable[..., Any]], Any] = interpreter._patch_lang
    patched: set[str] = set()

    def patch_new(fn: Callable[..., Any]) -> SimpleNamespace:
        if fn.__module__ not in patched:
            patch(fn)
            patched.add(fn.__module__)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_new
