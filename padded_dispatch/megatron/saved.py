"""Options in the run configs that Megatron-Bridge and Megatron-LM save as YAML.

Both save a config field by field, and `config.padded_dispatch` is a plain attribute. It cannot be a
field: `dataclasses.asdict` of every config, also of stock ones, would then have a key that no
`TransformerConfig(**...)` takes, and Megatron-LM would make a flag of it. Nor can a saved config
name the class `PaddedOptions`: both load only classes of packages that they list.

So the saved config of a model with padded layers gets one more key, `padded_options`, with plain
values. Loading drops a key that it does not know, also where this package is not installed; the
options come back with `install(PaddedOptions(**saved["model"]["padded_options"]))`.

Read in Megatron-Bridge 0.3.1 and its head of November 2026 (0.7.0), and in Megatron-LM 0.19.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

from padded_dispatch.megatron.config import is_ours, padded_options
from padded_dispatch.megatron.options import to_plain
from padded_dispatch.utils.patches import Patches

KEY = "padded_options"

# Modules and classes whose class method converts a value of a run config to what YAML can hold.
_CONTAINERS = (
    ("megatron.bridge.training.utils.config_utils", "_ConfigContainerBase"),
    ("megatron.training.config.container", "ConfigContainerBase"),
)
_CONVERT = "_convert_value_to_dict"


def keep_options(patches: Patches) -> None:
    """Let saved run configs hold the options, if the code that saves them is imported.

    It is called whenever a config with our dispatcher is made, and changes each class once.

    Args:
        patches: gets the replaced methods.
    """
    for module, name in _CONTAINERS:
        container = getattr(sys.modules.get(module), name, None)
        method = vars(container).get(_CONVERT) if container is not None else None
        if isinstance(method, classmethod) and not patches.replaces(container, _CONVERT):
            patches.set(container, _CONVERT, classmethod(_keeping(method.__func__)))


def _keeping(convert: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(convert)
    def keeping(cls: Any, value: Any) -> Any:
        converted = convert(cls, value)
        _add_options(converted, value)
        # A model's config may hold Megatron's under this name and convert it by itself.
        if isinstance(converted, dict) and hasattr(value, "transformer"):
            _add_options(converted.get("transformer"), value.transformer)
        return converted

    return keeping


def _add_options(converted: Any, value: Any) -> None:
    """Add the options of `value` to what it was converted to, if it is a config with options."""
    if isinstance(converted, dict) and not isinstance(value, dict) and is_ours(value):
        converted[KEY] = to_plain(padded_options(value))
