"""Phases of the calling thread: a capture, a backward pass, recompute; and stages of a layer."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.cuda import nvtx
from torch.utils._python_dispatch import _disable_current_modes

from padded_dispatch.config import require

_Fn = TypeVar("_Fn", bound=Callable[..., object])


def nvtx_range(name: str) -> Callable[[_Fn], _Fn]:
    """Decorate a function so that profilers show its calls as ranges `padded_dispatch.NAME`.

    A replay runs no Python, so it has no ranges. A PyTorch without CUDA has no NVTX.
    """
    has_nvtx = torch.backends.cuda.is_built()
    return nvtx.range(f"padded_dispatch.{name}") if has_nvtx else lambda fn: fn


def is_capturing() -> bool:
    """Return whether the current stream captures a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def in_backward() -> bool:
    """Return whether backward is running, as it is while a pass is recomputed."""
    return torch._C._current_graph_task_id() != -1


def trains() -> bool:
    """Return whether backward will use what this pass keeps.

    It will not in evaluation, or if the pass is to be recomputed: that runs without gradients or,
    in torch's `checkpoint(use_reentrant=False)`, with hooks that drop what it keeps.
    """
    torch_c: Any = torch._C
    hooks = torch_c._autograd._top_saved_tensors_default_hooks(True)
    name = "" if hooks is None else getattr(hooks[0], "__qualname__", "")
    return torch.is_grad_enabled() and not name.startswith("_checkpoint_hook")


def wanted(ctx: Any, number: int) -> bool:
    """Return whether the backward pass that runs in a node asks for the gradient of this tensor.

    `number`: among the tensors that the node was given.

    `ctx.needs_input_grad` only says that some backward pass may: `autograd.grad` of other inputs
    does not.
    """
    node = ctx.next_functions[number][0]
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError:  # `autograd.grad` returns the gradient of this very leaf.
        return True


@contextmanager
def unseen() -> Iterator[None]:
    """Enter a context, or decorate a function, in which torch's dispatch modes see no operation.

    Selective activation checkpointing numbers the operations of a pass and of its recompute. What
    only one of them runs must not be among these: counting, comparing, allocating once.
    """
    with _disable_current_modes():
        yield


def untraced(function: _Fn) -> _Fn:
    """Decorate a function of the host, which `torch.compile` cannot trace.

    Importing the compiler takes two seconds. Megatron does it first; without it nothing is traced.
    """
    disable: Any = torch.compiler.disable
    return disable(function) if "torch._dynamo" in sys.modules else function


def require_first_derivatives() -> None:
    """Raise if the running backward pass is to be differentiated again."""
    rule = "be False in the backward pass of padded dispatch, which has no second derivatives"
    fix = "take second derivatives with Megatron's own dispatcher"
    require(not torch.is_grad_enabled(), "create_graph", True, rule, fix)
