"""Plan the memory of a rank before a run: `padded-dispatch tune --plan MODEL`.

All bytes are those of `padded_dispatch.memory`, by which buffers are laid out and logged, so a plan
is right before a machine is asked for. It is of packed experts in bf16, the layers of one chunk of
a pipeline stage; a chunk more, with a store of its own, adds what is kept. Megatron's own experts
keep all slots of their cells instead.

Letters: see `padded_dispatch.config`; H: hosts, Y: layers that share a store, I: micro-batches in
flight. On H hosts S and P are those inside of a host: S = R / H, P = H * T.
"""

import argparse
import textwrap
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from padded_dispatch.config import (
    CAPACITY_POOLS,
    NO_DROP,
    CapacityPool,
    DispatchConfig,
    ExchangeKind,
    StoreSizes,
    is_positive,
    require,
    require_tokens,
)
from padded_dispatch.memory import LayerMemory, gib
from padded_dispatch.utils.flags import Parser, errors_name_flags, read_factor
from padded_dispatch.utils.logs import show
from padded_dispatch.utils.shapes import MOE_LAYERS, SHAPES, LayerShape

_COLUMNS = 80


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a rank's memory; `formula` counts elements of 2 bytes, where it names no bytes."""

    name: str
    formula: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The memory of a rank.

    Args:
        shape: D, E, K and F.
        fc1_width: G; None for gated experts, 2 * F.
        ep: R.
        hosts: H.
        tokens: T.
        capacity_factor: of the store, or of cells; `NO_DROP` drops nothing.
        pool: see `DispatchConfig.capacity_pool`.
        store_layers: Y.
        microbatches: I.
        exchange: as for `padded_dispatch.exchange`; "auto" assumes NVLink inside of each host.

    Raises:
        ValueError: names the field, its value and what to change.
    """

    shape: LayerShape
    fc1_width: int | None = None
    ep: int
    hosts: int = 1
    tokens: int = 4096
    capacity_factor: float = 1.25
    pool: CapacityPool = "store"
    store_layers: int
    microbatches: int = 1
    exchange: ExchangeKind = "auto"

    def __post_init__(self) -> None:
        require_tokens(self.tokens)
        for name in ("ep", "hosts", "store_layers", "microbatches"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "be at least 1")
        given, rule = self.capacity_factor, "be a number above 0, or 'none' to drop nothing"
        require(is_positive(given), "capacity_factor", given, rule)
        rule = f"divide ep={self.ep}, so that hosts have as many ranks each"
        require(self.ep % self.hosts == 0, "hosts", self.hosts, rule)
        num_experts = self.shape.num_experts
        rule = f"divide the model's {num_experts} experts"
        require(num_experts % self.ep == 0, "ep", self.ep, rule)
        fix = "set auto or alltoall"
        rule = "be alltoall, since direct writes need several ranks on each host"
        several = self.ep > self.hosts
        require(self.exchange != "direct" or several, "exchange", self.exchange, rule, fix)
        rule = "be alltoall, since direct writes across hosts need a store"
        rails = self.hosts == 1 or self.pool == "store"
        require(self.exchange != "direct" or rails, "exchange", self.exchange, rule, fix)

    @cached_property
    def config(self) -> DispatchConfig:
        """The config of each layer."""
        return DispatchConfig(
            num_experts=self.shape.num_experts,
            top_k=self.shape.top_k,
            capacity_factor=self.capacity_factor,
            capacity_pool=self.pool,
            num_ranks=self.ep,
        )

    @cached_property
    def layer(self) -> LayerMemory:
        """Bytes of a layer."""
        shares = self.pool == "store"
        several = self.ep > self.hosts
        direct = self.exchange != "alltoall" and several and (shares or self.hosts == 1)
        return LayerMemory(
            config=self.config,
            num_tokens=self.tokens,
            hidden_size=self.shape.hidden_size,
            fc1_width=self.fc1_width or 2 * self.shape.ffn_size,
            direct=direct,
            num_hosts=self.hosts if several and shares else 1,
        )

    @cached_property
    def sizes(self) -> StoreSizes:
        """Rows of the store and of each layer."""
        return StoreSizes.of([self.config] * self.store_layers, self.tokens)

    @property
    def drops(self) -> str:
        """Rows that are dropped, in words."""
        drops, capacity = [], self.config.capacity(self.tokens)
        if self.pool != "store" and capacity < self.tokens:
            drops.append(f"rows of a rank for an expert past {capacity:,}")
        if self.sizes.num_rows < self.config.max_rows(self.tokens):
            drops.append(f"rows of one layer past {self.sizes.num_rows:,}")
        return " and ".join(drops) or "nothing"

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Parts in the order of their lives: buffers, what is kept, temporaries."""
        layer, sizes = self.layer, self.sizes
        found, buffers, rail = [], layer.buffers, layer.num_hosts > 1

        def add(name: str, formula: str, num_bytes: int) -> None:
            found.append(Part(name=name, formula=formula, num_bytes=num_bytes))

        if buffers is not None:
            again = "as much again" if buffers.second_landing else "none: tokens are kept"
            add("landing buffer", "(S - 1) P D", buffers.landing)
            add("second landing buffer", again, buffers.second_landing)
            add("plans that arrive", "12 S P K bytes", buffers.plans)
            add("rows that come home", "P K D", buffers.coming)
        add("store", "I M (G + 6)", self.microbatches * layer.store(sizes.num_rows))
        arrived = "(S - 1) P D" if layer.direct else "S P D"
        if self.config.num_sources == 1:
            arrived = "none"
        elif rail:
            arrived = "I Y H T D"
        else:
            arrived = "none: sent again" if layer.sends_again else f"I Y {arrived}"
        kept = self.store_layers * layer.kept_tokens
        add("tokens kept", arrived, self.microbatches * kept)
        plans = self.microbatches * layer.plans_kept(sizes)
        add("plans kept", "I Y S P (4 to 8) K bytes", plans)
        temporary = layer.temporaries(max(sizes.max_rows), self.shape.ffn_size)
        more = [] if layer.direct or self.ep == 1 else ["what arrives"]
        formula = " and ".join(["N (D + 2 F)", *more, *(["rails"] if rail else [])])
        add("temporaries of a layer", formula, temporary)
        return tuple(found)

    @property
    def num_bytes(self) -> int:
        """All parts together."""
        return sum(part.num_bytes for part in self.parts)

    def __str__(self) -> str:
        shape, layer, sizes = self.shape, self.layer, self.sizes
        way = "direct writes" if layer.direct else "collectives"
        if layer.num_hosts > 1:
            way = f"rails between {self.hosts} hosts, {way} inside"
        elif self.hosts > 1:
            way += f" across {self.hosts} hosts"
        if self.ep == 1:
            way = "no exchange"
        room = "none" if self.capacity_factor == NO_DROP else f"{self.capacity_factor:g}"
        head = (
            f"Memory of a rank for packed experts in bf16. D {shape.hidden_size:,}, E "
            f"{shape.num_experts}, K {shape.top_k}, F {shape.ffn_size:,}; EP {self.ep}, {way}; "
            f"T {self.tokens:,}, factor {room}, Y {self.store_layers}, "
            f"I {self.microbatches}; S {layer.num_sources}, P {layer.num_slots:,}, "
            f"N {max(sizes.max_rows):,}, M {sizes.num_rows:,}."
        )
        lines = ["   GiB  part"]
        lines += [f"{gib(one.num_bytes):>6}  {one.name}: {one.formula}" for one in self.parts]
        lines.append(f"{gib(self.num_bytes):>6}  in all, beside weights, gradients and attention")
        soft = "rows past M, which backward computes again"
        if layer.sends_again:
            whose = "other ranks of the host" if self.hosts > 1 else "other ranks"
            soft += f", and tokens of {whose}, which are sent again"
        notes = [f"Soft: {soft}. Dropped: {self.drops}."]
        if self.ep > 1:
            notes.append(
                f"{layer.plans_on_the_wire / 2**20:.1f} MiB of plans come to a rank in each layer. "
                f"At start each asks the job's store {requests_at_start(self.ep)} times. Before "
                f"an eager call {48 * self.ep:,} bytes come to each, to compare."
            )
        return "\n\n".join([_filled(head), "\n".join(lines), *map(_filled, notes)])


def requests_at_start(num_ranks: int) -> int:
    """Return how often a rank asks the store of the job to join R ranks, to compare calls.

    Gloo's connections take one request and two for each rank. Ours are three, with any number.
    """
    return 0 if num_ranks == 1 else 2 * num_ranks + 4


def _filled(text: str) -> str:
    return textwrap.fill(text, _COLUMNS, break_on_hyphens=False, break_long_words=False)


def read(argv: list[str]) -> argparse.Namespace:
    """Return the flags of `padded-dispatch tune --plan`."""
    parser = Parser(
        prog="padded-dispatch tune",
        usage="padded-dispatch tune --plan MODEL --ep N [FLAGS]",
        description="Count the memory of a rank before a run.",
    )
    add = parser.add_argument
    about = f"{', '.join(SHAPES)}; or D,E,K,F, or D,E,K,F,G if fc1 has other than 2 F columns"
    add("--plan", required=True, metavar="MODEL", help=about)
    add("--ep", required=True, type=int, help="ranks of the expert-parallel group (R)")
    add("--hosts", type=int, default=1, help="hosts of the group (H)")
    add("--tokens", type=int, default=4096, help="per rank and micro-batch (T)")
    about = "room relative to perfect balance; 'none' drops nothing"
    add("--capacity-factor", type=read_factor, metavar="X", default=1.25, help=about)
    add("--pool", choices=CAPACITY_POOLS, default="store", help="which rows share room")
    about = "MoE layers of a pipeline stage's chunk (default: all of the model's; 1 for sizes)"
    add("--store-layers", type=int, metavar="N", help=about)
    add("--microbatches", type=int, default=1, help="in flight")
    about = "auto: direct writes inside of each host"
    add("--exchange", choices=get_args(ExchangeKind), default="auto", help=about)
    return parser.parse_args(argv)


def main(given: argparse.Namespace) -> int:
    """Print a plan, and return the exit code.

    Raises:
        ValueError: a wrong flag; names it and what to change.
    """
    flags = vars(given).copy()
    model, layers = flags.pop("plan"), flags.pop("store_layers")
    if given.capacity_factor is None:
        flags["capacity_factor"] = NO_DROP
    with errors_name_flags(vars(given)):
        shape, fc1_width = _shape(model)
        layers = MOE_LAYERS.get(model, 1) if layers is None else layers
        plan = MemoryPlan(shape=shape, fc1_width=fc1_width, store_layers=layers, **flags)
        text = str(plan)
    show(text)
    return 0


def _shape(model: str) -> tuple[LayerShape, int | None]:
    """Return the sizes of a model by its name, or as they are given; G, if it is."""
    if model in SHAPES:
        return SHAPES[model], None
    words = model.split(",")
    is_sizes = len(words) in (4, 5) and all(word.isdecimal() and int(word) for word in words)
    rule = f"be one of {', '.join(SHAPES)}, or sizes D,E,K,F"
    require(is_sizes, "plan", model, rule)
    hidden_size, num_experts, top_k, ffn_size, *more = map(int, words)
    sizes = {"num_experts": num_experts, "top_k": top_k, "ffn_size": ffn_size}
    return LayerShape(hidden_size=hidden_size, **sizes), more[0] if more else None
