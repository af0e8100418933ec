"""`--graph`: which CUDA graphs a run captures, when, and the watchdog around them.

    partial          of each layer: attention, router and what precedes the exchange of tokens
    layer            each layer whole
    full-iteration   all passes of a step, with the reduction of gradients; the optimizer is eager

The first steps are always eager: libraries choose their algorithms, and Adam allocates its state
before the graphs take memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from padded_dispatch.megatron.compat import iteration_graph, layer_graphs
from padded_dispatch.megatron.graphs.capture import IterationGraph, LayerGraphs
from padded_dispatch.train.optimizer import MegatronAdam
from padded_dispatch.train.settings import Settings
from padded_dispatch.utils.watchdog import Watchdog

EAGER_STEPS = 3


def graph_fields(settings: Settings) -> dict[str, Any]:
    """Return the fields of Megatron's config for `--graph`."""
    match settings.output.graph:
        case "none":
            return {}
        case "partial":
            fields = layer_graphs("attn", "moe_router", "moe_preprocess")
        case "layer":
            fields = layer_graphs("attn", "moe")
        case "full-iteration":
            fields = iteration_graph()
    return {"cuda_graph_warmup_steps": EAGER_STEPS, **fields}


class TrainingGraphs:
    """The CUDA graphs of a run, captured in step `EAGER_STEPS` + 1.

    `memory_gib`: allocated and reserved memory before and after the last capture.

    Args:
        settings: with a `graph` other than 'none'.
        config: Megatron's, of the model.
        chunks: the model.
        optimizer: a capture of layers clears its gradients.
    """

    def __init__(
        self, settings: Settings, config: Any, chunks: list[Any], optimizer: MegatronAdam
    ) -> None:
        self._made: IterationGraph | LayerGraphs
        if settings.output.graph == "full-iteration":
            self._made = IterationGraph(config)
        else:
            self._made = LayerGraphs(
                chunks,
                seq_length=settings.recipe.seq_length,
                micro_batch=settings.recipe.micro_batch,
                optimizers=(optimizer.adam,),
            )
        self._watchdog = Watchdog(settings.output.graph_timeout)
        self._num_steps = 0
        self._capture_in = EAGER_STEPS + 1
        self.memory_gib: dict[str, float] = {}

    @property
    def schedule(self) -> Any:
        """The replacement of Megatron's schedule for training passes; None keeps Megatron's."""
        return self._made if isinstance(self._made, IterationGraph) else None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Wrap one step: capture when it is due, otherwise watch the replay."""
        self._num_steps += 1
        what = f"step {self._num_steps}"
        if self._num_steps == self._capture_in:
            self._note_memory("before")
            with self._watchdog.watch(f"the capture in {what}"):
                if isinstance(self._made, LayerGraphs):
                    self._made.capture()
                yield
                torch.cuda.synchronize()
            self._note_memory("after")
        else:
            yield
            self._watchdog.beat(what)

    def recapture(self) -> None:
        """Delete the graphs between two steps, because a setting baked into them has changed.

        The next step captures layers again; a full iteration waits for `EAGER_STEPS` eager steps.
        """
        self._made.delete()
        eager = EAGER_STEPS if isinstance(self._made, IterationGraph) else 0
        self._capture_in = max(self._capture_in, self._num_steps + eager + 1)

    def delete(self) -> None:
        """Free the graphs' memory. The process groups cannot be destroyed while graphs exist."""
        self._watchdog.stop()
        self._made.delete()

    def _note_memory(self, when: str) -> None:
        self.memory_gib |= {
            f"allocated {when} capture": torch.cuda.memory_allocated() / 2**30,
            f"reserved {when} capture": torch.cuda.memory_reserved() / 2**30,
        }
