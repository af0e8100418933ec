"""Passes of micro-batches through the model, by Megatron's own schedules.

`get_forward_backward_func` knows all of them: without a pipeline, with one, and interleaved.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from padded_dispatch.train.data import Windows
from padded_dispatch.train.settings import Settings


def run_passes(
    settings: Settings,
    chunks: list[Any],
    windows: Windows,
    device: torch.device,
    *,
    first_sample: int,
    num_passes: int,
    forward_only: bool = False,
    schedule: Callable[..., list[Any]] | None = None,
) -> list[Tensor]:
    """Each rank's `num_passes` micro-batches; backwards too, and the gradients are reduced.

    Args:
        first_sample: number of the first sample that the ranks read together.
        schedule: instead of Megatron's own.

    Returns:
        The mean loss of each pass, on ranks of the last pipeline stage; elsewhere nothing.
    """
    recipe = settings.recipe

    def batches() -> Iterator[dict[str, Tensor]]:
        rank, ranks = parallel_state.get_data_parallel_rank(), settings.layout.dp
        for number in range(num_passes):
            start = first_sample + (number * ranks + rank) * recipe.micro_batch
            batch = windows.batch(start, recipe.micro_batch, device)
            # A dict, as Megatron's graph of an iteration wants it.
            yield {"tokens": batch[:, :-1].contiguous(), "labels": batch[:, 1:].contiguous()}

    results = (schedule or get_forward_backward_func())(
        forward_step_func=_forward,
        data_iterator=[batches() for _ in chunks],
        model=chunks,
        num_microbatches=num_passes,
        seq_length=recipe.seq_length,
        micro_batch_size=recipe.micro_batch,
        forward_only=forward_only,
    )
    # A graph's results are overwritten by its next replay.
    return [result["loss"].clone() for result in results]


def _forward(batches: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    batch = next(batches)
    tokens, labels = batch["tokens"], batch["labels"]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    # No mask: attention is causal, and a packed text has nothing to hide.
    return model(tokens, positions, None, labels=labels), _mean


def _mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses.float().mean()
    # Megatron divides the first one in place by the number of passes.
    return loss, {"loss": loss.detach().clone()}
