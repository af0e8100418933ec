"""The exchange across hosts: a rail around the exchange of each host.

    open     all-gather over the rail: tokens and plans of the ranks with this number; then the
             host's own exchange, in which this rank is one source of H * P tokens
    home     the host's own exchange, whose sums are rounded once; all-to-all over the rail: the
             hosts' sums of each token, added in the order of hosts and rounded once
    push     as `open`, without the plans

Each token crosses the network once to each other host, whatever the routing, and one sum of it
comes back from there. So nothing depends on the routing, and no token lacks a slot.

On a host the experts of other hosts are no experts: -1, and k stays. Of the rows for an expert,
those of earlier hosts come first: a row's place is that at its source and the rows of the hosts
before. Layout, experts and store see G sources and have no part in it.

The rail is the exchange over collectives between H ranks, each of which has the experts of a host.
Both parts run on the stream of the layer, in the same order on all ranks.

H, G: see `exchange.hosts`.
"""

from collections.abc import Callable
from copy import copy
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.exchange.collectives import Arrived, Collectives, CollectiveWire, Values
from padded_dispatch.exchange.direct import DirectStores
from padded_dispatch.exchange.hosts import Hosts
from padded_dispatch.kernels import SlotList
from padded_dispatch.routing import Plan


class Rails:
    """The exchange of a layer whose ranks are on several hosts of several ranks each.

    Args:
        inside: the exchange of this rank's host.
        hosts: of the expert-parallel group.
        rail: the group of this rank's rail.
        device: of the tokens.

    Attributes:
        kind: that of the host's exchange.
        num_hosts: H.
        num_away: see `Collectives`.
    """

    def __init__(
        self,
        inside: Collectives | DirectStores,
        hosts: Hosts,
        rail: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.kind, self.inside = inside.kind, inside
        self.num_hosts = hosts.num_hosts
        self.num_away = hosts.num_away // hosts.num_inside
        local, order = inside.num_local_experts, [*chain(*hosts.ranks_HG)]
        ascends = order == sorted(order)
        self._across = Collectives(hosts.num_inside * local, rail, ascends=ascends)
        # The experts host by host, and the number that each of them then has; -1, none, stays -1.
        rank_R1 = torch.tensor(order, device=device)[:, None]
        self._expert_E = (rank_R1 * local + torch.arange(local, device=device)).flatten()
        number_E = torch.argsort(self._expert_E)
        self._number_E = torch.cat([number_E, number_E.new_full((1,), -1)]).int()

    def broke_off(self) -> bool:
        """Return whether a pass inside of the host did: see `DirectStores.broke_off`."""
        return self.inside.broke_off()

    def start(
        self, plan: Plan, tokens_TD: Tensor, num_slots: int, *, sends_again: bool = False
    ) -> "RailWire":
        """Begin a pass; the first pass with a shape is a collective call.

        P is T, as of each store, or more for ranks with more tokens. `sends_again`: inside of the
        host.
        """
        plan = Plan(
            expert_TK=self._number_E[plan.expert_TK],
            place_TK=plan.place_TK,
            kept_E=plan.kept_E[self._expert_E],
        )
        return RailWire(self.inside, self._across.start(plan, tokens_TD, num_slots), sends_again)


class RailWire:
    """The exchange of one pass across hosts: see `CollectiveWire`.

    `homes_S` and `sends_again` are those of the exchange inside of the host, from `open` on.
    """

    splits = False
    homes_S: Tensor | None
    sends_again: bool

    def __init__(
        self, inside: Collectives | DirectStores, across: CollectiveWire, sends_again: bool
    ) -> None:
        self._start, self._across = partial(inside.start, sends_again=sends_again), across
        self._inside: Any = None
        self._shape: Any = ()  # H, P

    def open(self, tokens_TD: Tensor, prob_TK: Tensor) -> Arrived:
        """Send tokens and their plan. `prob_TK`: at least fp32."""
        arrived = self._across.open(tokens_TD, prob_TK)
        self._shape = arrived.expert_SPK.shape[:2]
        tokens_QD = arrived.values.rows_SPD.flatten(0, 1)
        self._inside = self._start(plan_of_host(arrived), tokens_QD, len(tokens_QD))
        self.homes_S, self.sends_again = self._inside.homes_S, self._inside.sends_again
        return self._inside.open(tokens_QD, arrived.prob_SPK.flatten(0, 1))

    def push(
        self, values_TD: Tensor, again_QD: Tensor | None = None
    ) -> tuple[Values, Values | None]:
        """Send a row for every token to the ranks of its experts, without the plan.

        `again_QD`: `Arrived.sent_TD`, if the pass sends tokens again. They stay inside of the host.
        """
        values, _ = self._across.push(values_TD)
        return self._inside.push(values.rows_SPD.flatten(0, 1), again_QD)

    def bring(self, sum_SPD: Tensor) -> Tensor:
        """Send the sum of every (source, slot) home, and add the sums of every token there."""
        return self._across.bring(self._inside.bring(sum_SPD).unflatten(0, self._shape))

    def home(
        self,
        product: Callable[[], Tensor],
        listed: SlotList,
        offsets: Tensor,
        beside_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a product, and bring home its rows, summed for every token, on each host once."""
        sum_QD, beside = self._inside.home(product, listed, offsets, beside_N)
        if beside is not None:
            beside = self._across.bring_beside(beside.unflatten(0, self._shape))
        return self._across.bring(sum_QD.unflatten(0, self._shape)), beside

    def routed(self) -> dict[str, Tensor | None]:
        """Return the tensors that depend on the routing and that `push` and `home` read."""
        across = {f"across {name}": value for name, value in self._across.routed().items()}
        return across | self._inside.routed()

    def rerouted(self, saved: dict[str, Any]) -> "RailWire":
        """Return this wire with the tensors of `routed`, which a recompute may have replaced."""
        wire, mark = copy(self), "across "
        across = {name.removeprefix(mark): saved[name] for name in saved if name.startswith(mark)}
        wire._across, wire._inside = self._across.rerouted(across), self._inside.rerouted(saved)
        return wire


def plan_of_host(arrived: Arrived) -> Plan:
    """Return the plan of the tokens that a rail has brought, as of one source of this host.

    Example: two hosts, experts 0 and 1 of this one, and a token of each that asks for both, its
    first choice, and for one of the other host: `expert = [[[0, 2]], [[0, -1]]]`, `place = [[[4,
    0]], [[0, 1]]]` and `count = [[5, 0], [1, 0]]` give `expert = [[0, -1], [0, -1]]`, `place = [[4,
    0], [5, 1]]` (of no meaning where there is no expert) and `kept = [6, 0]`.
    """
    expert_HPK, count_HE = arrived.expert_SPK, arrived.count_SL
    is_here = (expert_HPK >= 0) & (expert_HPK < count_HE.shape[1])
    expert_HPK = torch.where(is_here, expert_HPK, -1)
    before_HE = count_HE.cumsum(0, dtype=torch.int32) - count_HE
    host_H11 = torch.arange(len(count_HE), device=count_HE.device)[:, None, None]
    before_HPK = torch.where(is_here, before_HE[host_H11, expert_HPK], 0)
    return Plan(
        expert_TK=expert_HPK.flatten(0, 1),
        place_TK=(arrived.place_SPK + before_HPK).flatten(0, 1),
        kept_E=count_HE.sum(0, dtype=torch.int32),
    )
