"""Capacity factors that change between steps: by schedule, or because too much was dropped.

    control = CapacityControl(chunks, options)
    for step in ...:
        train()
        for change in control.step(telemetry.step()):
            ...                            # say it; graphs are to be captured again

Decisions follow from options and from readings, which are the same on all ranks, so every rank
takes the same ones at the same step; a rank without a layer decides for it, too. Nothing happens
within a step: what a pass or a replay drops is dropped, and counted.
"""

import logging
import math
from typing import Any

import torch.distributed as dist

from padded_dispatch.megatron.options import PaddedOptions, show_factor
from padded_dispatch.megatron.telemetry import Reading, padded_moe_layers
from padded_dispatch.telemetry import Snapshot

_log = logging.getLogger("padded_dispatch")


class CapacityControl:
    """Keeps every layer's capacity factor. All methods are for all ranks.

    `factors`: of all layers of the model, by layer number.

    Args:
        chunks: the model's chunks on this rank.
        options: `schedule`, `on_overflow` and what belongs to it.
        step: steps done already; the schedule's factor is that of this step.
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
        mine = {n: configs.training.capacity_factor for n, configs in self._configs.items()}
        everyone: list[dict[int, float]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        found = {number: factor for known in everyone for number, factor in known.items()}
        self.factors: dict[int, float] = dict(sorted(found.items()))
        self._num_warnings = 0
        self._reads_above = dict.fromkeys(self.factors, 0)
        self._changed_at = dict.fromkeys(self.factors, step)
        before = [done for done in options.factor_of_step if done <= step]
        if before:
            self._follow_schedule(max(before))

    def set_factors(self, factors: dict[int, float]) -> None:
        """Change some layers' factors, by number, between steps. Graphs have to be captured again.

        Layers with a factor for evaluation keep that one.
        """
        self.factors |= factors
        self._changed_at |= dict.fromkeys(factors, self._step)
        self._reads_above |= dict.fromkeys(factors, 0)
        for number in factors.keys() & self._configs.keys():
            self._configs[number].set_factor(factors[number])

    def step(self, reading: Reading | None) -> list[str]:
        """To be called after each training step.

        Args:
            reading: what `Telemetry.step` has returned.

        Returns:
            What has changed, in words; if anything has, CUDA graphs are to be captured again.

        Raises:
            RuntimeError: on all ranks, when a layer has dropped more than `overflow_threshold` and
                `on_overflow` is "error"; names layers and the factors that they needed.
        """
        self._step += 1
        changes = []
        if reading is not None:
            self.check(reading)
            if self._options.on_overflow == "grow":
                changes += self._grow(reading)
        if self._step in self._options.factor_of_step:
            changes += self._follow_schedule(self._step)
        return changes

    def check(self, reading: Reading) -> None:
        """Warn or raise, if that is what `on_overflow` says for these counts; as `step` does."""
        above = self._above(reading.training)
        if above and self._options.on_overflow == "error":
            raise RuntimeError(
                f"on_overflow='error': {self._words(above, reading)}. Give them that capacity "
                f"factor, or raise overflow_threshold={self._options.overflow_threshold}"
            )
        if above and self._options.on_overflow == "warn":
            self._warn(self._words(above, reading))

    def _above(self, seen: Snapshot) -> list[int]:
        shares = zip(seen.layers_Y.tolist(), seen.dropped_share.tolist(), strict=True)
        return [number for number, share in shares if share > self._options.overflow_threshold]

    def _grow(self, reading: Reading) -> list[str]:
        # What was counted with another factor says nothing about this one.
        before = reading.step - reading.num_steps
        above = [n for n in self._above(reading.training) if self._changed_at[n] <= before]
        for number in self.factors:
            self._reads_above[number] = self._reads_above[number] + 1 if number in above else 0
        ripe = [n for n in above if self._reads_above[n] >= self._options.grow_after]
        larger = {n: self._next_larger(n) for n in ripe}
        stuck = [n for n, factors in larger.items() if not factors]
        if stuck:
            self._warn(f"{self._words(stuck, reading)}; grow_factors has nothing larger")
        growing = {number: factors[0] for number, factors in larger.items() if factors}
        changes = [
            f"capacity factor {show_factor(self.factors[n])} -> {show_factor(new)}: "
            f"{self._words([n], reading)}"
            for n, new in growing.items()
        ]
        self.set_factors(growing)
        return changes

    def _next_larger(self, number: int) -> list[float]:
        now = self.factors[number]
        return [factor for factor in self._options.grow_factors if factor > now]

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
        """The first, second, fourth, eighth ... time, by one rank."""
        self._num_warnings += 1
        if self._num_warnings.bit_count() == 1 and dist.get_rank() == 0:
            _log.warning("%s (for the %d. time)", text, self._num_warnings)

    def _words(self, numbers: list[int], reading: Reading) -> str:
        seen, first = reading.training, reading.step - reading.num_steps + 1
        figures = zip(seen.layers_Y, seen.dropped_share, seen.needed_factor, strict=True)
        return "; ".join(
            f"layer {number} dropped {share:.2%} of its rows in steps {first} to {reading.step} "
            f"and needed factor {math.ceil(needed * 100) / 100:g}"
            for number, share, needed in figures
            if number in numbers
        )
