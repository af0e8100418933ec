"""Train a GPT twice in lockstep: with Megatron's combined schedule, and with its plain one.

`overlap_moe_expert_parallel_comm` runs the forward pass of a microbatch beside the backward pass of
the one before, in pieces of layers, and frees what goes into a piece. Losses, gradients,
parameters, buffers, logged sums and counts are compared bit by bit after each step.

With pipeline stages the combined schedule runs forward passes in another order, so batches have a
generator of their own.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import utils as schedule_streams
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer import transformer_config
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from padded_dispatch.megatron import LayerGraphs
from padded_dispatch.megatron.compat import layer_graphs
from padded_dispatch.megatron.options import Experts
from padded_dispatch.megatron.router import protect
from padded_dispatch.megatron.telemetry import padded_moe_layers
from padded_dispatch.utils.patches import Patches
from tests.support.graph_training import Findings
from tests.support.process_memory import direct_between_processes
from tests.support.retried_training import (
    EAGER_STEPS,
    RetriedCase,
    Training,
    differing_names,
    world,
)
from tests.support.spans import profiled
from tests.support.stream_order import StreamOrder


@dataclass(frozen=True, kw_only=True)
class OverlapCase(RetriedCase):
    """A model, and what its schedule overlaps.

    `experts`, `exchange`, `pool`: the options. `delay_wgrad`: gradients of weights are computed
    after those of rows.
    `dispatch_backward`: so they are in the plain schedule, beside the dispatch's backward pass,
    instead of the combined schedule; new in 0.18.
    `scopes`: parts of layers that CUDA graphs of the combined schedule hold; none for no such
    graphs. `graph`: or "full-iteration".
    `shared_ffn`: width of shared experts, if there are any. `padded`: other tokens are padding in
    each microbatch. `protects`: each microbatch protects other tokens.
    """

    ranks: int = 2
    ep: int = 2
    microbatches: int = 3
    dropout: float = 0.0
    factor: float = 1.25
    steps: int = 2
    experts: Experts = "module"
    exchange: str = "auto"
    pool: str = "expert"
    delay_wgrad: bool = False
    dispatch_backward: bool = False
    scopes: tuple[str, ...] = ()
    shared_ffn: int | None = None
    padded: bool = False
    protects: bool = False

    @property
    def in_bf16(self) -> bool:
        """True: Megatron's combined schedule needs it."""
        return True


class OverlapTraining(Training):
    """A training whose batches follow from the number of the step."""

    def step(self, number: int) -> dict[str, Tensor]:
        """Run step `number`; see `Training`."""
        self._number = number
        results = super().step(number)
        for layer_number, layer in padded_moe_layers(self.chunks).items():
            results[f"counts of layer {layer_number}"] = layer.token_dispatcher.counters.totals
        return results

    def run(self, number: int) -> None:
        """Run the passes of step `number` alone: nothing is updated or compared."""
        self._number = number
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self.passes()

    def modules(self) -> Iterator[Any]:
        """Yield all modules of the model on this rank."""
        for chunk in self.chunks:
            yield from chunk.modules()

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Return an iterator over the step's microbatches, the same for all chunks."""
        case, generator = self.case, torch.Generator().manual_seed(self._number)
        while True:
            ids = torch.randint(case.vocab, (case.batch, case.seq + 1), generator=generator)
            if case.protects:
                draws = torch.rand(case.seq, case.batch, generator=generator)
                protect(self.chunks, draws.to(case.device) < 0.2)
            given = {"ids": ids}
            if case.padded:
                given["padding_mask"] = torch.rand(case.batch, case.seq, generator=generator) < 0.3
            yield {name: tensor.to(case.device) for name, tensor in given.items()}


def _timed(case: OverlapCase, *trainings: OverlapTraining) -> dict[str, float]:
    """Return milliseconds of a step of each training, and of overlap in the second."""
    found = {}
    for name, training in zip(("plain_ms", "ms"), trainings, strict=True):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        training.passes()
        end.record()
        end.synchronize()
        found[name] = start.elapsed_time(end)
    spans = profiled(trainings[1].passes)
    together = busy_together([(span.stream, span.start, span.end) for span in spans])
    return found | {"overlapped_ms": together / 1e6}


def busy_together(spans: list[tuple[int, int, int]]) -> int:
    """Return how long at least two streams were busy.

    Args:
        spans: stream, start and end of each kernel.
    """
    running: Counter[int] = Counter()
    together, since = 0, 0
    steps = [(start, 1, stream) for stream, start, _ in spans]
    steps += [(end, -1, stream) for stream, _, end in spans]
    for now, change, stream in sorted(steps):
        if sum(count > 0 for count in running.values()) > 1:
            together += now - since
        running[stream] += change
        since = now
    return together


def _layers(training: OverlapTraining) -> list[Any]:
    return [module for module in training.modules() if isinstance(module, TransformerLayer)]


@contextmanager
def schedule_on(case: OverlapCase) -> Iterator[StreamOrder | None]:
    """Let Megatron's combined schedule run in each version, and on a CPU, inside the block.

    Yields:
        For direct stores on a CPU, what orders them.
    """
    # Megatron keeps the streams of its first combined schedule.
    schedule_streams._COMP_STREAM = schedule_streams._COMM_STREAM = None
    with ExitStack() as stack:
        patches, order = stack.enter_context(Patches()), None
        if case.exchange == "direct" and not case.on_gpu:
            order = stack.enter_context(direct_between_processes())
        if not hasattr(RowParallelLinear, "backward_dw"):  # 0.16 calls it, and does not have it.
            patches.set(RowParallelLinear, "backward_dw", lambda linear: None)
        if not case.on_gpu:  # Nor has a CPU a Transformer Engine.
            patches.set(transformer_config, "is_te_min_version", lambda version: True)
        # Without Apex, Megatron's own linears cannot add to `main_grad`; those of TE can.
        patches.set(layers, "_grad_accum_fusion_available", True)
        yield order


def overlapped_equals_plain(case: OverlapCase, **options: Any) -> Findings:
    """Compare the two trainings. Runs on all `case.ranks` ranks of the default group.

    Args:
        case: the model.
        options: further options of the padded dispatcher, of both.
    """
    shared = {"moe_shared_expert_intermediate_size": case.shared_ffn, **case.fields}
    overlap = {
        "overlap_moe_expert_parallel_comm": True,
        "delay_wgrad_compute": case.delay_wgrad,
    }
    given = {"experts": case.experts, "exchange": case.exchange, "capacity_pool": case.pool}
    options = given | options
    if case.dispatch_backward:
        overlap = {"overlap_dispatch_backward_with_experts_wgrad": True}
    if case.scopes:
        overlap |= layer_graphs(*case.scopes)
    case = dataclasses.replace(case, graph="layer" if case.scopes else case.graph)
    with world(case), schedule_on(case) as order:
        plain = OverlapTraining(dataclasses.replace(case, fields=shared), **options)
        overlapped = OverlapTraining(
            dataclasses.replace(case, fields=shared | overlap),
            graphed=case.graph == "full-iteration",
            **options,
        )
        for module in (*plain.modules(), *overlapped.modules()):
            if isinstance(module, layers.ColumnParallelLinear):
                module.gradient_accumulation_fusion = False
        if case.scopes:
            overlapped.graphs = LayerGraphs(
                overlapped.chunks,
                seq_length=case.seq,
                micro_batch=case.batch,
                optimizers=() if overlapped.optimizer is None else (overlapped.optimizer,),
            )
        differing: dict[str, int] = {}
        for number in range(case.steps):
            if number == EAGER_STEPS and overlapped.graphs is not None:
                overlapped.graphs.capture()
            wanted = plain.step(number)
            given = overlapped.step(number)
            for name in differing_names(wanted, given):
                differing[name] = differing.get(name, 0) + 1
        timed = _timed(case, plain, overlapped) if case.on_gpu else {}
        graphs = [getattr(layer, "cuda_graphs", []) for layer in _layers(overlapped)]
        overlapped.end()
        facts = {
            "graphs": sum(map(len, graphs)),
            "tensors_per_step": len(wanted),
            "loss": plain.losses,
            **timed,
        }
        broken = ()
        if order is not None:
            second = schedule_streams.get_comm_stream()
            facts["barriers"] = order.barriers.count(second)
            facts["barriers_elsewhere"] = len(order.barriers) - facts["barriers"]
            broken = tuple(sorted(set(order.unordered)))
        return Findings(differing=differing, facts=facts, broken=broken)
