"""What a capacity factor costs on one rank: bytes on the wire, bytes in memory, FLOPs.

Arithmetic on sizes; nothing is measured here, and `capacity.calibration` makes milliseconds of it.
Two kinds of experts compute the same slots differently. "padded" ones compute every slot. "packed"
ones skip empty slots, so what they compute depends on how many rows were kept, and the rank with
the most rows decides, since the others wait for it. Skipping saves FLOPs only: shapes are static,
so every slot travels and owns its memory, full or empty.

The floor: what a perfectly balanced router still drops, because its tokens choose at random.

Every token takes K of E experts, all alike: an expert's rows are a binomial draw, T times with
probability K / E. With many experts it tends to Poisson's, which depends on the mean alone: m = T *
K / E rows per (source, expert). The relative width of both is 1 / sqrt(m), so a factor that drops
nothing at m = 1024 is lossy at m = 32: no factor can be copied from another job without m.

Both sums have positive terms only, computed from their logarithms; nothing cancels.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    ffn = sizes.ffn_size / config.etp_size
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
    return one_trip * (config.num_ranks - 1) // config.num_ranks + one_trip * (config.etp_size - 1)


_WIDTHS = 40  # standard deviations; what lies beyond is less than 1e-300 of what lies before


def binomial_floor(*, num_tokens: int, top_k: int, num_experts: int, capacity: int) -> float:
    """Expected share of dropped rows with `capacity` slots for one expert.

    Args:
        num_tokens: that compete for the slots: T, or R * T where all sources share them.
        top_k: experts of each token (K).
        num_experts: experts in all (E).
        capacity: slots (C).
    """
    if top_k == num_experts:
        return max(0, num_tokens - capacity) / num_tokens
    log_odds = math.log(top_k) - math.log(num_experts - top_k)
    rows = np.arange(1, num_tokens + 1)
    log_ratios = np.log(num_tokens + 1 - rows) - np.log(rows) + log_odds
    none = num_tokens * math.log1p(-top_k / num_experts)
    return _dropped(log_ratios, none, capacity) / (num_tokens * top_k / num_experts)


def poisson_floor(*, mean_rows: float, capacity: int) -> float:
    """Expected share of dropped rows with `capacity` slots, for many experts.

    Args:
        mean_rows: rows per group of slots (m), above 0.
        capacity: slots (C).

    Example: at m = 32, C = 32 drops 7.03 % of the rows, C = 40 0.73 %.
    """
    most = math.ceil(max(mean_rows, capacity) + _WIDTHS * (math.sqrt(mean_rows) + 1))
    log_ratios = math.log(mean_rows) - np.log(np.arange(1, most + 1))
    return _dropped(log_ratios, -mean_rows, capacity) / mean_rows


def _dropped(log_ratios: NDArray[np.float64], log_none: float, capacity: int) -> float:
    """The mean of max(0, n - C): `log_ratios[n - 1]` is log p(n) - log p(n - 1), from log p(0)."""
    probability = np.exp(log_none + np.cumsum(log_ratios))[capacity:]
    return float(np.sum(probability * np.arange(1, len(probability) + 1)))
