"""The rule by which two computations of the same thing are compared on all ranks.

The largest absolute error of ours against a more exact computation is at most twice that of the
stock path at the same dtype, plus one unit in the last place of the largest value. Nothing else.
"""

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import distributed_c10d

from padded_dispatch.megatron import install, uninstall
from padded_dispatch.megatron.compat import forget_moe_state
from padded_dispatch.megatron.cpu import megatron_on_cpu


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Largest absolute values over all ranks of one output or gradient.

    `ours`, `stock`: errors against fp64. `difference`: ours minus stock. `largest`: of the fp64
    values. `allowed`: what the rule allows.
    """

    ours: float
    stock: float
    difference: float
    largest: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the rule holds; a NaN fails it."""
        return self.ours <= self.allowed


@dataclass(frozen=True, kw_only=True)
class Parity:
    """The outcome of one case. `repeats`: ours run twice gave the same bits on this rank."""

    errors: dict[str, Errors]
    repeats: bool

    def failures(self) -> list[str]:
        """What broke the rule, in words."""
        broken = [f"{name}: {e}" for name, e in self.errors.items() if not e.passed]
        return broken if self.repeats else [*broken, "two runs of ours differ"]


@contextmanager
def megatron(device: str, **sizes: Any) -> Iterator[None]:
    """Megatron on this rank's device, with `padded_alltoall` installed.

    Args:
        device: "cpu" or "cuda".
        sizes: of the groups, arguments of `parallel_state.initialize_model_parallel`.
    """
    with ExitStack() as stack:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        else:
            stack.enter_context(megatron_on_cpu())
        install()
        stack.callback(uninstall)
        forget_moe_state()
        stack.callback(end_gloo_groups, set(distributed_c10d._world.pg_map))
        parallel_state.initialize_model_parallel(**sizes)
        stack.callback(parallel_state.destroy_model_parallel)
        yield


def end_gloo_groups(kept: set[Any]) -> None:
    """End all but those: Megatron forgets its groups, and each has three threads."""
    for group in set(distributed_c10d._world.pg_map) - kept:
        if dist.get_backend(group) == "gloo":
            dist.destroy_process_group(group)


def compare(
    ours: dict[str, Tensor], stock: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, Errors]:
    """Apply the rule to every tensor, by name.

    Of each name the ranks that have it are pooled: their largest errors, their largest value.
    """
    assert ours.keys() == stock.keys() == exact.keys()
    mine = {
        name: [
            _distance(ours[name], exact[name]),
            _distance(stock[name], exact[name]),
            _distance(ours[name], stock[name]),
            _distance(exact[name], torch.zeros_like(exact[name])),
        ]
        for name in exact
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    errors = {}
    for name in dict.fromkeys(name for rank in everyone for name in rank):
        found = torch.tensor([rank[name] for rank in everyone if name in rank])
        of_ours, of_stock, difference, largest = found.max(0).values.tolist()
        errors[name] = Errors(
            ours=of_ours,
            stock=of_stock,
            difference=difference,
            largest=largest,
            allowed=2 * of_stock + _ulp(largest, dtype),
        )
    return errors


def _distance(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a.double() - b.double()).abs().max().item()


def _ulp(value: float, dtype: torch.dtype) -> float:
    if value == 0:
        return 0.0
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(value))
