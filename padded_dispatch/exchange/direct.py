"""The exchange by direct stores: GPUs of one host write rows into each other's memory.

A source stores token t in slot t at each other rank of its experts, and reads its own tokens where
they are. The product that computes a row also stores it at home, in slot t * K + k. The source sums
a token's rows in ascending expert order.

    open, push   store tokens at the ranks of their experts (`open` adds the plan); barrier
    home         store numbers beside rows at home; product, which stores rows; barrier; sum

The caller must guarantee that all calls of a process are ordered as if on one stream, that all
ranks make them in the same order, and that pushes (`open`, `push`) and returns (`home`) alternate.

So one barrier per call keeps buffers from being overwritten too early. A rank reads what a push
brought before it enters the barrier of the next return, and no peer pushes again before it has
passed that barrier. A rank sums what a return brought before it enters the barrier of the next
push, and no peer returns rows again before it has passed that one. This holds for any sequence of
layers, shapes, replays, evaluation and recomputation. A pass that breaks off leaves a push without
a return. The next push may then overwrite rows, plan and counts that a slow rank still reads, which
may then write outside of its buffers: all ranks must synchronize their devices before it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.config import Policy
from padded_dispatch.exchange.collectives import Arrived, Values
from padded_dispatch.exchange.symmetric_memory import Buffers, Shape, buffers_for, check_group
from padded_dispatch.routing import Plan
from padded_dispatch.utils.phases import nvtx_range


class DirectStores:
    """The exchange of a layer by direct stores. Creating it is a collective call of the group.

    Args:
        num_local_experts: experts on this rank (L).
        group: the expert-parallel group, whose ranks must be on one host.
        over_nvlink: require NVLink between all GPUs.

    Raises:
        ValueError: on all ranks, if their GPUs cannot write to each other.
    """

    kind = "direct"

    def __init__(
        self, num_local_experts: int, group: dist.ProcessGroup | None, *, over_nvlink: bool = False
    ) -> None:
        self.num_local_experts = num_local_experts
        self.group = check_group(group, over_nvlink=over_nvlink)
        self._buffers: dict[Shape, Buffers] = {}

    def strike(
        self, map_TE: Tensor, probs_TE: Tensor, num_slots: int, policy: Policy
    ) -> tuple[Tensor, None]:
        """Return the map as it is: every token has a slot."""
        return map_TE, None

    def start(self, plan: Plan, tokens_TD: Tensor, num_slots: int) -> "DirectWire":
        """Begin a pass; the first pass with a shape is a collective call.

        Every token has a slot, also if P < T. P > T makes room for the tokens of ranks with more.
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
    """The exchange of one pass by direct stores: see `CollectiveWire`.

    `open` and `push` return buffers that all layers share; they are valid until `home`.
    `homes_S`: the address, at each source, of the buffer for returned rows, [P * K, D].
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
        """Send a row for every token to the ranks of its experts.

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
        """Compute a product that stores its rows at home, and sum them: see `CollectiveWire`."""
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
