"""A product that sends rows home, for CPUs, with the barriers of the one for GPUs.

That of the package has one more on CPUs, before rows are sent, and would hide it if a return needed
that one, too. Here the rows leave once they are computed.
"""

from torch import Tensor
from torch.library import custom_op

from padded_dispatch.exchange import direct, symmetric_memory
from padded_dispatch.kernels import direct as kernels
from padded_dispatch.ops.grouped import linear_by_expert


# An op, as the one that it replaces: `StreamOrder` follows no ops inside of ops.
@custom_op("padded_dispatch_tests::sending_product", mutates_args=())
def sending_product(
    rows_NI: Tensor,
    weight_LOI: Tensor,
    bias_LO: Tensor | None,
    weights_N: Tensor | None,
    probs_N: Tensor | None,
    offsets_L: Tensor,
    tiles: Tensor | None,
    offsets_LS: Tensor,
    slot_of_TK: Tensor,
    expert_of_TK: Tensor,
    kept_E: Tensor,
    kept_SE: Tensor | None,
    pool_slots: int,
    experts_per_pool: int,
    key: str,
) -> tuple[Tensor, Tensor]:
    """Return what `padded_dispatch.exchange.fused.return_product` returns."""
    buffers = symmetric_memory.find(key)
    workspace = buffers.workspace
    out_NO = linear_by_expert(rows_NI, weight_LOI, bias_LO, weights_N, offsets_L, tiles)
    if probs_N is not None:
        probs_N = probs_N.contiguous()
    to = workspace.slots_R, workspace.meta_R, buffers.rank, pool_slots, experts_per_pool
    kernels.return_rows(out_NO, probs_N, offsets_LS, kept_SE, *to)
    workspace.barrier()
    maps = slot_of_TK, expert_of_TK, kept_E, pool_slots
    return direct.received(workspace, slot_of_TK, *maps, numbers=probs_N is not None)
