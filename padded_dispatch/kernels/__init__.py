"""Triton kernels and their launchers: tensors and ints in, tensors out.

They need Triton, which comes with torch's CUDA builds. Their callers import them at the first CUDA
tensor. With TRITON_INTERPRET=1 they run on a CPU, which is how their logic is tested. `select` and
`plan` serve `routing`, `direct` serves `exchange.direct`, `counters` serves `counters`, and the
others `experts`. Letters: see `padded_dispatch.config`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# What `counters` counts, one number each, in the order in which they lie behind the numbers per
# expert: see `counters.Counters`. Listed here because the kernel shares the order, and `counters`
# must not need Triton.
SCALARS = (
    "lost_tokens",
    "num_positions",
    "num_passes",
    "num_slots",
    "num_unplaced",
    "idle_passes",
    "struck",
    "num_again",
)


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Rows of each expert: from `offsets[l * S]` to `offsets[(l + 1) * S]`.

    Offsets are on the device, and so is the first of them, the base: the rows of a pass may begin
    anywhere in a store. An operand is either stored (its row n is row n of the store) or loose (its
    row 0 is row `base`). Rows outside of the offsets are never read nor written.

    Attributes:
        offsets: contiguous int32 [L * S + 1], ascending: where each (expert, source) begins; the
            last is where all end.
        num_experts: L.
        num_sources: S, the sources of each expert's rows.
        num_rows: the most rows of a pass (N); launches and loose tensors have this size.
        num_expected: rows of a pass in perfect balance, which decide launch parameters.
        tiles: int32 [1 + most tiles, 4], the tiles of rows that products compute: see `gemm`; None
            where no product is computed.
    """

    offsets: Tensor
    num_experts: int
    num_sources: int
    num_rows: int
    num_expected: int
    tiles: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """Rows in e4m3 with a scale each: row n stands for `values[n] * scales[n]`.

    A scale is the smallest power of two with which its row is within +-448; it is at least 2**-126,
    and NaN for a row with inf or NaN. So quantizing rounds to e4m3 and nothing else.

    Attributes:
        values: float8_e4m3fn, contiguous, [..., I].
        scales: fp32, contiguous, [...].
        dtype: of the rows that it stands for, and of products with them.
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype

    @classmethod
    def empty(cls, *shape: int, like: Tensor) -> "Scaled":
        """Return unspecified memory for rows of a shape, in the dtype of `like`, beside it."""
        return cls(
            values=like.new_empty(shape, dtype=torch.float8_e4m3fn),
            scales=like.new_empty(shape[:-1], dtype=torch.float32),
            dtype=like.dtype,
        )
