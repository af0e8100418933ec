"""`--graph`: the CUDA graphs of a run.

    partial          of each layer: attention, router and what precedes the exchange of tokens
    layer            each layer whole
    full-iteration   all passes of a step, with the reduction of gradients; the optimizer is eager

The first `EAGER_STEPS` steps are eager.
"""

from typing import Any

from padded_dispatch.megatron.graphs.capture import IterationGraph, LayerGraphs
from padded_dispatch.train.model import EAGER_STEPS, MegatronAdam
from padded_dispatch.train.settings import Settings


class TrainingGraphs:
    """The CUDA graphs of a run, captured in step `EAGER_STEPS` + 1.

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

    @property
    def schedule(self) -> Any:
        """The replacement of Megatron's schedule for training passes; None keeps Megatron's."""
        return self._made if isinstance(self._made, IterationGraph) else None

    def begin(self, number: int) -> None:
        """Capture layers ahead of step `EAGER_STEPS` + 1; the schedule captures by itself."""
        if number == EAGER_STEPS + 1 and isinstance(self._made, LayerGraphs):
            self._made.capture()

    def delete(self) -> None:
        """Free the graphs' memory. The process groups cannot be destroyed while graphs exist."""
        self._made.delete()
