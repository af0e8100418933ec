"""Bytes that a rank takes: one function for each part, for code that allocates, logs and plans.

    once      buffers of direct writes, which all layers of a group share (`DirectBuffers`)
    kept      until backward, for each micro-batch in flight: the store, and of each layer the
              tokens that arrived, and row numbers (`LayerMemory`)
    a pass    temporaries, of one layer at a time (`LayerMemory`)

Parts of less than a thousandth of these are left out: offsets, tables of tiles, counts, addresses.
On several hosts the experts see G sources of H * P slots each, in place of S and P: see
`exchange.rails`. Weights, their gradients, and what the router keeps are not of this package; a
rank's own tokens are the layer's input, which the router keeps.

Letters: see `padded_dispatch.config`. H: hosts, G: ranks of the group on each.
"""

from dataclasses import dataclass

from padded_dispatch.config import DispatchConfig, StoreSizes

_ALIGNMENT = 256


def aligned(num_bytes: int) -> int:
    """Return the least multiple of 256 from `num_bytes` on, where the next buffer can begin."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def gib(num_bytes: float) -> str:
    """Format bytes as GiB with two digits."""
    return f"{num_bytes / 2**30:.2f}"


def row_bytes(fc1_width: int, element_size: int) -> int:
    """Return the bytes of a row in a store: fc1's result, its probability and its home address."""
    return fc1_width * element_size + 12


@dataclass(frozen=True, kw_only=True)
class DirectBuffers:
    """Buffers of direct writes on a rank: one allocation for what arrives, one for what comes home.

    Args:
        num_sources: S, the ranks of a host.
        num_slots: P.
        top_k: K.
        num_local_experts: L.
        token_bytes: of D elements.
        sends_again: whether tokens also arrive a second time, beside their gradients.
    """

    num_sources: int
    num_slots: int
    top_k: int
    num_local_experts: int
    token_bytes: int
    sends_again: bool

    @property
    def landing(self) -> int:
        """Tokens, or gradients, of the other ranks: (S - 1) * P * D elements."""
        return aligned((self.num_sources - 1) * self.num_slots * self.token_bytes)

    @property
    def second_landing(self) -> int:
        """As many tokens that arrive again; behind the first ones."""
        return self.landing if self.sends_again else 0

    @property
    def plan_part(self) -> int:
        """Experts of all choices of all sources; as much again for places, and probabilities."""
        return 4 * self.num_sources * self.num_slots * self.top_k

    @property
    def plans(self) -> int:
        """The plans of all sources, and their counts."""
        return 3 * self.plan_part + 4 * self.num_sources * self.num_local_experts

    @property
    def arriving(self) -> int:
        """All of the first allocation."""
        return self.landing + self.second_landing + self.plans

    @property
    def home_rows(self) -> int:
        """A row for each choice of this rank's own tokens, which come home."""
        return aligned(self.num_slots * self.top_k * self.token_bytes)

    @property
    def coming(self) -> int:
        """All of the second allocation: rows, and a number beside each."""
        return self.home_rows + 4 * self.num_slots * self.top_k


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """Bytes that packed experts of a layer take on a rank.

    Args:
        config: of its passes, in training.
        num_tokens: T.
        hidden_size: D.
        fc1_width: G, of this rank.
        direct: whether ranks of a host store into each other's memory; else collectives.
        num_hosts: H, above 1 if a rail crosses between hosts.
        element_size: bytes of an element.
    """

    config: DispatchConfig
    num_tokens: int
    hidden_size: int
    fc1_width: int
    direct: bool
    num_hosts: int = 1
    element_size: int = 2

    @property
    def num_sources(self) -> int:
        """Sources that the experts see."""
        return self.config.num_sources // self.num_hosts

    @property
    def num_slots(self) -> int:
        """Slots of each of them; one rank of experts has all tokens, also with cells."""
        if self.direct or self.config.num_ranks == 1:
            return self.num_hosts * self.num_tokens
        return self.num_hosts * self.config.wire_slots(self.num_tokens)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token, or a row of D elements."""
        return self.hidden_size * self.element_size

    @property
    def buffers(self) -> DirectBuffers | None:
        """Buffers of direct writes; None over collectives."""
        if not self.direct or self.num_sources == 1:
            return None
        return DirectBuffers(
            num_sources=self.num_sources,
            num_slots=self.num_slots,
            top_k=self.config.top_k,
            num_local_experts=self.config.num_local_experts,
            token_bytes=self.token_bytes,
            sends_again=self.sends_again,
        )

    def store(self, num_rows: int) -> int:
        """Return the bytes of a store of `num_rows` rows."""
        return num_rows * row_bytes(self.fc1_width, self.element_size)

    @property
    def sends_again(self) -> bool:
        """True if tokens of other ranks, or of the host, arrive once more in backward.

        With fewer slots than tokens they do not.
        """
        return self.num_slots >= self.num_tokens and self.config.sends_again(self.num_hosts)

    @property
    def kept_tokens(self) -> int:
        """Tokens that a pass keeps until backward: what arrived, or what a rail gathered.

        One source keeps none, and neither does a pass that sends tokens again. Direct writes keep
        no own ones.
        """
        if self.num_hosts > 1:
            return self.num_hosts * self.num_tokens * self.token_bytes
        if self.num_sources == 1 or self.sends_again:
            return 0
        return (self.num_sources - self.direct) * self.num_slots * self.token_bytes

    @property
    def plans_on_the_wire(self) -> int:
        """Plans and counts that other ranks send to this one: 12 bytes for each of their choices.

        Direct writes and cells send counts for the experts of a rank, gathers those of all ranks.
        """
        sources, slots, counts = self.num_sources, self.num_slots, self.config.num_local_experts
        gathers = not self.direct and slots >= self.num_tokens
        inside = 12 * slots * self.config.top_k + 4 * counts * (sources if gathers else 1)
        rail = 12 * self.num_tokens * self.config.top_k + 4 * self.config.num_experts
        return (sources - 1) * inside + (self.num_hosts - 1) * rail

    def kept_numbers(self, *, overwritten: bool) -> int:
        """Return what a pass keeps of plans: the list, rows of choices, and where sums come home.

        `overwritten`: whether later layers may overwrite its rows; it then keeps probabilities too.
        """
        top_k, num_sources, num_slots = self.config.top_k, self.num_sources, self.num_slots
        listed = num_sources * num_slots * top_k * (4 + 4 * overwritten)
        if num_sources > 1:
            listed += 4 * num_sources * num_slots
        # The experts of each choice; over collectives rows for its sum, too, in 8 and 4 bytes.
        inside, rail = 4 * self.num_hosts * self.num_tokens * top_k, 16 * self.num_tokens * top_k
        if not self.direct and num_sources > 1:
            inside *= 4
        if num_slots < self.num_tokens:
            inside += 8 * num_sources * num_slots  # The token of each slot.
        return listed + inside + (rail if self.num_hosts > 1 else 0)

    def plans_kept(self, sizes: StoreSizes) -> int:
        """Return `kept_numbers` of all layers that share a store of these sizes."""
        return sum(self.kept_numbers(overwritten=one) for one in sizes.overwritten)

    def kept(self, num_layers: int) -> int:
        """Return what a micro-batch keeps until backward in layers that share a store."""
        sizes = StoreSizes.of([self.config] * num_layers, self.num_tokens)
        tokens = num_layers * self.kept_tokens
        return self.store(sizes.num_rows) + tokens + self.plans_kept(sizes)

    def temporaries(self, num_rows: int, ffn_size: int) -> int:
        """Return the most that a pass with room for `num_rows` rows (N) allocates at a time.

        That is in backward, where the gradient of fc2's output, that of its input, and the input
        itself exist; or, if there are few rows, where sums come home. Over collectives, and from a
        rail, what arrives is temporary, too.
        """
        element, width, ffn = self.element_size, self.hidden_size, ffn_size
        rows = num_rows * ((width + 2 * ffn) * element + 4)
        railed = self.num_hosts * self.num_tokens * self.token_bytes if self.num_hosts > 1 else 0
        if self.direct or self.num_sources == 1:
            return max(rows + railed, num_rows * ffn * element + 2 * railed, 3 * railed)
        grid = self.num_sources * self.num_slots * self.token_bytes
        arrived = grid * (2 if self.sends_again else 1)
        summed = num_rows * max(width, ffn) * element + grid
        return arrived + max(rows, summed, 2 * grid + railed)
