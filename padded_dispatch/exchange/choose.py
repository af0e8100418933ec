"""Choose a layer's exchange and the layout of its experts' rows, per number of tokens.

`LayerExchanges` holds the exchanges that one layer may use. Which one serves a pass follows from
the config, T, and the kind of machine, and from nothing that the router decides. The choice is made
in the first eager pass with a T, alike on all ranks, and stays.

Direct stores or the all-to-all. `"auto"` takes direct stores where the experts read packed rows,
all ranks of the group are GPUs of one host that reach each other's memory, rows and probabilities
are at most fp32, and twice the buffers of all layers fit into the memory that is free in the first
pass (optimizer states are often allocated later). On 2 H200 they beat the all-to-all in 25 of 27
cases, by 1 to 32 %. With few rows, reading the experts' weights takes most of the time, and one
`torch.bmm` reads them faster: batched experts over the all-to-all were 1 and 3 % faster for
GPT-OSS-20B at 512 tokens, factors 1.0 and 1.25, and 3 to 13 % for all three models at 256. So
"auto" takes the all-to-all if F > 20 * m, with m as below, and the rule below prefers padded rows.

Packed or padded rows, for experts that take either. One `torch.bmm` over all slots (padded) is
faster per row than a grouped product over the real rows (packed), and computes the padding. With
m = S * T * K / E rows per expert in perfect balance and n = S * C slots, packed rows cost about as
much as

    1.05 * m + 90    padded rows, where the rows come from one rank and are not moved again;
    0.84 * m + 65    padded rows behind an all-to-all: the padded layout is copied once more.

So padded rows are chosen where n is below that. Milliseconds of a layer in a CUDA graph, forward
and backward, one H200, bf16, uniform routing, packed and padded; the slower choice is taken once,
and costs 0.1 %:

    factor             1.0           1.25            1.5            2.0
    Qwen3      512   1.52  1.30    1.53  1.32      1.51  1.32      1.52  1.35
              4096   2.54  2.29    2.83  2.65      2.87  3.01      2.90  3.53
             16384   7.96  7.85    8.38  8.95      8.41 10.19      8.42 12.43
    GPT-OSS    512   1.84  1.57    1.89  1.65      1.88  1.66      1.88  1.75
              4096   5.14  4.79    5.57  5.56      5.54  6.22      5.60  7.64
             16384  19.02 16.88   19.28 20.30     19.15 22.96     19.23 29.40

The line for the all-to-all was fitted when the products of packed rows were torch's, 2 to 4 % of a
layer slower: it cost at most 1.2 % in 3 of 27 cases on two H200. With it, over all of
notebooks/results/defaults.json, 66 cases on one and two H200, "auto" took at most 1.014 times as
long as the fastest explicit choice.

Experts that share pools read packed rows: the padded layout belongs to slots that one expert owns.
Two levels, for groups over several hosts, are taken only when asked for: no machine with several
hosts has run them. See `padded_dispatch.exchange.two_level` for the bytes that they save.

Letters: T tokens, K experts per token, E experts, L experts on a rank, R ranks of the group, S
sources, C capacity, D hidden size, F ffn size, N rows that a rank's experts can get.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from padded_dispatch.config import (
    DispatchConfig,
    ExchangeKind,
    LinkRows,
    PoolSizes,
    require,
    require_tokens,
)
from padded_dispatch.exchange import Exchange
from padded_dispatch.exchange.agreement import Agreement, Values
from padded_dispatch.exchange.alltoall import AllToAllExchange
from padded_dispatch.exchange.direct import DirectExchange
from padded_dispatch.exchange.links import num_places
from padded_dispatch.exchange.local import LocalExchange
from padded_dispatch.exchange.symmetric_memory import (
    Shape,
    direct_bytes,
    free_bytes,
    shares_workspace,
)
from padded_dispatch.exchange.two_level import TwoLevelExchange, hosts_of, require_room

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

    Args:
        config: config of the layer.
        num_tokens: tokens on this rank (T).
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

    `kind`: "alltoall", "direct" or "two-level"; "none" for one rank. `reason`: for the log.
    `sizes`: those of the pass as this exchange lays rows out, for `make_plan`.
    `direct`: the exchange again if it stores directly; such a pass may be a fused one.
    """

    exchange: Exchange
    kind: Literal["alltoall", "direct", "two-level", "none"]
    reason: str
    sizes: PoolSizes
    direct: DirectExchange | None = None


class LayerExchanges:
    """The exchanges of one layer. Creating it is a collective call of both groups' members.

    Args:
        config: its sizes of groups, number of experts and kind of pools are read.
        agreement: an agreement over the same groups.
        group: the expert-parallel group; None for a single rank.
        etp_group: the group whose ranks split every expert's ffn; None where none do.
        layout: what the experts read: padded rows, packed rows, or either. Experts that share pools
            read packed rows.
        kind: "alltoall", any backend's; "direct", stores between the GPUs of one host, which needs
            packed rows; "two-level", for a group over several hosts; or "auto".
        microbatches_in_flight: with direct stores, the most forward passes of the layer that wait
            for their backward pass; each has a buffer.
        link_rows: with direct stores, how often a token crosses a link; see
            `padded_dispatch.exchange.links`.
        ranks_per_host: with two levels, ranks of the group on each host; None asks the hosts.
        num_layers: layers of the model on this rank that will want buffers; "auto" makes sure that
            all of them fit.
        ffn_size: width of the experts' hidden layer (F), for "auto"; 0 if unknown.
        why_not_direct: reason for which "auto" leaves direct stores out in all passes; "" if none.

    Attributes:
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
        link_rows: LinkRows = "auto",
        ranks_per_host: int | None = None,
        num_layers: int = 1,
        ffn_size: int = 0,
        why_not_direct: str = "",
    ) -> None:
        if kind == "auto" and why_not_direct:
            kind = "alltoall"
        kinds, layouts, links = get_args(ExchangeKind), get_args(Layout), get_args(LinkRows)
        # Compare before anything is built: the constructor of DirectExchange runs collectives. All
        # that "auto" decides by is compared here or by `agree_on_shapes`, because some of its
        # decisions run collectives and others do not.
        agreement.check(
            exchange=kinds.index(kind) if kind in kinds else -1,
            layout=layouts.index(layout),
            microbatches_in_flight=microbatches_in_flight,
            link_rows=links.index(link_rows) if link_rows in links else -1,
            ranks_per_host=ranks_per_host,
            num_layers=num_layers,
            ffn_size=ffn_size,
        )
        pool = config.capacity_pool
        _check(kind, link_rows, layout, pool)
        if pool != "expert" and layout == "either":
            layout = "packed"
        self._hosts = hosts_of(group, ranks_per_host) if kind == "two-level" else None
        self._group = group
        self._etp_group = etp_group
        self._kind = kind
        self._microbatches_in_flight = microbatches_in_flight
        self._link_rows: LinkRows = link_rows
        self._num_layers = num_layers
        self._ffn_size = ffn_size
        num_local_experts = config.num_local_experts
        self._direct: DirectExchange | None = None
        self.no_direct = why_not_direct or f'exchange="{kind}" was asked for'
        if kind in ("auto", "direct"):
            try:
                self._direct = self._by_direct_stores(num_local_experts, layout)
            except ValueError as error:
                if kind == "direct":
                    raise
                self.no_direct = str(error)
        self._packed: Exchange | None = None
        self._padded: Exchange | None = None
        # Passes that fit may have other numbers of tokens on each rank, which a rail cannot gather.
        groups = num_local_experts, group, etp_group
        self._fitting: Exchange
        if layout != "packed":
            self._padded = self._by_collectives(num_local_experts, packed=False)
            self._fitting = AllToAllExchange(*groups, packed=False)
        if layout != "padded":
            shared = 1 if pool == "expert" else num_local_experts
            self._packed = self._fitting = LocalExchange()
            if config.num_sources > 1:
                self._packed = self._by_collectives(
                    num_local_experts, packed=True, experts_per_pool=shared
                )
                self._fitting = AllToAllExchange(
                    *groups, packed=True, experts_per_pool=num_local_experts
                )
        self._choices: dict[tuple[int, ...], Choice] = {}
        self._chosen: dict[tuple[int, ...], Exchange] = {}

    def _by_direct_stores(self, num_local_experts: int, layout: Layout) -> DirectExchange:
        """Return the exchange by direct stores, or raise `ValueError` where it cannot work."""
        require(
            layout != "padded",
            "the experts' layout",
            layout,
            "be packed with exchange='direct'",
            "set experts='packed' or exchange='alltoall'",
        )
        return DirectExchange(
            num_local_experts,
            self._group,
            self._etp_group,
            microbatches_in_flight=self._microbatches_in_flight,
            link_rows=self._link_rows,
        )

    def _by_collectives(self, num_local_experts: int, **settings: Any) -> AllToAllExchange:
        """Return an exchange by collectives, over two levels if that was asked for."""
        if self._hosts is None:
            return AllToAllExchange(num_local_experts, self._group, self._etp_group, **settings)
        assert self._group is not None
        groups = self._group, self._etp_group
        summed = self._link_rows == "summed"
        return TwoLevelExchange(num_local_experts, self._hosts, *groups, summed=summed, **settings)

    def choose(
        self,
        config: DispatchConfig,
        tokens_TD: Tensor,
        probs_TE: Tensor,
    ) -> Choice:
        """Return the exchange for a pass. The first pass with a T and sizes is a collective call.

        Call `agree_on_shapes` before it, which raises in a capture that has a new T or C.

        Args:
            config: the config of this pass; its capacity factor may change between steps.
            tokens_TD: floating point [T, D].
            probs_TE: floating point [T, E]; its dtype is read.
        """
        num_tokens = tokens_TD.shape[0]
        sizes = config.sizes(num_tokens)
        key = num_tokens, sizes.num_pools, sizes.pool_slots, sizes.num_rows
        choice = self._choices.get(key)
        if choice is None:
            choice = self._decide(config, sizes, tokens_TD, probs_TE)
            self._choices[key] = choice
            laid_out = choice.sizes
            self._chosen[num_tokens, laid_out.num_pools, laid_out.pool_slots] = choice.exchange
        return choice

    @property
    def direct(self) -> DirectExchange | None:
        """The exchange by direct stores, if it may serve passes."""
        return self._direct

    @property
    def num_hosts(self) -> int:
        """Hosts of the group with two levels, 1 without."""
        return 1 if self._hosts is None else self._hosts.rail.size()

    @property
    def _collectives(self) -> Literal["alltoall", "two-level"]:
        """Which exchange by collectives the layer has."""
        return "alltoall" if self._hosts is None else "two-level"

    def fitting(self, sizes: PoolSizes) -> Choice:
        """Return the exchange of a pass with `FIT`: one without a buffer for each size.

        Args:
            sizes: those that `padded_dispatch.exchange.fit` found.
        """
        exchange = self._fitting
        kind = "none" if exchange.num_sources == 1 else "alltoall"
        return Choice(exchange=exchange, kind=kind, reason="sizes fit each pass", sizes=sizes)

    @property
    def fits_packed(self) -> bool:
        """True if experts read packed rows in passes with `FIT`."""
        return self._fitting.packed

    def chosen(self, num_tokens: int, num_pools: int, pool_slots: int) -> Exchange:
        """Return the exchange that `choose` chose for T and the pools of a plan, G and P."""
        return self._chosen[num_tokens, num_pools, pool_slots]

    def is_packed(self, config: DispatchConfig, num_tokens: int) -> bool:
        """Return whether experts are expected to read packed rows; callable before the first pass.

        Where the machine allows direct stores, it assumes them.
        """
        if self._direct is not None or self._padded is None:
            return True
        return self._packed is not None and not prefers_padded(config, num_tokens)

    def _decide(
        self, config: DispatchConfig, sizes: PoolSizes, tokens_TD: Tensor, probs_TE: Tensor
    ) -> Choice:
        reason = self.no_direct
        if self._direct is not None and self._group is not None:
            shape = Shape(
                num_experts=config.num_experts,
                num_slots=sizes.num_pools * sizes.pool_slots,
                num_rows=sizes.num_rows,
                width=tokens_TD.shape[1],
                dtype=tokens_TD.dtype,
                num_places=num_places(
                    self._link_rows,
                    num_ranks=self._group.size(),
                    num_experts=config.num_experts,
                    top_k=config.top_k,
                    num_tokens=tokens_TD.shape[0],
                ),
                summed=self._link_rows == "summed",
            )
            reason = ""
            if self._kind == "auto":
                reason = self._why_not_direct(config, shape, tokens_TD, probs_TE)
            if not reason:
                reason = f"the {self._group.size()} ranks share a host and reach each other's GPUs"
                direct = self._direct
                return Choice(
                    exchange=direct, kind="direct", reason=reason, sizes=sizes, direct=direct
                )
        kind = self._collectives
        if config.num_sources == 1:
            kind, reason = "none", "one rank"
        if self._hosts is not None and self._group is not None:
            summed = self._link_rows == "summed"
            require_room(config, tokens_TD, self._group, self.num_hosts, summed)
        exchange = self._packed or self._padded
        if self._packed is not None and self._padded is not None:
            padded = prefers_padded(config, tokens_TD.shape[0])
            exchange = self._padded if padded else self._packed
            fast = "fast" if padded else "slow"
            slots = sizes.pool_slots
            reason += f"; batched experts are {fast} for {slots} slots per source and expert"
        assert exchange is not None
        return Choice(exchange=exchange, kind=kind, reason=reason, sizes=sizes)

    def _why_not_direct(
        self, config: DispatchConfig, shape: Shape, tokens_TD: Tensor, probs_TE: Tensor
    ) -> str:
        """Return why "auto" leaves direct stores out for a pass; empty if it takes them."""
        num_tokens = tokens_TD.shape[0]
        for name, values in (("rows", tokens_TD), ("probabilities", probs_TE)):
            if not values.is_cuda or values.dtype == torch.float64:
                return f"the {name} are {values.dtype} on {values.device.type}"
        if self._padded is not None and prefers_padded(config, num_tokens):
            balanced = _balanced(config, num_tokens)
            if self._ffn_size > _OUTWEIGHS * balanced:
                return f"{balanced:.0f} rows per expert are few for weights of {self._ffn_size}"
        return self._no_room(shape, tokens_TD.device)

    def _no_room(self, shape: Shape, device: torch.device) -> str:
        """Return why the buffers of a shape are not made; empty if they fit."""
        assert self._group is not None
        if sum(choice.kind == "direct" for choice in self._choices.values()) == _MAX_DIRECT_SHAPES:
            return f"{_MAX_DIRECT_SHAPES} other shapes have buffers"
        # Once one layer of a shape has buffers, the others follow: the sum below counted theirs,
        # and by now less memory is free.
        if shares_workspace(self._group, shape):
            return ""
        num_buffers = self._num_layers * self._microbatches_in_flight
        need = direct_bytes(shape, num_ranks=self._group.size(), num_buffers=num_buffers)
        free = free_bytes(self._group, device)
        if 2 * need <= free:
            return ""
        return (
            f"buffers of direct stores need {need / 2**30:.2f} GiB for {self._num_layers} layers, "
            f"and {free / 2**30:.2f} GiB are free"
        )


def _check(kind: str, link_rows: str, layout: Layout, pool: str) -> None:
    """Raise for an unknown word, and for words that exclude each other."""
    for name, value, known in (
        ("exchange", kind, get_args(ExchangeKind)),
        ("link_rows", link_rows, get_args(LinkRows)),
    ):
        require(value in known, name, value, f"be one of {', '.join(known)}")
    require(
        pool == "expert" or layout != "padded",
        "capacity_pool",
        pool,
        "be 'expert' with experts that read padded rows",
        "set experts='packed' or capacity_pool='expert'",
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
        tokens_TD: floating point [T, D].
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
