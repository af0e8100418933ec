"""Retry, telemetry, control and traces in Megatron-LM's own training loop, without a line of code.

Three functions of `megatron.training.training` are wrapped, and their arguments read by name:

- `train`, the loop: a run starts before layers are captured, and ends after the last step.
- `train_step`, a step, which is given the forward-backward function, be it Megatron's schedule or a
  graph of it: with `on_overflow="retry"` it gets a `Retry` instead. The step is counted afterwards.
- `training_log`, which logs a step: figures go where Megatron's own do.

A script that calls `train_step` in a loop of its own has all of it as well; there the run starts
with the first step, and its last reading is not shown. What happens is in
`padded_dispatch.megatron.megatron_lm_run`.

Megatron-LM repeats a step by itself when it looks for irreproducible results (its rerun state
machine). It zeroes gradients and rewinds the data before each attempt, so each is a step for
`Retry`, and all of them are one for telemetry.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from megatron.core.utils import get_model_config

from padded_dispatch.megatron.config import is_ours
from padded_dispatch.megatron.megatron_lm_run import Run
from padded_dispatch.utils.patches import Patches

_MODULE = "megatron.training.training"


def follow_training(patches: Patches) -> None:
    """Follow Megatron-LM's training loop; do nothing if it is not imported, or followed already.

    Args:
        patches: gets the replaced functions.
    """
    training: Any = sys.modules.get(_MODULE)
    if training is None or not hasattr(training, "train_step"):
        return  # Not imported, or about to be.
    if isinstance(vars(training.train_step).get("followed_by"), _Loop):
        return
    loop = _Loop(training)
    for name in ("train", "train_step", "training_log"):
        if hasattr(training, name):
            patches.set(training, name, loop.wrapped(getattr(training, name), getattr(loop, name)))


class _Loop:
    """The loop of a process; it has one run at a time.

    Args:
        training: Megatron-LM's module.
    """

    def __init__(self, training: Any) -> None:
        self._training = training
        self._run: Run | None = None

    def wrapped(
        self,
        function: Callable[..., Any],
        instead: Callable[[Callable[[], Any], dict[str, Any]], Any],
    ) -> Callable[..., Any]:
        """Return a function that calls `instead` with a call of `function` and its arguments.

        The arguments are given by name. Changes of them count.
        """
        signature = inspect.signature(function)

        @functools.wraps(function)
        def followed(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)

            def call() -> Any:
                return function(*bound.args, **bound.kwargs)

            return instead(call, bound.arguments)

        vars(followed)["followed_by"] = self
        return followed

    def train(self, call: Callable[[], Any], given: dict[str, Any]) -> Any:
        """Train a model from where it is to the last step."""
        run = self._run_of(given["model"], self._training.get_args().iteration)
        if run is None:
            return call()
        try:
            result = call()
            run.finish()
        finally:
            run.close()
            self._run = None
        return result

    def train_step(self, call: Callable[[], Any], given: dict[str, Any]) -> Any:
        """Run one step."""
        steps_done = given.get("iteration")
        if steps_done is None:
            steps_done = self._training.get_args().curr_iteration
        run = self._run_of(given["model"], steps_done)
        if run is None:
            return call()
        given["forward_backward_func"] = run.before_step(given["forward_backward_func"])
        result = call()
        run.after_step(steps_done + 1)
        return result

    def training_log(self, call: Callable[[], Any], given: dict[str, Any]) -> Any:
        """Log one step."""
        if self._run is not None:
            self._run.before_log(
                given["total_loss_dict"],
                given["iteration"],
                skipped=bool(given.get("skipped_iter")),
                first=bool(given.get("is_first_iteration")),
            )
        return call()

    def _run_of(self, chunks: list[Any], steps_done: int) -> Run | None:
        """Return the run of a model, which starts if it is another one; None without our layers.

        A dense model may have our word in its config.
        """
        if self._run is None or self._run.chunks is not chunks:
            if self._run is not None:
                self._run.close()
            config: Any = get_model_config(chunks[0])
            ours = is_ours(config) and config.num_moe_experts is not None
            self._run = Run(self._training, chunks, step=steps_done) if ours else None
        return self._run
