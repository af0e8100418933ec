"""Record the choices of a model's routers, for `padded-dispatch tune`."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from padded_dispatch.config import require, require_count
from padded_dispatch.megatron.config import last_layer
from padded_dispatch.megatron.telemetry import padded_moe_layers
from padded_dispatch.recorder import RoutingBuffer, TraceRecorder, steps_apart
from padded_dispatch.trace import TracedRun, steps_before
from padded_dispatch.utils.logs import log_once
from padded_dispatch.utils.results import require_folder


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The sizes of a run that its trace needs.

    Attributes:
        num_microbatches: the most micro-batches of a step on this rank.
        num_tokens: tokens of a micro-batch that this rank routes (T).
        num_steps: steps at the end of the run.
        every: steps between two recorded ones, at least; see `steps_apart`.

    Raises:
        ValueError: if one of them is no int of at least 1.
    """

    num_microbatches: int
    num_tokens: int
    num_steps: int
    every: int = 1

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            require_count(name, number)


# Of this process.
_recorders: WeakSet[TraceRecorder] = WeakSet()


def record_routing(
    chunks: list[Any], folder: Path, passes: Passes, *, steps_done: int
) -> TraceRecorder | None:
    """Attach a recorder to all padded layers of this rank. Call it before graphs are captured.

    From the names of files `load_traces` finds the steps that a resumed run has repeated. Files
    that begin at its checkpoint or later hold only such steps. They are deleted, also those of
    other ranks, because an earlier run may have had more ranks. All ranks come here before any
    writes a file.

    Args:
        chunks: the model's chunks on this rank.
        folder: the folder, which is created.
        passes: sizes of the run.
        steps_done: steps that a resumed run has done already, else 0.

    Returns:
        The recorder; None if this rank has no padded layer.

    Raises:
        ValueError: not even one step fits into the limit, the folder cannot be written, or a layer
            has been captured already.
    """
    require_folder("trace", folder)
    layers = padded_moe_layers(chunks)
    model: Any = get_model_config(chunks[0])
    for name, once in (("mlp_chunks_for_training", 1), ("mtp_use_repeated_layer", False)):
        times = getattr(model, name, None) or once
        rule = f"be {once} with a trace, which has a record of each layer and micro-batch"
        require(times == once, name, times, rule, "leave out one of the two")
    num_layers = -(-last_layer(model) // model.pipeline_model_parallel_size)
    apart = steps_apart(
        passes.every,
        steps_done=steps_done,
        num_steps=passes.num_steps,
        num_records=num_layers * passes.num_microbatches,
        num_tokens=passes.num_tokens,
        top_k=model.moe_router_topk,
    )
    if (
        apart > passes.every and dist.get_rank() == 0
    ):  # Before the return: rank 0 may have no layer.
        words = f"one step in {apart} is traced, because a rank's trace has about 1 GiB at most"
        log_once(words, logging.WARNING)
    if not layers:
        return None
    captured = [m for c in chunks for m in c.modules() if getattr(m, "cuda_graphs", None)]
    rule = "start before layers are captured, because a graph holds what is recorded"
    fix = "set cuda_graph_warmup_steps to 1 or more"
    require(not captured, "trace", str(folder), rule, fix)
    dispatcher = next(iter(layers.values())).token_dispatcher
    config = dispatcher.configs.current
    num_sources = dispatcher.ep_size * dispatcher.tp_size
    run = TracedRun(
        num_tokens=passes.num_tokens,
        top_k=config.top_k,
        num_experts=config.num_experts,
        num_ranks=num_sources,
        hidden_size=model.moe_latent_size or model.hidden_size,
        fc1_width=model.moe_ffn_hidden_size * (2 if model.gated_linear_unit else 1),
        capacity_pool=config.capacity_pool,
        etp_size=config.etp_size,
    )
    buffers = {}
    for number, layer in layers.items():
        device = layer.token_dispatcher.configs.router.weight.device
        buffer = RoutingBuffer(run, num_microbatches=passes.num_microbatches, device=device)
        layer.token_dispatcher.observers.append(buffer)
        buffers[number] = buffer
    folder.mkdir(parents=True, exist_ok=True)
    for other in _recorders:
        if not other.ended and other.path.parent.resolve() == folder.resolve():
            other.close()  # Else both would write to one file.
            words = "the trace of another model ends; give each model a folder of its own"
            log_once(f"{folder}: {words}", logging.WARNING)
    for earlier in folder.glob("rank-*-step-*.npy"):
        before = steps_before(earlier)
        if before is not None and before >= steps_done:
            words = f"traces of steps after {steps_done}, of an earlier run, are deleted"
            log_once(f"{folder}: {words}", logging.WARNING)
            earlier.unlink(missing_ok=True)
    group: Any = parallel_state.get_expert_tensor_and_model_parallel_group()
    recorder = TraceRecorder(
        folder / f"rank-{dist.get_rank():05d}-step-{steps_done:08d}.npy",
        run,
        buffers,
        rank=parallel_state.get_expert_data_parallel_rank() * num_sources + dist.get_rank(group),
        every=apart,
    )
    _recorders.add(recorder)
    return recorder
