"""The exchange over equal-split collectives: NCCL on GPUs, gloo on CPUs.

A token is sent to each rank that has one of its experts, with its part of the plan. Its slot there
follows from P and its source's plan, without counts of other ranks:

    P >= T    slot t, by an all-gather: all tokens go to all ranks, needed there or not
    P < T     the next slot of that rank, in token order, by an equal-split all-to-all

P < T only with cells, where selection leaves at most L * C = P tokens of a source for any rank: a
store takes all. P is the same on all ranks; T may differ if P is at least the largest T.

A receiver sums the rows of each (source, slot) in at least fp32 and rounds once. An all-to-all
brings the sums home; the source adds those of each token in rank order, in at least fp32. If ranks
split experts, an all-gather first gives each of them what the others received. A reduce-scatter
sums their partial outputs in at least fp32, before that rounding. With one rank nothing moves.

`open` and `bring` are differentiable, for experts in plain torch. Every rank that ran a collective
forward runs its transpose in backward, if a gradient is wanted.

If I ranks split each expert, S = R * I, and source i * R + r is rank r of the i-th expert-parallel
group.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.kernels import SlotList
from padded_dispatch.routing import Plan
from padded_dispatch.utils.phases import nvtx_range, require_first_derivatives, unseen

# torch 2.13 deprecates the longer names; 2.8 has no others.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True, kw_only=True)
class Values:
    """A row for every token that arrived: the token itself, or its output's gradient.

    Attributes:
        rows_SPD: the rows of each source, by slot, without this rank's if `own_TD` has them;
            unspecified in slots without a token.
        own_TD: the rows of this rank's own tokens, contiguous; None if `rows_SPD` has them.
        own: this rank's number among the sources; None if `own_TD` is.
        lasts: whether the rows stay as they are until backward; other layers overwrite a buffer
            that all share.
    """

    rows_SPD: Tensor
    own_TD: Tensor | None = None
    own: int | None = None
    lasts: bool = True

    def rows(self) -> dict[str, Any]:
        """Return the arguments of kernels that read the rows."""
        return {"rows_SPD": self.rows_SPD, "own_TD": self.own_TD, "own": self.own}


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """Tokens and plans of all sources, as they arrived at this rank in a forward pass.

    Attributes:
        values: the tokens.
        expert_SPK: int32, local experts of each token, 0 to L - 1; any other number, such as -1, is
            no expert of this rank.
        place_SPK: int32, index of the row among its source's rows for that expert.
        prob_SPK: at least fp32, the probability; unspecified where there is no expert.
        count_SL: int32, contiguous: rows of each source for each local expert.
        sent_TD: the tokens that this rank sent as a source, contiguous; of its rail, if hosts are
            several.
    """

    values: Values
    expert_SPK: Tensor
    place_SPK: Tensor
    prob_SPK: Tensor
    count_SL: Tensor
    sent_TD: Tensor


@dataclass(frozen=True, kw_only=True)
class _Slots:
    """Slots of a source's tokens.

    Attributes:
        expert_TK: of the plan.
        row_TK: where the sum of each choice's rank comes home, among [R * P, D]; -1: no choice.
        first_TK: int32; the same for the first choice of each rank, -1 for the others.
        token_RP: the token of each slot, -1 for none; None if slot t is token t.
    """

    expert_TK: Tensor
    row_TK: Tensor | None = None
    first_TK: Tensor | None = None
    token_RP: Tensor | None = None


class Collectives:
    """The exchange of a layer over equal-split collectives.

    Args:
        num_local_experts: experts on this rank (L).
        group: the expert-parallel group (R ranks), or None for one rank.
        etp_group: the group whose ranks split every expert's ffn, or None for one rank.
        ascends: whether a token's experts ascend, as in a source's own plan.

    Attributes:
        num_away: how many ranks, whose tokens come here, are on other hosts.
    """

    num_away = 0
    num_hosts = 1

    def __init__(
        self,
        num_local_experts: int,
        group: dist.ProcessGroup | None = None,
        etp_group: dist.ProcessGroup | None = None,
        *,
        ascends: bool = True,
    ) -> None:
        self.num_local_experts, self.ascends = num_local_experts, ascends
        self.group = group if group is not None and group.size() > 1 else None
        self.etp_group = etp_group if etp_group is not None and etp_group.size() > 1 else None
        self.num_ranks = group.size() if group is not None else 1
        etp_size = etp_group.size() if etp_group is not None else 1
        self.num_sources = self.num_ranks * etp_size
        self.kind = "none" if self.num_sources == 1 else "alltoall"

    def broke_off(self) -> bool:
        """Return False: what a pass leaves behind disturbs no later one."""
        return False

    def start(
        self, plan: Plan, tokens_TD: Tensor, num_slots: int, *, sends_again: bool = False
    ) -> "CollectiveWire":
        """Begin a pass of tokens, of which at most P = `num_slots` have experts on one rank.

        `sends_again`: see `DispatchConfig`; if P < T, less arrives than it counts, and is kept.
        """
        return CollectiveWire(self, plan, tokens_TD, num_slots, sends_again)


class CollectiveWire:
    """The exchange of one pass. Calls alternate: `open` or `push`, then `home` (or `bring`).

    The sums that come home have the dtype of the tokens.

    Attributes:
        homes_S: None, since sums go home, not rows: see `exchange.direct.DirectWire`.
        sends_again: whether backward sends tokens again.
        splits: whether other ranks compute parts of the same experts.
    """

    homes_S: Tensor | None = None

    def __init__(
        self,
        exchange: Collectives,
        plan: Plan,
        tokens_TD: Tensor,
        num_slots: int,
        sends_again: bool,
    ) -> None:
        self._exchange, self._plan = exchange, plan
        self.splits = exchange.etp_group is not None
        self._num_tokens, self._dtype = tokens_TD.shape[0], tokens_TD.dtype
        # True if slot t is token t on every rank; then there are at least T slots.
        self._whole = num_slots >= self._num_tokens or exchange.num_ranks == 1
        self._num_slots = max(num_slots, self._num_tokens) if self._whole else num_slots
        self.sends_again = sends_again and self._whole
        self._slots = self._number_slots()

    @unseen()  # A mode that kept a result could not know that it is written afterwards.
    def _number_slots(self) -> _Slots:
        """Compute the slot of every token at the ranks of its choices, and the token of every slot.

        One source moves nothing and needs no numbers.
        """
        local, expert_TK = self._exchange.num_local_experts, self._plan.expert_TK
        ranks, token_RP = self._exchange.num_ranks, None
        if self._exchange.num_sources == 1:
            return _Slots(expert_TK=expert_TK)
        token_T1 = torch.arange(self._num_tokens, device=expert_TK.device)[:, None]
        # No choice counts as one of a rank behind the last.
        rank_TK = torch.where(expert_TK >= 0, expert_TK // local, ranks).long()
        if self._whole:
            slot_TK = token_T1
        else:
            reached_TR = token_T1.new_zeros(self._num_tokens, ranks + 1).scatter_(1, rank_TK, 1)
            slot_TK = (reached_TR.cumsum(0) - 1).gather(1, rank_TK)
        row_TK = torch.where(rank_TK < ranks, rank_TK * self._num_slots + slot_TK, -1)
        # Where experts ascend, the choices of a rank are neighbours.
        ordered_TK = row_TK if self._exchange.ascends else row_TK.sort(1).values
        follows_TK = torch.zeros_like(expert_TK, dtype=torch.bool)
        follows_TK[:, 1:] = ordered_TK[:, 1:] == ordered_TK[:, :-1]
        if not self._whole:
            # Index -1 writes to the last element, which is cut off.
            token_Q = token_T1.new_full((ranks * self._num_slots + 1,), -1)
            token_Q[row_TK] = token_T1.expand_as(row_TK)
            token_RP = token_Q[:-1].view(ranks, -1)
        first_TK = ordered_TK.masked_fill(follows_TK, -1).to(torch.int32)
        return _Slots(expert_TK=expert_TK, row_TK=row_TK, first_TK=first_TK, token_RP=token_RP)

    def routed(self) -> dict[str, Tensor | None]:
        """Return the tensors that depend on the routing and that `push` and `home` read."""
        return vars(self._slots)

    def rerouted(self, saved: dict[str, Any]) -> "CollectiveWire":
        """Return this wire with the tensors of `routed`, which a recompute may have replaced."""
        wire = copy(self)
        wire._slots = _Slots(**{name: saved[name] for name in vars(self._slots)})
        return wire

    @nvtx_range("exchange")
    def open(self, tokens_TD: Tensor, prob_TK: Tensor) -> Arrived:
        """Send tokens and their plan. `prob_TK`: at least fp32."""
        if self._exchange.num_sources == 1:
            plan = self._plan
            numbers = [part[None] for part in (plan.expert_TK, plan.place_TK, plan.kept_E)]
            arrived = self.send(tokens_TD), prob_TK[None], *numbers
        else:
            arrived = _Send.apply(self, tokens_TD, prob_TK)
        rows_SPD, prob_SPK, expert_SPK, place_SPK, count_SL = arrived
        return Arrived(
            values=Values(rows_SPD=rows_SPD),
            expert_SPK=expert_SPK,
            place_SPK=place_SPK,
            prob_SPK=prob_SPK,
            count_SL=count_SL,
            sent_TD=tokens_TD,
        )

    @nvtx_range("exchange")
    def push(
        self, values_TD: Tensor, again_TD: Tensor | None = None
    ) -> tuple[Values, Values | None]:
        """Send a row for every token to the ranks of its experts, without the plan.

        `again_TD`: the tokens, if the pass sends them again; they are the second result.
        """
        values = Values(rows_SPD=self.send(values_TD))
        return values, None if again_TD is None else Values(rows_SPD=self.send(again_TD))

    @nvtx_range("exchange")
    def bring(self, sum_SPD: Tensor) -> Tensor:
        """Send the sum of every (source, slot) home, and add the sums of every token there.

        Args:
            sum_SPD: the sum of each token's rows on this rank, 0 if it has none; slots without a
                token are not read. In at least fp32 if ranks split experts. Its gradient is
                unspecified in slots without a row here.
        """
        if self._exchange.num_sources == 1:
            return self.bring_sums(sum_SPD)
        return _Bring.apply(self, sum_SPD)

    def home(
        self,
        product: Callable[[], Tensor],
        listed: SlotList,
        offsets: Tensor,
        beside_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a product on a GPU and bring home its rows, summed for every token.

        A token's rows are added in ascending expert order, in at least fp32. Collectives first add
        those of one rank, then the ranks' sums. Rows without room count as zero.

        Args:
            product: computes the rows. It returns them, loose (see `kernels.Segments`); for direct
                stores it writes each row to its address at home instead.
            listed: the slots whose token has an expert of this rank, and the rows of the store.
            offsets: of the pass; the first is its first row.
            beside_N: loose fp32, a number to bring home with each row, or None.

        Returns:
            The sums, [T, D], and the numbers, fp32 [T, K]: 0 where a token has no choice, or its
            row found no room.
        """
        from padded_dispatch.kernels import rows

        sum_SPD = rows.sum_slots(product(), listed, offsets=offsets, wide=self.splits)
        beside_TK = None
        if beside_N is not None:
            beside_TK = self.bring_beside(rows.send_numbers(beside_N, listed, offsets=offsets))
        return self.bring(sum_SPD), beside_TK

    # The methods below run without autograd. The backward of each is another one, its transpose.

    def send(self, values_TD: Tensor) -> Tensor:
        """Send a row for every token, and return the rows that arrive, [S, P, D]."""
        if self._whole:
            rows_PD = _padded(values_TD, self._num_slots)
            rows_RPD = _gathered(rows_PD[None], self._exchange.group)
        else:
            rows_RPD = self._swap(values_TD[self._slots.token_RP])  # -1, no token, sends the last.
        return _gathered(rows_RPD, self._exchange.etp_group)

    def send_plan(self, prob_TK: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Send the plan; return probabilities, experts, places, [S, P, K], and counts, [S, L]."""
        plan, exchange, num_slots = self._plan, self._exchange, self._num_slots
        local, ranks, top_k = exchange.num_local_experts, exchange.num_ranks, prob_TK.shape[1]
        first = 0 if exchange.group is None else exchange.group.rank() * local
        # One int32 message: experts, places and bits of probabilities by token, then counts.
        bits_TX = prob_TK.contiguous().view(torch.int32)
        plan_TX = torch.cat([plan.expert_TK, plan.place_TK, bits_TX], 1)
        if self._whole:
            plan_PX = _padded(plan_TX, num_slots, fill=-1)
            message_X = torch.cat([plan_PX.flatten(), plan.kept_E])
            message_RX = _gathered(message_X[None], exchange.group)
        else:
            # Slots without a token, -1, send the last row, which is filled with -1.
            plan_RPX = _padded(plan_TX, self._num_tokens + 1, fill=-1)[self._slots.token_RP]
            message_RX = torch.cat([plan_RPX.flatten(1), plan.kept_E.view(ranks, local)], 1)
            message_RX = self._swap(message_RX)
        size = num_slots * plan_TX.shape[1]
        plan_RPX = message_RX[:, :size].unflatten(1, (num_slots, -1))
        count_RL = message_RX[:, size:]
        if self._whole:
            count_RL = count_RL[:, first : first + local]
        plan_SPX = _gathered(plan_RPX, exchange.etp_group)
        expert_SPK, place_SPK, bits_SPX = plan_SPX.tensor_split((top_k, 2 * top_k), 2)
        prob_SPK = bits_SPX.contiguous().view(prob_TK.dtype)
        count_SL = _gathered(count_RL, exchange.etp_group).contiguous()
        return prob_SPK, expert_SPK - first, place_SPK.contiguous(), count_SL

    def bring_sums(self, sum_SPD: Tensor) -> Tensor:
        """Send sums home and add those of every token, [T, D]: the transpose of `send`."""
        if self._exchange.num_sources == 1:
            sum_TD = sum_SPD[0, : self._num_tokens].to(self._dtype)
            # Autograd forbids in-place changes of a view that a Function returns.
            return sum_TD if torch.is_grad_enabled() else sum_TD.detach()
        first_TK = self._slots.first_TK
        assert first_TK is not None
        sum_QD = self._swap(self._add_split(sum_SPD).to(self._dtype)).flatten(0, 1)
        if sum_QD.is_cuda:
            from padded_dispatch.kernels import rows

            return rows.sum_rows(sum_QD, first_TK)
        wide = torch.promote_types(self._dtype, torch.float32)
        total_TD = sum_QD.new_zeros(self._num_tokens, sum_QD.shape[1], dtype=wide)
        for row_T in first_TK.T:
            total_TD = total_TD + sum_QD[row_T].to(wide).masked_fill((row_T < 0)[:, None], 0)
        return total_TD.to(self._dtype)

    def bring_beside(self, beside_SPK: Tensor) -> Tensor:
        """Send numbers home; return that of every choice, [T, K], 0 where there is no expert."""
        if self._exchange.num_sources == 1:
            beside_TK = beside_SPK[0, : self._num_tokens]
        else:
            beside_QK = self._swap(self._add_split(beside_SPK)).flatten(0, 1)
            k_K = torch.arange(beside_QK.shape[1], device=beside_QK.device)
            beside_TK = beside_QK[self._slots.row_TK, k_K]
        return beside_TK.masked_fill(self._slots.expert_TK < 0, 0)

    @unseen()  # A mode that kept a result of the past would leave `received` as it is.
    def _swap(self, blocks: Tensor) -> Tensor:
        """Send block r of dim 0 to rank r and receive block r from rank r; its own transpose."""
        if self._exchange.num_ranks == 1:
            return blocks
        received = torch.empty_like(blocks, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, blocks.contiguous(), group=self._exchange.group)
        return received

    @unseen()
    def _add_split(self, blocks: Tensor) -> Tensor:
        """Sum this rank's part over the ranks that split the same experts, in at least fp32."""
        group = self._exchange.etp_group
        if group is None:
            return blocks
        wide = blocks.to(torch.promote_types(blocks.dtype, torch.float32)).contiguous()
        summed = wide.new_empty(wide.shape[0] // group.size(), *wide.shape[1:])
        _reduce_scatter(summed, wide, group=group)
        return summed


@unseen()
def _gathered(blocks: Tensor, group: Any) -> Tensor:
    """Concatenate, along dim 0, the blocks of all ranks of a group; None is one rank."""
    if group is None:
        return blocks
    gathered = blocks.new_empty(group.size() * blocks.shape[0], *blocks.shape[1:])
    _all_gather(gathered, blocks.contiguous(), group=group)
    return gathered


def _padded(values: Tensor, length: int, fill: int = 0) -> Tensor:
    missing = length - values.shape[0]
    if missing == 0:
        return values
    return torch.cat([values, values.new_full((missing, *values.shape[1:]), fill)])


class _Send(torch.autograd.Function):
    """The tokens and plans of all sources, with gradients of tokens and probabilities."""

    @staticmethod
    def forward(ctx, wire: CollectiveWire, tokens_TD: Tensor, prob_TK: Tensor):
        ctx.wire = wire
        ctx.save_for_backward(*wire.routed().values())
        rows_SPD = wire.send(tokens_TD)
        prob_SPK, *numbers = wire.send_plan(prob_TK)
        return rows_SPD, prob_SPK, *numbers

    @staticmethod
    @nvtx_range("exchange backward")
    def backward(ctx, grad_SPD, grad_SPK, *_):  # pyright: ignore
        require_first_derivatives()
        wire, (_, needs_tokens, needs_probs) = _wire_of(ctx), ctx.needs_input_grad
        grad_TD = wire.bring_sums(grad_SPD) if needs_tokens else None
        return None, grad_TD, wire.bring_beside(grad_SPK) if needs_probs else None


class _Bring(torch.autograd.Function):
    """The sum of every token, with a gradient."""

    @staticmethod
    def forward(ctx, wire: CollectiveWire, sum_SPD: Tensor):
        ctx.wire, ctx.dtype = wire, sum_SPD.dtype
        ctx.save_for_backward(*wire.routed().values())
        return wire.bring_sums(sum_SPD)

    @staticmethod
    @nvtx_range("exchange backward")
    def backward(ctx, grad_TD):  # pyright: ignore[reportIncompatibleMethodOverride]
        require_first_derivatives()
        return None, _wire_of(ctx).send(grad_TD).to(ctx.dtype)


def _wire_of(ctx: Any) -> CollectiveWire:
    """Return the wire of a node, with the routing that autograd has saved for it."""
    return ctx.wire.rerouted(dict(zip(ctx.wire.routed(), ctx.saved_tensors, strict=True)))
