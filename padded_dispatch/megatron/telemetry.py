"""Read the counters of padded layers, without stalling a step.

A read is enqueued on the training stream: the layers' totals are summed over groups of ranks, or
over none, and copied to pinned memory. The host looks at the copy once it has arrived. Totals are
not zeroed: the host takes differences, which are right even if a total wraps around. Only the
largest need is zeroed.

Every rank counts the tokens that it routes, and, with a store, the rows that it receives and keeps.
Without sequence parallelism, tensor-parallel peers route the same tokens, and only the first of
them is counted. A layer is on one pipeline stage only; ranks of other stages add zeros for it.

`StepHooks` reads for all ranks once every few steps; `Drops` reads for one rank alone, in loops
that have no `StepHooks`.

Letters: Y layers of the whole model, W totals of a layer.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.config import DispatchConfig, in_hundredths
from padded_dispatch.counters import Ints, Snapshot, counts_in
from padded_dispatch.megatron.compat import number_in_model
from padded_dispatch.megatron.config import padded_options
from padded_dispatch.megatron.dispatcher import is_padded
from padded_dispatch.megatron.options import PaddedOptions

_log = logging.getLogger("padded_dispatch")


@dataclass(frozen=True, kw_only=True)
class Snapshots:
    """Counts of training and of evaluation in the last `num_steps` steps up to step `step`."""

    step: int
    num_steps: int
    training: Snapshot
    evaluation: Snapshot


def scalars(snapshots: Snapshots, *, per_layer: bool = False) -> dict[str, float]:
    """Return the figures of snapshots, named like Megatron's MoE metrics.

    Names are those of `Snapshot.figures`: `moe/dropped` for training, `moe-held-out/dropped` for
    evaluation. A phase in which no pass ran has no figures.

    Args:
        snapshots: those that `StepHooks` returns.
        per_layer: also return `moe/dropped_layer_0` and so on; layers count from 0, as Megatron's.
    """
    found = {}
    for prefix, snapshot in (("moe", snapshots.training), ("moe-held-out", snapshots.evaluation)):
        figures = snapshot.figures()
        found |= {f"{prefix}/{name}": value for name, value in figures.items()}
        if figures and per_layer:
            for name, column in snapshot.figures_of_layers().items():
                for number, value in zip(snapshot.layers_Y, column, strict=True):
                    found[f"{prefix}/{name}_layer_{number - 1}"] = value
    return found


def overflow_words(training: Snapshot, when: str, settings: "LayerSettings") -> str:
    """Return a sentence: what the worst layer dropped, and the factor that would drop nothing.

    `when`: the time and place of the snapshot, such as "at step 3".
    """
    shares_Y = np.nan_to_num(training.dropped_share)
    worst = int(shares_Y.argmax())
    needed = np.nan_to_num(training.needed_factor).max()
    factor = in_hundredths(needed)
    more = " without layer_factors" if settings.options.layer_factors else ""
    in_cells = training.share_rows_Y is None
    pool = "capacity_pool='store' or " if in_cells and settings.packed else "or "
    return (
        f"{shares_Y[worst]:.2%} of the rows of layer {training.layers_Y[worst]} found no room "
        f"{when} ({training.figures()['dropped']:.2%} of all rows); "
        f"moe_expert_capacity_factor={factor:g}{more} would have held all layers: set it, "
        f"{pool}on_overflow='retry'"
    )


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A copy of the counters on its way to the host, until the event `arrived` has passed."""

    step: int
    sums: Tensor
    largest: Tensor
    arrived: torch.cuda.Event | None


class Reader:
    """Sums counters over groups of ranks, makes snapshots, and applies `on_overflow` to them.

    Args:
        local: this rank's layers, by number.
        settings: settings of the layers of all ranks of the groups, by number.
        groups: `start` sums over each, one after the other; None is the group of all ranks.
        device: device of the counters.
        logs: whether this rank logs warnings.
    """

    def __init__(
        self,
        local: dict[int, Any],
        settings: dict[int, "LayerSettings"],
        groups: list[Any],
        device: torch.device,
        *,
        logs: bool,
    ) -> None:
        self._logs, self._num_warnings = logs, 0
        self._layers, self._groups, self._device = list(settings), groups, device
        # Of the dispatchers keep only what they count: they hold the experts' weights.
        dispatchers = [layer.token_dispatcher for layer in local.values()]
        self._counters = [d.counters for d in dispatchers] + [d.eval_counters for d in dispatchers]
        self._counts_kept = all(d.counts_kept for d in dispatchers)
        # Count tokens once: no other rank routes them, or this rank is the first that does.
        self._counts_tokens = all(
            d.config.sequence_parallel or d.tensor_rank == 0 for d in dispatchers
        )
        self._index = torch.tensor([self._layers.index(number) for number in local], device=device)
        self.settings = settings[self._layers[0]]
        own_shares = [one.config.share(1) for one in settings.values()]
        shares = [one.shares_per_token for one in settings.values()]
        self._shares_per_token = np.array([shares, own_shares], dtype=np.int64)
        self._read_step = 0
        # Training and evaluation, Y, W.
        self._sums_shape = 2, len(self._layers), self.settings.num_totals
        self._last_sums = np.zeros(self._sums_shape, dtype=np.int64)
        self._largest = np.zeros((2, len(self._layers)), dtype=np.int64)

    @torch.no_grad()
    def start(self, step: int) -> Copy:
        """Enqueue a read; a collective call of each group."""
        sums = torch.zeros(self._sums_shape, dtype=torch.int64, device=self._device)
        largest = torch.zeros(sums.shape[:2], dtype=torch.int64, device=self._device)
        if self._counters:
            self._put(sums, torch.stack([c.totals for c in self._counters]))
            needs = [c.max_need for c in self._counters]
            largest[:, self._index] = torch.stack(needs).view(2, -1)
            torch._foreach_zero_(needs)  # pyright: ignore[reportPrivateImportUsage]
        for group in self._groups:
            dist.all_reduce(sums, group=group)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        if self._device.type == "cpu":
            return Copy(step=step, sums=sums, largest=largest, arrived=None)
        copies = [
            torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True)
            for t in (sums, largest)
        ]
        for copy, tensor in zip(copies, (sums, largest), strict=True):
            copy.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return Copy(step=step, sums=copies[0], largest=copies[1], arrived=arrived)

    def _put(self, sums: Tensor, totals: Tensor) -> None:
        """Write the layers' totals, without what other ranks count, too."""
        totals = totals.view(2, -1, self.settings.num_totals)
        counts = counts_in(totals)
        if not self._counts_kept:
            for name in ("kept_E", "no_room", "num_again"):
                counts[name].zero_()
        # With a store count all sources, because its room is for the rows of all.
        if self.settings.shares_per_token or self._counts_tokens:
            sums[:, self._index] = totals

    def finish(self, copy: Copy) -> Snapshots:
        """Return snapshots of what was counted since the last ones; waits for the copy."""
        self.take_largest(copy)
        all_sums = copy.sums.numpy()
        sums, largest = all_sums - self._last_sums, self._largest
        self._last_sums, self._largest = all_sums, np.zeros_like(largest)
        num_steps, self._read_step = copy.step - self._read_step, copy.step
        return Snapshots(
            step=copy.step,
            num_steps=num_steps,
            training=self._snapshot(0, sums, largest),
            evaluation=self._snapshot(1, sums, largest),
        )

    def take_largest(self, copy: Copy) -> None:
        """Keep the largest needs of a copy, which no later copy includes."""
        if copy.arrived is not None:
            copy.arrived.synchronize()
        self._largest = np.maximum(self._largest, copy.largest.numpy())

    def follow(self, training: Snapshot, when: str) -> None:
        """Raise, or warn of the 1st, 2nd, 4th ... snapshot that dropped, as `on_overflow` says."""
        shares_Y = np.nan_to_num(training.dropped_share)
        options = self.settings.options
        threshold = options.overflow_threshold
        if options.on_overflow == "retry" or not (shares_Y > threshold).any():
            return
        words = overflow_words(training, when, self.settings)
        if options.on_overflow == "error":
            raise RuntimeError(
                f"on_overflow='error': {words}, or raise overflow_threshold={threshold:g}"
            )
        self._num_warnings += 1
        if self._num_warnings.bit_count() == 1 and self._logs:
            _log.warning("%s (warning %d)", words, self._num_warnings)

    def _snapshot(self, phase: int, sums: Ints, largest: Ints) -> Snapshot:
        totals_YW, rows_Y = sums[phase], None
        if self.settings.shares_per_token:
            counts = counts_in(totals_YW)
            rows_Y = self._shares_per_token[phase] * counts["num_positions"]
            rows_Y //= np.maximum(counts["num_passes"], 1)
        return Snapshot(
            layers_Y=np.array(self._layers),
            top_k=self.settings.config.top_k,
            share_rows_Y=rows_Y,
            totals_YW=totals_YW,
            max_need_Y=largest[phase],
            num_ranks=self.settings.config.num_ranks,
        )


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """Settings of a layer, which ranks without layers need, too.

    Only the factor and `shares_per_token` differ between the layers of a model.

    Attributes:
        num_totals: W.
        shares_per_token: that of the layer's dispatcher.
        packed: whether the experts are packed, so that they can have a store.
    """

    config: DispatchConfig
    options: PaddedOptions
    num_totals: int
    shares_per_token: int
    packed: bool

    @classmethod
    def of(cls, layer: Any) -> "LayerSettings":
        """Return the settings of a MoELayer."""
        dispatcher = layer.token_dispatcher
        return cls(
            config=dispatcher.configs.training,
            options=padded_options(layer.config),
            num_totals=len(dispatcher.counters.totals),
            shares_per_token=dispatcher.shares_per_token,
            packed=dispatcher.packed,
        )


def padded_moe_layers(chunks: list[Any]) -> dict[int, Any]:
    """Return a model's MoE layers with the padded dispatcher; see `by_number`."""
    return by_number(m for chunk in chunks for m in chunk.modules() if is_padded(m))


def by_number(layers: Iterable[Any]) -> dict[int, Any]:
    """Return MoE layers by `number_in_model`; layers without a number of their own come last.

    A layer outside of a transformer layer has no number. The layers of a hybrid stack that predict
    different tokens share one. An adapter may stand in the place of `layer.router`.
    """
    numbered: dict[int, Any] = {}
    others = []
    for layer in layers:
        router = layer.token_dispatcher.configs.router
        if router.layer_number is not None and number_in_model(router) not in numbered:
            numbered[number_in_model(router)] = layer
        else:
            others.append(layer)
    return numbered | dict(enumerate(others, max(numbered, default=0) + 1))
