"""Telemetry and capacity control of a training run: one piece for every loop.

    watch = CapacityWatch(chunks, options, show=log.capacity, changed=capture_again)
    for step in ...:
        train()
        watch.after_step()
    watch.finish()

`padded-dispatch train` and Megatron-LM's loop (`padded_dispatch.megatron.megatron_lm`) differ in
where figures are shown and in how graphs are captured again, and in nothing else. So both are
functions that the loop gives.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from padded_dispatch.config import CapacityFactor
from padded_dispatch.megatron.control import CapacityControl
from padded_dispatch.megatron.options import PaddedOptions
from padded_dispatch.megatron.telemetry import Snapshots, Telemetry


class CapacityWatch:
    """The counters of a run, and the capacity factors that follow them.

    All ranks must call all methods.

    Attributes:
        step: steps done.

    Args:
        chunks: the model's chunks on this rank.
        options: options of the dispatcher.
        show: called with each reading.
        changed: called after factors have changed, with the steps done and a description of each
            change. CUDA graphs have to be captured again.
        step: steps that a resumed run has done already, else 0.
        factors: factors of its layers at that step, by layer number; may name other layers.
        reads_above: its `reads_above` at that step.
    """

    def __init__(
        self,
        chunks: list[Any],
        options: PaddedOptions,
        *,
        show: Callable[[Snapshots], None],
        changed: Callable[[int, list[str]], None],
        step: int = 0,
        factors: Mapping[int, CapacityFactor] | None = None,
        reads_above: Mapping[int, int] | None = None,
    ) -> None:
        self.step = step
        self._show = show
        self._changed = changed
        self._telemetry = Telemetry(chunks, every=options.telemetry_every, step=step)
        self._control = CapacityControl(chunks, options, step=step)
        known = self._control.factors.keys()
        self._control.set_factors({n: f for n, f in (factors or {}).items() if n in known})
        self._control.reads_above |= reads_above or {}

    @property
    def factors(self) -> dict[int, CapacityFactor]:
        """Capacity factors of all layers of the model, by layer number."""
        return self._control.factors

    @property
    def reads_above(self) -> dict[int, int]:
        """Readings in a row in which a layer dropped too much, by layer number."""
        return self._control.reads_above

    def after_step(self) -> None:
        """Count a step, show a reading if there is one, and apply changes of factors.

        Raises:
            RuntimeError: see `CapacityControl.step`.
        """
        self.step += 1
        reading = self._telemetry.step()
        if reading is not None:
            self._show(reading)
        self._tell(self._control.step(reading))

    def read_pending(self) -> None:
        """Do now, between two steps, what `after_step` would do one step later.

        For a place where the host waits for the device anyway.

        Raises:
            RuntimeError: see `CapacityControl.step`.
        """
        reading = self._telemetry.finish()
        if reading is not None:
            self._show(reading)
            self._tell(self._control.react(reading))

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Read all counts, between two steps, and apply changes of factors; save in this block.

        A checkpoint has no counters. So a run that resumes from it reads over the same steps as the
        run that wrote it, and both decide alike.

        Raises:
            RuntimeError: after the block; see `CapacityControl.step`.
        """
        reading = self._telemetry.read()
        self._show(reading)
        self._tell(self._control.grow(reading))
        yield
        self._control.check(reading)

    def finish(self) -> None:
        """Show and check a last reading after the last step, unless `checkpoint` has.

        Raises:
            RuntimeError: see `CapacityControl.step`.
        """
        reading = self._telemetry.read()
        if reading.num_steps:
            self._show(reading)
            self._control.check(reading)

    def _tell(self, changes: list[str]) -> None:
        if changes:
            self._changed(self.step, changes)
