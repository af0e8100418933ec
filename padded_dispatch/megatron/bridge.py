"""Stacked experts in Megatron-Bridge: Hugging Face weights, and adapters.

Bridge lists a model's parameters, looks each name up in a table of the model, and copies its
values. The tables know TEGroupedMLP's names, one weight per expert; `StackedExperts` has one
parameter for all of them. So while Bridge lists parameters, each stacked linear shows the parts of
single experts instead, under TEGroupedMLP's names. A part shares memory with the parameter: values
that Bridge copies into it are the model's, and the other way round. Nothing is computed, so loading
and exporting are exact.

Bridge decides by the name of a module's class how tensor parallelism splits a weight. Our router
keeps its base's name, and a stacked linear has the attribute that Bridge reads for other classes.

Adapters, such as LoRA's, wrap Megatron's own linears. A stacked linear has no forward pass that
they could add to, so Bridge raises for its class, and here the error gets its remedy. With adapters
on other modules only, such as attention's, stacked experts train as they are: frozen.

Read in Megatron-Bridge 0.3.1 and its head of November 2026 (0.7.0).
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from padded_dispatch.megatron.stacked_linear import StackedLinear

_CONVERSION = "megatron.bridge.models.conversion.model_bridge"
_ADAPTERS = "megatron.bridge.peft.base"

# The methods of `MegatronModelBridge` that list parameters. 0.3.1 lacks the last one.
_LISTING = (
    "_megatron_global_adapters_info_all_pp_ranks",
    "_megatron_global_param_names_all_pp_ranks",
    "build_conversion_tasks",
    "build_export_fp8_tasks",
)


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
                "packed or batched ones; set PaddedOptions(experts='module'), or leave these two "
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
