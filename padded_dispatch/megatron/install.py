"""`install()`: after it, the config word `padded_alltoall` alone is enough, anywhere in Megatron.

Three places of Megatron-Core know the names of the dispatchers. Each gets one wrapper that stock
configs pass through unchanged:

- `TransformerConfig.__post_init__` checks some options against the names it knows. It runs with
  'alltoall', whose checks are right for us, then ours run.
- `MoELayer.__init__` raises for an unknown name: see `padded_dispatch.megatron.layer`.
- the type of the config field becomes the choices of `--moe-token-dispatcher-type`.

Besides, layers that replay CUDA graphs are guarded: see `padded_dispatch.megatron.graphs.guard`.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from padded_dispatch.megatron.compat import captures_moe
from padded_dispatch.megatron.config import check_config
from padded_dispatch.megatron.graphs import guard
from padded_dispatch.megatron.layer import build, dispatcher_type
from padded_dispatch.megatron.options import PaddedOptions

NAME = "padded_alltoall"

_Config: Any = TransformerConfig
_FIELD = _Config.__dataclass_fields__["moe_token_dispatcher_type"]
_originals: dict[str, Any] = {}


def install(options: PaddedOptions | None = None) -> None:
    """Make `moe_token_dispatcher_type="padded_alltoall"` work. Repeated calls change the options.

    Args:
        options: for every config that is made from now on; one config's own can be set on it
            afterwards (`config.padded_dispatch = PaddedOptions(...)`, an attribute, which
            `dataclasses.replace` does not take along).
    """
    uninstall()
    _originals["post_init"] = _Config.__post_init__
    _originals["init"] = MoELayer.__init__
    _originals["type"] = _FIELD.type
    _Config.__post_init__ = _wrap_post_init(_Config.__post_init__, options or PaddedOptions())
    MoELayer.__init__ = _wrap_init(MoELayer.__init__)
    _FIELD.type = Literal[(*get_args(_FIELD.type), NAME)]
    guard.install()


def uninstall() -> None:
    """Undo `install`. Layers that exist keep working; without `install` before, nothing happens."""
    if _originals:
        _Config.__post_init__ = _originals.pop("post_init")
        MoELayer.__init__ = _originals.pop("init")
        _FIELD.type = _originals.pop("type")
        guard.uninstall()


def _wrap_init(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def padded_init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.moe_token_dispatcher_type == NAME:
            build(init, self, config, *args, **kwargs)
        else:
            init(self, config, *args, **kwargs)

    return padded_init


def _wrap_post_init(
    post_init: Callable[[Any], None], options: PaddedOptions
) -> Callable[[Any], None]:
    @functools.wraps(post_init)
    def padded_post_init(self: Any) -> None:
        if self.moe_token_dispatcher_type != NAME:
            post_init(self)
            return
        with dispatcher_type(self, "alltoall"):
            if captures_moe(self):
                _with_static_shapes(post_init, self)
            else:
                post_init(self)
        check_config(self)
        if not hasattr(self, "padded_dispatch"):
            self.padded_dispatch = options

    return padded_post_init


def _with_static_shapes(post_init: Callable[[Any], None], config: Any) -> None:
    """Run Megatron's checks of graph scopes, which take a padded capacity for static shapes.

    Ours are static also without a factor, and padded without being told.
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
