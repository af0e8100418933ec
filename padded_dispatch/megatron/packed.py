"""Raise if a CUDA graph would ignore the boundaries of packed sequences.

Packed sequences (`packed_seq_params`, in format THD) are separated in attention; the MoE part of a
layer sees T tokens, whatever their sequences. So graphs of the MoE part or of its router replay
with attention in front of them that is eager. A graph of attention has the boundaries of its
capture, so it is refused, in the first training pass: before the capture, in all three ways to
capture.

With `tokens_per_sample` (0.19 and later) Megatron rearranges flattened samples for the MoE part,
[B * S, 1, D] to [S, B, D], which it leaves out in a capture. Policies and the auxiliary loss per
sequence would then see tokens in another order than in eager passes.
"""

from typing import Any

from padded_dispatch.config import require
from padded_dispatch.megatron.compat import captures_attention, captures_routing


def check_packed(layer: Any, packed_seq_params: Any) -> None:
    """Raise if graphs of this layer could not follow these sequences in training.

    Args:
        layer: a transformer layer.
        packed_seq_params: Megatron's PackedSeqParams, or None.

    Raises:
        ValueError: if the config captures attention; or if it captures the routing, and a
            microbatch has several flattened samples.
    """
    if packed_seq_params is None:
        return
    config = layer.config
    require(
        not captures_attention(config),
        "packed_seq_params",
        packed_seq_params.qkv_format,
        "be None where a CUDA graph holds attention, which keeps the boundaries of its capture",
        "set cuda_graph_impl='transformer_engine' and leave 'attn' out of its scopes ('moe'; or "
        "'moe_router' and 'moe_preprocess'), or pad every sequence to one length",
    )
    length = getattr(packed_seq_params, "tokens_per_sample", None)
    require(
        length is None or not captures_routing(config),
        "packed_seq_params.tokens_per_sample",
        length,
        "be None where a CUDA graph holds the router, because Megatron captures it without "
        "separating the samples",
        "set micro_batch_size=1 without it, or cuda_graph_impl='none'",
    )
