"""Routing in one launch: scores, the K best experts of each token, probabilities, both maps.

A program holds the logits of some tokens, whole rows. The K best are taken one after the other: K
times, the largest score of each row is found, with the lowest id that has it, and struck out.

Results have the bits of torch's CUDA kernels, by the same operations in the same order; a test on
GPUs compares them:

- exp is `expf` of CUDA's math library, and quotients are rounded correctly. Powers below 2**-126
  are 0, where torch has the number.
- A softmax sums as torch's for rows of up to 1,024: the elements l, l + 32, l + 64, ... of each of
  32 lanes l in this order, then halves of lanes: l and l + 16, then l and l + 8, ...
- A sum of sigmoids is that of torch's reduction over a contiguous row: four sums of each lane, of
  every fourth of its elements, then these in order, then neighbours: lanes 0 and 1, 2 and 3, ...

So eager and replayed passes agree, and Megatron's. The backward kernel computes the scores again
from the logits, which takes less time than to write and read them, and sums in any order.

`padded_dispatch.ops.router` explains the arguments.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

_TILE = 1024  # Elements of the logits that a program holds.


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    top_k: int,
    function: str,
    scaling: float,
    with_scores: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `padded_dispatch.ops.router.Routed`; those not wanted have no rows.

    Arguments and results: see `padded_dispatch.ops.router.route_in_torch`; example: see `route`
    there.
    """
    num_tokens, num_experts = logits_TE.shape
    logits_TE = logits_TE.contiguous()
    probs_TE = torch.empty_like(logits_TE)
    map_TE = torch.empty_like(logits_TE, dtype=torch.bool)
    num_scored = num_tokens if with_scores else 0
    scores_TE = logits_TE.new_empty(num_scored, num_experts)
    counted_TE = map_TE.new_empty(0 if function == "softmax" else num_scored, num_experts)
    block_t, block_e = _tile(num_experts)
    _route_kernel[(triton.cdiv(num_tokens, block_t),)](
        logits_TE,
        bias_E,
        probs_TE,
        map_TE,
        scores_TE,
        counted_TE,
        num_tokens,
        scaling,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        FUNCTION=function,
        WITH_SCORES=with_scores,
        EXACT=logits_TE.is_cuda,
        BLOCK_T=block_t,
        BLOCK_E=block_e,
        num_warps=4,
    )
    return probs_TE, map_TE, scores_TE, counted_TE


def route_backward(
    grad_probs_TE: Tensor,
    grad_scores_TE: Tensor | None,
    logits_TE: Tensor,
    map_TE: Tensor,
    top_k: int,
    function: str,
    scaling: float,
) -> Tensor:
    """Return the gradient of the logits, [T, E].

    Arguments: see `padded_dispatch.ops.router.route_backward_in_torch`. The gradient of scores is
    often that of a sum over tokens, and is read with its strides.
    """
    num_tokens, num_experts = logits_TE.shape
    grad_TE = torch.empty_like(logits_TE, memory_format=torch.contiguous_format)
    block_t, block_e = _tile(num_experts)
    _route_backward_kernel[(triton.cdiv(num_tokens, block_t),)](
        grad_probs_TE.contiguous(),
        grad_scores_TE,
        logits_TE.contiguous(),
        map_TE.contiguous(),
        grad_TE,
        num_tokens,
        scaling,
        *(0, 0) if grad_scores_TE is None else grad_scores_TE.stride(),
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        FUNCTION=function,
        BLOCK_T=block_t,
        BLOCK_E=block_e,
        num_warps=4,
    )
    return grad_TE


def _tile(num_experts: int) -> tuple[int, int]:
    """Return a program's tokens, and the experts rounded up to a power of two."""
    block_e = triton.next_power_of_2(num_experts)
    return max(1, _TILE // block_e), block_e


@triton.jit
def _route_kernel(
    logits,
    bias,
    probs,
    asked,
    scores,
    counted,
    num_tokens,
    scaling,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FUNCTION: tl.constexpr,
    WITH_SCORES: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    row = logits + t * NUM_EXPERTS
    inside = (t < num_tokens)[:, None] & (e < NUM_EXPERTS)[None, :]
    at = t[:, None] * NUM_EXPERTS + e[None, :]
    x = tl.load(logits + at, mask=inside, other=-float("inf"))

    # `value` is what probabilities are made of, `choice` what experts are chosen by.
    value = x
    if FUNCTION == "softmax":
        value = _softmax(x, row, t < num_tokens, NUM_EXPERTS, EXACT, BLOCK_T, BLOCK_E)
    elif FUNCTION == "sigmoid":
        value = _sigmoid(x, EXACT)
    choice = value
    if bias is not None:
        choice = value + tl.load(bias + e, mask=e < NUM_EXPERTS, other=0.0)[None, :]
    chosen, best_TK = _top(choice, value, inside, TOP_K, BLOCK_K, BLOCK_T, BLOCK_E)

    if FUNCTION == "chosen":
        highest = tl.max(best_TK, 1)[:, None]
        total = _sum_halves(_exp(best_TK - highest, EXACT), BLOCK_T, BLOCK_K)
        value = tl.div_rn(_exp(x - highest, EXACT), tl.broadcast_to(total[:, None], x.shape))
    elif FUNCTION == "sigmoid" and TOP_K > 1:
        of_best = tl.where(best_TK == -float("inf"), 0.0, best_TK)
        total = _sum_best(of_best, TOP_K, BLOCK_T, BLOCK_K) + 1e-20
        value = tl.div_rn(value, tl.broadcast_to(total[:, None], x.shape))
    tl.store(probs + at, tl.where(chosen, value * scaling, 0.0), mask=inside)
    tl.store(asked + at, chosen, mask=inside)

    if WITH_SCORES:
        if FUNCTION == "sigmoid":
            total = _sum_sigmoids(row, t < num_tokens, NUM_EXPERTS, EXACT, BLOCK_T, BLOCK_E) + 1e-20
            score = tl.div_rn(_sigmoid(x, EXACT), tl.broadcast_to(total[:, None], x.shape))
        elif FUNCTION == "chosen":
            score = _softmax(x, row, t < num_tokens, NUM_EXPERTS, EXACT, BLOCK_T, BLOCK_E)
        else:
            score = value
        tl.store(scores + at, score, mask=inside)
        if FUNCTION != "softmax":
            best, _ = _top(score, score, inside, TOP_K, BLOCK_K, BLOCK_T, BLOCK_E)
            tl.store(counted + at, best, mask=inside)


@triton.jit
def _top(
    choice,
    value,
    inside,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Return the map of the K best, and their values, best first, with -inf behind them.

    Of equals, the lower id comes first. A NaN is larger than all numbers.
    """
    e = tl.arange(0, BLOCK_E)[None, :]
    # The bits of a negative float fall as it rises: flip all but the sign.
    bits = choice.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(choice == choice, order, 0x7FFFFFFF)
    order = tl.where(inside, order, -0x80000000)
    k = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.int1)
    best_TK = tl.full((BLOCK_T, BLOCK_K), -float("inf"), dtype=tl.float32)
    for number in range(TOP_K):
        largest = order == tl.max(order, 1)[:, None]
        mine = e == tl.min(tl.where(largest, e, BLOCK_E), 1)[:, None]
        best = tl.sum(tl.where(mine, value, 0.0), 1)
        best_TK = tl.where(k == number, best[:, None], best_TK)
        chosen = chosen | mine
        order = tl.where(mine, -0x80000000, order)
    return chosen, best_TK


@triton.jit
def _exp(x, EXACT: tl.constexpr):
    # Triton's own is faster and less exact; its interpreter does not have the other.
    if EXACT:
        return libdevice.exp(x)
    else:
        return tl.exp(x)


@triton.jit
def _sigmoid(x, EXACT: tl.constexpr):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + _exp(-x, EXACT))


@triton.jit
def _softmax(
    x,
    row,
    there,
    NUM_EXPERTS: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    LANES: tl.constexpr = min(32, BLOCK_E)
    lane = tl.arange(0, LANES)
    highest = tl.max(x, 1)[:, None]
    sums = tl.zeros((BLOCK_T, LANES), dtype=tl.float32)
    # Read again, from the cache: a tile in registers cannot be taken apart in this order.
    for first in tl.static_range(0, BLOCK_E, LANES):
        mask = there[:, None] & (first + lane < NUM_EXPERTS)[None, :]
        part = tl.load(row[:, None] + first + lane[None, :], mask=mask, other=-float("inf"))
        sums += _exp(part - highest, EXACT)
    total = _sum_halves(sums, BLOCK_T, LANES)
    return tl.div_rn(_exp(x - highest, EXACT), tl.broadcast_to(total[:, None], x.shape))


@triton.jit
def _sum_sigmoids(
    row,
    there,
    NUM_EXPERTS: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    # As many lanes as the largest power of two that is not above E, at most 32.
    LANES: tl.constexpr = min(32, BLOCK_E if BLOCK_E == NUM_EXPERTS else BLOCK_E // 2)
    lane = tl.arange(0, LANES)
    total = tl.zeros((BLOCK_T, LANES), dtype=tl.float32)
    for number in tl.static_range(4):
        sums = tl.zeros((BLOCK_T, LANES), dtype=tl.float32)
        for first in tl.static_range(number * LANES, BLOCK_E, 4 * LANES):
            mask = there[:, None] & (first + lane < NUM_EXPERTS)[None, :]
            part = tl.load(row[:, None] + first + lane[None, :], mask=mask, other=-float("inf"))
            sums += tl.where(mask, _sigmoid(part, EXACT), 0.0)
        total += sums
    return _sum_neighbours(total, BLOCK_T, LANES)


@triton.jit
def _sum_best(x_TK, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr):
    # As many lanes as the largest power of two that is not above K.
    if TOP_K == BLOCK_K:
        return _sum_neighbours(x_TK, BLOCK_T, BLOCK_K)
    else:
        half: tl.constexpr = BLOCK_K // 2
        return _sum_neighbours(tl.sum(tl.reshape(x_TK, (BLOCK_T, 2, half)), 1), BLOCK_T, half)


@triton.jit
def _sum_halves(x, BLOCK_T: tl.constexpr, LANES: tl.constexpr):
    """Add the upper half of the columns to the lower one until one is left."""
    if LANES == 1:
        return tl.reshape(x, (BLOCK_T,))
    else:
        half: tl.constexpr = LANES // 2
        return _sum_halves(tl.sum(tl.reshape(x, (BLOCK_T, 2, half)), 1), BLOCK_T, half)


@triton.jit
def _sum_neighbours(x, BLOCK_T: tl.constexpr, LANES: tl.constexpr):
    """Add each odd column to the one before until one is left."""
    if LANES == 1:
        return tl.reshape(x, (BLOCK_T,))
    else:
        half: tl.constexpr = LANES // 2
        return _sum_neighbours(tl.sum(tl.reshape(x, (BLOCK_T, half, 2)), 2), BLOCK_T, half)


@triton.jit
def _route_backward_kernel(
    grad_probs,
    grad_scores,
    logits,
    asked,
    grad,
    num_tokens,
    scaling,
    score_stride_t,
    score_stride_e,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    FUNCTION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    inside = (t < num_tokens)[:, None] & (e < NUM_EXPERTS)[None, :]
    at = t[:, None] * NUM_EXPERTS + e[None, :]
    x = tl.load(logits + at, mask=inside, other=-float("inf"))
    chosen = tl.load(asked + at, mask=inside, other=0) != 0
    of_probs = tl.load(grad_probs + at, mask=chosen, other=0.0) * scaling
    of_scores = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    if grad_scores is not None:
        score_at = t[:, None] * score_stride_t + e[None, :] * score_stride_e
        of_scores = tl.load(grad_scores + score_at, mask=inside, other=0.0)

    if FUNCTION == "sigmoid":
        value = tl.where(inside, 1 / (1 + tl.exp(-x)), 0.0)
        of_value = of_probs
        if TOP_K > 1:
            of_value = _quotient_backward(of_probs, tl.where(chosen, value, 0.0), chosen)
        if grad_scores is not None:
            of_value += _quotient_backward(of_scores, value, inside)
        result = of_value * value * (1 - value)
    elif FUNCTION == "softmax":
        result = _softmax_backward(of_probs + of_scores, x, inside)
    else:
        result = _softmax_backward(of_probs, x, chosen)
        if grad_scores is not None:
            result += _softmax_backward(of_scores, x, inside)
    tl.store(grad + at, result, mask=inside)


@triton.jit
def _softmax_backward(of_result, x, among):
    """Return the gradient of `x` whose softmax among some elements of a row has a gradient."""
    highest = tl.max(tl.where(among, x, -float("inf")), 1)[:, None]
    power = tl.where(among, tl.exp(x - highest), 0.0)
    result = power / tl.sum(power, 1)[:, None]
    return result * (of_result - tl.sum(result * of_result, 1)[:, None])


@triton.jit
def _quotient_backward(of_quotient, value, among):
    """Return the gradient of values that were divided by their sum."""
    total = (tl.sum(value, 1) + 1e-20)[:, None]
    of_sum = tl.sum(of_quotient * value, 1)[:, None] / total / total
    return tl.where(among, of_quotient / total - of_sum, 0.0)
