"""Figures, warnings, errors, repeated steps and traces: all that happens once a training step.

`StepHooks` does it in any loop. `loops` calls it in the loops of Megatron-LM and Megatron-Bridge;
in a loop of your own:

    hooks = StepHooks(chunks)
    forward_backward = hooks.wrap(get_forward_backward_func())
    for ...:
        forward_backward(...)           # gradients are zeroed before it
        optimizer.step()
        snapshots = hooks.after_step()  # None, except one step after each read
    hooks.read()  # of the steps since the last one, which go unread otherwise

`Reader` sums the counters over all ranks between two steps. The host looks at the copy one step
later, when it has long arrived, so all ranks get the same figures at the same step. `on_overflow`
is applied to what was read: a drop is logged, or ends the run.
"""

import dataclasses
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from padded_dispatch.config import require, require_count
from padded_dispatch.exchange.mirror import differing
from padded_dispatch.megatron.dispatcher import device_of, is_chunks, require_chunks
from padded_dispatch.megatron.record import Passes, record_routing
from padded_dispatch.megatron.retry import Retry
from padded_dispatch.megatron.telemetry import (
    Copy,
    LayerSettings,
    Reader,
    Snapshots,
    padded_moe_layers,
)


class StepHooks:
    """The hooks of one model's steps. All ranks must call all methods.

    They warn of drops in training, or raise on all ranks if `on_overflow` is "error" and a layer
    has dropped more than `overflow_threshold`. A loop that prints the figures before an error ends
    it calls `take`, then `follow`.

    Args:
        chunks: the model's chunks on this rank.
        every: steps between two reads. The first step is read by itself.
        steps_done: steps done already.
        passes: sizes for a trace, which the option `trace` asks for. Make the hooks before graphs
            are captured.

    Attributes:
        layers: numbers of the model's padded layers, on all ranks.
        settings: those of the model's first padded layer, which another rank may have.
        recorder: the recorder of the trace; None without one, or without a layer on this rank.
        retry: the function that repeats steps, see `wrap`.

    Raises:
        ValueError: if `chunks` is no list of modules, no rank has a layer with the padded
            dispatcher, other hooks follow a layer, `layer_factors` names a layer without it,
            `every` is below 1, a trace lacks `passes`, or ranks differ in an argument or an option.
    """

    def __init__(
        self,
        chunks: list[Any],
        *,
        every: int = 10,
        steps_done: int = 0,
        passes: Passes | None = None,
    ) -> None:
        # What one rank alone was given wrong must raise on all: compare before checking.
        is_list = is_chunks(chunks)
        local = padded_moe_layers(chunks) if is_list else {}
        arguments = {"every": every, "steps_done": steps_done, "passes": passes is not None}
        arguments["chunks"] = "a list of chunks" if is_list else type(chunks).__name__
        settings, is_followed = _settings_of_all(local, arguments)
        require_chunks(chunks)
        require_count("every", every)
        # A read sets the largest need to zero, which others have not seen.
        rule = "have no other StepHooks: with two, neither sees the largest need of a pass"
        require(not is_followed, "chunks", "some that have", rule, "use those, or delete them")
        _check_layers(settings)
        self._chunks, self._every = chunks, every
        self._steps_done = self._step = steps_done
        self.layers: tuple[int, ...] = tuple(settings)
        logs, device = dist.get_rank() == 0, device_of(chunks)
        self._reader = Reader(local, settings, [None], device, logs=logs)
        self.settings = self._reader.settings
        for layer in local.values():
            layer.token_dispatcher.configs.hooks = weakref.ref(self)
        self._reader.finish(self._reader.start(steps_done))
        self._pending: Copy | None = None
        self.retry: Retry | None = None
        self.recorder = None
        if (folder := self.settings.options.trace) is not None:
            rule = "be None in a loop that gives StepHooks no sizes"
            fix = "make StepHooks(chunks, passes=Passes(...))"
            require(passes is not None, "trace", folder, rule, fix)
            assert passes is not None
            problem = ""  # The folder may be on a disk of each host.
            try:
                self.recorder = record_routing(chunks, Path(folder), passes, steps_done=steps_done)
            except ValueError as error:
                problem = str(error)
            _raise_on_all(problem)
            if self.recorder is not None:  # Close it after an error, too, or with the process.
                weakref.finalize(self, self.recorder.close)

    @property
    def num_retried(self) -> int:
        """Steps that ran twice."""
        return 0 if self.retry is None else self.retry.num_retried

    def wrap(
        self, forward_backward_func: Callable[..., list[Any]], *counting: Any
    ) -> Callable[..., list[Any]]:
        """Return the function for a step's passes: a `Retry` if the options ask for one.

        Args:
            forward_backward_func: the result of `get_forward_backward_func()`, or a graph of it;
                may be another one for each step.
            counting: objects of the loop with numbers that its forward steps add to.
        """
        if self.settings.options.on_overflow != "retry":
            return forward_backward_func
        if self.retry is None:
            self.retry = Retry(forward_backward_func, self._chunks, counting)
        self.retry.forward_backward_func = forward_backward_func
        return self.retry

    def after_step(self, *, skipped: int = 0) -> Snapshots | None:
        """Count a training step, record it, and start or finish a read. Call it after each step.

        Args:
            skipped: steps before it that the loop has left out.

        Returns:
            Snapshots in the step after the one that started a read; otherwise None.
        """
        before, self._step = self._step, self._step + skipped + 1
        finished = None if self._pending is None else self.follow(self.take())
        if self._step // self._every > before // self._every or before == self._steps_done:
            self._pending = self._reader.start(self._step)
        if self.recorder is not None:
            self.recorder.step(self._step)
        return finished

    def read(self) -> Snapshots:
        """Return snapshots of everything since the last ones, now; waits for the device."""
        return self.follow(self.take(now=True))

    def take(self, *, now: bool = False) -> Snapshots:
        """Return snapshots of the pending read, else of a new one; waits until it has arrived.

        It costs nothing where the host waits for the device anyway. `now`: always start a new read.
        """
        copy, self._pending = self._pending, None
        if now and copy is not None:
            # New sums include the pending ones. The largest needs do not: they have been zeroed.
            self._reader.take_largest(copy)
            copy = None
        return self._reader.finish(copy or self._reader.start(self._step))

    def follow(self, snapshots: Snapshots) -> Snapshots:
        """Apply `on_overflow` to snapshots that `take` returned, and return them."""
        first, last = snapshots.step - snapshots.num_steps + 1, snapshots.step
        when = f"in steps {first} to {last}" if last > first else f"at step {last}"
        self._reader.follow(snapshots.training, when)
        return snapshots


def _settings_of_all(
    local: dict[int, Any], arguments: dict[str, object]
) -> tuple[dict[int, LayerSettings], bool]:
    """Return the settings of the layers of all ranks, by number, and whether hooks follow any.

    It compares arguments and options.

    Replicas and stages of a pipeline, too, must make the same calls, and do the same after.
    """
    local_settings = {number: LayerSettings.of(layer) for number, layer in local.items()}
    for one in local_settings.values():
        arguments = arguments | dataclasses.asdict(one.options)
    is_followed = any(layer.token_dispatcher.configs.is_followed for layer in local.values())
    given: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(given, (arguments, local_settings, is_followed))
    for name in dict.fromkeys(name for of_rank, *_ in given for name in of_rank):
        values = {rank: one[name] for rank, (one, *_) in enumerate(given) if name in one}
        if shown := differing(values):
            raise ValueError(
                f"{name} must be the same on all ranks, got {shown}; set one of these values"
            )
    merged = {number: value for _, part, _ in given for number, value in part.items()}
    return {number: merged[number] for number in sorted(merged)}, any(one[2] for one in given)


def _raise_on_all(problem: str) -> None:
    """Raise on all ranks if one of them has a problem; a collective call."""
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, found in enumerate(problems):
        if found:
            raise ValueError(f"{found} (on rank {rank})")


def _check_layers(settings: dict[int, LayerSettings]) -> None:
    """Raise if no rank has a padded layer, or `layer_factors` names other layers."""
    if not settings:
        raise ValueError(
            "chunks must have a layer with moe_token_dispatcher_type='padded_alltoall', got none "
            "on any rank; set it in the config, or build the model with padded_spec"
        )
    factors = next(iter(settings.values())).options.layer_factors
    for number, factor in factors.items():
        # The config of a hybrid stack does not show which layers have experts. Its layers that
        # predict different tokens share a number, and so a factor.
        applies = number in settings and settings[number].config.capacity_factor == factor
        rule = f"name layers with experts, {(*settings,)}, by Megatron's numbers"
        require(applies, "layer_factors", factors, rule, f"leave out layer {number}")
