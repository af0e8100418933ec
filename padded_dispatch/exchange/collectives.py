"""Equal-split collectives as custom ops over a named process group.

Functional: each allocates its result and changes nothing else, so autograd, fake tensors and
`torch.compile(fullgraph=True)` see an ordinary op, and a CUDA graph records one NCCL call on the
current stream. (torch's own functional collectives run on NCCL's stream and keep their work in a
registry until somebody waits for it; neither is of use inside a graph.)

Reducing accumulates in at least fp32, whatever the rows' dtype.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.library import custom_op

from padded_dispatch.utils.nvtx import stage

# torch 2.13 deprecates the longer names; 2.8 knows no others.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def group_name(group: dist.ProcessGroup) -> str:
    """The name under which the ops below find `group`."""
    return cast(str, group.group_name)


def _group(name: str) -> dist.ProcessGroup:
    # Private, but the one that torch's own functional collectives are built on; its argument's
    # type has a different name in each release.
    return cast(Any, distributed_c10d)._resolve_process_group(name)


@custom_op("padded_dispatch::all_to_all", mutates_args=())
def all_to_all(blocks: Tensor, name: str) -> Tensor:
    """Block r of dim 0 to rank r; the result holds block r from rank r. Its own transpose."""
    received = torch.empty_like(blocks, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, blocks.contiguous(), group=_group(name))
    return received


@custom_op("padded_dispatch::all_gather", mutates_args=())
def all_gather(block: Tensor, name: str, size: int) -> Tensor:
    """Everybody's block, concatenated along dim 0 by rank. Transpose of `reduce_scatter`."""
    gathered = block.new_empty(size * block.shape[0], *block.shape[1:])
    _all_gather(gathered, block.contiguous(), group=_group(name))
    return gathered


@custom_op("padded_dispatch::reduce_scatter", mutates_args=())
def reduce_scatter(blocks: Tensor, name: str, size: int) -> Tensor:
    """The sum over ranks of this rank's block of dim 0. Transpose of `all_gather`."""
    wide = blocks.to(torch.promote_types(blocks.dtype, torch.float32)).contiguous()
    summed = wide.new_empty(wide.shape[0] // size, *wide.shape[1:])
    _reduce_scatter(summed, wide, group=_group(name))
    return summed.to(blocks.dtype)


@all_to_all.register_fake
def _(blocks, name):
    return torch.empty_like(blocks, memory_format=torch.contiguous_format)


@all_gather.register_fake
def _(block, name, size):
    return block.new_empty(size * block.shape[0], *block.shape[1:])


@reduce_scatter.register_fake
def _(blocks, name, size):
    return blocks.new_empty(blocks.shape[0] // size, *blocks.shape[1:])


def _save_group(ctx, inputs, output) -> None:
    ctx.group = inputs[1:]


all_to_all.register_autograd(
    stage("exchange backward")(lambda ctx, grad: (all_to_all(grad, *ctx.group), None)),
    setup_context=_save_group,
)
all_gather.register_autograd(
    lambda ctx, grad: (reduce_scatter(grad, *ctx.group), None, None), setup_context=_save_group
)
reduce_scatter.register_autograd(
    lambda ctx, grad: (all_gather(grad, *ctx.group), None, None), setup_context=_save_group
)
