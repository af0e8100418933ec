"""Record the routing of a model's padded layers while it trains: one file per rank.

    recorder = record_routing(chunks, folder, ...)      # before anything is captured
    for step in ...:
        train()
        recorder.step(step)

`padded_dispatch.recorder` does the recording; this module knows the layers and the ranks.
"""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from padded_dispatch.config import require
from padded_dispatch.megatron.telemetry import padded_moe_layers
from padded_dispatch.recorder import Recording, RoutingBuffer, TraceRecorder


def record_routing(
    chunks: list[Any],
    folder: Path,
    *,
    num_microbatches: int,
    num_tokens: int,
    every: int,
    steps_done: int,
    num_steps: int,
    max_bytes: int,
) -> TraceRecorder | None:
    """Attach a recorder to all padded layers of this rank. Call it before graphs are captured.

    The names of the files tell `load_traces` which steps a resumed run has repeated. Files that
    begin after its checkpoint hold only such steps, and are deleted.

    Args:
        chunks: the model's chunks on this rank.
        folder: the folder, which is created.
        num_microbatches: micro-batches of a step on this rank.
        num_tokens: tokens of a micro-batch that this rank routes (T).
        every: steps between two recorded ones; see `TraceRecorder.every`.
        steps_done: steps that a resumed run has done already, else 0.
        num_steps: steps at the end of the run.
        max_bytes: limit for this rank's file.

    Returns:
        The recorder; None if this rank has no padded layer.

    Raises:
        ValueError: not even one step fits into the limit, or a layer has been captured already.
    """
    layers = padded_moe_layers(chunks)
    if not layers:
        return None
    captured = [m for c in chunks for m in c.modules() if getattr(m, "cuda_graphs", None)]
    require(
        not captured,
        "trace",
        str(folder),
        "start before layers are captured, because a graph holds what is recorded",
        "start it earlier",
    )
    buffers = {}
    for number, layer in layers.items():
        dispatch = layer.token_dispatcher.dispatch_config
        buffers[number] = RoutingBuffer(
            num_microbatches=num_microbatches,
            num_tokens=num_tokens,
            top_k=dispatch.top_k,
            device=layer.router.weight.device,
        )
        layer.router.selector.observers.append(buffers[number])
    folder.mkdir(parents=True, exist_ok=True)
    dispatcher = next(iter(layers.values())).token_dispatcher
    num_sources = dispatcher.ep_size * dispatcher.tp_size
    group: Any = parallel_state.get_expert_tensor_and_model_parallel_group()
    recording = Recording(
        num_experts=dispatcher.dispatch_config.num_experts,
        num_ranks=num_sources,
        rank=parallel_state.get_expert_data_parallel_rank() * num_sources + dist.get_rank(group),
        every=every,
        num_steps=num_steps,
        max_bytes=max_bytes,
    )
    name = f"rank-{dist.get_rank():05d}-step-"
    for earlier in folder.glob(f"{name}*.npy"):
        if int(earlier.stem.removeprefix(name)) > steps_done:
            earlier.unlink()
    return TraceRecorder(folder / f"{name}{steps_done:08d}.npy", buffers, recording)
