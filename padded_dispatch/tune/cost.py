"""Cost of a capacity factor on one rank: bytes on the wire, bytes in memory, FLOPs; balanced drop.

This is arithmetic on sizes; nothing is measured here. `tune.time_model` turns it into milliseconds.
Two kinds of experts compute the same slots differently. "padded" ones compute every slot. "packed"
ones skip empty slots, so their work depends on how many rows were kept, and the rank with the most
rows decides, since the others wait for it. Skipping saves FLOPs only: shapes are static, so every
slot travels and occupies memory, full or empty.

The balanced drop is that of a perfectly balanced router, which still drops rows, because its tokens
choose at random. Every token takes K of E experts, all alike, so an expert's rows are a binomial
draw: T times with probability K / E. With many experts it tends to Poisson's, which depends on the
mean alone: m = T * K / E rows per (source, expert). The relative width of both is 1 / sqrt(m), so a
factor that drops nothing at m = 1024 is lossy at m = 32: no factor can be copied from another job
without m. Both sums have positive terms only, computed from their logarithms, so nothing cancels.

Letters: T tokens on this rank; K experts per token; E experts; R ranks; C slots per (source,
expert); D hidden size; F ffn size of an expert.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.config import DispatchConfig, require

_META_BYTES = 4  # probabilities and counts travel in fp32
# Multiply-adds count 2; fc1 is D x 2F and fc2 F x D; backward does each twice more.
_FLOPS_PER_DF = 18


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Sizes of a MoE layer with SwiGLU experts, and how many of it are alive at once on one rank.

    Args:
        num_tokens: of a micro-batch, on this rank (T).
        hidden_size: width of a row (D).
        ffn_size: of an expert (F).
        element_size: bytes of an element of a row: 2 for bf16.
        num_layers: MoE layers on this rank.
        microbatches_in_flight: micro-batches whose backward is still to come: 1 without pipeline
            stages.

    Raises:
        ValueError: for a size below 1.
    """

    num_tokens: int
    hidden_size: int
    ffn_size: int
    element_size: int = 2
    num_layers: int = 1
    microbatches_in_flight: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(value >= 1, name, value, "be at least 1")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of one factor on one rank.

    `capacity`: slots per (source, expert), of which pools have as many in all. `num_slots`: rows
    that this rank's experts have room for.

    Per layer and micro-batch, forward and backward: `wire_bytes` that leave this rank by the
    all-to-all, `network_bytes` those of them that leave its host, see `tune.hosts`;
    `padded_flops` and `packed_flops` of the experts' GEMMs.

    In memory: `buffer_bytes` of dispatch and combine, which the layers share; `saved_bytes` that
    one layer and micro-batch keeps for backward. `memory_bytes`: both, for all layers and
    micro-batches in flight: an upper bound, see `BufferBytes.total`. `graph_pool_bytes`: the same
    plus the static inputs and outputs of every captured layer. A graph pool never returns any of
    it; without graphs the memory serves others between backward and the next forward.
    """

    capacity: int
    num_slots: int
    wire_bytes: int
    network_bytes: int
    buffer_bytes: int
    saved_bytes: int
    memory_bytes: int
    graph_pool_bytes: int
    padded_flops: float
    packed_flops: float


def members_per_host(config: DispatchConfig, ranks_per_host: int) -> int:
    """Return the ranks of an expert-parallel group on each host, R if one host has them all.

    The ranks that split an expert are neighbours, so a host has fewer members of each group. Hosts
    have equally many: the most that divide R.
    """
    most = min(config.num_ranks, max(1, ranks_per_host // config.etp_size))
    return next(members for members in range(most, 0, -1) if config.num_ranks % members == 0)


def cost(
    config: DispatchConfig, sizes: LayerSizes, *, busiest_rows: float, ranks_per_host: int = 8
) -> Cost:
    """Return bytes and FLOPs at the config's capacity.

    Saved for backward: the input of fc1 (D), its output (2F), the input of fc2 (F), an fp32
    probability per row, and the maps. Recomputation, which would keep less, is not considered.

    Args:
        config: with the factor.
        sizes: of the layer.
        busiest_rows: rows that the busiest rank of the group receives after dropping.
        ranks_per_host: ranks on each host.

    Example: T = 4,096, K = 8, E = 128, R = 8, D = 2,048, F = 768 in bf16 at factor 1.25: 40,960
    slots, 587.5 MB on the wire, 1.16 TFLOP padded, and 0.93 packed if 32,768 rows are real.
    """
    capacity = config.capacity(sizes.num_tokens)
    pools = config.sizes(sizes.num_tokens)
    num_slots = pools.num_rows
    sent_rows = pools.num_pools * pools.pool_slots
    ffn = sizes.ffn_size / config.etp_size
    buffers = config.buffer_bytes(sizes.num_tokens, sizes.hidden_size, sizes.element_size)
    saved = round(num_slots * ((sizes.hidden_size + 3 * ffn) * sizes.element_size + _META_BYTES))
    alive = sizes.num_layers * sizes.microbatches_in_flight
    # Tokens in, tokens out, and the gradients of both.
    static = 4 * sizes.num_tokens * sizes.hidden_size * sizes.element_size
    memory = buffers.total + alive * (saved + buffers.plan)
    sent = _sent_bytes(config, sizes, sent_rows)
    others = config.num_ranks - 1
    on_other_hosts = config.num_ranks - members_per_host(config, ranks_per_host)
    flops_per_row = _FLOPS_PER_DF * sizes.hidden_size * ffn
    return Cost(
        capacity=capacity,
        num_slots=num_slots,
        wire_bytes=sent * others // config.num_ranks + sent * (config.etp_size - 1),
        network_bytes=sent * on_other_hosts // config.num_ranks,
        buffer_bytes=buffers.total,
        saved_bytes=saved + buffers.plan,
        memory_bytes=memory,
        graph_pool_bytes=memory + alive * static,
        padded_flops=flops_per_row * num_slots,
        packed_flops=flops_per_row * busiest_rows,
    )


def _sent_bytes(config: DispatchConfig, sizes: LayerSizes, sent_rows: int) -> int:
    """Return the bytes of four exchanges of rows and two of metadata, to all ranks and to itself.

    The four: dispatch and combine, forward and backward. `sent_rows`: of one exchange.
    """
    rows = sent_rows * sizes.hidden_size * sizes.element_size
    meta = (sent_rows + config.num_experts) * _META_BYTES
    return 4 * rows + 2 * meta


_WIDTHS = 40  # standard deviations; the tail beyond is less than 1e-300 of the sum before it


def balanced_drop(*, num_tokens: int, top_k: int, num_experts: int, capacity: int) -> float:
    """Return the expected share of rows that a perfectly balanced router drops.

    Args:
        num_tokens: that compete for the slots: T, or R * T where all sources share them.
        top_k: experts of each token (K).
        num_experts: experts in all (E).
        capacity: slots of one expert (C).
    """
    if top_k == num_experts:
        return max(0, num_tokens - capacity) / num_tokens
    log_odds = math.log(top_k) - math.log(num_experts - top_k)
    rows = np.arange(1, num_tokens + 1)
    log_ratios = np.log(num_tokens + 1 - rows) - np.log(rows) + log_odds
    log_none = num_tokens * math.log1p(-top_k / num_experts)
    return _mean_excess(log_ratios, log_none, capacity) / (num_tokens * top_k / num_experts)


def balanced_drop_poisson(*, mean_rows: float, capacity: int) -> float:
    """Return the limit of `balanced_drop` for many experts.

    Args:
        mean_rows: rows per group of slots (m), above 0.
        capacity: slots (C).

    Example: at m = 32, C = 32 drops 7.03 % of the rows, C = 40 0.73 %.
    """
    most = math.ceil(max(mean_rows, capacity) + _WIDTHS * (math.sqrt(mean_rows) + 1))
    log_ratios = math.log(mean_rows) - np.log(np.arange(1, most + 1))
    return _mean_excess(log_ratios, -mean_rows, capacity) / mean_rows


def _mean_excess(log_ratios: NDArray[np.float64], log_none: float, capacity: int) -> float:
    """Return the mean of max(0, n - C).

    Args:
        log_ratios: log p(n) - log p(n - 1), for n from 1.
        log_none: log p(0).
        capacity: C.
    """
    probability = np.exp(log_none + np.cumsum(log_ratios))[capacity:]
    return float(np.sum(probability * np.arange(1, len(probability) + 1)))
