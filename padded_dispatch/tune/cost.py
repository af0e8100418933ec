"""What a capacity factor costs on one rank: bytes on the wire, bytes in memory, FLOPs.

Arithmetic on sizes; nothing is measured here, and `capacity.calibration` makes milliseconds of it.
Two kinds of experts compute the same slots differently. "padded" ones compute every slot. "packed"
ones skip empty slots, so what they compute depends on how many rows were kept, and the rank with
the most rows decides, since the others wait for it. Skipping saves FLOPs only: shapes are static,
so every slot travels and owns its memory, full or empty.
"""

from dataclasses import dataclass

from padded_dispatch.config import DispatchConfig

_SIDE_BYTES = 4  # probabilities and counts travel in fp32
# Multiply-adds count 2; fc1 is D x 2F and fc2 F x D; backward does each twice more.
_FLOPS_PER_DF = 18


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """A MoE layer with SwiGLU experts, and how many of it are alive at a time on one rank.

    Args:
        num_tokens: of a micro-batch, on this rank (T).
        hidden_size: width of a row (D).
        ffn_size: of an expert (F).
        element_size: bytes of an element of a row: 2 for bf16.
        num_layers: MoE layers that this rank holds.
        num_in_flight: micro-batches whose backward is still to come: 1 without pipeline stages.

    Raises:
        ValueError: for a size below 1.
    """

    num_tokens: int
    hidden_size: int
    ffn_size: int
    element_size: int = 2
    num_layers: int = 1
    num_in_flight: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name}={value} is not possible: give at least 1")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one factor, on one rank.

    `capacity`: slots per (source, expert). `num_slots`: rows that this rank's experts have room
    for. Per layer and micro-batch, forward and backward: `wire_bytes` that leave this rank;
    `padded_flops` and `packed_flops` of the experts' GEMMs. In memory: `buffer_bytes` of dispatch
    and combine, which layers take in turn; `saved_bytes` that one layer and micro-batch keeps for
    backward.
    `memory_bytes`: both, for all layers and micro-batches in flight: an upper bound, see
    `BufferBytes.total`. `graph_pool_bytes`: the same
    and the static inputs and outputs of every captured layer; a pool never gives any of it back,
    where without graphs the memory serves others between backward and the next forward.
    """

    capacity: int
    num_slots: int
    wire_bytes: int
    buffer_bytes: int
    saved_bytes: int
    memory_bytes: int
    graph_pool_bytes: int
    padded_flops: float
    packed_flops: float


def cost(config: DispatchConfig, sizes: LayerSizes, *, busiest_rows: float) -> Cost:
    """Bytes and FLOPs at the config's capacity.

    Saved for backward: the input of fc1 (D), its output (2F), the input of fc2 (F), an fp32
    probability per row, and the maps. Recomputation would keep less and is not in it.

    Args:
        config: with the factor.
        sizes: of the layer.
        busiest_rows: rows that the busiest rank of the group is sent after dropping.

    Example: T = 4,096, K = 8, E = 128, R = 8, D = 2,048, F = 768 in bf16 at factor 1.25: 40,960
    slots, 587.5 MB on the wire, 1.16 TFLOP padded, and 0.93 packed if 32,768 rows are real.
    """
    capacity = config.capacity(sizes.num_tokens)
    num_slots = config.num_local_experts * config.num_sources * capacity
    ffn = sizes.ffn_size / config.tp_size
    buffers = config.buffer_bytes(sizes.num_tokens, sizes.hidden_size, sizes.element_size)
    saved = round(num_slots * ((sizes.hidden_size + 3 * ffn) * sizes.element_size + _SIDE_BYTES))
    alive = sizes.num_layers * sizes.num_in_flight
    # Tokens in, tokens out, and the gradients of both.
    static = 4 * sizes.num_tokens * sizes.hidden_size * sizes.element_size
    memory = buffers.total + alive * (saved + buffers.plan)
    flops_per_row = _FLOPS_PER_DF * sizes.hidden_size * ffn
    return Cost(
        capacity=capacity,
        num_slots=num_slots,
        wire_bytes=_wire_bytes(config, sizes, capacity),
        buffer_bytes=buffers.total,
        saved_bytes=saved + buffers.plan,
        memory_bytes=memory,
        graph_pool_bytes=memory + alive * static,
        padded_flops=flops_per_row * num_slots,
        packed_flops=flops_per_row * busiest_rows,
    )


def _wire_bytes(config: DispatchConfig, sizes: LayerSizes, capacity: int) -> int:
    """Four trips of the rows and two of what goes beside them, and their gathering over ETP."""
    rows = config.num_experts * capacity * sizes.hidden_size * sizes.element_size
    side = config.num_experts * (capacity + 1) * _SIDE_BYTES
    one_trip = 4 * rows + 2 * side
    return one_trip * (config.num_ranks - 1) // config.num_ranks + one_trip * (config.tp_size - 1)
