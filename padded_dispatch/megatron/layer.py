"""A MoE layer with the padded dispatcher and the router that goes with it.

`MoELayer.__init__` accepts three dispatchers by name and raises for other names. So `build` runs it
with the all-gather dispatcher, which owns nothing (the all-to-all one would create a CUDA stream).
Then `build` replaces the dispatcher, the class of the router and, for packed experts, the experts.
`PaddedMoELayer` calls `build` in its constructor. `install()` wraps the constructor of `MoELayer`
with it, for configs with `moe_token_dispatcher_type="padded_alltoall"`.
"""

import copy
import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeGuard

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from padded_dispatch.config import require
from padded_dispatch.megatron import drops, guard
from padded_dispatch.megatron.bridge import show_single_experts
from padded_dispatch.megatron.compat import mark_experts
from padded_dispatch.megatron.config import check_config, check_experts, take_over
from padded_dispatch.megatron.cpu import check_device
from padded_dispatch.megatron.dispatcher import CellTokenDispatcher, PackedTokenDispatcher
from padded_dispatch.megatron.experts import StackedExperts, chosen_experts
from padded_dispatch.megatron.router import select_after_counting
from padded_dispatch.megatron.stacked_linear import following_zeros
from padded_dispatch.utils.patches import PATCHED, Patches


def build(
    init: Callable[..., None],
    layer: Any,
    config: TransformerConfig,
    *args: object,
    pg_collection: ProcessGroupCollection | None = None,
    **kwargs: Any,
) -> None:
    """Run `init`, then replace the layer's dispatcher, the class of its router, and its experts.

    `init` is `MoELayer.__init__`, and the other arguments are those of `init`. All builders of
    Megatron pass `pg_collection` by keyword.

    Raises:
        ValueError: if there is no device, or the config or the experts are not supported; see
            `check_device`, `check_config` and `check_experts`.
    """
    check_device()
    take_over(config)
    check_config(config)
    guard.install(config)
    pg_collection = pg_collection or get_default_pg_collection()
    chosen, in_bf16 = chosen_experts(config), nullcontext()
    if chosen.packed and config.fp8 and config.fp8_param:  # Packed experts keep bf16 weights.
        from transformer_engine.pytorch import fp8_model_init

        in_bf16 = fp8_model_init(enabled=False)
    with Patches() as patches, in_bf16:
        patches.set(config, "moe_token_dispatcher_type", "allgather")
        # The op fuser's experts take counts on the device, so MoE layers are built without it;
        # dense layers may use it. Some versions lack the field.
        patches.set(config, "use_transformer_engine_op_fuser", False)
        init(layer, config, *args, pg_collection=pg_collection, **kwargs)
    check_experts(layer.experts)
    mark_experts(layer.experts, config)
    if chosen.packed:
        PATCHED.wrap(DistributedDataParallel, "zero_grad_buffer", following_zeros)
        show_single_experts()
        layer.experts = StackedExperts(config, layer.experts, pg_collection)
        torch.cuda.empty_cache()  # Free the blocks of single weights, which are too small to reuse.
    # The spec's own experts get no NVTX range: Megatron's local CUDA graphs refuse modules with
    # forward pre-hooks, and a function set on the instance would follow the module into its copies.
    made = PackedTokenDispatcher if chosen.packed else CellTokenDispatcher
    dispatcher = made(config, pg_collection, chosen)
    if layer.use_shared_expert and layer.shared_expert_overlap:
        dispatcher.set_shared_experts(layer.shared_experts)
    dispatcher.experts = layer.experts
    layer.token_dispatcher = dispatcher
    select_after_counting(layer.router, dispatcher, kwargs.get("name") or "")
    if config.cuda_graph_impl == "none":  # Else the guard calls it, also for replays.
        weak = weakref.ref(layer)  # A cycle would keep deleted weights.
        dispatcher.see_pass = lambda: drops.see_pass(weak())


class _EqualsMoELayer(type(MoELayer)):
    """Metaclass that makes `PaddedMoELayer == MoELayer` true; its subclasses equal themselves.

    In 0.16 and 0.17 `TransformerLayer.__init__` passes process groups and `is_mtp_layer` only to a
    spec whose module is `in (MoELayer, ...)`; others silently get Megatron's global groups.
    """

    # The caches of an abstract class would take an equal class for this one.
    __instancecheck__ = type.__instancecheck__
    __subclasscheck__ = type.__subclasscheck__

    def __eq__(cls, other: object) -> bool:
        return cls is other or (other is MoELayer and cls.__base__ is MoELayer)

    def __hash__(cls) -> int:
        return hash(MoELayer) if cls.__base__ is MoELayer else super().__hash__()


class PaddedMoELayer(MoELayer, metaclass=_EqualsMoELayer):
    """`MoELayer` with static shapes and the same arguments, for use without `install()`.

    `_padded` puts it in front of subclasses of `MoELayer`. If the config asks for CUDA graphs,
    `guard.install` adds checks before each replay, and hands on padding masks. Packed experts wrap
    DDP's `zero_grad_buffer`, and two methods of Megatron-Bridge.
    """

    def __init__(self, config: Any, *args: object, **kwargs: Any) -> None:
        config.has_padded_layers = True  # See `is_ours`.
        build(super().__init__.__func__, self, config, *args, **kwargs)


def padded_spec(spec: Any) -> Any:
    """Return a copy of a Megatron spec in which every `MoELayer` is a `PaddedMoELayer`, too.

    A subclass of `MoELayer` keeps what it overrides.

    Args:
        spec: the spec of a GPT layer, of a block of layers (`layer_specs`), also of multi-token
            prediction, of a hybrid stack (`moe_layer`), or of the MoE layer itself: a ModuleSpec in
            0.16 and 0.17, a `functools.partial` in 0.18 and later.

    Raises:
        ValueError: if the spec has no MoE layer. The spec of a block may have none, because a
            pipeline stage may have dense layers only. So may None, for a stage without a block.
    """
    padded = _replace(spec)
    kind = type(spec).__name__  # The text of a whole spec would fill a screen.
    has_experts = padded is not spec or spec is None or hasattr(spec, "layer_specs")
    require(has_experts, "spec", kind, "contain a MoELayer", "give num_experts to the spec")
    return padded


def _padded(kind: type) -> type:
    """Return a class of MoE layers with `PaddedMoELayer` in front of it, which calls its `init`."""
    if kind is MoELayer or issubclass(kind, PaddedMoELayer):
        return PaddedMoELayer if kind is MoELayer else kind
    return _EqualsMoELayer(f"Padded{kind.__name__}", (PaddedMoELayer, kind), {})


def _is_moe_layer(kind: object) -> TypeGuard[type[MoELayer]]:
    return isinstance(kind, type) and issubclass(kind, MoELayer)


def _replace(spec: Any) -> Any:
    """Return a copy in which every `MoELayer` is replaced, or `spec` itself if it has none."""
    if isinstance(spec, functools.partial) and _is_moe_layer(spec.func):
        return functools.partial(_padded(spec.func), *spec.args, **spec.keywords)
    if isinstance(spec, ModuleSpec) and _is_moe_layer(spec.module):
        return dataclasses.replace(spec, module=_padded(spec.module))
    if isinstance(spec, list | tuple):  # of the layers of a block
        layers = [_replace(layer) for layer in spec]
        return layers if any(map(operator.is_not, layers, spec)) else spec
    # `mtp_model_layer` is the layer of multi-token prediction from 0.17 on, `transformer_layer`
    # that before.
    names = "submodules", "mlp", "moe_layer", "mtp_model_layer", "transformer_layer", "layer_specs"
    for name in names:
        if (inner := getattr(spec, name, None)) is not None:
            padded, copied = _replace(inner), copy.copy(spec)
            setattr(copied, name, padded)
            return spec if padded is inner else copied
    return spec
