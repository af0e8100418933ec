"""Read the counters of a model's padded layers every few steps, without stalling a step.

    telemetry = Telemetry(chunks, every=10)
    for step in ...:
        train()
        snapshots = telemetry.step()      # None, except one step after each read was started
        if snapshots is not None:
            for name, value in scalars(snapshots).items():
                writer.add_scalar(name, value, snapshots.step)

`on_overflow` is followed here: a reading with drops is logged in words, or ends the run.

A read is enqueued on the training stream, between two steps: the layers' totals are summed over all
ranks and copied to pinned memory. The host looks at the copy one step later, when it has long
arrived, so all ranks get the same figures at the same step. Totals are not zeroed: the host takes
differences, which are right even if a total wraps around. Only the largest demand is zeroed.

Every rank counts the tokens that it routes. Without sequence parallelism, tensor-parallel peers
route the same tokens, and only the first of them is counted. A layer is on one pipeline stage only;
ranks of other stages add zeros for it.

Letters: Y layers of the whole model, R ranks of the expert-parallel group, W columns of a layer's
sums (its totals, then the idle passes of each rank).
"""

import logging
import math
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from padded_dispatch.megatron.compat import number_in_model
from padded_dispatch.megatron.config import padded_options
from padded_dispatch.megatron.dispatcher import is_padded
from padded_dispatch.counters import Counters, Ints, Snapshot, snapshot_of

_T = TypeVar("_T")
_log = logging.getLogger("padded_dispatch")


@dataclass(frozen=True, kw_only=True)
class Snapshots:
    """Snapshots of training and of evaluation, of `num_steps` steps that ended with step `step`."""

    step: int
    num_steps: int
    training: Snapshot
    evaluation: Snapshot


# Figures of single layers, the most telling first; see `scalars`.
_OF_LAYERS = ("dropped", "needed_factor", "fill", "expert_overload", "rank_overload", "lost_tokens")


def scalars(snapshots: Snapshots, *, per_layer: bool = False) -> dict[str, float]:
    """Return the figures of snapshots, named like Megatron's MoE metrics.

    Names are those of `Snapshot.figures`: `moe/dropped` for training, `moe-held-out/dropped` for
    evaluation. Nothing is returned of a phase in which no pass ran.

    Args:
        snapshots: the result of `Telemetry.step` or `Telemetry.read`.
        per_layer: also return `moe/dropped_layer_0` and so on, at most 2 * K names per layer;
            layers count from 0, as Megatron's.
    """
    found = {}
    for prefix, snapshot in (("moe", snapshots.training), ("moe-held-out", snapshots.evaluation)):
        figures = snapshot.figures()
        found |= {f"{prefix}/{name}": value for name, value in figures.items()}
        if figures and per_layer:
            columns = snapshot.figures_of_layers()
            for name in _OF_LAYERS[: 2 * snapshot.top_k]:
                for number, value in zip(columns["layer"], columns[name], strict=True):
                    found[f"{prefix}/{name}_layer_{int(number) - 1}"] = value
    return found


def overflow_words(snapshots: Snapshots) -> str:
    """Return what the layer dropped that dropped most, and what to set."""
    training, first = snapshots.training, snapshots.step - snapshots.num_steps + 1
    shares_Y = np.nan_to_num(training.dropped_share)
    worst = int(shares_Y.argmax())
    several = snapshots.num_steps > 1
    when = f"in steps {first} to {snapshots.step}" if several else f"at step {snapshots.step}"
    factor = math.ceil(training.needed_factor[worst] * 100) / 100
    pool = "" if training.cells_per_pool > 1 else "capacity_pool='rank' or "
    return (
        f"{shares_Y[worst]:.2%} of the rows of layer {training.layers_Y[worst]} found no room "
        f"{when} ({training.figures()['dropped']:.2%} of all rows); a capacity factor of "
        f"{factor:g} would have held them: set it, {pool}on_overflow='retry'"
    )


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """A copy of the counters on its way to the host; it has arrived once `arrived` has."""

    step: int
    sums: Tensor
    largest: Tensor
    arrived: torch.cuda.Event | None


class Telemetry:
    """Reader of the counters of all padded layers of a model. All ranks must call all methods.

    Every method that returns snapshots warns of drops in training, or raises a RuntimeError on all
    ranks if `on_overflow` is "error" and a layer has dropped more than `overflow_threshold`.

    Args:
        chunks: the model's chunks on this rank.
        every: steps between two reads. The first step is read by itself.
        step: steps done already.

    Raises:
        ValueError: if no rank has a layer with the padded dispatcher.
    """

    def __init__(self, chunks: list[Any], *, every: int = 10, step: int = 0) -> None:
        self._local_layers = padded_moe_layers(chunks)
        self._every, self._first = every, step + 1
        self._step = self._read_step = step
        self._num_warnings = 0
        shapes = of_all_ranks({n: _LayerShape.of(layer) for n, layer in self._local_layers.items()})
        if not shapes:
            raise ValueError(
                "chunks must have a layer with moe_token_dispatcher_type='padded_alltoall', got "
                "none on any rank; set it in the config, or build the model with padded_spec"
            )
        self.layers: tuple[int, ...] = tuple(shapes)
        self._shape = shapes[self.layers[0]]
        # No other rank routes this rank's tokens, or it is the first.
        shared = parallel_state.get_tensor_model_parallel_world_size() > 1
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        sequence_parallel = get_model_config(chunks[0]).sequence_parallel
        self._counts_here = sequence_parallel or not shared or first
        [parameter, *_] = chunks[0].parameters()
        self._device = parameter.device
        self._pending: _Copy | None = None
        # Training and evaluation, Y, W.
        self._sums_shape = 2, len(self.layers), self._shape.num_totals + self._shape.num_ranks
        self._last_sums = np.zeros(self._sums_shape, dtype=np.int64)
        self._largest = np.zeros((2, len(self.layers)), dtype=np.int64)
        for layer in self._local_layers.values():
            layer.token_dispatcher.configs.controlled = True
        self._pending = self._start()
        self._finish()

    def step(self) -> Snapshots | None:
        """Count one training step, and start or finish a read. Call it after each step.

        Returns:
            Snapshots in the step after the one that started a read; otherwise None.
        """
        finished = None if self._pending is None else self._finish()
        self._step += 1
        if self._step % self._every == 0 or self._step == self._first:
            self._pending = self._start()
        return self._followed(finished)

    def finish(self) -> Snapshots | None:
        """Return the snapshots of a read that was started, if any; waits until it has arrived.

        It costs nothing where the host waits for the device anyway.
        """
        return self._followed(None if self._pending is None else self._finish())

    def read(self) -> Snapshots:
        """Return snapshots of everything since the last ones, now; waits for the device."""
        if self._pending is not None:
            # The next sums include the pending ones. The largest demand was zeroed.
            self._take_largest(self._pending)
        self._pending = self._start()
        snapshots = self._finish()
        self._followed(snapshots)
        return snapshots

    def _followed(self, snapshots: Snapshots | None) -> Snapshots | None:
        """Return the snapshots, after `on_overflow` has been followed."""
        on_overflow, threshold = self._shape.on_overflow, self._shape.overflow_threshold
        if snapshots is None or on_overflow == "retry":
            return snapshots
        shares_Y = np.nan_to_num(snapshots.training.dropped_share)
        if not (shares_Y > threshold).any():
            return snapshots
        words = overflow_words(snapshots)
        if on_overflow == "error":
            raise RuntimeError(
                f"on_overflow='error': {words}, or raise overflow_threshold={threshold:g}"
            )
        self._num_warnings += 1
        if self._num_warnings.bit_count() == 1 and dist.get_rank() == 0:
            _log.warning("%s (warning %d)", words, self._num_warnings)
        return snapshots

    @torch.no_grad()
    def _start(self) -> _Copy:
        sums = torch.zeros(self._sums_shape, dtype=torch.int64, device=self._device)
        largest = torch.zeros(sums.shape[:2], dtype=torch.int64, device=self._device)
        for number, layer in self._local_layers.items():
            index, dispatcher = self.layers.index(number), layer.token_dispatcher
            for phase, counters in enumerate((dispatcher.counters, dispatcher.eval_counters)):
                if self._counts_here:
                    self._put(sums[phase, index], dispatcher, counters)
                largest[phase, index] = counters.max_demand
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
        """Write a layer's totals, and its idle passes into this rank's column."""
        sums_W[: self._shape.num_totals] = counters.totals
        if dispatcher.tp_rank == 0:
            rank = dist.get_rank(dispatcher.ep_group)
            sums_W[self._shape.num_totals + rank] = counters.idle_passes

    def _finish(self) -> Snapshots:
        assert self._pending is not None
        copy, self._pending = self._pending, None
        self._take_largest(copy)
        now = copy.sums.numpy()
        sums, largest = now - self._last_sums, self._largest
        self._last_sums, self._largest = now, np.zeros_like(largest)
        num_steps, self._read_step = copy.step - self._read_step, copy.step
        return Snapshots(
            step=copy.step,
            num_steps=num_steps,
            training=self._snapshot(sums[0], largest[0]),
            evaluation=self._snapshot(sums[1], largest[1]),
        )

    def _take_largest(self, copy: _Copy) -> None:
        if copy.arrived is not None:
            copy.arrived.synchronize()
        self._largest = np.maximum(self._largest, copy.largest.numpy())

    def _snapshot(self, sums_YW: Ints, largest_Y: Ints) -> Snapshot:
        num_totals = self._shape.num_totals
        return snapshot_of(
            sums_YW[:, :num_totals],
            largest_Y,
            sums_YW[:, num_totals:],
            layers=self.layers,
            top_k=self._shape.top_k,
            cells_per_pool=self._shape.cells_per_pool,
        )


@dataclass(frozen=True, kw_only=True)
class _LayerShape:
    """Sizes and options of a layer, for ranks without one. All layers of a model have the same."""

    top_k: int
    cells_per_pool: int
    num_ranks: int
    num_totals: int
    on_overflow: str
    overflow_threshold: float

    @classmethod
    def of(cls, layer: Any) -> "_LayerShape":
        config, options = layer.token_dispatcher.dispatch_config, padded_options(layer.config)
        return cls(
            top_k=config.top_k,
            cells_per_pool=config.cells_per_pool,
            num_ranks=config.num_ranks,
            num_totals=len(layer.token_dispatcher.counters.totals),
            on_overflow=options.on_overflow,
            overflow_threshold=options.overflow_threshold,
        )


def padded_moe_layers(chunks: list[Any]) -> dict[int, Any]:
    """Return a model's MoE layers with the padded dispatcher, by `number_in_model`.

    Layers without a number, which no transformer layer surrounds, follow the others in their order.
    """
    found: dict[int, Any] = {}
    unnumbered = []
    for chunk in chunks:
        for module in chunk.modules():
            if is_padded(module):
                if module.router.layer_number is None:
                    unnumbered.append(module)
                else:
                    found[number_in_model(module.router)] = module
    first = max(found, default=0) + 1
    return found | dict(enumerate(unnumbered, first))


def of_all_ranks(local: dict[int, _T]) -> dict[int, _T]:
    """Return what all ranks have by number of layer, in its order; a collective call."""
    of_ranks: list[dict[int, _T]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, local)
    found = {number: one for of_rank in of_ranks for number, one in of_rank.items()}
    return {number: found[number] for number in sorted(found)}
