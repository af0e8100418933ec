"""Memory of a capacity factor on one rank, and the drop of a perfectly balanced router.

This is arithmetic on sizes; nothing is measured here.

A perfectly balanced router still asks for more than its cells have, because its tokens choose at
random. Every token takes K of E equally likely experts, so an expert's number of rows is binomial:
T draws with probability K / E. Its relative width is about 1 / sqrt(m), m = T * K / E, so a factor
that drops nothing at m = 1024 drops rows at m = 32. Do not copy a factor of cells from a job with
another m.

Letters: T tokens on this rank; K experts per token; E experts; C slots per (source, expert); D
hidden size; F ffn size of an expert.
"""

import math

import numpy as np

from padded_dispatch.config import DispatchConfig, kept_tokens, row_bytes

_ELEMENT_BYTES = 2  # bf16


def kept_bytes(
    config: DispatchConfig, num_tokens: int, *, hidden_size: int, fc1_width: int, num_layers: int
) -> int:
    """Return the bytes that packed experts of all layers keep for backward of a micro-batch.

    They keep fc1's result, a probability and a home of each row; a row number and a probability of
    each choice of each source; and the tokens that arrived (D). Tokens are counted as for direct
    stores with up to 8 ranks that each have whole experts, else as for collectives. Recomputation,
    which would keep less, is not considered.

    Args:
        config: its capacity factor is used.
        num_tokens: tokens of a micro-batch on this rank (T).
        hidden_size: width of a row (D).
        fc1_width: width of fc1's result in a whole expert: 2F if gated, else F.
        num_layers: layers on this rank, which share a store.

    Example: T = 4,096, K = 8, E = 128, R = 8, D = 2,048, F = 768 in bf16 at factor 1.25: 40,960
    rows of 3,084 bytes, 262,144 choices of 8 and 28,672 tokens of 4,096, 245.9 MB for each layer.
    """
    rows = config.store_rows(num_tokens, num_layers)
    bytes_of_row = row_bytes(fc1_width / config.etp_size, _ELEMENT_BYTES)
    choices = 8 * config.num_sources * num_tokens * config.top_k
    direct, slots = config.etp_size == 1 and config.num_sources <= 8, config.wire_slots(num_tokens)
    tokens = kept_tokens(config.num_sources, num_tokens, slots, direct=direct)
    bytes_of_layer = choices + tokens * hidden_size * _ELEMENT_BYTES
    return round(rows * bytes_of_row) + num_layers * bytes_of_layer


def balanced_drop(*, num_tokens: int, top_k: int, num_experts: int, capacity: int) -> float:
    """Return the expected share of rows that a perfectly balanced router drops.

    Its terms are positive and computed from their logarithms, so nothing cancels or overflows.

    Args:
        num_tokens: tokens of a source (T).
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
