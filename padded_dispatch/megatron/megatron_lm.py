"""`on_overflow="retry"` in Megatron-LM's own training loop, without a line of code.

`pretrain()` calls `megatron.training.training.train_step` for each step and passes it the
forward-backward function, be it Megatron's schedule or a graph of it. `retry_steps` wraps that one
function of Megatron-LM: where the model's options ask for retry, `train_step` gets a `Retry`.

Megatron-LM repeats a step by itself when it looks for irreproducible results (its rerun state
machine). It zeroes gradients and rewinds the data before each attempt, so each is a step here.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from megatron.core.utils import get_model_config

from padded_dispatch.megatron.config import is_ours, padded_options
from padded_dispatch.megatron.retry import Retry
from padded_dispatch.utils.patches import Patches

_MODULE = "megatron.training.training"


def retry_steps(patches: Patches) -> None:
    """Let Megatron-LM's `train_step` repeat steps; do nothing if its loop is not imported.

    Args:
        patches: gets the replaced function.
    """
    training: Any = sys.modules.get(_MODULE)
    if training is not None:
        patches.set(training, "train_step", _with_retry(training, training.train_step))


def _with_retry(training: Any, train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Return `train_step` with a `Retry` in place of its forward-backward function.

    Args:
        training: Megatron-LM's module, whose arguments and TensorBoard writer are read.
        train_step: its function; the names of two of its arguments are read.
    """
    signature = inspect.signature(train_step)
    current: Retry | None = None

    def retry_for(forward_backward_func: Any, model: list[Any]) -> Retry:
        """Return the `Retry` of this training; one more only for another model or function."""
        nonlocal current
        if (
            current is None
            or current.chunks is not model
            or current.forward_backward_func is not forward_backward_func
        ):
            current = Retry(forward_backward_func, model)
        return current

    @functools.wraps(train_step)
    def repeated(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        config: Any = get_model_config(given["model"][0])
        if not is_ours(config) or padded_options(config).on_overflow != "retry":
            return train_step(*args, **kwargs)
        retry = retry_for(given["forward_backward_func"], given["model"])
        given["forward_backward_func"] = retry
        num_before = retry.num_retried
        result = train_step(*bound.args, **bound.kwargs)
        writer = training.get_tensorboard_writer()
        if writer is not None and retry.num_retried > num_before:
            step = training.get_args().curr_iteration
            writer.add_scalar("moe/retried_steps", retry.num_retried, step)
        return result

    return repeated
