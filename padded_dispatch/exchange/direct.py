"""The exchange by direct writes: GPUs of one host write rows into each other's memory.

A source stores token t in slot t at each other rank of its experts, and reads its own tokens where
they are. The product that computes a row also stores it at home, in slot t * K + k. The source sums
a token's rows in ascending expert order.

    open, push   store tokens at the ranks of their experts (`open` adds the plan, `push` tokens
                 that are sent again, to memory of their own); barrier
    home         store numbers beside rows at home; product, which stores rows; barrier; sum

The caller must guarantee that all calls of a process are ordered as if on one stream, that all
ranks make them in the same order, and that pushes (`open`, `push`) and returns (`home`) alternate.
So one barrier per call keeps buffers from being overwritten too early:

    rank A   push k | barrier | read k         return k | barrier | sum k      push k+1 | barrier
    rank B   push k | barrier | still reads k  return k | barrier | still sums push k+1 | barrier

A overwrites what push k brought to B, tokens sent again included, in push k+1: behind the barrier
of return k, which B enters behind its last read. A overwrites what return k brought to B in return
k+1: behind the barrier of push k+1, which B enters behind its sum. This holds for any sequence of
layers, shapes, replays, evaluation and recomputation.

A pass that breaks off leaves a push without a return. A slow rank may then read the plan of the
next push, and write outside of its buffers. So the next eager pass raises: see `broke_off`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.exchange.collectives import Arrived, Values
from padded_dispatch.exchange.hosts import Hosts
from padded_dispatch.exchange.symmetric_memory import (
    Buffers,
    Shape,
    buffers_for,
    check_group,
    shared_memory,
)
from padded_dispatch.kernels import SlotList
from padded_dispatch.routing import Plan
from padded_dispatch.utils.phases import is_capturing, nvtx_range


class DirectStores:
    """The exchange of a layer by direct writes. Creating it is a collective call of the group.

    Args:
        num_local_experts: experts on this rank (L).
        group: the expert-parallel group, whose ranks must be on one host (see `exchange.hosts`), or
            several with `hosts`.
        hosts: those of the group, if a rail crosses between them: see `exchange.rails`.
        over_nvlink: require NVLink between all GPUs of a host.

    Attributes:
        group: the ranks of this host.

    Raises:
        ValueError: on all ranks, if the GPUs of a host cannot write to each other.
    """

    kind = "direct"
    num_away = 0
    num_hosts = 1

    def __init__(
        self,
        num_local_experts: int,
        group: dist.ProcessGroup | None,
        *,
        hosts: Hosts | None = None,
        over_nvlink: bool = False,
    ) -> None:
        self.num_local_experts = num_local_experts
        self._whole = group
        self.group = check_group(group, hosts=hosts, over_nvlink=over_nvlink)

    def broke_off(self) -> bool:
        """Return whether an eager pass of the group pushed and did not return; once for each.

        The ranks compare the answer before the next eager pass, and raise if it is True on one.
        """
        if is_capturing():
            return False
        shared = shared_memory(self.group)
        was_open, shared.is_open = shared.is_open, False
        return was_open

    def start(
        self, plan: Plan, tokens_TD: Tensor, num_slots: int, *, sends_again: bool = False
    ) -> "DirectWire":
        """Begin a pass; the first pass with a shape is a collective call.

        Every token has a slot, also if P < T. P > T makes room for the tokens of ranks with more.
        """
        shape = Shape(
            num_slots=max(tokens_TD.shape[0], num_slots),
            top_k=plan.expert_TK.shape[1],
            num_local_experts=self.num_local_experts,
            width=tokens_TD.shape[1],
            dtype=tokens_TD.dtype,
            sends_again=sends_again,
        )
        buffers = buffers_for(self.group, shape, tokens_TD.device, self._whole)
        return DirectWire(plan=plan, buffers=buffers, homes_S=buffers.coming_R)


@dataclass(frozen=True, kw_only=True, eq=False)
class DirectWire:
    """The exchange of one pass by direct writes: see `CollectiveWire`.

    `open` and `push` return buffers that all layers share; they are valid until `home`.
    `homes_S`: the address, at each source, of the buffer for returned rows, [P * K, D].
    """

    plan: Plan
    buffers: Buffers
    homes_S: Tensor

    @property
    def sends_again(self) -> bool:
        """See `CollectiveWire`."""
        return self.buffers.again_SPD is not None

    def open(self, tokens_TD: Tensor, prob_TK: Tensor) -> Arrived:
        """Send tokens and their plan. Probabilities travel as fp32."""
        plan, buffers = self.plan, self.buffers
        prob_TK = prob_TK.to(torch.float32).contiguous()
        values, _ = self.push(tokens_TD, beside=(plan.place_TK, prob_TK, plan.kept_E))
        return Arrived(
            values=values,
            expert_SPK=buffers.expert_SPK,
            place_SPK=buffers.place_SPK,
            prob_SPK=buffers.prob_SPK,
            count_SL=buffers.count_SL,
            sent_TD=tokens_TD.contiguous(),
        )

    @nvtx_range("exchange")
    def push(
        self,
        values_TD: Tensor,
        again_TD: Tensor | None = None,
        *,
        beside: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Values, Values | None]:
        """Send a row for every token to the ranks of its experts, and its token again.

        `beside`: places, probabilities and counts of the plan; None sends rows only.
        """
        from padded_dispatch.kernels import direct

        buffers, own_TD = self.buffers, values_TD.contiguous()
        assert own_TD.dtype == buffers.rows_SPD.dtype
        buffers.shared.note(is_open=True)
        direct.push(
            own_TD,
            self.plan.expert_TK,
            buffers.arriving_R,
            again_TD=again_TD,
            again_at=buffers.again_at,
            beside=beside,
            plan_at=buffers.plan_at,
            rank=buffers.rank,
            num_slots=buffers.rows_SPD.shape[1],
            num_local_experts=buffers.count_SL.shape[1],
        )
        buffers.barrier()
        values = Values(rows_SPD=buffers.rows_SPD, own_TD=own_TD, own=buffers.rank, lasts=False)
        if again_TD is None:
            return values, None
        assert buffers.again_SPD is not None
        return values, replace(values, rows_SPD=buffers.again_SPD, own_TD=again_TD)

    def routed(self) -> dict[str, Tensor]:
        """Return the tensors that depend on the routing and that `push` and `home` read."""
        return {"expert_TK": self.plan.expert_TK}

    def rerouted(self, saved: dict[str, Any]) -> "DirectWire":
        """Return this wire with the tensors of `routed`, which a recompute may have replaced."""
        return replace(self, plan=replace(self.plan, expert_TK=saved["expert_TK"]))

    def home(
        self,
        product: Callable[[], Tensor],
        listed: SlotList,
        offsets: Tensor,
        beside_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a product that stores its rows at home, and sum them: see `CollectiveWire`."""
        from padded_dispatch.kernels import rows

        buffers, expert_TK, beside_TK = self.buffers, self.plan.expert_TK, None
        if beside_N is not None:
            home = {"homes_S": buffers.coming_R, "home_at": buffers.beside_at}
            rows.send_numbers(beside_N, listed, offsets=offsets, **home)
        product()
        buffers.barrier()
        buffers.shared.note(is_open=False)
        sum_TD = rows.sum_rows(buffers.home_QD, expert_TK, choices=True)
        if beside_N is not None:
            beside_TK = buffers.beside_PK[: len(expert_TK)].masked_fill(expert_TK < 0, 0)
        return sum_TD, beside_TK
