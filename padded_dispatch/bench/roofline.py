"""The roofline of a layer: the least time that NVIDIA H200s need for its real rows.

GEMMs run at 790 TFLOP/s, the best rate that torch reaches on these shapes in bf16. Every real row
crosses the wire four times (dispatch and combine, forward and backward) at 450 GB/s each way,
NVLink's rated speed. Nothing overlaps, nothing is padded, and nothing else costs anything. The
slowest rank decides. Results files call this time `floor_ms`.

Shape suffixes: S source ranks, R receiving ranks, E experts.
"""

from dataclasses import dataclass

from torch import Tensor

from padded_dispatch.utils.shapes import LayerShape

_FLOP_PER_S = 790e12
_BYTES_PER_S = 450e9
_HOPS = 4
_ELEMENT_BYTES = 2  # bf16


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Least milliseconds of one forward and backward pass, and the FLOPs of the busiest rank."""

    gemm_ms: float
    wire_ms: float
    flops: float

    @property
    def ms(self) -> float:
        """`gemm_ms + wire_ms`, without overlap."""
        return self.gemm_ms + self.wire_ms


def roofline(rows_SE: Tensor, shape: LayerShape) -> Roofline:
    """Return the roofline for the rows that source ranks send to experts.

    A row costs `2 * D * 2F` FLOPs in fc1 and `2 * F * D` in fc2. The backward pass costs each
    twice: `18 * D * F` in all.

    Args:
        rows_SE: numbers of rows, any dtype; rank r holds the r-th of R equal parts of the experts.
        shape: sizes of the layer.

    Example: 8 ranks that send 256 rows to each of 128 experts of Qwen3-30B-A3B (T = 4,096, K = 8)
    need 1.17 ms for GEMMs and 1.04 ms for the wire.
    """
    num_ranks = rows_SE.shape[0]
    rows_SR = rows_SE.double().unflatten(1, (num_ranks, -1)).sum(2)
    stay_R = rows_SR.diagonal()
    crossing = max((rows_SR.sum(1) - stay_R).max().item(), (rows_SR.sum(0) - stay_R).max().item())
    flops = 18 * shape.hidden_size * shape.ffn_size * rows_SR.sum(0).max().item()
    wire_bytes = _HOPS * crossing * shape.hidden_size * _ELEMENT_BYTES
    return Roofline(
        gemm_ms=flops / _FLOP_PER_S * 1e3, wire_ms=wire_bytes / _BYTES_PER_S * 1e3, flops=flops
    )
