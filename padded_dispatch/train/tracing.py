"""`--trace`: what the routers of a run ask for, one file per rank, for `padded-dispatch tune`."""

from typing import Any

import torch
import torch.distributed as dist

from padded_dispatch.megatron.telemetry import padded_moe_layers
from padded_dispatch.train.settings import Settings
from padded_dispatch.tune.recorder import Recording, RoutingBuffer, TraceRecorder


def trace_recorder(
    settings: Settings, chunks: list[Any], device: torch.device, *, steps_done: int
) -> TraceRecorder:
    """Watch all layers of this rank, from before their graphs are captured.

    Args:
        settings: with a folder for `trace`, which is made.
        chunks: the model.
        device: of the model.
        steps_done: by the run that is resumed, else 0.

    Raises:
        ValueError: not even one step fits into the limit.
    """
    output, layout, recipe = settings.output, settings.layout, settings.recipe
    assert output.trace is not None
    buffers = {}
    for number, layer in padded_moe_layers(chunks).items():
        buffers[number] = RoutingBuffer(
            num_passes=settings.num_microbatches,
            # Sequence parallelism, without which there is no tensor parallelism here, splits them.
            num_tokens=recipe.micro_batch * recipe.seq_length // layout.tp,
            top_k=settings.model.top_k,
            device=device,
        )
        layer.router.selector.observers.append(buffers[number])
    output.trace.mkdir(parents=True, exist_ok=True)
    recording = Recording(
        num_experts=settings.model.num_experts,
        num_ranks=layout.ep * layout.etp,
        # Pipeline stages come last in Megatron's order of ranks, and expert-parallel groups first.
        rank=dist.get_rank() % (layout.workers // layout.pp),
        every=output.trace_every,
        num_steps=output.steps,
        max_bytes=int(output.trace_gib * 2**30),
    )
    # From these names `load_traces` knows what a resumed run did again; and what began later than
    # the checkpoint is undone as a whole.
    name = f"rank-{dist.get_rank():05d}-step-"
    for earlier in output.trace.glob(f"{name}*.npy"):
        if int(earlier.stem.removeprefix(name)) > steps_done:
            earlier.unlink()
    path = output.trace / f"{name}{steps_done:08d}.npy"
    return TraceRecorder(path, buffers, recording)
