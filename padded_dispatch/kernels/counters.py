"""What a selection asked for, kept and dropped, added to running totals in one launch.

Each program reads the maps of some tokens and adds its sums, which are whole numbers, so that it
does not matter in which order the programs come; the first one adds what is known already.
Probability mass is in units of 2**-32, each row's rounded half to even.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096  # elements of the maps per program


def count(
    totals: Tensor,
    max_demand: Tensor,
    asked_TE: Tensor,
    kept_TE: Tensor,
    probs_TE: Tensor,
    demand_E: Tensor,
    capacity: int,
) -> None:
    """Add one pass to `totals` and `max_demand`, in place.

    Args:
        totals: int64, contiguous: demand [E], kept [E], then `ops.counters.SCALARS`.
        max_demand: int64 scalar.
        asked_TE: bool [T, E].
        kept_TE: bool [T, E].
        probs_TE: floating point [T, E], finite where asked.
        demand_E: int32 [E], the column sums of `asked_TE`.
        capacity: slots per expert (C).

    Example: E = 2, C = 1, `asked = [[1, 1], [1, 0]]`, `kept = [[0, 1], [1, 0]]`,
    `probs = [[.25, .75], [.5, 0]]`, `demand = [2, 1]` add demand [2, 1] and kept [1, 1]; then asked
    mass 1.5 and dropped mass .25, both times 2**32; 2 tokens, none lost; 2 positions, 1 pass, 2
    slots.
    """
    num_tokens, num_experts = asked_TE.shape
    block_e = triton.next_power_of_2(num_experts)
    block_t = max(1, _TILE // block_e)
    _count_kernel[(triton.cdiv(num_tokens, block_t),)](
        totals,
        max_demand,
        asked_TE.contiguous(),
        kept_TE.contiguous(),
        probs_TE.contiguous(),
        demand_E,
        num_tokens,
        capacity,
        NUM_EXPERTS=num_experts,
        BLOCK_T=block_t,
        BLOCK_E=block_e,
        WIDE=tl.float64 if probs_TE.dtype == torch.float64 else tl.float32,
    )


@triton.jit
def _count_kernel(
    totals,
    max_demand,
    asked,
    kept,
    probs,
    demand,
    num_tokens,
    capacity,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    WIDE: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    inside = (t < num_tokens)[:, None] & (e < NUM_EXPERTS)[None, :]
    at = t[:, None] * NUM_EXPERTS + e[None, :]
    asks = tl.load(asked + at, mask=inside, other=0) != 0
    keeps = tl.load(kept + at, mask=inside, other=0) != 0
    prob = tl.load(probs + at, mask=asks, other=0.0).to(WIDE)
    mass = _half_to_even(prob * 4294967296.0)

    scalars = totals + 2 * NUM_EXPERTS
    kept_e = tl.sum(keeps.to(tl.int64), 0)
    tl.atomic_add(totals + NUM_EXPERTS + e, kept_e, mask=(e < NUM_EXPERTS) & (kept_e > 0))
    tl.atomic_add(scalars + 0, tl.sum(mass))
    tl.atomic_add(scalars + 1, tl.sum(tl.where(keeps, 0, mass)))
    asks_any = tl.max(asks.to(tl.int64), 1)
    keeps_any = tl.max(keeps.to(tl.int64), 1)
    tl.atomic_add(scalars + 2, tl.sum(asks_any))
    tl.atomic_add(scalars + 3, tl.sum(asks_any * (1 - keeps_any)))
    if tl.program_id(0) == 0:
        demand_e = tl.load(demand + e, mask=e < NUM_EXPERTS, other=0).to(tl.int64)
        before_e = tl.load(totals + e, mask=e < NUM_EXPERTS, other=0)
        tl.store(totals + e, before_e + demand_e, mask=e < NUM_EXPERTS)
        tl.store(max_demand, tl.maximum(tl.load(max_demand), tl.max(demand_e)))
        tl.store(scalars + 4, tl.load(scalars + 4) + num_tokens)
        tl.store(scalars + 5, tl.load(scalars + 5) + 1)
        tl.store(scalars + 6, tl.load(scalars + 6) + NUM_EXPERTS * capacity)


@triton.jit
def _half_to_even(x):
    """The nearest whole number, int64; exact, since a float and its floor differ exactly."""
    low = tl.floor(x)
    rest = x - low
    whole = low.to(tl.int64)
    up = (rest > 0.5) | ((rest == 0.5) & (whole % 2 != 0))
    return whole + up.to(tl.int64)
