"""Linears with one weight for each expert, against one expert after the other."""

from collections import deque

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from padded_dispatch.routing import grouped
from tests.ops.test_activation import BIASED
from tests.support.grids import poisoned_memory

# Rows of each expert: none in front, between and behind; one; everything in one expert; nothing.
CASES = pytest.mark.parametrize(
    "counts", [[0, 3, 0, 5, 1, 0], [1], [0, 7, 0], [0, 0], [4, 4]], ids=str
)
I, O = 6, 5  # noqa: E741
SPARE = 3


def test_row_tiles_example():
    table = grouped.row_tiles(offsets_of([3, 0, 130]), 140)
    assert table.shape == (1 + 1 + 3, 4)
    assert table[:4].tolist() == [[3, 0, 0, 0], [0, 0, 1, 0], *[[2, 1, 2, 3]] * 2]


def offsets_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).int()


def inputs(counts: list[int], biased: bool, spare: int = SPARE) -> list[Tensor | None]:
    """Rows, weights, bias and probabilities; of the rows the last `spare` are NaN."""
    generator = torch.Generator().manual_seed(sum(counts) + len(counts))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    num_rows, num_experts = sum(counts), len(counts)
    rows_NI, probs_N = draw(num_rows + spare, I), draw(num_rows + spare)
    rows_NI[num_rows:] = probs_N[num_rows:] = torch.nan
    made = [rows_NI, draw(num_experts, O, I)]
    made += [draw(num_experts, O), probs_N] if biased else []
    leaves: list[Tensor | None] = [value.requires_grad_() for value in made]
    return leaves if biased else [*leaves, None, None]


def ours(rows_NI, weight_LOI, bias_LO, probs_N, offsets_L: Tensor) -> Tensor:
    return grouped.grouped_linear(rows_NI, weight_LOI, offsets_L, bias_LO, probs_N)


def one_by_one(rows_NI, weight_LOI, bias_LO, probs_N, offsets_L: Tensor) -> Tensor:
    out, start = [], 0
    for expert, end in enumerate(offsets_L.tolist()):
        found = rows_NI[start:end] @ weight_LOI[expert].T
        if bias_LO is not None:
            found = found + probs_N[start:end, None] * bias_LO[expert]
        out.append(found)
        start = end
    return torch.cat(out)


def results(function, counts: list[int], biased: bool) -> list[Tensor]:
    """Output and gradients of the real rows; that of the output is NaN where no row is."""
    given, num_rows = inputs(counts, biased), sum(counts)
    with poisoned_memory():
        out_NO = function(*given, offsets_of(counts))
        grad_NO = torch.full_like(out_NO, torch.nan)
        grad_NO[:num_rows] = torch.linspace(-1, 1, num_rows * O).view(-1, O)
        out_NO.backward(grad_NO)
    found = [out_NO.detach()] + [leaf.grad for leaf in given if leaf is not None]
    by_row = {0, 1, 4}  # Output, rows and probabilities.
    return [value[:num_rows] if i in by_row else value for i, value in enumerate(found)]


def batched(rows_NI, weight_LOI, bias_LO, probs_N, offsets_L: Tensor) -> Tensor:
    return grouped.batched_linear(rows_NI, weight_LOI, offsets_L, bias_LO, probs_N)


@BIASED
@pytest.mark.parametrize("counts", [[4, 4], [1], [0, 0], [3, 3, 3]], ids=str)
def test_one_product_where_all_experts_have_equally_many_rows(counts, biased):
    """With padded rows, zero and of probability zero, among them: the last of every expert."""
    found = []
    for function in (batched, one_by_one):
        leaves = inputs(counts, biased, spare=0)
        rows_NI, probs_N = leaves[0], leaves[3]
        with torch.no_grad():
            for end in offsets_of(counts).tolist():
                rows_NI[end - 1 : end] = 0
                if biased:
                    probs_N[end - 1 : end] = 0
        with poisoned_memory():
            out_NO = function(*leaves, offsets_of(counts))
            out_NO.backward(torch.linspace(-1, 1, out_NO.numel()).double().view_as(out_NO))
        found.append([out_NO.detach(), *(leaf.grad for leaf in leaves if leaf is not None)])
        assert not any(out_NO[end - 1].any() for end in offsets_of(counts).tolist() if sum(counts))
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-13)
        assert mine.is_contiguous()


@BIASED
@CASES
def test_output_and_gradients(counts, biased):
    mine, expected = results(ours, counts, biased), results(one_by_one, counts, biased)
    for got, value in zip(mine, expected, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("num_steps", [1, 8])
def test_weight_gradients_are_rounded_once_and_added_in_fp32(num_steps):
    """What DDP's `main_grad` holds against fp64: off by at most 2**-8 of every gradient added."""
    generator = torch.Generator().manual_seed(1)
    offsets_L = offsets_of([0, 32, 64])

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    weight_LOI = draw(3, 33, 40).requires_grad_()
    main = torch.zeros(3, 33, 40)
    exact, sizes, terms = torch.zeros(3, 3, 33, 40, dtype=torch.float64)
    for _ in range(num_steps):
        rows_NI, grad_NO = draw(96, 40), draw(96, 33)
        weight_LOI.grad = None
        grouped.grouped_linear(rows_NI, weight_LOI, offsets_L).backward(grad_NO)
        assert weight_LOI.grad is not None and weight_LOI.grad.dtype == torch.bfloat16
        main += weight_LOI.grad
        added = grouped.outer_by_expert(grad_NO.double(), rows_NI.double(), offsets_L)
        exact, sizes = exact + added, sizes + added.abs()
        terms += grouped.outer_by_expert(grad_NO.double().abs(), rows_NI.double().abs(), offsets_L)
    # Besides, at most 128 roundings of fp32 lie between a product and `main`.
    assert ((main - exact).abs() <= 2**-8 * sizes + 128 * 2**-24 * terms).all()
    relative = (main - exact).square().sum() / exact.square().sum()
    assert relative.sqrt().item() == pytest.approx(0.0017, abs=5e-5)  # The docstring's 0.17 %.


@pytest.mark.parametrize("linear", [grouped.grouped_linear, grouped.batched_linear])
def test_sums_get_the_gradient_without_rounding_it(linear):
    """Two passes are in flight; rows of NaN follow the last expert's in the packed layout."""
    counts = [0, 3, 4, 0] if linear is grouped.grouped_linear else [3, 3, 3]
    spare = SPARE if linear is grouped.grouped_linear else 0
    offsets_L, num_rows = offsets_of(counts), sum(counts)
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    weight_LOI = draw(len(counts), O, I).requires_grad_()
    sums_LOI = torch.full(weight_LOI.shape, 0.5)
    passes, expected_LOI = [], sums_LOI.double()
    for _ in range(2):
        rows_NI, grad_NO = draw(num_rows + spare, I), draw(num_rows + spare, O)
        rows_NI[num_rows:] = grad_NO[num_rows:] = torch.nan
        rows_NI.requires_grad_()
        out_NO = linear(rows_NI, weight_LOI, offsets_L, sums_LOI=sums_LOI)
        passes.append((out_NO, grad_NO, rows_NI))
        expected_LOI += grouped.outer_by_expert(grad_NO.double(), rows_NI.double(), offsets_L)
    for out_NO, grad_NO, rows_NI in passes:
        out_NO.backward(grad_NO)
        plain_NI = rows_NI.detach().requires_grad_()
        linear(plain_NI, weight_LOI.detach(), offsets_L).backward(grad_NO)
        assert rows_NI.grad is not None and plain_NI.grad is not None
        assert torch.equal(rows_NI.grad[:num_rows], plain_NI.grad[:num_rows])
    # Sums of at most 8 products of two numbers below 4, and 0.5, in fp32.
    assert (sums_LOI - expected_LOI).abs().max() <= 2 * 8 * 128 * 2**-24
    assert weight_LOI.grad is not None and weight_LOI.grad.shape == weight_LOI.shape


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("rows_have_gradients", [True, False])
@pytest.mark.parametrize("linear", [grouped.grouped_linear, grouped.batched_linear])
def test_a_delayed_gradient_has_the_bits_of_one_at_once(linear, rows_have_gradients, added):
    """Two passes wait, and come in the order of their backward passes."""
    counts = [0, 3, 4, 0] if linear is grouped.grouped_linear else [3, 3, 3]
    offsets_L, num_rows = offsets_of(counts), sum(counts)
    drawn = [torch.randn(2, num_rows, width).bfloat16() for width in (I, O)]
    weight_LOI = torch.randn(len(counts), O, I).bfloat16().requires_grad_()

    def run(delayed: grouped.Delayed | None) -> list[Tensor]:
        sums_LOI = torch.full(weight_LOI.shape, 0.5) if added else None
        found = []
        for rows_NI, grad_NO in zip(*drawn, strict=True):
            weight_LOI.grad = None
            rows_NI = rows_NI.clone().requires_grad_(rows_have_gradients)
            out_NO = linear(rows_NI, weight_LOI, offsets_L, sums_LOI=sums_LOI, delayed=delayed)
            out_NO.backward(grad_NO)
            found += [out_NO.detach()] + ([rows_NI.grad] if rows_NI.grad is not None else [])
            if delayed is None:
                found.append(weight_LOI.grad)
            else:
                assert weight_LOI.grad is None
        while delayed:
            found.append(delayed.popleft()())
        return found if sums_LOI is None else [sums_LOI]

    expected, given = run(None), run(deque())
    if not added:  # Delayed ones come last.
        per_pass = len(expected) // 2
        first, second = expected[:per_pass], expected[per_pass:]
        expected = [*first[:-1], *second[:-1], first[-1], second[-1]]
    assert len(given) == len(expected)
    for value, wanted in zip(given, expected, strict=True):
        assert torch.equal(value, wanted)


def test_a_frozen_weight_delays_nothing():
    rows_NI, weight_LOI, *_ = inputs([2, 2], biased=False, spare=0)
    assert rows_NI is not None and weight_LOI is not None
    for linear in (grouped.grouped_linear, grouped.batched_linear):
        delayed: grouped.Delayed = deque()
        linear(rows_NI, weight_LOI.detach(), offsets_of([2, 2]), delayed=delayed).sum().backward()
        assert not delayed


@BIASED
def test_all_are_sound_custom_ops(biased):
    # Every row is real, since opcheck compares every element.
    offsets_L = offsets_of([2, 0, 3])
    rows_NI, weight_LOI, bias_LO, probs_N = inputs([2, 0, 3], biased, spare=0)
    assert rows_NI is not None
    plain_NI, grad_NO = rows_NI.detach(), torch.randn(5, O, dtype=torch.float64)
    opcheck(
        grouped.linear_by_expert, (rows_NI, weight_LOI, bias_LO, probs_N, offsets_L, None, None)
    )
    sums_LOI = torch.zeros(weight_LOI.shape, dtype=torch.float64)
    opcheck(grouped.add_outer_by_expert, (grad_NO, plain_NI, offsets_L, sums_LOI))
    opcheck(grouped.outer_by_expert, (grad_NO, plain_NI, offsets_L))
    weights_N = None if probs_N is None else probs_N.detach()
    opcheck(grouped.sum_rows, (grad_NO, weights_N, offsets_L))
    if bias_LO is not None:
        opcheck(grouped._dot_rows, (grad_NO, bias_LO.detach(), weights_N, offsets_L))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "width", "message"),
    [
        (torch.float32, 8, "dtype must be torch.bfloat16 .* got torch.float32; train in bf16"),
        (torch.bfloat16, 12, r"sizes must be multiples of 8 .* got \(8, 12\); use an experts"),
    ],
)
def test_what_would_wait_for_the_host_is_refused(dtype, width, message):
    assert torch.cuda.is_available(), "this test was asked for and needs a CUDA device"
    rows_NI, weight_LOI = (
        torch.ones(*s, width, dtype=dtype, device="cuda") for s in ((8,), (1, 8))
    )
    with pytest.raises(ValueError, match=message):
        grouped.grouped_linear(rows_NI, weight_LOI, offsets_of([8]).cuda())
