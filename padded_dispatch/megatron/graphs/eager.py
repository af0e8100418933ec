"""Run a model with captured layers eagerly for a while, in training mode, and keep its graphs.

Megatron replays a layer's graphs in every training pass once they exist. Each of its two ways has
one place that decides, and both are set on the layer here, not on Megatron's classes:

- `transformer_engine` replays the graphs in `layer.cuda_graphs`, and runs eagerly without any.
  Forward pre-hooks of DDP, which a replay calls by hand, are on the modules as well, so that they
  run in an eager pass.
- `local` asks `layer._should_call_local_cudagraph`.

Whole iterations need nothing of the layers: the un-captured function runs instead of the graph.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from padded_dispatch.utils.patches import Patches


@contextmanager
def without_graphs(chunks: list[Any]) -> Iterator[None]:
    """Run every captured layer of a model eagerly inside the block.

    Args:
        chunks: the model's chunks on this rank.
    """
    with Patches() as patches:
        for chunk in chunks:
            for module in chunk.modules():
                if getattr(module, "cuda_graphs", None):
                    patches.set(module, "cuda_graphs", [])
                if hasattr(module, "cudagraph_manager"):
                    patches.set(module, "_should_call_local_cudagraph", _never)
        yield


def _never(*args: Any, **kwargs: Any) -> bool:
    return False
