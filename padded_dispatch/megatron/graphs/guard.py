"""A change that a replay would ignore raises before the replay.

A captured layer runs no Python: it goes on with the shape, capacity, mode and config that it was
captured with, and copies whatever it is given into the captured input, by broadcast if need be. So
each layer's facts are recorded when Megatron captures it and compared whenever Megatron replays it.
`TransformerLayer._te_cuda_graph_capture` and `_te_cuda_graph_replay` (0.16.1 to 0.19.0) are where
all of Megatron's ways into a layer's graph by Transformer Engine meet. With "local" it is
`_should_call_local_cudagraph`: the first step, at whose end Megatron captures, is recorded, and
evaluation runs eagerly, for which stock replays the graph of a training step, counters and dropout
included. What else "local" needs comes along from `local_graphs`. Layers of models without our
dispatcher pass unchanged. A whole iteration is watched by our `IterationGraph`, and by nobody where
Megatron's own wrapper is used without it.

It raises on the ranks where something changed. Where that is not all of them, the others wait for
the exchange, until their watchdog ends them.

Megatron's own graphs of layers, `cuda_graph_impl="local"`: what their capture would leave wrong.

Megatron captures by itself at the end of the first step, layer by layer in
`_CudaGraphRunner.create_fwd_graph`, and checks the shapes of inputs in each replay. For models with
our dispatcher:

- What a capture's passes over zeros count is put back: our counters, and until 0.17 Megatron's
  buffers, too, such as those of expert bias.
- A layer's input stays in its buffer. In 0.16 and 0.17 this is free for others once the forward is
  captured, although backward reads it where the layer is not fed by another graph: the gradient of
  the last layer's output goes there, and the first norm's weights get a gradient of it. Seen with
  0.16.1 on H200s, in a model without experts, too: it was off by all of its size.
- Of scope `moe` Megatron makes no graphs in a GPTModel's layers, and says nothing (0.16.1 to
  0.19.0): that raises.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.cuda_graphs import _CudagraphGlobalRecord, _CudaGraphRunner
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from padded_dispatch.megatron.compat import FREES_GRAPH_INPUTS, graph_scopes
from padded_dispatch.megatron.config import is_ours
from padded_dispatch.megatron.dispatcher import counts_put_back, is_padded
from padded_dispatch.megatron.router import MASK_IS_LOST

# What a graph depends on, by names for people.
Facts = dict[str, Any]

_MOE_FIELDS = tuple(
    field.name for field in dataclasses.fields(TransformerConfig) if field.name.startswith("moe_")
)
_PACKED = (
    "packed_seq_params is not possible with a layer that is replayed from a CUDA graph: where "
    "sequences begin is no tensor that a graph could read; pad every sequence to one length, or "
    "set cuda_graph_impl='none'"
)
_originals: dict[tuple[Any, str], Any] = {}
_captured: WeakKeyDictionary[Any, Facts] = WeakKeyDictionary()


def install() -> None:
    """Guard every layer that has a padded dispatcher, from now on. Again: nothing happens."""
    if not _originals:
        for owner, attribute, wrap in (
            (TransformerLayer, "_te_cuda_graph_capture", _wrap_capture),
            (TransformerLayer, "_te_cuda_graph_replay", _wrap_replay),
            (TransformerLayer, "_should_call_local_cudagraph", _wrap_local),
            *PATCHES,
        ):
            original = _originals[owner, attribute] = getattr(owner, attribute)
            setattr(owner, attribute, wrap(original))


def uninstall() -> None:
    """Undo `install`; without it before, nothing happens."""
    while _originals:
        (owner, attribute), original = _originals.popitem()
        setattr(owner, attribute, original)


def padded_layers(chunks: list[Any]) -> list[Any]:
    """The transformer layers of a model that have a padded dispatcher."""
    modules = (module for chunk in chunks for module in chunk.modules())
    return [m for m in modules if isinstance(m, TransformerLayer) and _is_padded(m)]


def facts_of(layers: list[Any]) -> Facts:
    """Mode, capacity and config of padded layers, whatever their input."""
    return {
        f"{name} in layer {layer.layer_number}": value
        for layer in layers
        for name, value in _layer_facts(layer).items()
    }


def check_unchanged(then: Facts, now: Facts) -> None:
    """Compare what a graph depends on with what it was captured with.

    Raises:
        ValueError: names everything that differs, with both values.
    """
    if now != then:
        changed = [name for name in then if now[name] != then[name]]
        values = ", ".join(f"{name}={now[name]} (was {then[name]})" for name in changed)
        raise ValueError(
            f"{values} is not possible with a CUDA graph that was captured before: change it back, "
            "or delete the graphs and capture again"
        )


def _wrap_capture(capture: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(capture)
    def recorded_capture(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_padded(layer):
            _captured[layer] = _replay_facts(layer, args, kwargs)
        return capture(layer, *args, **kwargs)

    return recorded_capture


def _wrap_replay(replay: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(replay)
    def guarded_replay(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if layer in _captured:
            if kwargs.get("padding_mask") is not None:
                raise ValueError(f"padding_mask is not possible in a replay: {MASK_IS_LOST}")
            if kwargs.get("packed_seq_params") is not None:
                raise ValueError(_PACKED)
            then, now = _captured[layer], _replay_facts(layer, args, kwargs)
            if len(layer.cuda_graphs) == 1:
                # It serves all microbatches, since each is done with before the next one starts.
                # With a pipeline there is a graph for each, and their order has been captured.
                now["num_microbatches"] = then["num_microbatches"]
            check_unchanged(then, now)
        return replay(layer, *args, **kwargs)

    return guarded_replay


def _wrap_local(choose: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(choose)
    def guarded_choice(layer: Any, *args: Any, **kwargs: Any) -> bool:
        graphed, padded = choose(layer, *args, **kwargs), _is_padded(layer)
        if padded:  # Built by `padded_spec` it has not been looked at before.
            check_captured(layer, layer.config)
        if not graphed or not is_ours(layer.config) or kwargs.get("inference_context") is not None:
            return graphed
        if layer.training and padded:
            facts = _layer_facts(layer)
            if _CudagraphGlobalRecord.cudagraph_created:
                check_unchanged(_captured.get(layer, facts), facts)
            else:
                _captured[layer] = facts
        return layer.training

    return guarded_choice


def _replay_facts(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Facts:
    hidden_states = args[0] if args else kwargs["hidden_states"]
    return {
        "hidden_states.shape": tuple(hidden_states.shape),
        "hidden_states.dtype": hidden_states.dtype,
        "num_microbatches": get_num_microbatches(),
        **_layer_facts(layer),
    }


def _layer_facts(layer: Any) -> Facts:
    moe, config = layer.mlp, layer.config
    return {
        "training": (layer.training, moe.training, moe.router.training, moe.experts.training),
        "dispatch_config": moe.token_dispatcher.dispatch_config,
        **{name: getattr(config, name) for name in _MOE_FIELDS},
    }


def _is_padded(layer: Any) -> bool:
    return is_padded(getattr(layer, "mlp", None))


_NOTHING_IS_CAPTURED = (
    "cuda_graph_impl='local' with scope 'moe' is not possible in a GPTModel: Megatron would "
    "capture nothing of its layers; leave the scopes empty, which captures whole layers, or set "
    "cuda_graph_impl='transformer_engine'"
)


def check_captured(layer: Any, config: Any) -> None:
    """Refuse a layer of which Megatron would capture nothing, though its config asks for it."""
    asked = config.cuda_graph_impl == "local" and "moe" in graph_scopes(config)
    if asked and not hasattr(layer, "cudagraph_manager"):
        raise ValueError(_NOTHING_IS_CAPTURED)


def _wrap_manager(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def loud_create(layer: Any, config: Any) -> None:
        create(layer, config)
        if is_ours(config):
            check_captured(layer, config)

    return loud_create


def _wrap_local_capture(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def clean_create(runner: Any, *args: Any, **kwargs: Any) -> Any:
        captured = runner.base_module  # A sampler, say, which has no config.
        if not is_ours(getattr(captured, "config", None)):
            return create(runner, *args, **kwargs)
        with counts_put_back(captured), _inputs_kept():
            return create(runner, *args, **kwargs)

    return clean_create


PATCHES = (
    (TransformerLayer, "create_mcore_cudagraph_manager", _wrap_manager),
    (_CudaGraphRunner, "create_fwd_graph", _wrap_local_capture),
)


@contextmanager
def _inputs_kept() -> Iterator[None]:
    """Within the capture of a forward, buffers of inputs are all that is given back to the pool."""
    if not FREES_GRAPH_INPUTS:
        yield
        return
    pool: Any = _CudagraphGlobalRecord.tensor_reuse_pool
    pool.insert = lambda buffer: None  # In front of the method.
    try:
        yield
    finally:
        del pool.insert
