"""`install()`: make the config value `padded_alltoall` work everywhere in Megatron-Core.

Three places of Megatron-Core check the names of the dispatchers. `install()` patches each of them;
stock configs pass through unchanged:

- `TransformerConfig.__post_init__` checks some options against the names of the stock dispatchers.
  It runs with 'alltoall', whose checks are right for this dispatcher; then `check_config` runs.
- `MoELayer.__init__` raises for an unknown name: see `padded_dispatch.megatron.layer`. With
  `padded_dispatch.megatron` imported and no `install()`, its error names the missing call.
- The type of the config field becomes the choices of `--moe-token-dispatcher-type`.

It also follows Megatron-LM's training loop (`padded_dispatch.megatron.megatron_lm`), if that has
been imported by then, or when a config with this dispatcher is made.

If Megatron-Bridge has been imported, its check of the name where a recipe overlaps expert-parallel
communication runs with 'alltoall', too. Import Bridge before `install()`.

`install()` also guards layers that replay CUDA graphs: see `padded_dispatch.megatron.graphs.guard`.
"""

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from padded_dispatch.config import require
from padded_dispatch.megatron.bridge import keep_options
from padded_dispatch.megatron.compat import captures_moe
from padded_dispatch.megatron.config import NAME, check_config, log_once, take_over
from padded_dispatch.megatron.cpu import CPU_REMEDY, is_on_cpu
from padded_dispatch.megatron.graphs import guard
from padded_dispatch.megatron.layer import PaddedMoELayer, build, dispatcher_type
from padded_dispatch.megatron.megatron_lm import follow_training
from padded_dispatch.megatron.options import PaddedOptions, require_options
from padded_dispatch.utils.patches import Patches

_BRIDGE = "megatron.bridge.training.comm_overlap"
_OVERLAP_CHECK = "_get_model_comm_overlap_cfgs"

_FIELD: Any = TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"]
_patches = Patches()
_log = logging.getLogger(__name__)


def install(options: PaddedOptions | None = None) -> None:
    """Make `moe_token_dispatcher_type="padded_alltoall"` work. A repeated call changes the options.

    Args:
        options: for every config that is made from now on. To give one config other options, set
            `config.padded_dispatch = PaddedOptions(...)` afterwards; this is a plain attribute,
            which `dataclasses.replace` does not copy.

    Raises:
        ValueError: `options` are no `PaddedOptions`.
    """
    options = PaddedOptions() if options is None else options
    require_options("options", options)
    if not (torch.cuda.is_available() or is_on_cpu()):
        _log.warning("PyTorch sees no GPU; %s", CPU_REMEDY)
    uninstall()
    post_init: Any = TransformerConfig.__post_init__
    post_init = _wrap_post_init(post_init, options)
    _patches.set(TransformerConfig, "__post_init__", post_init)
    _patches.set(MoELayer, "__init__", _wrap_init(MoELayer.__init__, options))
    _patches.set(_FIELD, "type", Literal[(*get_args(_FIELD.type), NAME)])
    follow_training(_patches)
    _pass_overlap_check()
    guard.install()


def uninstall() -> None:
    """Undo `install`; do nothing without an `install` before. Layers that exist keep working."""
    if _patches:
        _patches.undo()
        guard.uninstall()


def _pass_overlap_check() -> None:
    """Let our word pass the check of Bridge's settings of overlap, if Bridge is imported.

    It is called whenever a config is made, of any dispatcher: Bridge's recipes make one before they
    take our word, and check it before they make the final one.
    """
    overlap = getattr(sys.modules.get(_BRIDGE), "CommOverlapConfig", None)
    check = getattr(overlap, _OVERLAP_CHECK, None)
    if check is not None and not _patches.replaces(overlap, _OVERLAP_CHECK):
        _patches.set(overlap, _OVERLAP_CHECK, _with_stock_name(check))


def _with_stock_name(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of Bridge that checks the dispatcher of a model's config."""

    @functools.wraps(method)
    def checked(self: Any, model_cfg: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(model_cfg, "moe_token_dispatcher_type", None) != NAME:
            return method(self, model_cfg, *args, **kwargs)
        with dispatcher_type(model_cfg, "alltoall"):
            return method(self, model_cfg, *args, **kwargs)

    return checked


def _wrap_init(init: Callable[..., None], options: PaddedOptions) -> Callable[..., None]:
    @functools.wraps(init)
    def padded_init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.moe_token_dispatcher_type == NAME:
            build(init, self, config, *args, **kwargs)
        else:
            if options != PaddedOptions() and not isinstance(self, PaddedMoELayer):
                log_once(
                    "options of the padded dispatcher have no effect: moe_token_dispatcher_type "
                    f"must be {NAME!r}, got {config.moe_token_dispatcher_type!r}",
                    logging.WARNING,
                )
            init(self, config, *args, **kwargs)

    return padded_init


def _wrap_post_init(
    post_init: Callable[[Any], None], options: PaddedOptions
) -> Callable[[Any], None]:
    @functools.wraps(post_init)
    def padded_post_init(self: Any) -> None:
        _pass_overlap_check()
        if self.moe_token_dispatcher_type != NAME:
            post_init(self)
            return
        take_over(self)
        with dispatcher_type(self, "alltoall"):
            if captures_moe(self):
                _with_static_shapes(post_init, self)
            else:
                post_init(self)
        if not hasattr(self, "padded_dispatch"):
            self.padded_dispatch = options
        take_over(self)
        check_config(self)
        follow_training(_patches)
        keep_options(_patches)

    return padded_post_init


def _with_static_shapes(post_init: Callable[[Any], None], config: Any) -> None:
    """Run Megatron's checks of graph scopes as if the config had a padded capacity.

    Megatron accepts scope `moe` only with `moe_pad_expert_input_to_capacity` and a capacity factor.
    Shapes of the padded dispatcher are static without either.
    """
    pads, factor = config.moe_pad_expert_input_to_capacity, config.moe_expert_capacity_factor
    drops = factor is not None and factor >= 0
    config.moe_pad_expert_input_to_capacity = True
    if not drops:
        config.moe_expert_capacity_factor = float(config.num_moe_experts or 1)
    try:
        post_init(config)
    finally:
        config.moe_pad_expert_input_to_capacity = pads
        config.moe_expert_capacity_factor = factor if drops else None


def _explain(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap `MoELayer.__init__`, which raises for our name, to name the remedy instead."""

    @functools.wraps(init)
    def explained_init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        require(
            config.moe_token_dispatcher_type != NAME,
            "moe_token_dispatcher_type",
            NAME,
            "be made known to Megatron first",
            "call padded_dispatch.megatron.install() before the config and the model are made",
        )
        init(self, config, *args, **kwargs)

    return explained_init


MoELayer.__init__ = _explain(MoELayer.__init__)
