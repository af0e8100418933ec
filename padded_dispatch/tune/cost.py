"""Cost of a capacity factor on one rank, in bytes, and the drop of a perfectly balanced router.

This is arithmetic on sizes; nothing is measured here.

A perfectly balanced router still drops rows, because its tokens choose at random. Every token takes
K of E experts, all alike, so an expert's rows are a binomial draw: T times with probability K / E.
The relative width is about 1 / sqrt(m), m = T * K / E, so a factor that drops nothing at m = 1024
is lossy at m = 32: no factor can be copied from another job without m.

Letters: T tokens on this rank; K experts per token; E experts; R ranks; C slots per (source,
expert); D hidden size; F ffn size of an expert.
"""

import math
from dataclasses import dataclass

import numpy as np

from padded_dispatch.config import DispatchConfig, require

_META_BYTES = 4  # probabilities and counts travel in fp32


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Sizes of a MoE layer with SwiGLU experts, and how many of it are alive at once on one rank.

    Args:
        hidden_size: width of a row (D).
        ffn_size: of an expert (F).
        element_size: bytes of an element of a row: 2 for bf16.
        num_layers: MoE layers on this rank.
        in_flight: micro-batches whose backward is still to come: 1 without pipeline stages.

    Raises:
        ValueError: for a size below 1.
    """

    hidden_size: int
    ffn_size: int
    element_size: int = 2
    num_layers: int = 1
    in_flight: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(value >= 1, name, value, "be at least 1")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes of one factor on one rank.

    `wire_bytes`: leave this rank by the all-to-all, per layer and micro-batch, forward and
    backward; empty slots travel, too. `memory_bytes`: buffers of dispatch and combine, which the
    layers share, and what all layers and micro-batches in flight keep for backward: an upper bound,
    see `BufferBytes.total`.
    """

    wire_bytes: int
    memory_bytes: int


def cost(config: DispatchConfig, num_tokens: int, sizes: LayerSizes) -> Cost:
    """Return the bytes at the config's capacity.

    Saved for backward: the input of fc1 (D), its output (2F), the input of fc2 (F), an fp32
    probability per row, and the maps. Recomputation, which would keep less, is not considered.

    Args:
        config: with the factor.
        num_tokens: of a micro-batch, on this rank (T).
        sizes: of the layer.

    Example: T = 4,096, K = 8, E = 128, R = 8, D = 2,048, F = 768 in bf16 at factor 1.25: 40,960
    slots, 587.5 MB on the wire.
    """
    pools = config.sizes(num_tokens)
    row_bytes = sizes.hidden_size * sizes.element_size
    ffn = sizes.ffn_size / config.etp_size
    buffers = config.buffer_bytes(num_tokens, sizes.hidden_size, sizes.element_size)
    saved = round(pools.num_rows * (row_bytes + 3 * ffn * sizes.element_size + _META_BYTES))
    # Rows travel four times (dispatch and combine, forward and backward), probabilities and counts
    # twice.
    sent_rows = pools.num_pools * pools.pool_slots
    sent = 4 * sent_rows * row_bytes + 2 * (sent_rows + config.num_experts) * _META_BYTES
    others = sent * (config.num_ranks - 1) // config.num_ranks
    return Cost(
        wire_bytes=others + sent * (config.etp_size - 1),
        memory_bytes=buffers.total + sizes.num_layers * sizes.in_flight * (saved + buffers.plan),
    )


def balanced_drop(*, num_tokens: int, top_k: int, num_experts: int, capacity: int) -> float:
    """Return the expected share of rows that a perfectly balanced router drops.

    Its terms are positive and computed from their logarithms, so nothing cancels or overflows.

    Args:
        num_tokens: of a source (T).
        top_k: experts of each token (K).
        num_experts: experts in all (E).
        capacity: slots of one (source, expert) (C).

    Example: T = 4,096, K = 8, E = 1,024 (m = 32), C = 40 drops 0.73 % of the rows.
    """
    if top_k == num_experts:
        return max(0, num_tokens - capacity) / num_tokens
    rows = np.arange(1, num_tokens + 1)
    log_odds = math.log(top_k) - math.log(num_experts - top_k)
    log_ratios = np.log(num_tokens + 1 - rows) - np.log(rows) + log_odds
    log_none = num_tokens * math.log1p(-top_k / num_experts)
    probability = np.exp(log_none + np.cumsum(log_ratios))[capacity:]
    excess = float(np.sum(probability * np.arange(1, len(probability) + 1)))
    return excess / (num_tokens * top_k / num_experts)
