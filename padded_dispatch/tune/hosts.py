"""Which exchange is fastest over how many hosts: bytes of each level, and a rate for each.

    direct       inside one host: real rows
    alltoall     every slot; both levels send at once, so the slower one decides
    two-level    between hosts tokens there and slots back, inside a host slots; one level after the
                 other, so their times add up

Bytes are exact (`padded_dispatch.exchange.two_level.level_bytes`), those of "direct" an upper
bound: a token that crosses a link once sends fewer. Times are bytes by rates. **None of them was
measured between hosts**, and neither launches nor the copies of two levels inside a GPU count.

The default rates: 296 GB/s inside a host, NCCL's all-to-all of 134 MB over 8 H200 (the command
takes that of its time model); 50 GB/s to other hosts, the nominal rate of one adapter of 400 Gb/s
for each GPU, as DGX H100 and H200 have. A network gives less than its nominal rate.

Letters: T tokens on this rank; K experts per token; R ranks of the group; B of them on each host.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from padded_dispatch.config import DispatchConfig, require
from padded_dispatch.exchange.two_level import level_bytes
from padded_dispatch.tune.cost import LayerSizes, members_per_host
from padded_dispatch.tune.table import Table

ABOUT = (
    "Exchanges over hosts, modelled: MB that a rank sends to other hosts, and milliseconds of the "
    "links, for a layer, forward and backward."
)


@dataclass(frozen=True, kw_only=True)
class Links:
    """Rates, in GB/s, at which a rank sends to its own host and to others.

    Raises:
        ValueError: for a rate that is not above 0.
    """

    nvlink_gb_per_s: float = 296.0
    network_gb_per_s: float = 50.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(value > 0, name, value, "be above 0")


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """The bytes that a layer sends by one exchange, forward and backward, and their time.

    `between`, `within`: bytes that a rank sends to other hosts and to its own.
    """

    between: int
    within: int
    ms: float


@dataclass(frozen=True, kw_only=True)
class OverHosts:
    """The exchanges by name that can serve a layer on `num_ranks` ranks of `num_hosts` hosts."""

    num_ranks: int
    num_hosts: int
    exchanges: dict[str, Exchanged]

    @property
    def fastest(self) -> str:
        """The name of the exchange with the fewest milliseconds."""
        return min(self.exchanges, key=lambda name: self.exchanges[name].ms)


def over_hosts(
    config: DispatchConfig, sizes: LayerSizes, ranks_per_host: int, links: Links
) -> OverHosts:
    """Return what each exchange would send and take.

    Example: Qwen3-30B-A3B at T = 4096 and factor 1.25 on 16 ranks of two hosts sends 336 MB between
    hosts by the all-to-all, in 6.7 ms, and 202 MB by two levels, in 6.0 ms.
    """
    members = members_per_host(config, ranks_per_host)
    num_hosts = config.num_ranks // members
    found = {}
    between, within = _by_level(config, sizes, members, two_levels=False)
    network_ms, nvlink_ms = _ms(between, within, links)
    found["alltoall"] = Exchanged(between=between, within=within, ms=max(network_ms, nvlink_ms))
    if num_hosts == 1:
        sent = _direct_bytes(config, sizes)
        found["direct"] = Exchanged(between=0, within=sent, ms=sum(_ms(0, sent, links)))
    else:
        between, within = _by_level(config, sizes, members, two_levels=True)
        ms = sum(_ms(between, within, links))
        found["two-level"] = Exchanged(between=between, within=within, ms=ms)
    return OverHosts(num_ranks=config.num_ranks, num_hosts=num_hosts, exchanges=found)


def _by_level(
    config: DispatchConfig, sizes: LayerSizes, members: int, *, two_levels: bool
) -> tuple[int, int]:
    """Return the bytes that a rank sends between hosts and within its own, forward and backward."""
    sent = level_bytes(
        config,
        sizes.num_tokens,
        sizes.hidden_size,
        sizes.element_size,
        ranks_per_host=members,
        two_levels=two_levels,
    )
    # Backward sends as many bytes as forward.
    return 2 * (sent.there_between + sent.back_between), 2 * (sent.there_within + sent.back_within)


def _ms(between: int, within: int, links: Links) -> tuple[float, float]:
    per_ms = 1e6 * links.network_gb_per_s, 1e6 * links.nvlink_gb_per_s
    return between / per_ms[0], within / per_ms[1]


def _direct_bytes(config: DispatchConfig, sizes: LayerSizes) -> int:
    """Return the bytes of real rows and their probabilities if no token crosses a link once only.

    Each row travels four times, each probability and its gradient once.
    """
    pools = config.sizes(sizes.num_tokens)
    rows = min(pools.num_pools * pools.pool_slots, sizes.num_tokens * config.top_k)
    sent = rows * (4 * sizes.hidden_size * sizes.element_size + 2 * 4)
    return sent * (config.num_ranks - 1) // config.num_ranks


def by_ranks(
    config: DispatchConfig, sizes: LayerSizes, ranks_per_host: int, links: Links
) -> tuple[OverHosts, ...]:
    """Return what serves a layer on one host, two, four and so on, while each rank has experts.

    The R of `config` is one of the numbers of ranks.
    """
    numbers, next_one = {config.num_ranks}, max(1, ranks_per_host // config.etp_size)
    while next_one <= config.num_experts:
        numbers.add(next_one)
        next_one *= 2
    return tuple(
        over_hosts(dataclasses.replace(config, num_ranks=number), sizes, ranks_per_host, links)
        for number in sorted(numbers)
        if config.num_experts % number == 0
    )


def sentence(found: Sequence[OverHosts]) -> str:
    """Return from which R on which exchange is fastest."""
    changes = [
        f"{one.fastest} from EP {one.num_ranks}"
        for before, one in zip((None, *found), found, strict=False)
        if before is None or before.fastest != one.fastest
    ]
    return f"Fastest by this model: {', '.join(changes)}. None was measured between hosts."


def exchange_table(found: Sequence[OverHosts], num_ranks: int) -> Table:
    """Return MB that a rank sends to other hosts and ms, by R; the row of `num_ranks` is marked."""
    names = "direct", "alltoall", "two-level"
    headers = ("EP", "hosts", *(f"{name} MB" for name in names[1:]))
    rows = [
        (
            str(one.num_ranks),
            str(one.num_hosts),
            *(_cell(one, name, lambda sent: f"{sent.between / 1e6:.0f}") for name in names[1:]),
            *(_cell(one, name, lambda sent: f"{sent.ms:.2f}") for name in names),
            one.fastest,
        )
        for one in found
    ]
    return Table(
        headers=(*headers, *(f"{name} ms" for name in names), "fastest"),
        rows=tuple(rows),
        marked=[one.num_ranks for one in found].index(num_ranks),
    )


def _cell(one: OverHosts, name: str, words: Callable[[Exchanged], str]) -> str:
    return words(one.exchanges[name]) if name in one.exchanges else "-"
