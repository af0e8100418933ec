"""The floor: what arithmetic and the wire take when nothing else does, on NVIDIA H200s.

GEMMs at 790 TFLOP/s, the best rate that torch reaches on these shapes in bf16, and every real row
once over the wire at 450 GB/s each way, NVLink's rated speed, four hops: dispatch and combine,
forward and backward. Nothing overlaps, nothing is padded, and nothing else costs anything. The
slowest rank decides.
"""

from dataclasses import dataclass

from torch import Tensor

from padded_dispatch.bench.cases import LayerShape

_FLOP_PER_S = 790e12
_BYTES_PER_S = 450e9
_HOPS = 4
_ELEMENT_BYTES = 2  # bf16


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Least milliseconds of one forward and backward, and the FLOPs of the busiest rank."""

    gemm_ms: float
    wire_ms: float
    flops: float

    @property
    def ms(self) -> float:
        """Of both, one after the other."""
        return self.gemm_ms + self.wire_ms


def floor(rows_SE: Tensor, shape: LayerShape) -> Floor:
    """The floor for rows that source ranks send to experts.

    A row costs `2 * D * 2F` FLOPs in fc1 and `2 * F * D` in fc2, and each again twice backward:
    `18 * D * F`.

    Args:
        rows_SE: numbers of rows, [R, E]; the experts of rank r are the r-th of R equal parts.
        shape: of the layer.

    Example: 8 ranks that send 256 rows to each of 128 experts of Qwen3-30B-A3B's (T = 4,096, K = 8)
    give 1.17 ms of GEMMs and 1.04 ms on the wire.
    """
    num_ranks = rows_SE.shape[0]
    rows_SR = rows_SE.double().unflatten(1, (num_ranks, -1)).sum(2)
    stay_R = rows_SR.diagonal()
    crossing = max((rows_SR.sum(1) - stay_R).max().item(), (rows_SR.sum(0) - stay_R).max().item())
    flops = 18 * shape.hidden_size * shape.ffn_size * rows_SR.sum(0).max().item()
    wire_bytes = _HOPS * crossing * shape.hidden_size * _ELEMENT_BYTES
    return Floor(
        gemm_ms=flops / _FLOP_PER_S * 1e3, wire_ms=wire_bytes / _BYTES_PER_S * 1e3, flops=flops
    )
