"""The exchange over several hosts: tokens between hosts, slots inside a host.

    there   every token goes once to each other host, to the rank with the same place there; that
            rank puts it into slots for the experts of its host, and sends those inside the host
    back    every slot goes inside the host to the rank that the token came over, and on from there

The ranks with the same place on all hosts are a rail. An all-gather along the rail needs no slots,
drops nothing, and has a size that no routing changes: (H - 1) * T rows per rank for H hosts. An
all-to-all over all ranks sends slots, (1 - 1 / H) * E * C rows. So the way there is shorter where H
is below the top-k times the capacity factor: for top-8 and factor 1.25 a fifth of the bytes with 2
hosts, four fifths with 8.

A copy of a token only to the hosts of its experts, into slots of (source, host), was simulated and
left out (`python -m tests.hosts --only copies`, notebooks/results/hosts.json). Factor 1.25, 4,096
tokens, 8 ranks per host, uniform routing (DeepSeek-V3's with its groups); MB between hosts on the
way there, and ms of a layer's links, forward and backward, by the rates of `tune.hosts`:

                          all-to-all        rail         copy
    Qwen3-30B-A3B  EP 16     84   6.7     17   6.0     17   6.0
                   EP 32    126  10.1     50   9.0     50   9.0
                   EP 64    147  11.7    117  12.6     98  11.8
    GPT-OSS-20B    EP 16     59   4.7     24   4.7     24   4.7
                   EP 32     88   7.1     71   7.8     62   7.4
    GPT-OSS-120B   EP 32     88   7.1     71   7.8     61   7.4
                   EP 64    103   8.3    165  12.1     86   9.0
    DeepSeek-V3    EP 16    294  23.5     59  21.0     59  21.0
                   EP 32    440  35.2    176  31.6    172  31.5
                   EP 64    514  41.1    411  44.0    255  37.7

Two hosts of these models are the all-gather either way. With more, the copy sends less, but GPT-OSS
and Qwen3 at EP 64 take longer than by the all-to-all, since the hop inside the host costs more than
is saved. Only DeepSeek-V3 at EP 64 gains, 8 %. A token without a slot would lose its rows on a
whole host: at factor 1.0 up to 1.1 % of the rows on top of what experts' slots drop, none at 1.25.
That is a second selection in the router, and a kind of drop that telemetry does not know.

Direct stores inside the host were left out, too. They pack rows by (expert, source), and here a
rank of the host sends for one rank of every host, whose rows would lie between those of others:
weight gradients would be other sums than those of the all-to-all. The way back needs slots, not
the sums that direct stores make.

The way back has one row per slot, as many bytes between hosts as the all-to-all. So results,
forward and backward, are those of the all-to-all, bit by bit. Dispatch and combine are each other's
transpose: the backward pass of combine takes the way there, that of dispatch the way back.

With `link_rows="summed"` the rank that a token came over adds what the experts of its host return,
in fp32 and ascending expert order, and one row per token and host goes back, as many as there. The
sums of hosts are rounded before they travel, so results are rounded once more. A layer's links by
the rates above, ms, modelled:

                          all-to-all   rail   summed
    Qwen3-30B-A3B  EP 16      6.7       6.0     3.3
                   EP 32     10.1       9.0     6.0
                   EP 64     11.7      12.6    11.4
    GPT-OSS-20B    EP 16      4.7       4.7     3.3
    DeepSeek-V3    EP 16     23.5      21.0    11.7
                   EP 32     35.2      31.6    21.1
                   EP 64     41.1      43.9    39.9

Probabilities and counts, a few bytes per slot, go by the all-to-all over all ranks. The rail also
carries the token of each slot, 4 bytes.

All ranks must have equally many tokens. Passes whose sizes fit their routing need not, so they go
by the all-to-all.

`prepare` takes the whole way there and `combine` the whole way back, because both need the plan.

Letters as in `padded_dispatch.exchange.alltoall`; H hosts, B ranks per host. Rank r of the group is
rank r % B of host r // B.
"""

import socket
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.library import custom_op

from padded_dispatch.config import DispatchConfig, require
from padded_dispatch.exchange import Slots
from padded_dispatch.exchange.alltoall import (
    AllToAllExchange,
    all_to_all,
    gather_into,
    group_name,
)
from padded_dispatch.exchange.symmetric_memory import free_bytes, gather_objects
from padded_dispatch.ops.plan import DispatchPlan
from padded_dispatch.ops.rows import gather_meta
from padded_dispatch.utils.nvtx import nvtx_range


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The groups of a rank of several hosts: `rail` across them, `host` inside its own."""

    rail: dist.ProcessGroup
    host: dist.ProcessGroup

    @property
    def way(self) -> tuple[str, str, int, int]:
        """Names and sizes of both, for ops."""
        return group_name(self.rail), group_name(self.host), self.rail.size(), self.host.size()


# Groups cost connections, so all layers of a group share them.
_hosts: WeakKeyDictionary[dist.ProcessGroup, dict[int, Hosts]] = WeakKeyDictionary()


def hosts_of(group: dist.ProcessGroup | None, ranks_per_host: int | None = None) -> Hosts:
    """Return the groups of this rank; a collective call of the members of `group`.

    Args:
        group: the expert-parallel group.
        ranks_per_host: members on each host, in the order of their ranks; None asks the hosts for
            their names.

    Raises:
        ValueError: on all ranks, unless there are several hosts with equally many members each.
    """
    name, fix = "the ranks of exchange='two-level'", "set exchange='alltoall'"
    if group is None or group.size() == 1:
        raise ValueError(f"{name} must be on several hosts, got one rank; {fix}")
    size, ranks = group.size(), dist.get_process_group_ranks(group)
    require(ranks == sorted(ranks), name, ranks, "ascend in their group", fix)
    if ranks_per_host is None:
        ranks_per_host = _equal_runs(gather_objects(group, socket.gethostname()))
    require(
        0 < ranks_per_host < size and size % ranks_per_host == 0,
        name,
        f"{ranks_per_host} ranks per host in a group of {size}",
        "be on several hosts, equally many on each",
        f"{fix}, or ranks_per_host, if ranks of a host are to play several",
    )
    of_group = _hosts.setdefault(group, {})
    if ranks_per_host not in of_group:
        _check_names(group)
        host, place = divmod(group.rank(), ranks_per_host)
        first = host * ranks_per_host
        of_group[ranks_per_host] = Hosts(
            rail=_subgroup(group, ranks[place::ranks_per_host]),
            host=_subgroup(group, ranks[first : first + ranks_per_host]),
        )
    return of_group[ranks_per_host]


def _check_names(group: dist.ProcessGroup) -> None:
    """Raise on all ranks if torch could not make groups of some members with these alone.

    It names a group by its members and by the groups that a process has made, and members with
    other names wait for each other. A default group that is bound to a device splits its
    communicator, which all processes of the job must join.
    """
    name, fix = "groups of the ranks of exchange='two-level'", "set exchange='alltoall'"
    counts = gather_objects(group, len(distributed_c10d._world.pg_names))
    rule = "be equally many, since torch names new ones by their number"
    before = f"build the model before groups that only some ranks have, or {fix}"
    require(len(set(counts)) == 1, name, counts, rule, before)
    default = distributed_c10d._get_default_group()
    require(
        getattr(default, "bound_device_id", None) is None or group.size() == dist.get_world_size(),
        name,
        f"a part of a default group that is bound to {getattr(default, 'bound_device_id', None)}",
        "be all ranks of the job, or made without device_id",
        f"leave device_id out of init_process_group, or {fix}",
    )


def _equal_runs(names: list[str]) -> int:
    """Return the length of the runs of equal names, 0 if they differ or a name comes again."""
    hosts = list(dict.fromkeys(names))
    length = len(names) // len(hosts)
    return length if names == [name for name in hosts for _ in range(length)] else 0


def _subgroup(group: dist.ProcessGroup, ranks: list[int]) -> dist.ProcessGroup:
    """Return a group of some members of `group`, called by these alone."""
    backend = dist.get_backend(group)
    made = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)  # As this rank is a member.
    return made


@dataclass(frozen=True, kw_only=True)
class LevelBytes:
    """Bytes that a rank sends to others in one pass: `there` to the experts, `back` from them.

    A backward pass sends as many: the gradients of the output there, those of the input back.

    Attributes:
        there_between, back_between: to ranks of other hosts.
        there_within, back_within: to ranks of its own host.
    """

    there_between: int
    there_within: int
    back_between: int
    back_within: int


def level_bytes(
    config: DispatchConfig,
    num_tokens: int,
    hidden_size: int,
    element_size: int,
    *,
    ranks_per_host: int,
    two_levels: bool,
    summed: bool = False,
) -> LevelBytes:
    """Return what a forward pass sends on each level, which no routing changes.

    Example: Qwen3-30B-A3B (E 128, K 8, D 2048, bf16) at T = 4096 and factor 1.25 sends 117 MB
    there between 8 hosts of 8 ranks by two levels, 147 MB by the all-to-all; between 2 hosts 17 MB
    and 84 MB.

    Args:
        config: config of the layer; its pools are of "expert" or "rank".
        num_tokens: tokens on this rank (T).
        hidden_size: width of a row (D).
        element_size: bytes of one element of a row.
        ranks_per_host: B.
        two_levels: of this exchange; otherwise of the all-to-all.
        summed: see `TwoLevelExchange`.
    """
    sizes, size = config.sizes(num_tokens), config.num_ranks
    slots, per_row = sizes.num_pools * sizes.pool_slots, hidden_size * element_size
    meta = 4 * (slots + config.num_experts)  # A probability per slot, a count per expert.
    between, within = size - ranks_per_host, ranks_per_host - 1  # Ranks, of `size` in all.
    back_between = slots * per_row * between // size
    if not two_levels:
        return LevelBytes(
            there_between=(slots * per_row + meta) * between // size,
            there_within=(slots * per_row + meta) * within // size,
            back_between=back_between,
            back_within=slots * per_row * within // size,
        )
    # All slots of a host's ranks go over a rank of this host, also those from other hosts.
    in_host = slots * per_row * within // ranks_per_host
    tokens = num_tokens * per_row * (between // ranks_per_host)
    if summed:  # And where each token's slots are.
        back_between = tokens + 4 * num_tokens * config.top_k * (between // ranks_per_host)
    return LevelBytes(
        there_between=tokens + (4 * slots + meta) * between // size,
        there_within=in_host + meta * within // size,
        back_between=back_between,
        back_within=in_host,
    )


def bytes_at_once(
    config: DispatchConfig,
    num_tokens: int,
    hidden_size: int,
    element_size: int,
    *,
    num_hosts: int,
    summed: bool = False,
) -> int:
    """Return the bytes of rows that one way holds at once, on top of what it is given.

    They are slots before and after a hop, or slots beside the tokens of a rank of each host; with
    sums on hosts also these tokens' before and after a hop. All that one pass allocates, without
    sums on hosts, is in `DispatchConfig.buffer_bytes`.
    """
    sizes, per_row = config.sizes(num_tokens), hidden_size * element_size
    slots, tokens = sizes.num_pools * sizes.pool_slots, num_hosts * num_tokens
    there, back = slots + tokens + 1, 2 * (max(slots, tokens) if summed else slots)
    return per_row * max(there, back)


def require_room(
    config: DispatchConfig,
    tokens_TD: Tensor,
    group: dist.ProcessGroup,
    num_hosts: int,
    summed: bool = False,
) -> None:
    """Raise on all ranks if a GPU has no room for two levels; a collective call if on GPUs.

    Raises:
        ValueError: says how much is needed and free.
    """
    if not tokens_TD.is_cuda:
        return
    num_tokens, width = tokens_TD.shape
    size = tokens_TD.element_size()
    need = bytes_at_once(config, num_tokens, width, size, num_hosts=num_hosts, summed=summed)
    free = free_bytes(group, tokens_TD.device)
    require(
        need <= free,
        "exchange='two-level'",
        f"{free / 2**30:.2f} GiB on the rank that has least",
        f"have {need / 2**30:.2f} GiB free for slots before and after a hop",
        "lower the capacity factor or the tokens per rank, or set exchange='alltoall'",
    )


class TwoLevelExchange(AllToAllExchange):
    """`Exchange` that sends tokens between hosts and slots inside a host.

    Args:
        num_local_experts: experts on this rank (L).
        hosts: groups of this rank, from `hosts_of`.
        group: the expert-parallel group (R ranks).
        etp_group: the group whose ranks split every expert's ffn, or None for one rank.
        packed: hand out the packed layout of `ExpertInput` instead of the padded one.
        experts_per_pool: local experts that share a pool (X); the padded layout needs 1.
        summed: add a token's rows on each host before they go back, which rounds once more.
    """

    def __init__(
        self,
        num_local_experts: int,
        hosts: Hosts,
        group: dist.ProcessGroup,
        etp_group: dist.ProcessGroup | None = None,
        *,
        packed: bool = False,
        experts_per_pool: int = 1,
        summed: bool = False,
    ) -> None:
        groups = group, etp_group
        super().__init__(
            num_local_experts, *groups, packed=packed, experts_per_pool=experts_per_pool
        )
        self._way = *hosts.way, not packed, summed

    @nvtx_range("exchange")
    def prepare(
        self, tokens_TD: Tensor, probs_TE: Tensor, plan: DispatchPlan, num_rows: int
    ) -> Slots:
        """Send tokens and probabilities to their experts: received rows [M, P, D] and meta."""
        maps = plan.slot_of_TK, plan.choice_of_slot_GP
        meta_GPX = gather_meta(probs_TE, plan)
        return Slots(
            rows_MPD=_go(tokens_TD, *maps, *self._way),
            meta_MPX=all_to_all(meta_GPX, self._group),
        )

    def move(self, outgoing: Slots) -> Slots:
        """Return the slots: `prepare` has sent them, `combine` sends them back."""
        return outgoing

    move_back = move

    @nvtx_range("exchange")
    def combine(self, incoming: Slots, plan: DispatchPlan, offsets_LS: Tensor | None) -> Tensor:
        """Send slots back to the ranks of their tokens, and sum those of every token: [T, D]."""
        maps = plan.slot_of_TK, plan.choice_of_slot_GP
        return _return(incoming.rows_MPD, *maps, *self._way)


def _swapped(blocks: Tensor, first: int, second: int) -> Tensor:
    """Swap two dimensions that dim 0 consists of."""
    by_both = blocks.unflatten(0, (first, second, -1))
    return by_both.transpose(0, 1).flatten(0, 2)


@custom_op("padded_dispatch::go_over_hosts", mutates_args=())
def _go(
    tokens_TD: Tensor,
    slot_of_TK: Tensor,
    choice_of_slot_GP: Tensor,
    rail: str,
    host: str,
    num_hosts: int,
    per_host: int,
    zeros: bool,
    summed: bool,
) -> Tensor:
    """Send tokens to their experts: [T, D] to [M, P, D], by source. Transpose of `_return`."""
    # Nested calls keep no name for what is no longer read, so at most two buffers are alive.
    by_host_MP = _rows_over_rail(slot_of_TK, choice_of_slot_GP, rail, num_hosts)
    row_MP = _swapped(by_host_MP, num_hosts, per_host)
    return _swapped(
        all_to_all(_slots_of_host(tokens_TD, row_MP, rail, num_hosts, zeros), host),
        per_host,
        num_hosts,
    )


def _rows_over_rail(
    slot_of_TK: Tensor, choice_of_slot_GP: Tensor, rail: str, num_hosts: int
) -> Tensor:
    """Return which of the rail's rows the slots of this rank's host take: int64 [M, P], by host.

    The rail's rows are the tokens of all its ranks, and a last one for empty slots.
    """
    num_tokens, top_k = slot_of_TK.shape
    token_GP = torch.where(choice_of_slot_GP >= 0, choice_of_slot_GP // top_k, -1)
    token_HGP = all_to_all(token_GP, rail).unflatten(0, (num_hosts, -1))
    first_H11 = torch.arange(num_hosts, device=token_GP.device).view(-1, 1, 1) * num_tokens
    row_HGP = torch.where(token_HGP >= 0, token_HGP + first_H11, num_hosts * num_tokens)
    return row_HGP.flatten(0, 1)


def _slots_of_host(
    tokens_TD: Tensor, row_MP: Tensor, rail: str, num_hosts: int, zeros: bool
) -> Tensor:
    """Gather the rail's tokens into the slots of this rank's host: [M, P, D]."""
    num_rows = num_hosts * tokens_TD.shape[0]
    rows_ND = tokens_TD.new_empty(num_rows + 1, tokens_TD.shape[1])
    gather_into(rows_ND[:-1], tokens_TD, rail)
    rows_ND[-1] = 0.0 if zeros else torch.nan  # What empty slots take.
    return rows_ND.index_select(0, row_MP.flatten()).view(*row_MP.shape, -1)


@custom_op("padded_dispatch::return_over_hosts", mutates_args=())
def _return(
    rows_MPD: Tensor,
    slot_of_TK: Tensor,
    choice_of_slot_GP: Tensor,
    rail: str,
    host: str,
    num_hosts: int,
    per_host: int,
    zeros: bool,
    summed: bool,
) -> Tensor:
    """Send slots back to their tokens, and sum those of each: [M, P, D] to [T, D]."""
    # By host of their tokens. Names are used again, so at most two buffers are alive.
    rows = _swapped(all_to_all(_swapped(rows_MPD, num_hosts, per_host), host), per_host, num_hosts)
    slots = slot_of_TK
    if summed:
        num_slots = choice_of_slot_GP.numel() // num_hosts
        slots = _slots_of_rail(slot_of_TK, num_slots, rail, num_hosts)
    else:
        rows = all_to_all(rows, rail)
    rows = torch.ops.padded_dispatch.combine(rows, slots, choice_of_slot_GP, zeros)
    if not summed:
        return rows
    rows = all_to_all(rows, rail).unflatten(0, (num_hosts, -1))
    return rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32)).to(rows.dtype)


def _slots_of_rail(slot_of_TK: Tensor, num_slots: int, rail: str, num_hosts: int) -> Tensor:
    """Return which slots on this rank's host the rail's tokens have: int32 [H * T, K], or -1.

    `num_slots`: of a source on each host.
    """
    host_H11 = torch.arange(num_hosts, dtype=torch.int32, device=slot_of_TK.device).view(-1, 1, 1)
    slot_HTK = slot_of_TK - host_H11 * num_slots  # Of a dropped row below 0, too.
    there_HTK = torch.where((slot_HTK >= 0) & (slot_HTK < num_slots), slot_HTK, -1)
    here_HTK = all_to_all(there_HTK, rail)
    return torch.where(here_HTK >= 0, here_HTK + host_H11 * num_slots, -1).flatten(0, 1)


@_go.register_fake
def _(tokens_TD, slot_of_TK, choice_of_slot_GP, rail, host, num_hosts, per_host, zeros, summed):
    return tokens_TD.new_empty(*choice_of_slot_GP.shape, tokens_TD.shape[1])


@_return.register_fake
def _(rows_MPD, slot_of_TK, choice_of_slot_GP, rail, host, num_hosts, per_host, zeros, summed):
    return rows_MPD.new_empty(slot_of_TK.shape[0], rows_MPD.shape[-1])


def _save(ctx, inputs, output) -> None:
    _, slot_of_TK, choice_of_slot_GP, *ctx.way = inputs
    ctx.save_for_backward(slot_of_TK, choice_of_slot_GP)


def _go_backward(ctx, grad_MPD):
    return _return(grad_MPD, *ctx.saved_tensors, *ctx.way), *[None] * 8


def _return_backward(ctx, grad_TD):
    return _go(grad_TD, *ctx.saved_tensors, *ctx.way), *[None] * 8


_go.register_autograd(nvtx_range("exchange backward")(_go_backward), setup_context=_save)
_return.register_autograd(nvtx_range("exchange backward")(_return_backward), setup_context=_save)
