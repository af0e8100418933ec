"""Megatron's own graphs of layers, `cuda_graph_impl="local"`: what their capture would leave wrong.

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

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.transformer.cuda_graphs import _CudagraphGlobalRecord, _CudaGraphRunner
from megatron.core.transformer.transformer_layer import TransformerLayer

from padded_dispatch.megatron.compat import FREES_GRAPH_INPUTS, graph_scopes
from padded_dispatch.megatron.config import is_ours
from padded_dispatch.megatron.dispatcher import counts_put_back

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


def _wrap_capture(create: Callable[..., Any]) -> Callable[..., Any]:
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
    (_CudaGraphRunner, "create_fwd_graph", _wrap_capture),
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
