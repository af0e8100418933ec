"""What a run drops, said and acted on between steps."""

from typing import Any

from padded_dispatch.megatron.control import CapacityControl
from padded_dispatch.megatron.factors import Factor
from padded_dispatch.megatron.options import PaddedOptions
from padded_dispatch.megatron.telemetry import Telemetry
from padded_dispatch.train.display import Log
from padded_dispatch.train.graphs import TrainingGraphs


class CapacityWatch:
    """Telemetry and capacity control of a run with the padded dispatcher.

    Args:
        chunks: the model.
        options: of the dispatcher.
        graphs: those to capture again when a factor changes.
        log: where readings and changes go.
        step: steps done already, in the run that is resumed.
        factors: of its layers, at that step.
    """

    def __init__(
        self,
        chunks: list[Any],
        options: PaddedOptions,
        graphs: TrainingGraphs | None,
        log: Log,
        *,
        step: int,
        factors: dict[int, Factor],
    ) -> None:
        self._telemetry = Telemetry(chunks, every=options.telemetry_every, step=step)
        self._control = CapacityControl(chunks, options, step=step)
        self._control.set_factors(factors)
        self._graphs = graphs
        self._log = log

    @property
    def factors(self) -> dict[int, Factor]:
        """Of all layers of the model, by number."""
        return self._control.factors

    def after_step(self, number: int) -> None:
        """To be called after every step, by all ranks.

        Raises:
            RuntimeError: see `CapacityControl.step`.
        """
        reading = self._telemetry.step()
        if reading is not None:
            self._log.capacity(reading)
        changes = self._control.step(reading)
        for change in changes:
            self._log.say(f"after step {number}: {change}")
        if changes and self._graphs is not None:
            self._graphs.recapture()

    def finish(self) -> None:
        """To be called after the last step: what has not been read yet. Raises as `after_step`."""
        reading = self._telemetry.read()
        self._log.capacity(reading)
        self._control.check(reading)
