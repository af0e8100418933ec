"""Triton kernels and their launchers, and the structures that they share.

This module runs without Triton. The others need it, so their callers import them at the first CUDA
tensor. With TRITON_INTERPRET=1 they run on a CPU, which is how their logic is tested. `select` and
`plan` serve `routing`, `direct` serves `exchange.direct`, `counters` serves `counters`, `rows`
serves `exchange` and `experts`, and the others `experts`. Letters: see `padded_dispatch.config`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# The single numbers in `counters.Counters.totals`, in their order behind the numbers per expert.
# Listed here because the kernel shares the order, and `counters` must not need Triton.
SCALARS = (
    "lost_tokens",
    "num_positions",
    "num_passes",
    "num_slots",
    "no_room",
    "num_again",
)

# A source's count of rows for each expert, if one of its tokens has more than K experts.
TOO_MANY = -(2**24)


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Rows of each expert: from `offsets[l * S]` to `offsets[(l + 1) * S]`.

    Offsets are on the device, and so is the first of them, the base: the rows of a pass may begin
    anywhere in a store. An operand is either stored (its row n is row n of the store) or loose (its
    row 0 is row `base`). Rows outside of the offsets are neither read nor written.

    Attributes:
        offsets: contiguous int32 [L * S + 1], ascending: where each (expert, source) begins; the
            last is where all end.
        num_experts: L.
        num_sources: S, the sources of each expert's rows.
        num_rows: the most rows of a pass; loose tensors have this many (N).
        num_expected: rows of a pass in perfect balance, which choose tiles of weight gradients.
        tiles: the table of `gemm.with_tiles`, which only products read, of these very offsets.
    """

    offsets: Tensor
    num_experts: int
    num_sources: int
    num_rows: int
    num_expected: int
    tiles: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class SlotList:
    """The list: the slots whose token has an expert of this rank, and the rows of their choices.

    It is in the order of (source, slot), and its length is on the device, so what walks it costs as
    much as there are such tokens, however many slots there are. With one source there is no list:
    entry a is slot a. Entries from the length on are unspecified and never read.

    Attributes:
        slot_A: int32, source * P + slot; None with one source.
        length: int32 [1], the number of entries; None with one source, which has P.
        row_AK: int32, the row of each choice; -1 if it is none of this rank, -2 if it has no room.
        prob_AK: at least fp32, its probability; unspecified where there is no row.
        num_sources, num_slots: S and P.
    """

    slot_A: Tensor | None
    length: Tensor | None
    row_AK: Tensor
    prob_AK: Tensor
    num_sources: int
    num_slots: int


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """Rows in e4m3 with a scale each: row n stands for `values[n] * scales[n]`.

    A scale is the smallest power of two with which its row is within +-448; it is at least 2**-126,
    and NaN for a row with inf or NaN. So quantizing rounds to e4m3 and nothing else.

    Attributes:
        values: float8_e4m3fn, contiguous, [..., I].
        scales: fp32, contiguous, [...].
        dtype: of the rows that they stand for, and of products with them.
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype

    @classmethod
    def empty(cls, *shape: int, like: Tensor) -> "Scaled":
        """Return unspecified memory on the device of `like` for rows of its dtype."""
        return cls(
            values=like.new_empty(shape, dtype=torch.float8_e4m3fn),
            scales=like.new_empty(shape[:-1], dtype=torch.float32),
            dtype=like.dtype,
        )
