"""Megatron-Bridge: Hugging Face weights and adapters of stacked experts; options in saved configs.

Weights. Bridge lists a model's parameters, looks each name up in a table, and copies its values.
The tables have TEGroupedMLP's names, one weight per expert. So while Bridge lists parameters, each
stacked linear shows the parts of single experts under these names. A part shares memory with the
parameter, so loading and exporting are exact. Bridge decides by the name of a module's class how
tensor parallelism splits the module's weight. So the class of our router keeps the name of its base
class. A stacked linear has the attributes that Bridge reads for classes without a rule.

Saved configs. Bridge and Megatron-LM save a config field by field as YAML. `padded_dispatch` cannot
be a field, because every stock config would have a key that `TransformerConfig(**...)` does not
take; and YAML cannot name the class `PaddedOptions`. So the saved config of a model with padded
layers gets one more key, `padded_dispatch`, with plain values. Loading drops the key. To restore
the options, call `install(PaddedOptions(**saved["model"]["padded_dispatch"]))`.

Based on the sources of Megatron-Bridge 0.3.1 and 0.7.0 (November 2026), and of Megatron-LM 0.19.
"""

import dataclasses
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from padded_dispatch.megatron.config import is_ours, padded_options
from padded_dispatch.megatron.stacked_linear import StackedLinear
from padded_dispatch.utils.logs import log_once
from padded_dispatch.utils.patches import PATCHED, Patches

_CONVERSION = "megatron.bridge.models.conversion.model_bridge"

# The methods of `MegatronModelBridge` that list parameters.
_LISTING = "build_conversion_tasks", "_megatron_global_adapters_info_all_pp_ranks"

KEY = "padded_dispatch"

# Module and name of the classes whose class method `_CONVERT` turns a value of a run config into
# what YAML can hold. Up to 0.3.1 Bridge has such a class of its own.
_CONTAINERS = (
    ("megatron.bridge.training.utils.config_utils", "_ConfigContainerBase"),
    ("megatron.training.config.container", "ConfigContainerBase"),
)
_CONVERT = "_convert_value_to_dict"


def show_single_experts() -> None:
    """Let Bridge see single experts in stacked parameters, if Bridge has been imported.

    `layer.build` calls it. Models without stacked experts are converted as before.
    """
    if "megatron.bridge" not in sys.modules:
        return
    bridge = getattr(sys.modules.get(_CONVERSION), "MegatronModelBridge", None)
    for name in _LISTING:
        if hasattr(bridge, name):
            PATCHED.wrap(bridge, name, _showing)
        else:
            log_once(
                f"Megatron-Bridge cannot load or export packed experts, because it has no "
                f"MegatronModelBridge.{name}; for that, set PaddedOptions(experts='module')",
                logging.WARNING,
            )


@contextmanager
def single_experts(chunks: Iterable[Any]) -> Iterator[None]:
    """List the parameters of stacked linears as those of single experts inside a `with` block."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    with Patches() as patches:
        for module in modules:
            if isinstance(module, StackedLinear) and "weight" in module._parameters:
                patches.set(module, "_parameters", module.singles())
        yield


def _showing(method: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(method)

    @functools.wraps(method)
    def showing(*args: object, **kwargs: object) -> Any:
        model = parameters.bind(*args, **kwargs).arguments["megatron_model"]
        with single_experts(model if isinstance(model, list) else [model]):
            return method(*args, **kwargs)

    return showing


def keep_options() -> None:
    """Add the options to saved run configs, if the code that saves them has been imported.

    It is called whenever a config with our dispatcher is made, and wraps each class once.
    """
    for module, name in _CONTAINERS:
        container = getattr(sys.modules.get(module), name, None)
        if hasattr(container, _CONVERT):
            PATCHED.wrap(container, _CONVERT, lambda bound: classmethod(_keeping(bound.__func__)))


def _keeping(convert: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(convert)
    def keeping(cls: type, value: Any) -> Any:
        converted = convert(cls, value)
        _add_options(converted, value)
        # A model config of Bridge may hold Megatron's as `transformer`, and convert it by itself.
        if isinstance(converted, dict) and hasattr(value, "transformer"):
            _add_options(converted.get("transformer"), value.transformer)
        return converted

    return keeping


def _add_options(converted: object, value: object) -> None:
    """Add the options of `value` to `converted`, if `value` is a config with padded layers."""
    if isinstance(converted, dict) and not isinstance(value, dict) and is_ours(value):
        converted[KEY] = dataclasses.asdict(padded_options(value))
