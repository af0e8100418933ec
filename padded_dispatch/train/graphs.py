"""`--graph`: what a run captures as CUDA graphs, when, and under whose eyes.

    partial          per layer: attention, router and what comes before the exchange of tokens
    layer            per layer: all of it
    full-iteration   all passes of a step, with the reduction of gradients; the optimizer is eager

The first steps are eager in any case: libraries settle, and Adam's state is there before the graphs
take their memory.
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
    """What Megatron's config says about graphs."""
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
    """The graphs of a run, from their capture in step `EAGER_STEPS` + 1 to their end.

    `memory_gib`: around the last capture.

    Args:
        settings: with a `graph` other than 'none'.
        config: Megatron's, of the model.
        chunks: the model.
        optimizer: its gradients are cleared by a capture of layers.
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
        """What runs training passes in place of Megatron's schedule; None for Megatron's."""
        return self._made if isinstance(self._made, IterationGraph) else None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around each step: captures when it is time, and watches over replays."""
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
        """Between steps: delete the graphs, since what they depend on has changed. The next step
        captures again; of full iterations, once `EAGER_STEPS` more have been eager."""
        self._made.delete()
        eager = EAGER_STEPS if isinstance(self._made, IterationGraph) else 0
        self._capture_in = max(self._capture_in, self._num_steps + eager + 1)

    def delete(self) -> None:
        """Give the graphs' memory back. The process groups cannot end while they live."""
        self._watchdog.stop()
        self._made.delete()

    def _note_memory(self, when: str) -> None:
        self.memory_gib |= {
            f"allocated {when} capture": torch.cuda.memory_allocated() / 2**30,
            f"reserved {when} capture": torch.cuda.memory_reserved() / 2**30,
        }
