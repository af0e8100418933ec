"""Megatron-Bridge: Hugging Face weights and adapters of stacked experts; options in saved configs.

Weights. Bridge lists a model's parameters, looks each name up in a table, and copies its values.
The tables know TEGroupedMLP's names, one weight per expert; `StackedExperts` has one parameter for
all. So while Bridge lists parameters, each stacked linear shows the parts of single experts under
TEGroupedMLP's names. A part shares memory with the parameter, so loading and exporting are exact.
Bridge decides by the name of a module's class how tensor parallelism splits a weight. Our router
keeps its base's name, and a stacked linear has the attribute that Bridge reads for other classes.

Adapters, such as LoRA's, wrap Megatron's own linears. Bridge raises for a stacked linear's class,
and here the error gets its remedy. With adapters on other modules only, stacked experts are frozen.

Saved configs. Bridge and Megatron-LM save a config field by field as YAML. `padded_dispatch` cannot
be a field (every stock config would have a key that no `TransformerConfig(**...)` takes), nor can
YAML name the class `PaddedOptions`. So the saved config of a model with padded layers gets a key
more, `padded_options`, with plain values. Loading drops it; the options come back with
`install(PaddedOptions(**saved["model"]["padded_options"]))`.

Read in Megatron-Bridge 0.3.1 and its head of November 2026 (0.7.0), and in Megatron-LM 0.19.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from padded_dispatch.megatron.config import is_ours, padded_options
from padded_dispatch.megatron.options import to_plain
from padded_dispatch.megatron.stacked_linear import StackedLinear
from padded_dispatch.utils.patches import Patches

_CONVERSION = "megatron.bridge.models.conversion.model_bridge"
_ADAPTERS = "megatron.bridge.peft.base"

# The methods of `MegatronModelBridge` that list parameters. 0.3.1 lacks the last one.
_LISTING = (
    "_megatron_global_adapters_info_all_pp_ranks",
    "_megatron_global_param_names_all_pp_ranks",
    "build_conversion_tasks",
    "build_export_fp8_tasks",
)

KEY = "padded_options"

# Modules and classes whose class method converts a value of a run config to what YAML can hold.
_CONTAINERS = (
    ("megatron.bridge.training.utils.config_utils", "_ConfigContainerBase"),
    ("megatron.training.config.container", "ConfigContainerBase"),
)
_CONVERT = "_convert_value_to_dict"


def show_single_experts() -> None:
    """Let Bridge see single experts in stacked parameters, if Bridge is imported.

    It is called when a layer is built, and changes Bridge once. Models without stacked experts are
    converted as before, so there is nothing to undo.
    """
    conversion = sys.modules.get(_CONVERSION)
    if conversion is None:
        return
    bridge = conversion.MegatronModelBridge
    for name in _LISTING:
        method = getattr(bridge, name, None)
        if method is not None and not hasattr(method, "shows_single_experts"):
            setattr(bridge, name, _showing(method))


def explain_adapters() -> None:
    """Let Bridge's error about adapters on stacked experts name the remedy, if it is imported."""
    adapters = getattr(sys.modules.get(_ADAPTERS), "PEFT", None)
    if adapters is not None and not hasattr(adapters.__call__, "explains_stacked_experts"):
        adapters.__call__ = _explaining(adapters.__call__)


def _explaining(add: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(add)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return add(*args, **kwargs)
        except (AttributeError, NotImplementedError) as error:
            if StackedLinear.__name__ not in str(error):
                raise
            raise ValueError(
                "experts must be 'module' for adapters on their linear_fc1 and linear_fc2, got "
                "packed ones; set PaddedOptions(experts='module'), or leave these two "
                "out of target_modules"
            ) from error

    vars(explained)["explains_stacked_experts"] = True
    return explained


@contextmanager
def single_experts(chunks: Iterable[Any]) -> Iterator[None]:
    """List the parameters of stacked linears as those of single experts inside a `with` block."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    kept = {
        linear: linear._parameters
        for linear in modules
        if isinstance(linear, StackedLinear) and "weight" in linear._parameters
    }
    singles = {linear: linear.singles() for linear in kept}
    try:
        for linear, parameters in singles.items():
            linear.__dict__["_parameters"] = parameters
        yield
    finally:
        for linear, parameters in kept.items():
            linear.__dict__["_parameters"] = parameters


def _showing(method: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(method)

    @functools.wraps(method)
    def showing(*args: Any, **kwargs: Any) -> Any:
        model = parameters.bind(*args, **kwargs).arguments["megatron_model"]
        with single_experts(model if isinstance(model, list) else [model]):
            return method(*args, **kwargs)

    vars(showing)["shows_single_experts"] = True
    return showing


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
