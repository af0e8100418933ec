"""The exchange by direct stores: GPUs of one host write rows into each other's memory.

A token crosses the link into slot t of its source; a rank's own tokens stay where they are. Its
rows come home from inside of the product that computes them, each to slot t * K + k, and are summed
there in ascending expert order.

    open, push   rows to their experts, with the plan in a forward pass; barrier
    home         numbers beside rows, product whose rows go home; barrier; sum

The caller must guarantee that all calls of a process are ordered as if on one stream, that all
ranks make them in the same order, and that pushes and returns alternate, as in `experts.packed`.

Why no buffer is overwritten too early: rows and plans that arrived are read before the rank comes
to the barrier of the return that follows, and a peer that pushes again has passed that barrier.
What came home is read behind it, before the rank comes to the barrier of the push that follows;
who sends rows home has passed that one. So each call needs one barrier, and passes may be those of
other layers, of other shapes, replays of graphs, evaluation or recomputation. A pass that breaks
off leaves a push without a return: the push behind it may then overwrite what a slow rank still
reads, in a pass whose result is lost.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.exchange import Arrived, Values
from padded_dispatch.exchange.symmetric_memory import Buffers, Shape, buffers_for, check_group
from padded_dispatch.routing.plan import Plan
from padded_dispatch.utils.nvtx import nvtx_range


class DirectStores:
    """`Collectives` by direct stores. Creating it is a collective call of the group.

    Args:
        num_local_experts: experts on this rank (L).
        group: the expert-parallel group, all on one host.
        over_nvlink: require NVLink between all GPUs.

    Raises:
        ValueError: on all ranks, if their GPUs cannot write to each other.
    """

    kind = "direct"

    def __init__(
        self,
        num_local_experts: int,
        group: dist.ProcessGroup | None,
        *,
        over_nvlink: bool = False,
    ) -> None:
        self.num_local_experts = num_local_experts
        self.group = check_group(group, over_nvlink=over_nvlink)
        self._buffers: dict[Shape, Buffers] = {}

    def strike(self, map_TE: Tensor, probs_TE: Tensor, num_slots: int) -> tuple[Tensor, None]:
        """Return the map as it is: every token has a slot."""
        return map_TE, None

    def start(self, plan: Plan, tokens_TD: Tensor, num_slots: int) -> "DirectWire":
        """Begin a pass; the first one with a shape is a collective call.

        Every token has a slot, whatever P is. P above T stands for ranks with more tokens.
        """
        shape = Shape(
            num_slots=max(tokens_TD.shape[0], num_slots),
            top_k=plan.expert_TK.shape[1],
            num_local_experts=self.num_local_experts,
            width=tokens_TD.shape[1],
            dtype=tokens_TD.dtype,
        )
        if shape not in self._buffers:
            self._buffers[shape] = buffers_for(self.group, shape, tokens_TD.device)
        buffers = self._buffers[shape]
        return DirectWire(plan=plan, buffers=buffers, homes_S=buffers.homes_R)


@dataclass(kw_only=True, eq=False)
class DirectWire:
    """`CollectiveWire` by direct stores.

    What `open` and `push` return lies in buffers that all layers share: it lasts until `home`.
    `homes_S`: the address at each source of the rows of its choices, [T * K, D].
    """

    plan: Plan
    buffers: Buffers
    homes_S: Tensor
    lasts = False

    def open(self, tokens_TD: Tensor, prob_TK: Tensor) -> Arrived:
        """Send tokens and their plan. Probabilities travel as fp32."""
        plan, buffers = self.plan, self.buffers
        prob_TK = prob_TK.to(torch.float32).contiguous()
        return Arrived(
            values=self.push(tokens_TD, (plan.place_TK, prob_TK, plan.kept_E)),
            expert_SPK=buffers.expert_SPK,
            place_SPK=buffers.place_SPK,
            prob_SPK=buffers.prob_SPK,
            count_SL=buffers.count_SL,
        )

    @nvtx_range("exchange")
    def push(
        self, values_TD: Tensor, beside: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> Values:
        """Send a row for every token over the same way.

        `beside`: places, probabilities and counts of the plan; None sends rows only.
        """
        from padded_dispatch.kernels import direct

        buffers, own_TD = self.buffers, values_TD.contiguous()
        assert own_TD.dtype == buffers.rows_SPD.dtype
        direct.push(
            own_TD,
            self.plan.expert_TK,
            buffers.rows_R,
            buffers.plan_R,
            rank=buffers.rank,
            num_slots=buffers.rows_SPD.shape[1],
            num_local_experts=buffers.count_SL.shape[1],
            beside=beside,
        )
        buffers.barrier()
        return Values(rows_SPD=buffers.rows_SPD, own_TD=own_TD, own=buffers.rank)

    def home(
        self,
        product: Callable[[], Tensor],
        row_SPK: Tensor,
        offsets: Tensor,
        beside_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a product whose rows go home, and sum what came: see `CollectiveWire`."""
        from padded_dispatch.kernels import direct, rows

        buffers, expert_TK, beside_TK = self.buffers, self.plan.expert_TK, None
        if beside_N is not None:
            direct.send_beside(beside_N, row_SPK, buffers.besides_R, offsets)
        product()
        buffers.barrier()
        sum_TD = rows.sum_rows(buffers.home_QD, expert_TK, choices=True)
        if beside_N is not None:
            beside_TK = buffers.beside_PK[: len(expert_TK)].masked_fill(expert_TK < 0, 0)
        return sum_TD, beside_TK
