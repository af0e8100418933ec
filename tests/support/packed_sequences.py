"""Packed sequences, attention for the CPU that separates them, and parts of sequences."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor


def packed(lengths: list[int], device: str = "cpu") -> PackedSeqParams:
    """Return the parameters of sequences with these lengths, in format THD."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


@contextmanager
def packed_attention() -> Iterator[None]:
    """Let Megatron's local attention take packed sequences, by a mask of blocks; it is causal.

    Megatron's own packed attention is Transformer Engine's, which needs a GPU.
    """
    original = DotProductAttention.forward

    def forward(
        attention: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if packed_seq_params is None:
            return original(attention, query, key, value, attention_mask, *args, **kwargs)
        parts = (tensor[:, None] for tensor in (query, key, value))  # [T, heads, width]
        other = blocks(packed_seq_params.cu_seqlens_q, query.shape[0])
        return original(attention, *parts, other, *args, **kwargs)[:, 0]

    with patch.object(DotProductAttention, "forward", forward):
        yield


def own_part(tensor: Tensor, dim: int) -> Tensor:
    """Return this context-parallel rank's part: of 2R pieces, piece r and the one at 2R - 1 - r."""
    num_ranks = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    pieces = tensor.chunk(2 * num_ranks, dim)
    return torch.cat([pieces[rank], pieces[2 * num_ranks - 1 - rank]], dim)


def blocks(bounds: Tensor, num_tokens: int) -> Tensor:
    """Return an attention mask [1, 1, T, T], True where a token must not look."""
    positions = torch.arange(num_tokens)
    number = torch.bucketize(positions, bounds[1:].long(), right=True)
    other = (number[:, None] != number[None]) | (positions[:, None] < positions[None])
    return other[None, None]
