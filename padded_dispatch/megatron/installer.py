"""`install()`: make the config value `padded_alltoall` work everywhere in Megatron-Core.

Three places in Megatron-Core check the names of dispatchers; configs with other names pass through:

- `TransformerConfig.__post_init__` checks some options against the names of the stock dispatchers.
  It runs with 'alltoall', whose checks are right for this dispatcher; then `check_config` runs.
- `MoELayer.__init__` raises for an unknown name: see `padded_dispatch.megatron.layer`.
- The type of the config field becomes the choices of `--moe-token-dispatcher-type`.

The table in `padded_dispatch/megatron/MAINTAINERS.md` lists all that `install` and layers wrap. If
a training loop is imported only after `install`, it is wrapped when a config is made.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal, get_args

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from padded_dispatch.megatron import guard
from padded_dispatch.megatron.bridge import keep_options
from padded_dispatch.megatron.compat import captures_moe
from padded_dispatch.megatron.config import NAME, check_config, take_over
from padded_dispatch.megatron.layer import PaddedMoELayer, build
from padded_dispatch.megatron.loops import follow_loops
from padded_dispatch.megatron.options import PaddedOptions, require_options
from padded_dispatch.utils.logs import log_once
from padded_dispatch.utils.patches import PATCHED, Patches

_FIELD: Any = TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"]
_options: PaddedOptions | None = None  # None: not installed; what is still wrapped passes through.


def install(options: PaddedOptions | None = None) -> None:
    """Make `moe_token_dispatcher_type="padded_alltoall"` work. A repeated call changes the options.

    Args:
        options: for every config that has none, made from now on or before the first call. To give
            one config other options, set `config.padded_dispatch = PaddedOptions(...)` after it
            is made; this is a plain attribute, which `dataclasses.replace` does not copy.

    Raises:
        ValueError: `options` are no `PaddedOptions`.
    """
    global _options
    options = PaddedOptions() if options is None else options
    require_options("options", options)
    _options = options
    PATCHED.wrap(TransformerConfig, "__post_init__", _wrap_post_init)
    PATCHED.wrap(MoELayer, "__init__", _wrap_init)
    PATCHED.wrap(_FIELD, "type", lambda names: Literal[(*get_args(names), NAME)])
    follow_loops()


def uninstall() -> None:
    """Undo `install` and all that models with graphs have wrapped.

    Existing layers keep working. Without `StepHooks`, those of a config with CUDA graphs warn of no
    drops any more. Replays of their graphs check nothing, and get no masks.
    """
    global _options
    _options = None
    PATCHED.undo()


def _wrap_init(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def padded_init(self: MoELayer, config: Any, *args: object, **kwargs: Any) -> None:
        if _options is not None and config.moe_token_dispatcher_type == NAME:
            if not hasattr(config, "padded_dispatch"):  # Made before `install`.
                config.padded_dispatch = _options
            build(init, self, config, *args, **kwargs)
            return
        if _options not in (None, PaddedOptions()) and not isinstance(self, PaddedMoELayer):
            log_once(
                "options of the padded dispatcher have no effect: moe_token_dispatcher_type must "
                f"be {NAME!r}, got {config.moe_token_dispatcher_type!r}",
                logging.WARNING,
            )
        init(self, config, *args, **kwargs)

    return padded_init


def _wrap_post_init(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(post_init)
    def padded_post_init(self: Any) -> None:
        if _options is None or self.moe_token_dispatcher_type != NAME:
            post_init(self)
            return
        take_over(self)
        with Patches() as patches:
            patches.set(self, "moe_token_dispatcher_type", "alltoall")
            # Megatron allows a factor only with some kinds of load balancing, since its own router
            # would drop. It requires a factor and padding for graphs of scope `moe`.
            pads = captures_moe(self)
            factor = float(self.num_moe_experts or 1) if pads else None
            patches.set(self, "moe_pad_expert_input_to_capacity", pads)
            patches.set(self, "moe_expert_capacity_factor", factor)
            post_init(self)
        if not hasattr(self, "padded_dispatch"):
            self.padded_dispatch = _options
        take_over(self)
        check_config(self)
        guard.install(self)  # Also for a dense model with this name, which builds no MoE layer.
        follow_loops()
        keep_options()

    return padded_post_init
