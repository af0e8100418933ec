"""Helpers of tests. Without a GPU, what Megatron compiles when it is imported stays as it is.

Each process of the tests would import torch's compiler, a third of its time to start; what they
start has the environment variable.
"""

import os
from collections.abc import Callable
from typing import Any

import torch


def _as_it_is(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return _as_it_is if function is None else function


if not torch.cuda.is_available():
    torch.compile = _as_it_is
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
