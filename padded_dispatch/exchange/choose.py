"""Choose a layer's exchange and the layout of its experts' rows, per number of tokens.

`LayerExchanges` holds the exchanges that one layer may use. Which one serves a pass follows from
the config, T, and the kind of machine, and from nothing that the router decides. The choice is made
in the first eager pass with a T, alike on all ranks, and stays.

`"auto"` takes direct stores where the experts read packed rows, all ranks of the group are GPUs of
one host that reach each other's memory, rows and probabilities are at most fp32, and twice the
buffers of all layers fit into the memory that is free in the first pass (optimizer states are often
allocated later). With few rows (F > 20 * m), reading the experts' weights takes most of the time,
and one `torch.bmm` reads them faster: then it takes the all-to-all and padded rows.

Packed or padded rows, for experts that take either. One `torch.bmm` over all slots (padded) is
faster per row than a grouped product over the real rows (packed), and computes the padding. With
m = S * T * K / E rows per expert in perfect balance and n = S * C slots, padded rows are chosen
where n is below 1.05 * m + 90 if the rows come from one rank, and below 0.84 * m + 65 behind an
all-to-all, which copies the padded layout once more. Experts that share pools read packed rows: the
padded layout belongs to slots that one expert owns. notebooks/results/LOG.md has the measurements.

Letters: T tokens, K experts per token, E experts, L experts on a rank, R ranks of the group, S
sources, C capacity, D hidden size, F ffn size, N rows that a rank's experts can get.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.config import DispatchConfig, ExchangeKind, PoolSizes, require, require_tokens
from padded_dispatch.exchange import Exchange
from padded_dispatch.exchange.agreement import Agreement, Values
from padded_dispatch.exchange.collectives import AllToAllExchange
from padded_dispatch.exchange.direct import DirectExchange
from padded_dispatch.exchange.local import LocalExchange
from padded_dispatch.exchange.symmetric_memory import (
    Shape,
    direct_bytes,
    free_bytes,
    shares_workspace,
)

Layout = Literal["padded", "packed", "either"]

# (per row, per expert): what a packed row and an expert of packed rows cost, in padded rows.
_ALONE = 1.05, 90
_EXCHANGED = 0.84, 65

# F over rows per expert, from which on reading weights takes most of the time; see above.
_OUTWEIGHS = 20

# Every shape has buffers that stay, so "auto" does not follow a T that changes again and again.
_MAX_DIRECT_SHAPES = 4


def prefers_padded(config: DispatchConfig, num_tokens: int) -> bool:
    """Return whether experts that take either layout are faster on padded rows.

    Example: Qwen3-30B-A3B (E 128, K 8) on one rank at T = 4096 has m = 256 rows per expert. Factor
    1.25 gives n = 320 slots, below 1.05 * 256 + 90 = 358.8: padded. Factor 2.0 gives 512: packed.
    """
    per_row, per_expert = _ALONE if config.num_sources == 1 else _EXCHANGED
    slots = config.num_sources * config.capacity(num_tokens)
    return slots < per_row * _balanced(config, num_tokens) + per_expert


def _balanced(config: DispatchConfig, num_tokens: int) -> float:
    """Return m, the rows per expert in perfect balance."""
    return config.num_sources * num_tokens * config.top_k / config.num_experts


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """An exchange and why it was chosen.

    `kind`: "alltoall" or "direct"; "none" for one rank. `reason`: for the log.
    `sizes`: those of the pass as this exchange lays rows out, for `make_plan`.
    """

    exchange: Exchange
    kind: Literal["alltoall", "direct", "none"]
    reason: str
    sizes: PoolSizes


class LayerExchanges:
    """The exchanges of one layer. Creating it is a collective call of both groups' members.

    Args:
        config: its sizes of groups, number of experts and kind of pools are read.
        agreement: an agreement over the same groups.
        group: the expert-parallel group; None for a single rank.
        etp_group: the group whose ranks split every expert's ffn; None where none do.
        layout: what the experts read: padded rows, packed rows, or either. Experts that share pools
            read packed rows.
        kind: "alltoall"; "direct", which needs packed rows; or "auto".
        microbatches_in_flight: with direct stores, the most passes that wait for their backward
            pass; each has a buffer.
        num_layers: layers on this rank that will want buffers; all must fit for "auto".
        ffn_size: width of the experts' hidden layer (F), for "auto"; 0 if unknown.
        why_not_direct: reason for which "auto" leaves direct stores out in all passes; "" if none.

    Attributes:
        direct: the exchange by direct stores, if it may serve passes.
        no_direct: why direct stores are left out in all passes, if they are.

    Raises:
        ValueError: on all ranks, when they differ in an argument, or "direct" cannot work.
    """

    def __init__(
        self,
        config: DispatchConfig,
        agreement: Agreement,
        group: dist.ProcessGroup | None = None,
        etp_group: dist.ProcessGroup | None = None,
        *,
        layout: Layout,
        kind: ExchangeKind = "auto",
        microbatches_in_flight: int = 1,
        num_layers: int = 1,
        ffn_size: int = 0,
        why_not_direct: str = "",
    ) -> None:
        if kind == "auto" and why_not_direct:
            kind = "alltoall"
        kinds, layouts = get_args(ExchangeKind), get_args(Layout)
        # Compare before anything is built: the constructor of DirectExchange runs collectives. All
        # that "auto" decides by is compared here or by `agree_on_shapes`, because some of its
        # decisions run collectives and others do not.
        agreement.check(
            exchange=kinds.index(kind) if kind in kinds else -1,
            layout=layouts.index(layout),
            microbatches_in_flight=microbatches_in_flight,
            num_layers=num_layers,
            ffn_size=ffn_size,
        )
        pool = config.capacity_pool
        require(kind in kinds, "exchange", kind, f"be one of {', '.join(kinds)}")
        require(
            pool == "expert" or layout != "padded",
            "capacity_pool",
            pool,
            "be 'expert' with experts that read padded rows",
            "set experts='packed' or capacity_pool='expert'",
        )
        if pool != "expert" and layout == "either":
            layout = "packed"
        self._group, self._kind = group, kind
        self._microbatches_in_flight = microbatches_in_flight
        self._num_layers, self._ffn_size = num_layers, ffn_size
        self.direct: DirectExchange | None = None
        self.no_direct = why_not_direct or f'exchange="{kind}" was asked for'
        groups = config.num_local_experts, group, etp_group
        if kind in ("auto", "direct"):
            try:
                require(
                    layout != "padded",
                    "the experts' layout",
                    layout,
                    "be packed with exchange='direct'",
                    "set experts='packed' or exchange='alltoall'",
                )
                self.direct = DirectExchange(*groups, microbatches_in_flight=microbatches_in_flight)
            except ValueError as error:
                if kind == "direct":
                    raise
                self.no_direct = str(error)
        # By whether experts read packed rows; the last one serves passes that fit.
        self._others: dict[bool, Exchange] = {}
        if layout != "packed":
            self._others[False] = self._fitting = AllToAllExchange(*groups, packed=False)
        if layout != "padded" and config.num_sources == 1:
            self._others[True] = self._fitting = LocalExchange()
        elif layout != "padded":
            local = config.num_local_experts
            pools = 1 if pool == "expert" else local
            self._others[True] = AllToAllExchange(*groups, packed=True, experts_per_pool=pools)
            self._fitting = AllToAllExchange(*groups, packed=True, experts_per_pool=local)
        self._choices: dict[tuple[int, int, int], Choice] = {}

    def choose(self, config: DispatchConfig, tokens_TD: Tensor, probs_TE: Tensor) -> Choice:
        """Return the exchange for a pass. The first pass with a T and sizes is a collective call.

        Call `agree_on_shapes` before it, which raises in a capture that has a new T or C. The
        capacity factor of `config` may change between passes.
        """
        sizes = config.sizes(len(tokens_TD))
        key = len(tokens_TD), sizes.num_pools, sizes.pool_slots
        if key not in self._choices:
            self._choices[key] = self._decide(config, sizes, tokens_TD, probs_TE)
        return self._choices[key]

    @property
    def _collectives(self) -> Literal["alltoall", "none"]:
        """Which exchange passes take that make no direct stores."""
        return "none" if self._fitting.num_sources == 1 else "alltoall"

    def fitting(self, sizes: PoolSizes) -> Choice:
        """Return the exchange of a pass with `FIT` of these sizes, without a buffer for each."""
        kind, reason = self._collectives, "sizes fit each pass"
        return Choice(exchange=self._fitting, kind=kind, reason=reason, sizes=sizes)

    @property
    def fits_packed(self) -> bool:
        """True if experts read packed rows in passes with `FIT`."""
        return self._fitting.packed

    def chosen(self, num_tokens: int, num_pools: int, pool_slots: int) -> Exchange:
        """Return the exchange that `choose` chose for T and the pools of a plan, G and P."""
        return self._choices[num_tokens, num_pools, pool_slots].exchange

    def _decide(
        self, config: DispatchConfig, sizes: PoolSizes, tokens_TD: Tensor, probs_TE: Tensor
    ) -> Choice:
        reason = self.no_direct
        if self.direct is not None and self._group is not None:
            shape = Shape(
                num_experts=config.num_experts,
                num_slots=sizes.num_pools * sizes.pool_slots,
                num_rows=sizes.num_rows,
                width=tokens_TD.shape[1],
                dtype=tokens_TD.dtype,
                num_places=self._group.size() * tokens_TD.shape[0] * config.top_k,
            )
            reason = ""
            if self._kind == "auto":
                reason = self._why_not_direct(config, shape, tokens_TD, probs_TE)
            if not reason:
                reason = f"the {self._group.size()} ranks share a host and reach each other's GPUs"
                return Choice(exchange=self.direct, kind="direct", reason=reason, sizes=sizes)
        if config.num_sources == 1:
            reason = "one rank"
        packed = True in self._others
        if len(self._others) == 2:
            packed = not prefers_padded(config, len(tokens_TD))
            speed = "slow" if packed else "fast"
            reason += f"; batched experts are {speed} for {sizes.pool_slots} slots per source and "
            reason += "expert"
        exchange = self._others[packed]
        return Choice(exchange=exchange, kind=self._collectives, reason=reason, sizes=sizes)

    def _why_not_direct(
        self, config: DispatchConfig, shape: Shape, tokens_TD: Tensor, probs_TE: Tensor
    ) -> str:
        """Return why "auto" leaves direct stores out for a pass; empty if it takes them."""
        num_tokens = tokens_TD.shape[0]
        for name, values in (("rows", tokens_TD), ("probabilities", probs_TE)):
            if not values.is_cuda or values.dtype == torch.float64:
                return f"the {name} are {values.dtype} on {values.device.type}"
        if False in self._others and prefers_padded(config, num_tokens):
            balanced = _balanced(config, num_tokens)
            if self._ffn_size > _OUTWEIGHS * balanced:
                return f"{balanced:.0f} rows per expert are few for weights of {self._ffn_size}"
        assert self._group is not None
        if sum(choice.kind == "direct" for choice in self._choices.values()) == _MAX_DIRECT_SHAPES:
            return f"{_MAX_DIRECT_SHAPES} other shapes have buffers"
        # Once one layer of a shape has buffers, the others follow: the sum below counted theirs,
        # and by now less memory is free.
        if shares_workspace(self._group, shape):
            return ""
        num_buffers = self._num_layers * self._microbatches_in_flight
        need = direct_bytes(shape, num_ranks=self._group.size(), num_buffers=num_buffers)
        free = free_bytes(self._group, tokens_TD.device)
        if 2 * need <= free:
            return ""
        return (
            f"buffers of direct stores need {need / 2**30:.2f} GiB for {self._num_layers} layers, "
            f"and {free / 2**30:.2f} GiB are free"
        )


def agree_on_shapes(
    agreement: Agreement,
    config: DispatchConfig,
    tokens_TD: Tensor,
    rules: Values,
    *,
    any_tokens: bool = False,
    **shapes: object,
) -> None:
    """Compare everything that decides a result over the ranks, before the routing is known.

    T = 0 is checked after the comparison, so every rank raises and none is left in a collective.

    Args:
        agreement: an agreement over the layer's groups.
        config: config of the pass.
        tokens_TD: its D and dtype are read as well.
        rules: further values that must be equal on all ranks.
        any_tokens: ranks may have different T; for passes with `FIT`, whose sizes are agreed later.
        **shapes: as `rules`, of values that a CUDA graph captures.

    Raises:
        ValueError: on all ranks, when they differ or T is 0.
        AbsentRanksError: on all ranks that wait, when one does not come.
    """
    num_tokens, hidden_size = tokens_TD.shape
    if not torch.compiler.is_compiling():
        agreement.check(
            rules_of(config) + rules,
            T="any but 0" if any_tokens and num_tokens else num_tokens,
            D=hidden_size,
            E=config.num_experts,
            K=config.top_k,
            C=config.capacity(num_tokens) if num_tokens and not config.fits else 0,
            dtype=tokens_TD.dtype,
            **shapes,
        )
    require_tokens(num_tokens)


@functools.cache
def rules_of(config: DispatchConfig) -> Values:
    """Return the settings of `config` beside the sizes that `agree_on_shapes` compares anyway."""
    compared = ("num_experts", "top_k")
    fields = (field.name for field in dataclasses.fields(config) if field.init)
    return tuple((name, getattr(config, name)) for name in fields if name not in compared)
