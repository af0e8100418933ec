"""Raise if a setting that is baked into a captured CUDA graph has changed since the capture.

A replay runs no Python. It keeps the shape, capacity, train/eval mode and config of the capture,
and copies its input into the captured one, which broadcasts an input of another shape. So the guard
records what each layer's graph depends on when Megatron captures it, and compares before each
replay. It also restores the counters, which count the passes of a capture. Layers without a padded
dispatcher are left alone.

`cuda_graph_impl="local"` is for text generation: `_note_pass` marks a layer that generates before
it is captured, and raises in a training pass. There `local` replays training steps in evaluation,
and in 0.16 and 0.17 computes wrong gradients (`.github/LOG.md`).

A graph of a whole iteration has the padding mask among its inputs, so either all steps have a mask
or none has. If a batch lacks it, `StaticBufferLoader` leaves the mask of an earlier batch in
memory, so the loader is guarded for all models. Attention of some lengths is refused there.
"""

import atexit
import functools
import gc
import operator
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_model_config
from torch import Tensor

from padded_dispatch.config import require
from padded_dispatch.megatron import drops, masks
from padded_dispatch.megatron.compat import captures_iteration
from padded_dispatch.megatron.config import MOE_FIELDS, is_ours
from padded_dispatch.megatron.dispatcher import Copies, counting_tensors, is_padded
from padded_dispatch.megatron.telemetry import padded_moe_layers
from padded_dispatch.utils.patches import PATCHED, Patches

# Layers read these when they are built; after text generation Megatron leaves None and False there.
_READ_ONCE = {"moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"}
_FIELDS = *sorted({*MOE_FIELDS} - _READ_ONCE), "fp8", "fp8_recipe", "fp4", "fp4_recipe"
_read_fields = operator.itemgetter(*_FIELDS)
_NAMES = ("training", "dispatch_config", "frozen parameters", *_FIELDS)
_NAMES_OF_CALL = ("hidden_states.shape", "hidden_states.dtype", "num_microbatches", *_NAMES)
# What a layer's graphs depend on, by `_NAMES_OF_CALL`.
_captured: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()
# A layer's parameters by name, at its last capture: a walk in each replay would take too long.
_parameters: WeakKeyDictionary[Any, list[tuple[str, Tensor]]] = WeakKeyDictionary()
# Arguments of Megatron's schedules that a graph of a whole step depends on.
SIZES = "num_microbatches", "seq_length", "micro_batch_size"


def install(config: TransformerConfig) -> None:
    """Wrap what the guard needs of Megatron for a config, before its layers are built."""
    if config.cuda_graph_impl != "none":
        PATCHED.wrap(TransformerLayer, "__call__", _wrap_call)
    if config.cuda_graph_impl == "transformer_engine":
        PATCHED.wrap(TECudaGraphHelper, "create_cudagraphs", _wrap_capture)
    if captures_iteration(config):
        PATCHED.wrap(StaticBufferLoader, "__call__", _wrap_loader)
        PATCHED.wrap(FullCudaGraphWrapper, "__call__", _wrap_iteration)
        # Megatron-LM keeps the graph of a step until Python exits. If it holds collectives, NCCL
        # waits there until it is deleted: https://github.com/pytorch/pytorch/issues/115388
        atexit.unregister(forget_iterations)  # Register once: each layer calls this.
        atexit.register(forget_iterations)


def padded_layers(chunks: list[Any]) -> list[Any]:
    """Return the transformer layers of a model that have a padded dispatcher."""
    modules = (module for chunk in chunks for module in chunk.modules())
    return [m for m in modules if isinstance(m, TransformerLayer) and is_padded(m.mlp)]


def release_stores(layers: list[Any], *, captured: bool) -> None:
    """Free memory of the layers' stores: that of eager passes, or that of deleted graphs.

    `layers`: the result of `padded_layers`. `captured`: True for the memory of graphs.
    """
    stores = {id(store): store for layer in layers if (store := layer.mlp.token_dispatcher.store)}
    for store in stores.values():
        store.release(captured=captured)


def forget_iterations() -> None:
    """Free Megatron's graphs of a step and of an evaluation; next calls warm up, then capture."""
    wrapper = FullCudaGraphWrapper
    # Not by `reset_cuda_graph`, which is new in 0.18 and keeps the buffers of the batches.
    for stage in ("training", "validation"):
        wrapper.cuda_graph[stage] = wrapper.result[stage] = None
        wrapper.curr_iteration[stage] = 0
        StaticBufferLoader.static_buffers[stage] = []
    gc.collect()


def captured_state_of(layer: Any) -> tuple[Any, ...]:
    """Return the `state_of` a layer that a graph holds from now on; a list that changes is seen."""
    _parameters[layer] = [*layer.named_parameters()]
    return tuple([*value] if isinstance(value, list) else value for value in state_of(layer))


def state_of(layer: Any) -> tuple[Any, ...]:
    """Return mode, capacity and config of a padded layer, by `_NAMES`; the input is not included.

    Two states compare in a microsecond, as long as they hold the same objects.
    """
    moe = layer.mlp  # Read once: a module's look-up of a submodule is slow.
    dispatcher = moe.token_dispatcher
    configs, experts = dispatcher.configs, dispatcher.experts
    return (
        (layer.training, moe.training, configs.in_training, experts.training),
        configs.training,
        # A replay adds gradients to weights that were frozen later, and none to others.
        tuple(name for name, parameter in _parameters[layer] if not parameter.requires_grad),
        *_read_fields(vars(layer.config)),
    )


def check_unchanged(names: Sequence[str], captured: tuple[Any, ...], now: tuple[Any, ...]) -> None:
    """Raise if a value that a graph depends on has changed since the capture.

    Raises:
        ValueError: names everything that differs, with both values.
    """
    if now == captured:
        return
    changed = ", ".join(
        f"{name} must stay {before!r}, got {value!r}"
        for name, before, value in zip(names, captured, now, strict=True)
        if value != before
    )
    raise ValueError(
        f"{changed}: a captured CUDA graph would ignore the change; change it back, or delete the "
        "graphs and capture again"
    )


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """Sizes and states that a graph of a whole step, or of an evaluation, depends on.

    Attributes:
        sizes: the arguments of the schedule, by `SIZES`.
        states: the `captured_state_of` each padded layer, which this does not keep.
    """

    sizes: tuple[Any, ...]
    states: WeakKeyDictionary[Any, tuple[Any, ...]]

    @classmethod
    def of(cls, chunks: list[Any], given: dict[str, Any]) -> "Iteration":
        """Return those of a graph of these chunks and arguments of the schedule."""
        states = ((layer, captured_state_of(layer)) for layer in padded_layers(chunks))
        return cls(sizes=_sizes_of(given), states=WeakKeyDictionary(states))

    def check(self, given: dict[str, Any]) -> None:
        """Raise if a size, or the state of a layer, has changed; see `check_unchanged`."""
        check_unchanged(SIZES, self.sizes, _sizes_of(given))
        names: list[str] = []
        captured, changed = (), ()
        for layer, before in self.states.items():
            if (now := state_of(layer)) != before:
                names += [f"{name} in layer {layer.layer_number}" for name in _NAMES]
                captured, changed = captured + before, changed + now
        check_unchanged(names, captured, changed)


# Of Megatron's graph of each stage.
_iterations: dict[str, Iteration] = {}


def _sizes_of(given: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(given.get(name) for name in SIZES)


def _mask_of(inputs: dict[str, Any]) -> str:
    return "absent" if inputs.get("padding_mask") is None else "given"


def _wrap_call(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def guarded_call(layer: TransformerLayer, *args: object, **kwargs: object) -> Any:
        run = functools.partial(call, layer)
        if not is_ours(layer.config):
            return run(*args, **kwargs)
        moe = layer.mlp
        padded = is_padded(moe)
        if padded:
            _note_pass(layer, moe, kwargs)
        if padded and layer._should_call_te_cudagraph(*args, **kwargs):
            guarded = _replay if layer.cuda_graphs else _capture
            return guarded(layer, run, *args, **kwargs)
        return run(*args, **kwargs)

    return guarded_call


def _note_pass(layer: TransformerLayer, moe: Any, kwargs: dict[str, Any]) -> None:
    """Record the inputs of a padded layer's pass, eager or not; raise if no graph can be made."""
    impl = layer.config.cuda_graph_impl
    is_local = impl == "local" and not captures_iteration(layer.config)
    rule = "be 'none', 'transformer_engine' or full_iteration in training: 'local' generates text"
    require(not (layer.training and is_local), "cuda_graph_impl", impl, rule, "set one of these")
    has_context = kwargs.get("inference_context") is not None
    moe.token_dispatcher.configs.has_context = has_context
    if layer.training:
        masks.check_packed(layer, kwargs.get("packed_seq_params"))
        masks.note_mask(layer, kwargs.get("padding_mask"))
        drops.see_pass(moe)


def _capture(
    layer: TransformerLayer, capture: Callable[..., Any], *args: object, **kwargs: object
) -> Any:
    """Let Transformer Engine capture a layer, and record what its graphs depend on."""
    hidden_states = _hidden_states(args, kwargs)
    sizes = hidden_states.shape, hidden_states.dtype, get_num_microbatches()
    _captured[layer] = *sizes, *captured_state_of(layer)
    with masks.captured(layer, hidden_states):
        return capture(*args, **kwargs)


def _wrap_capture(create: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(create)
    def clean_create(helper: TECudaGraphHelper) -> None:
        if not is_ours(helper.config):
            return create(helper)
        layers = padded_layers(helper.model)
        with Patches() as patches:
            # Free memory of the warm-up and of eager steps: the graphs have their own.
            patches.callback(release_stores, layers, captured=False)
            patches.callback(Copies(t for layer in layers for t in counting_tensors(layer)).restore)
            return create(helper)

    return clean_create


def _replay(
    layer: TransformerLayer, replay: Callable[..., Any], *args: object, **kwargs: Any
) -> Any:
    moe: Any = layer.mlp
    configs = moe.token_dispatcher.configs  # In eager passes the router checks.
    configs.check_factor()
    configs.check_on_overflow()
    captured = _captured.get(layer)
    if captured is None:
        return replay(*args, **kwargs)
    # Without a pipeline one graph serves all microbatches: one ends before the next one starts. A
    # pipeline has a graph for each microbatch, captured in the order of its schedule.
    num_graphs = len(layer.cuda_graphs)
    num_microbatches = captured[2] if num_graphs == 1 else get_num_microbatches()
    hidden_states = _hidden_states(args, kwargs)
    now = hidden_states.shape, hidden_states.dtype, num_microbatches, *state_of(layer)
    check_unchanged(_NAMES_OF_CALL, captured, now)
    with masks.replayed(layer, kwargs.pop("padding_mask", None)):
        return replay(*args, **kwargs)


def _hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs["hidden_states"]


def _wrap_loader(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def checked_load(loader: StaticBufferLoader, inputs: Any, stage: str, microbatch: int) -> Any:
        held, graph = loader.static_buffers[stage], FullCudaGraphWrapper.cuda_graph[stage]
        if microbatch < len(held):
            batch, before = inputs[0] if isinstance(inputs, tuple) else inputs, held[microbatch]
            # If the batch lacks a mask, the loader keeps the earlier one.
            keeps_mask = before.get("padding_mask") is not None and "padding_mask" not in batch
            if keeps_mask or graph is not None:
                check_unchanged(["padding_mask"], (_mask_of(before),), (_mask_of(batch),))
        return load(loader, inputs, stage, microbatch)

    return checked_load


def _check_attention(chunks: list[Any], seq_length: int) -> None:
    """Raise if a graph of a step would get wrong gradients from cuDNN's attention.

    Up to 9.15.0 its backward reads other memory in replays if a length is no multiple of 128.
    Transformer Engine then takes other attention, but only in graphs of layers: Megatron does not
    tell it of this capture. Context parallelism cuts a sequence into two pieces a rank.
    """
    engine: Any = sys.modules.get("transformer_engine.pytorch")
    if engine is None or os.environ.get("NVTE_FUSED_ATTN") == "0":
        return
    modules = (module for chunk in chunks for module in chunk.modules())
    if any(isinstance(module, engine.DotProductAttention) for module in modules):
        ranks = get_model_config(chunks[0]).context_parallel_size
        multiple = 128 * (2 * ranks if ranks > 1 else 1)
        version = engine.utils.get_cudnn_version()
        number = ".".join(map(str, version))
        rule = f"be a multiple of {multiple} in a graph of a whole step with cuDNN {number}"
        # The other attention knows no context parallelism.
        other = "graphs of moe" if ranks > 1 else "graphs of layers, or NVTE_FUSED_ATTN=0"
        fix = f"set one, or {other}, or install cuDNN 9.15.1"
        ok = version >= (9, 15, 1) or seq_length % multiple == 0
        require(ok, "seq_length", seq_length, rule, fix)


def _wrap_iteration(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def seen_iteration(wrapper: FullCudaGraphWrapper, *args: object, **kwargs: Any) -> Any:
        model, trains = kwargs["model"], not kwargs["forward_only"]
        chunks = model if isinstance(model, list) else [model]
        stage = "training" if trains else "validation"
        layers = [*padded_moe_layers(chunks).values()] if trains else []
        is_captured = wrapper.cuda_graph[stage] is not None
        if trains and not is_captured:
            _check_attention(chunks, kwargs["seq_length"])
        elif trains:
            for layer in layers:
                layer.token_dispatcher.configs.check_on_overflow()
        if is_captured and stage in _iterations:
            _iterations[stage].check(kwargs)
        results = run(wrapper, *args, **kwargs)
        if not is_captured and wrapper.cuda_graph[stage] is not None:
            _iterations[stage] = Iteration.of(chunks, kwargs)
        if trains and wrapper.cuda_graph["training"] is not None:
            drops.see_iteration(layers)
        return results

    return seen_iteration
