"""Change capacity factors between steps: by schedule, or because too much was dropped.

    control = CapacityControl(chunks, options)
    for step in ...:
        train()
        for change in control.step(telemetry.step()):
            ...                            # log the change; capture CUDA graphs again

With `on_overflow="retry"` only the schedule is followed: `Retry` repeats a step before the
optimizer, and telemetry then has no drops to show.

Decisions depend only on options and on snapshots, which are the same on all ranks. So all ranks
make the same decisions in the same step, also for layers that they do not have. Nothing changes
within a step: rows that a pass or a replay drops stay dropped, and are counted.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from padded_dispatch.config import FIT, CapacityFactor
from padded_dispatch.megatron.options import PaddedOptions, show_factor
from padded_dispatch.megatron.telemetry import Snapshots, of_all_ranks, padded_moe_layers
from padded_dispatch.ops.counters import Snapshot

_log = logging.getLogger("padded_dispatch")


class CapacityControl:
    """The capacity factors of a model's layers, and when they change.

    All ranks must call all methods. By layer number: `factors`, the factor of every layer of the
    model, and `reads_above`, the snapshots in a row in which a layer dropped more than the
    threshold.

    Args:
        chunks: the model's chunks on this rank.
        options: `schedule`, `on_overflow` and the options of `on_overflow` are used.
        step: steps done already; layers start with the schedule's factor for this step.
    """

    def __init__(self, chunks: list[Any], options: PaddedOptions, *, step: int = 0) -> None:
        self._options = options
        self._step = step
        self._configs = {
            number: layer.token_dispatcher.configs
            for number, layer in padded_moe_layers(chunks).items()
        }
        for configs in self._configs.values():
            configs.controlled = True
        self.factors: dict[int, CapacityFactor] = of_all_ranks(
            {n: configs.training.capacity_factor for n, configs in self._configs.items()}
        )
        self._num_warnings = 0
        self.reads_above = dict.fromkeys(self.factors, 0)
        self._changed_at = dict.fromkeys(self.factors, step)
        past = [change for change in options.factor_of_step if change <= step]
        if past:
            self._follow_schedule(max(past))

    def set_factors(self, factors: Mapping[int, CapacityFactor]) -> None:
        """Change the factors of some layers, by number, between steps.

        CUDA graphs have to be captured again. Factors for evaluation (`eval_factor`) do not change.
        """
        self.factors |= factors
        self._changed_at |= dict.fromkeys(factors, self._step)
        self.reads_above |= dict.fromkeys(factors, 0)
        for number in factors.keys() & self._configs.keys():
            self._configs[number].set_factor(factors[number])

    def step(self, snapshots: Snapshots | None) -> list[str]:
        """Count one training step, and change factors if necessary. Call it after each step.

        Args:
            snapshots: the result of `Telemetry.step`.

        Returns:
            A description of each change. After any change, CUDA graphs have to be captured again.

        Raises:
            RuntimeError: on all ranks, if `on_overflow` is "error" and a layer has dropped more
                than `overflow_threshold`; names the layers and the factors that they needed.
        """
        self._step += 1
        changes = [] if snapshots is None else self.react(snapshots)
        if self._step in self._options.factor_of_step:
            changes += self._follow_schedule(self._step)
        return changes

    def react(self, snapshots: Snapshots) -> list[str]:
        """Warn, raise or let layers grow, between two steps; `step` calls it.

        Args:
            snapshots: the result of `Telemetry.finish`, which `step` will not be given.

        Returns:
            See `step`.

        Raises:
            RuntimeError: see `step`.
        """
        self.check(snapshots)
        return self.grow(snapshots)

    def grow(self, snapshots: Snapshots) -> list[str]:
        """Let layers grow if `on_overflow` asks for it; `react` calls it.

        Returns:
            See `step`.
        """
        return self._grow(snapshots) if self._options.on_overflow == "grow" else []

    def check(self, snapshots: Snapshots) -> None:
        """Warn or raise as `on_overflow` asks for; `react` calls it.

        Raises:
            RuntimeError: see `step`.
        """
        above = self._above(snapshots.training)
        if above and self._options.on_overflow == "error":
            raise RuntimeError(
                f"on_overflow='error': {self._words(above, snapshots)}; set their capacity factors "
                f"to these, or raise overflow_threshold={self._options.overflow_threshold}"
            )
        if above and self._options.on_overflow == "warn":
            self._warn(self._words(above, snapshots))

    def _above(self, snapshot: Snapshot) -> list[int]:
        shares = zip(snapshot.layers_Y.tolist(), snapshot.dropped_share.tolist(), strict=True)
        return [number for number, share in shares if share > self._options.overflow_threshold]

    def _grow(self, snapshots: Snapshots) -> list[str]:
        # Ignore counts of steps before a layer's last change, which had another factor.
        start = snapshots.step - snapshots.num_steps
        above = [n for n in self._above(snapshots.training) if self._changed_at[n] <= start]
        for number in self.factors:
            self.reads_above[number] = self.reads_above[number] + 1 if number in above else 0
        ripe = [n for n in above if self.reads_above[n] >= self._options.grow_after]
        larger = {n: self._larger(self.factors[n]) for n in ripe}
        stuck = [n for n, factors in larger.items() if not factors]
        if stuck:
            self._warn(f"{self._words(stuck, snapshots)}; grow_factors has no larger factor")
        growing = {number: factors[0] for number, factors in larger.items() if factors}
        changes = [
            f"capacity factor {show_factor(self.factors[n])} -> {show_factor(new)}: "
            f"{self._words([n], snapshots)}"
            for n, new in growing.items()
        ]
        self.set_factors(growing)
        return changes

    def _larger(self, factor: CapacityFactor) -> list[float]:
        """Return the factors that a layer may grow to; none of one that fits."""
        return [f for f in self._options.grow_factors if factor != FIT and f > factor]

    def _follow_schedule(self, step: int) -> list[str]:
        factor = self._options.factor_of_step[step]
        moved = [
            number
            for number, now in self.factors.items()
            if number not in self._options.layer_factors and now != factor
        ]
        self.set_factors(dict.fromkeys(moved, factor))
        layers = ", ".join(map(str, moved))
        return [f"capacity factor {show_factor(factor)} by schedule: layers {layers}"] * bool(moved)

    def _warn(self, text: str) -> None:
        """Log a warning on rank 0 the first, second, fourth, eighth ... time."""
        self._num_warnings += 1
        if self._num_warnings.bit_count() == 1 and dist.get_rank() == 0:
            _log.warning("%s (warning %d)", text, self._num_warnings)

    def _words(self, numbers: list[int], snapshots: Snapshots) -> str:
        """Describe what some layers dropped and which factor would have dropped nothing."""
        training, first = snapshots.training, snapshots.step - snapshots.num_steps + 1
        figures = zip(
            training.layers_Y, training.dropped_share, training.needed_factor, strict=True
        )
        return "; ".join(
            f"layer {number} dropped {share:.2%} of its rows in steps {first} to {snapshots.step} "
            f"and needed factor {math.ceil(needed * 100) / 100:g}"
            for number, share, needed in figures
            if number in numbers
        )
