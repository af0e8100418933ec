"""Raise if a setting that is baked into a captured CUDA graph has changed since the capture.

A captured layer runs no Python: it keeps the shape, capacity, train/eval mode and config of its
capture, and copies its input into the captured one, by broadcast if need be. So the guard records
what each layer's graph depends on when Megatron captures it, and compares before each replay. It
patches methods of Megatron and leaves layers without a padded dispatcher alone. A capture runs
passes of its own; what they count is restored.

With `cuda_graph_impl="local"` Megatron captures by itself at the end of the first step. What it
gets wrong for models with our dispatcher is corrected here:

- Stock replays the graph of a training step in evaluation; here evaluation is eager. Text
  generation keeps its graphs; the layer learns that it generates before it is captured.
- A layer's input stays in its buffer. In 0.16 others may use it once the forward is captured,
  although backward reads it (D22 of `padded_dispatch/megatron/README.md`).
- For scope `moe`, Megatron captures nothing of a GPTModel's layers and says nothing. Refused.

Padding masks and packed sequences: `padded_dispatch.megatron.schedule` has the rules. A graph of
`local` or of a whole iteration reads the mask among its inputs, so there must be one in each step
or in none. What a later batch lacks, Megatron's loader leaves in memory as it was, so the loader is
guarded for all models. `IterationGraph` guards whole iterations in the same way.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer import transformer_layer
from megatron.core.transformer.cuda_graphs import (
    TECudaGraphHelper,
    _CudagraphGlobalRecord,
    _CudaGraphRunner,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from padded_dispatch.config import require
from padded_dispatch.megatron import schedule, watch
from padded_dispatch.megatron.compat import (
    FREES_GRAPH_INPUTS,
    graph_scopes,
    logged_tensors,
    put_logged_back,
)
from padded_dispatch.megatron.config import is_ours
from padded_dispatch.megatron.dispatcher import counts_put_back, is_padded
from padded_dispatch.utils.patches import Patches

# Values that a graph depends on, by the names that errors give.
Invariants = dict[str, Any]

_FIELDS = (
    *(f.name for f in dataclasses.fields(TransformerConfig) if f.name.startswith("moe_")),
    *("fp8", "fp8_recipe", "fp4", "fp4_recipe"),
)
_read_fields = operator.itemgetter(*_FIELDS)
_NAMES = ("training", "dispatch_config", *_FIELDS)
_NAMES_OF_CALL = ("hidden_states.shape", "hidden_states.dtype", "num_microbatches", *_NAMES)
_patches = Patches()
# What graphs depend on: as `_state_of_call`, or of `local` ones the padding mask and `state_of`.
_captured: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()


def install() -> None:
    """Guard every layer that has a padded dispatcher; do nothing after an earlier `install`."""
    if _patches:
        return
    choice = "_should_call_local_cudagraph"
    # MoE layers of hybrid stacks have their own, which does not always call the other one.
    choosers = [
        (layer, choice, _wrap_local_choice)
        for layer in (TransformerLayer, getattr(transformer_layer, "MoETransformerLayer", None))
        if layer is not None and choice in vars(layer)
    ]
    for owner, name, wrap in (
        *choosers,
        (TransformerLayer, "_te_cuda_graph_capture", _wrap_capture),
        (TransformerLayer, "_te_cuda_graph_replay", _wrap_replay),
        (TransformerLayer, "create_mcore_cudagraph_manager", _wrap_local_manager),
        (_CudaGraphRunner, "create_fwd_graph", _wrap_local_capture),
        (TECudaGraphHelper, "create_cudagraphs", _wrap_helper),
        (StaticBufferLoader, "__call__", _wrap_loader),
        (TransformerLayerSchedulePlan, "_build_callable_nodes", schedule.adapted),
    ):
        _patches.set(owner, name, wrap(getattr(owner, name)))


def uninstall() -> None:
    """Undo `install`; do nothing without an `install` before."""
    _patches.undo()


def padded_layers(chunks: list[Any]) -> list[Any]:
    """Return the transformer layers of a model that have a padded dispatcher."""
    modules = (module for chunk in chunks for module in chunk.modules())
    return [m for m in modules if isinstance(m, TransformerLayer) and _is_padded(m)]


def release_stores(layers: list[Any], *, captured: bool) -> None:
    """Free rows of stores that eager passes, or graphs that are deleted, have left.

    Args:
        layers: see `padded_layers`.
        captured: whether those of graphs.
    """
    stores = {id(store): store for layer in layers if (store := layer.mlp.token_dispatcher.store)}
    for store in stores.values():
        store.release(captured=captured)


def state_of(layer: Any) -> tuple[Any, ...]:
    """Return mode, capacity and config of a padded layer, by `_NAMES`; the input is not included.

    Two of them compare in a microsecond, as long as they hold the same objects.
    """
    moe = layer.mlp
    return (
        (layer.training, moe.training, moe.router.training, moe.experts.training),
        moe.token_dispatcher.configs.training,
        *_read_fields(vars(layer.config)),
    )


def check_layers(layers: list[Any], states: list[tuple[Any, ...]]) -> None:
    """Raise if the state of a layer is another one than before; see `check_unchanged`."""
    captured: Invariants = {}
    changed: Invariants = {}
    for layer, before in zip(layers, states, strict=True):
        if (now := state_of(layer)) != before:
            names = [f"{name} in layer {layer.layer_number}" for name in _NAMES]
            captured |= _named(before, names)
            changed |= _named(now, names)
    check_unchanged(captured, changed)


def check_unchanged(captured: Invariants, now: Invariants) -> None:
    """Raise if anything that a graph depends on has changed since its capture.

    Raises:
        ValueError: names everything that differs, with both values.
    """
    changed = [
        f"{name} must stay {value!r}, got {now[name]!r}"
        for name, value in captured.items()
        if now[name] != value
    ]
    if changed:
        raise ValueError(
            f"{', '.join(changed)}: a captured CUDA graph would ignore the change; change it back, "
            "or delete the graphs and capture again"
        )


def _named(values: tuple[Any, ...], names: Iterable[str]) -> Invariants:
    return dict(zip(names, values, strict=True))


def _mask_of(given: dict[str, Any]) -> Invariants:
    return {"padding_mask": "absent" if given.get("padding_mask") is None else "given"}


def _is_padded(layer: Any) -> bool:
    return is_padded(getattr(layer, "mlp", None))


# Graphs of layers by Transformer Engine.


def _wrap_capture(capture: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(capture)
    def recorded_capture(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_padded(layer):
            hidden_states = _hidden_states(args, kwargs)
            _captured[layer] = _state_of_call(layer, hidden_states, get_num_microbatches())
            # The self-test's mask, if any, is for eager runs.
            with schedule.captured(layer, hidden_states):
                return capture(layer, *args, **kwargs)
        return capture(layer, *args, **kwargs)

    return recorded_capture


def _wrap_helper(create: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(create)
    def clean_create(helper: Any) -> None:
        if not is_ours(helper.config):
            create(helper)
            return
        with counts_put_back(*(chunk.module for chunk in helper.model)):
            create(helper)
        release_stores(padded_layers(helper.model), captured=False)

    return clean_create


def _wrap_replay(replay: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(replay)
    def guarded_replay(layer: Any, *args: Any, **kwargs: Any) -> Any:
        captured = _captured.get(layer)
        if captured is None:
            return replay(layer, *args, **kwargs)
        # One graph serves all microbatches, because each ends before the next one starts.
        # A pipeline has a graph for each microbatch, captured in the order of its schedule.
        num_graphs = len(layer.cuda_graphs)
        num_microbatches = captured[2] if num_graphs == 1 else get_num_microbatches()
        now = _state_of_call(layer, _hidden_states(args, kwargs), num_microbatches)
        if now != captured:
            check_unchanged(_named(captured, _NAMES_OF_CALL), _named(now, _NAMES_OF_CALL))
        schedule.check_packed(layer, kwargs.get("packed_seq_params"))
        with schedule.replayed(layer, kwargs.pop("padding_mask", None)):
            return replay(layer, *args, **kwargs)

    return guarded_replay


def _state_of_call(layer: Any, hidden_states: Any, num_microbatches: int) -> tuple[Any, ...]:
    return hidden_states.shape, hidden_states.dtype, num_microbatches, *state_of(layer)


def _hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs["hidden_states"]


# Megatron's own graphs of layers, `cuda_graph_impl="local"`.


def _wrap_local_choice(choose: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(choose)
    def guarded_choice(layer: Any, *args: Any, **kwargs: Any) -> bool:
        graphed, padded = choose(layer, *args, **kwargs), _is_padded(layer)
        if padded:
            # With `padded_spec`, the config is not ours yet when the manager is made.
            _check_captures(layer, layer.config)
            layer.mlp.token_dispatcher.configs.given_context = (
                kwargs.get("inference_context") is not None
            )
        if padded and layer.training:  # Megatron asks in each pass, whatever its way of capturing.
            schedule.check_packed(layer, kwargs.get("packed_seq_params"))
            schedule.note_mask(layer, kwargs.get("padding_mask"))
            watch.see_pass(layer, _hidden_states(args, kwargs))
        if not graphed or not is_ours(layer.config) or kwargs.get("inference_context") is not None:
            return graphed
        if layer.training and padded:
            now = (*_mask_of(kwargs).values(), *state_of(layer))
            captured = _captured.get(layer, now)
            if not _CudagraphGlobalRecord.cudagraph_created:
                _captured[layer] = now
            elif now != captured:
                names = "padding_mask", *_NAMES
                check_unchanged(_named(captured, names), _named(now, names))
        return layer.training

    return guarded_choice


def _wrap_local_manager(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def checked_create(layer: Any, config: Any) -> None:
        create(layer, config)
        if is_ours(config):
            _check_captures(layer, config)

    return checked_create


def _wrap_local_capture(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def clean_create(runner: Any, *args: Any, **kwargs: Any) -> Any:
        captured = runner.base_module  # Some have no config, a sampler for example.
        if not is_ours(getattr(captured, "config", None)):
            return create(runner, *args, **kwargs)
        with counts_put_back(captured), Patches() as patches:
            if FREES_GRAPH_INPUTS:
                # All that a forward's capture gives back to this pool are buffers of inputs.
                pool: Any = _CudagraphGlobalRecord.tensor_reuse_pool
                patches.set(pool, "insert", lambda buffer: None)
            logged = {name: tensor.clone() for name, tensor in logged_tensors().items()}
            made = create(runner, *args, **kwargs)
            put_logged_back(logged)
            return made

    return clean_create


def _check_captures(layer: Any, config: Any) -> None:
    """Raise if Megatron would capture nothing of a layer although its config has a scope."""
    asked = config.cuda_graph_impl == "local" and "moe" in graph_scopes(config)
    require(
        not asked or hasattr(layer, "cudagraph_manager"),
        "cuda_graph_impl",
        config.cuda_graph_impl,
        "be 'transformer_engine' for scope 'moe' in a GPTModel, because 'local' captures nothing "
        "of its layers",
        "set it, or leave the scopes empty, which captures whole layers",
    )


# Graphs of whole iterations.


def _wrap_loader(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def checked_load(loader: Any, inputs: Any, stage: str, microbatch: int) -> Any:
        held = StaticBufferLoader.static_buffers[stage]
        graph = FullCudaGraphWrapper.cuda_graph[stage]
        if stage == "training" and microbatch == 0 and graph is not None:
            watch.see_iteration()
        if microbatch < len(held):
            batch, before = inputs[0] if isinstance(inputs, tuple) else inputs, held[microbatch]
            # What a batch lacks, the loader leaves as it was.
            keeps = before.get("padding_mask") is not None and "padding_mask" not in batch
            if keeps or graph is not None:
                check_unchanged(_mask_of(before), _mask_of(batch))
        return load(loader, inputs, stage, microbatch)

    return checked_load
