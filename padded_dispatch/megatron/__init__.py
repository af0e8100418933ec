"""The padded dispatcher in Megatron-Core 0.16.1 to 0.20.

There are two ways to use it. `install()` makes `moe_token_dispatcher_type="padded_alltoall"` work
everywhere. `padded_spec(spec)` puts `PaddedMoELayer` into a layer spec. Its layers wrap what packed
experts and CUDA graphs need.

Each name below is imported at its first use, and Megatron with it. Command lines import
`padded_dispatch.megatron.options` alone, which needs neither Megatron nor torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from padded_dispatch.megatron.cpu import megatron_on_cpu
    from padded_dispatch.megatron.graphs import IterationGraph, LayerGraphs
    from padded_dispatch.megatron.installer import install, uninstall
    from padded_dispatch.megatron.layer import PaddedMoELayer, padded_spec
    from padded_dispatch.megatron.options import PaddedOptions
    from padded_dispatch.megatron.record import Passes
    from padded_dispatch.megatron.steps import StepHooks

__all__ = [
    "IterationGraph",
    "LayerGraphs",
    "PaddedMoELayer",
    "PaddedOptions",
    "Passes",
    "StepHooks",
    "install",
    "megatron_on_cpu",
    "padded_spec",
    "uninstall",
]

# The module of each name.
_HOMES = {
    "IterationGraph": "graphs",
    "LayerGraphs": "graphs",
    "PaddedMoELayer": "layer",
    "PaddedOptions": "options",
    "Passes": "record",
    "StepHooks": "steps",
    "install": "installer",
    "megatron_on_cpu": "cpu",
    "padded_spec": "layer",
    "uninstall": "installer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # The next look-up finds it without this function.
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
