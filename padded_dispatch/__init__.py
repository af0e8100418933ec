"""padded_dispatch: a Mixture-of-Experts token dispatcher with static shapes.

The public API is what this package and `padded_dispatch.megatron` export. A name that needs torch
is imported at its first use, so `padded-dispatch --help` and usage errors do not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from padded_dispatch.config import NO_DROP, DispatchConfig

if TYPE_CHECKING:
    from padded_dispatch.dispatcher import Dispatched, PaddedDispatcher
    from padded_dispatch.experts import Activation, ExpertWeights
    from padded_dispatch.experts.padded import ExpertInput
    from padded_dispatch.experts.store import Store
    from padded_dispatch.routing import Plan, make_plan, select

__version__ = "0.1.0"

__all__ = [
    "NO_DROP",
    "Activation",
    "DispatchConfig",
    "Dispatched",
    "ExpertInput",
    "ExpertWeights",
    "PaddedDispatcher",
    "Plan",
    "Store",
    "__version__",
    "make_plan",
    "select",
]

# The module that defines each name imported at first use.
_HOMES = {
    "Activation": "experts",
    "Dispatched": "dispatcher",
    "ExpertInput": "experts.padded",
    "ExpertWeights": "experts",
    "PaddedDispatcher": "dispatcher",
    "Plan": "routing",
    "Store": "experts.store",
    "make_plan": "routing",
    "select": "routing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # The next look-up finds it without this function.
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
