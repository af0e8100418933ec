"""What the routers of a model counted, read every few steps without stalling any.

    telemetry = Telemetry(chunks, every=10)
    for step in ...:
        train()
        reading = telemetry.step()        # None, but one step after each read was started
        if reading is not None:
            write_scalars(reading, writer)

A read is enqueued on the training stream, between two steps: the layers' totals are summed over
all ranks and copied to pinned memory. The host looks at the copy one step later, when it has
arrived long since; to the step in between it costs nothing, and all ranks see the same figures at
the same step. Nothing is zeroed but the largest demand, in stream order: the host keeps what it
read last and takes differences, which are right also when a total wraps around.

Every rank counts the tokens that it routes itself: under sequence parallelism its own part of
them, else the same ones as its tensor-parallel peers, of whom then only the first is counted. A
layer is on one pipeline stage only; ranks of the others add zeros for it.

Megatron's own tracker of MoE metrics (0.16.1: `save_to_aux_losses_tracker`, from 0.18 on
`MoEMetricsTracker`) is not used: its reports come every step, write zeros in those without a
reading, and in Megatron's training loop leave out names that the loop does not know.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from padded_dispatch.megatron.compat import number_in_model
from padded_dispatch.megatron.dispatcher import is_padded
from padded_dispatch.ops.counters import Counters
from padded_dispatch.telemetry import Ints, Snapshot, snapshot_of


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was counted in a stretch of `num_steps` steps that ended with step `step`."""

    step: int
    num_steps: int
    training: Snapshot
    evaluation: Snapshot


def write_scalars(reading: Reading, writer: Any, *, per_layer: bool = False) -> None:
    """Give a reading to TensorBoard, under names like those of Megatron's MoE metrics.

    `moe/dropped`, and with `per_layer` `moe/dropped_layer_0`, counted from 0 as Megatron does; of
    evaluation `moe-held-out/...`. The names are those of `Snapshot.figures`.

    Args:
        writer: a `SummaryWriter`, or anything with its `add_scalar(name, value, step)`.
    """
    for prefix, seen in (("moe", reading.training), ("moe-held-out", reading.evaluation)):
        figures = seen.figures()
        for name, value in figures.items():
            writer.add_scalar(f"{prefix}/{name}", value, reading.step)
        if figures and per_layer:
            columns = seen.figures_of_layers()
            for name in figures:
                for number, value in zip(columns["layer"], columns[name], strict=True):
                    tag = f"{prefix}/{name}_layer_{int(number) - 1}"
                    writer.add_scalar(tag, value, reading.step)


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """A read on its way to the host."""

    step: int
    sums: Tensor
    largest: Tensor
    arrived: torch.cuda.Event | None


class Telemetry:
    """Reads the counters of all padded layers of a model. All methods are for all ranks.

    Args:
        chunks: the model's chunks on this rank.
        every: steps between two reads.
        step: steps done already.

    Raises:
        ValueError: when no rank has a layer with the padded dispatcher.
    """

    def __init__(self, chunks: list[Any], *, every: int = 10, step: int = 0) -> None:
        self._mine = padded_moe_layers(chunks)
        self._every = every
        self._step = self._read_step = step
        facts = {number: _Shape.of(layer) for number, layer in self._mine.items()}
        everyone: list[dict[int, _Shape]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, facts)
        shapes = {number: shape for known in everyone for number, shape in known.items()}
        if not shapes:
            raise ValueError(
                "chunks is not possible: no layer has moe_token_dispatcher_type='padded_alltoall'"
            )
        self.layers: tuple[int, ...] = tuple(sorted(shapes))
        self._shape = shapes[self.layers[0]]
        self._counts_here = _routes_its_own_tokens(get_model_config(chunks[0]))
        [parameter, *_] = chunks[0].parameters()
        self._device = parameter.device
        self._pending: _Copy | None = None
        self._seen = np.zeros(self._sums_shape, dtype=np.int64)
        self._largest = np.zeros((2, len(self.layers)), dtype=np.int64)
        self.read()

    def step(self) -> Reading | None:
        """To be called after each training step.

        Returns:
            After the step that follows the start of a read, what it has read.
        """
        finished = None if self._pending is None else self._finish()
        self._step += 1
        if self._step % self._every == 0:
            self._pending = self._start()
        return finished

    def read(self) -> Reading:
        """Everything since the last reading, now; waits for the device."""
        if self._pending is not None:
            # Its sums are in the next ones; the largest demand is not.
            self._take_largest(self._pending)
        self._pending = self._start()
        return self._finish()

    @property
    def _sums_shape(self) -> tuple[int, int, int]:
        """Training and evaluation, layers, totals and idle passes of each rank."""
        return 2, len(self.layers), self._shape.num_totals + self._shape.num_ranks

    @torch.no_grad()
    def _start(self) -> _Copy:
        sums = torch.zeros(self._sums_shape, dtype=torch.int64, device=self._device)
        largest = torch.zeros(sums.shape[:2], dtype=torch.int64, device=self._device)
        for number, layer in self._mine.items():
            y, dispatcher = self.layers.index(number), layer.token_dispatcher
            for phase, counters in enumerate((dispatcher.counters, dispatcher.eval_counters)):
                if self._counts_here:
                    self._put(sums[phase, y], dispatcher, counters)
                largest[phase, y] = counters.max_demand
                counters.max_demand.zero_()
        dist.all_reduce(sums)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        if self._device.type == "cpu":
            return _Copy(step=self._step, sums=sums, largest=largest, arrived=None)
        copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in (sums, largest)]
        for copy, tensor in zip(copies, (sums, largest), strict=True):
            copy.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return _Copy(step=self._step, sums=copies[0], largest=copies[1], arrived=arrived)

    def _put(self, sums_W: Tensor, dispatcher: Any, counters: Counters) -> None:
        """One layer's totals, and its idle passes at the place of this rank."""
        sums_W[: self._shape.num_totals] = counters.totals
        if dispatcher.tp_rank == 0:
            rank = dist.get_rank(dispatcher.ep_group)
            sums_W[self._shape.num_totals + rank] = counters.idle_passes

    def _finish(self) -> Reading:
        assert self._pending is not None
        copy, self._pending = self._pending, None
        self._take_largest(copy)
        now = copy.sums.numpy()
        window, largest = now - self._seen, self._largest
        self._seen, self._largest = now, np.zeros_like(largest)
        num_steps, self._read_step = copy.step - self._read_step, copy.step
        return Reading(
            step=copy.step,
            num_steps=num_steps,
            training=self._snapshot(window[0], largest[0]),
            evaluation=self._snapshot(window[1], largest[1]),
        )

    def _take_largest(self, copy: _Copy) -> None:
        if copy.arrived is not None:
            copy.arrived.synchronize()
        self._largest = np.maximum(self._largest, copy.largest.numpy())

    def _snapshot(self, sums_YW: Ints, largest_Y: Ints) -> Snapshot:
        totals_YW = sums_YW[:, : self._shape.num_totals]
        idle_YR = sums_YW[:, self._shape.num_totals :]
        return snapshot_of(
            totals_YW, largest_Y, idle_YR, layers=self.layers, top_k=self._shape.top_k
        )


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """What ranks without a layer have to know of it. All layers of a model are alike."""

    top_k: int
    num_ranks: int
    num_totals: int

    @classmethod
    def of(cls, layer: Any) -> "_Shape":
        config = layer.token_dispatcher.dispatch_config
        return cls(
            top_k=config.top_k,
            num_ranks=config.num_ranks,
            num_totals=len(layer.token_dispatcher.counters.totals),
        )


def padded_moe_layers(chunks: list[Any]) -> dict[int, Any]:
    """A model's MoE layers with the padded dispatcher, by `number_in_model`."""
    found = {}
    for chunk in chunks:
        for module in chunk.modules():
            if is_padded(module):
                found[number_in_model(module.router)] = module
    return found


def _routes_its_own_tokens(config: Any) -> bool:
    """Whether this rank's tokens are nobody else's, or it is the first of those that share them."""
    shared = parallel_state.get_tensor_model_parallel_world_size() > 1
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    return config.sequence_parallel or not shared or first
