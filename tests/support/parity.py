"""The parity rule: how two computations of the same result are compared on all ranks.

Ours and stock are both compared with a more exact computation. Our largest absolute error must be
at most twice the stock path's at the same dtype, plus one unit in the last place of the largest
value. There is no other tolerance.
"""

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.megatron import install, uninstall
from padded_dispatch.megatron.compat import forget_moe_state
from padded_dispatch.megatron.cpu import megatron_on_cpu
from tests.support.tiny import model_parallel


@contextmanager
def megatron(device: str, **sizes: Any) -> Iterator[None]:
    """Set Megatron's groups of these sizes up, with `padded_alltoall` installed."""
    with ExitStack() as stack:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        else:
            stack.enter_context(megatron_on_cpu())
        install()
        stack.callback(uninstall)
        forget_moe_state()
        stack.enter_context(model_parallel(**sizes))
        yield


def too_far(
    ours: dict[str, Tensor], stock: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype
) -> list[str]:
    """Return the tensors that break the rule, over all ranks that have one of this name."""
    assert ours.keys() == stock.keys() == exact.keys()
    mine = {
        name: [
            _distance(ours[name], exact[name]),
            _distance(stock[name], exact[name]),
            _distance(exact[name], torch.zeros_like(exact[name])),
        ]
        for name in exact
    }
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    broken = []
    for name in dict.fromkeys(name for rank in of_ranks for name in rank):
        found = torch.tensor([rank[name] for rank in of_ranks if name in rank])
        of_ours, of_stock, largest = found.max(0).values.tolist()
        exponent = math.floor(math.log2(largest)) if largest else -math.inf
        allowed = 2 * of_stock + torch.finfo(dtype).eps * 2.0**exponent
        if not of_ours <= allowed:  # A NaN breaks it.
            broken.append(f"{name}: {of_ours}, above {allowed}, twice stock's and one ulp")
    return broken


def _distance(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a.double() - b.double()).abs().max().item()
