"""Grouped products against one product per expert, bit by bit."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from padded_dispatch.experts.scaled import quantize
from padded_dispatch.kernels import Scaled, Segments, gemm
from tests.support.device import (
    DEVICE,
    equal,
    here,
    in_store,
    operand,
    real,
    segments_of,
    small_tiles,
)
from tests.support.threads import poisoned_memory

# The interpreter's products of bf16 are wrong (Triton 3.9): it multiplies the bits.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16


@pytest.fixture
def small() -> Iterator[None]:
    with small_tiles():
        yield


SMALL_TILES = pytest.mark.usefixtures("small")

# Rows of each expert, where the first one lies, and sources. None in front, between and behind; one
# row; all in one expert; no row; many experts.
ROWS = pytest.mark.parametrize(
    ("counts", "base", "num_sources"),
    [
        ([0, 70, 0, 64, 1, 0], 37, 2),
        ([1], 0, 1),
        ([129, 0], 64, 8),
        ([0, 0], 5, 2),
        ([3] * 20, 1, 1),
    ],
    ids=["some", "one", "all in one", "none", "many"],
)
STORED = pytest.mark.parametrize("stored", [True, False], ids=["stored", "loose"])
KINDS = pytest.mark.parametrize("kind", ["stored", "loose", "e4m3"])


def tiled(counts: list[int], **how: int) -> Segments:
    return gemm.with_tiles(segments_of(counts, **how))


def by_expert(rows_nI: Tensor, weight_LOI: Tensor, counts: list[int]) -> Tensor:
    parts = zip(rows_nI.float().split(counts), weight_LOI.float(), strict=True)
    return torch.cat([rows @ weight.T for rows, weight in parts]).to(rows_nI.dtype)


def e4m3(rows: Tensor, segments: Segments | None = None) -> Scaled:
    scaled = quantize(rows.contiguous())
    values, scales = (
        here(part) if segments is None else operand(part, segments, stored=False)
        for part in (scaled.values, scaled.scales)
    )
    return Scaled(values=values, scales=scales, dtype=rows.dtype)


def operands(
    kind: str, rows_nI: Tensor, weight_LOI: Tensor, segments: Segments
) -> tuple[Tensor | Scaled, Tensor | Scaled, Segments]:
    """Return what a product is given: rows and weights are in e4m3, or rows stored or loose."""
    if kind == "e4m3":
        return e4m3(rows_nI, segments), e4m3(weight_LOI), segments
    return operand(rows_nI, segments, kind == "stored"), here(weight_LOI), segments


@pytest.mark.parametrize("num_sources", [1, 8])
@pytest.mark.parametrize(
    "counts", [[0, 0], [1], [0, 128, 129, 0, 127], [5000, 3, 2049], [3] * 150], ids=str
)
def test_row_tiles_are_listed_expert_by_expert(counts, num_sources):
    expected, start = [], 1000
    for expert, count in enumerate(counts):
        first, num_tiles = len(expected), -(-count // gemm._TILES.rows)
        for before in range(0, num_tiles, gemm._TILES_OF_GROUP):
            of_group = min(gemm._TILES_OF_GROUP, num_tiles - before)
            line = [expert, first + before, of_group, start + before * gemm._TILES.rows]
            expected += [line] * of_group
        start += count
    segments = tiled(counts, base=1000, num_sources=num_sources)
    found = segments.tiles
    assert found is not None
    assert found.shape == (1 + segments.num_rows // gemm._TILES.rows + len(counts), 5)
    assert found[: 1 + len(expected), :4].tolist() == [[len(expected), 0, 0, 0], *expected]
    by_rows = sorted(range(len(counts)), key=lambda expert: -counts[expert])
    assert found[1 : 1 + len(counts), 4].tolist() == by_rows


@SMALL_TILES
@ROWS
@KINDS
@pytest.mark.parametrize(
    ("transposed", "down"), [(False, False), (False, True), (True, True)], ids=str
)
def test_each_expert_has_its_own_matrix(
    counts, base, num_sources, kind, transposed, down, monkeypatch
):
    """Other rows are NaN, and stay so. One of the two operands with rows lies in a store."""
    monkeypatch.setattr(gemm, "_SMALL_WEIGHT", 0 if down else 2**30)
    segments = tiled(counts, base=base, num_sources=num_sources)
    rows_nI, weight_LOI, expected_nO = whole_numbers(counts, transposed)
    given, loose = operands(kind, rows_nI, weight_LOI, segments), kind == "stored"
    out = None if loose else operand(torch.full_like(expected_nO, 7), segments, True)
    with poisoned_memory():
        found = gemm.rows_times_weights(*given, out=out, stored=loose)
    assert loose or found is out
    equal((real(found, segments, not loose), expected_nO))
    assert int(found.isnan().all(1).sum()) == len(found) - sum(counts)


def whole_numbers(counts: list[int], transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, weights, and their product: rows of 80 and 40 elements.

    Small whole numbers, whose sums are exact in any order, times a power of two for each row.
    """
    generator = torch.Generator().manual_seed(len(counts))

    def draw(*shape: int) -> Tensor:
        rows = torch.randint(-2, 3, shape, generator=generator)
        return (rows * torch.randint(-3, 4, (*shape[:-1], 1), generator=generator).exp2()).to(DTYPE)

    rows_nI, weight_LOI = draw(sum(counts), 80), draw(len(counts), 40, 80)
    expected_nO = by_expert(rows_nI, weight_LOI, counts)
    if transposed:
        weight_LOI = weight_LOI.transpose(1, 2).contiguous().transpose(1, 2)
    return rows_nI, weight_LOI, expected_nO


@SMALL_TILES
def test_more_tiles_than_a_group_has_by_one_program(monkeypatch):
    """Without `out` the result is loose, and as long as a pass may be."""
    monkeypatch.setattr(gemm, "_SMALL_WEIGHT", 0)
    monkeypatch.setattr(gemm, "multiprocessors", lambda device: 1)
    counts = [5, 64 * gemm._TILES_OF_GROUP + 70, 3]
    segments = tiled(counts, base=11, num_sources=2)
    rows_nI, weight_LOI, expected_nO = whole_numbers(counts, transposed=False)
    given = operand(rows_nI, segments, True), here(weight_LOI), segments
    out_NO = gemm.rows_times_weights(*given, stored=True)
    assert len(out_NO) == segments.num_rows
    equal((real(out_NO, segments, False), expected_nO))


def addresses(buffer_NO: Tensor, places: list[int]) -> list[int]:
    row_bytes = buffer_NO.shape[1] * buffer_NO.element_size()
    return [buffer_NO.data_ptr() + row_bytes * place for place in places]


@SMALL_TILES
@ROWS
@KINDS
@pytest.mark.parametrize(("transposed", "biased"), [(False, True), (True, False)])
def test_rows_at_addresses_are_those_of_the_product(
    counts, base, num_sources, kind, transposed, biased
):
    """In another order, with rows of a buffer between them that are not written."""
    generator = torch.Generator().manual_seed(len(counts))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DTYPE)

    segments = tiled(counts, base=base, num_sources=num_sources)
    num_rows, width_in, width_out = sum(counts), 32, 40
    rows, weight_LOI = draw(num_rows, width_in), draw(len(counts), width_out, width_in)
    if transposed:
        weight_LOI = weight_LOI.transpose(1, 2).contiguous().transpose(1, 2)
    places = 2 * torch.randperm(num_rows, generator=generator)
    bias_LO = here(draw(len(counts), width_out)) if biased else None
    prob_M = here(in_store(torch.rand(num_rows, generator=generator), base)) if biased else None
    buffer_NO = torch.full((2 * num_rows, width_out), 7.0, dtype=DTYPE, device=DEVICE)
    # Addresses of rows that do not exist would crash.
    at_M = here(torch.tensor([0] * base + addresses(buffer_NO, places.tolist()) + [0] * 3))
    given = operands(kind, rows, weight_LOI, segments)
    how = {"bias_LO": bias_LO, "prob_M": prob_M, "stored": kind == "stored"}
    gemm.rows_times_weights(*given, at_M=at_M, **how)
    product_NO = gemm.rows_times_weights(*given, **how)
    expected_NO = torch.full_like(buffer_NO, 7.0)
    expected_NO[here(places)] = real(product_NO, segments, False)
    equal((buffer_NO, expected_NO))


@SMALL_TILES
@ROWS
@KINDS
def test_a_bias_is_added_to_the_rounded_product(counts, base, num_sources, kind):
    """2049 is not an fp16, nor 257 a bf16: it rounds down before a bias is added."""
    segments = tiled(counts, base=base, num_sources=num_sources)
    rows_nI = torch.zeros(sum(counts), 32, dtype=DTYPE)
    weight_LOI = torch.zeros(len(counts), 40, 32, dtype=DTYPE)
    big, bias_L = 2 / torch.finfo(DTYPE).eps, 2.0 * torch.arange(len(counts))
    rows_nI[:, 0], rows_nI[:, 1], weight_LOI[..., 0], weight_LOI[..., 1] = big, 1, 1, 1
    bias_LO = bias_L[:, None].expand(-1, 40).contiguous().to(DTYPE)
    prob_n = torch.arange(1.0, sum(counts) + 1) / 2
    out_NO = gemm.rows_times_weights(
        *operands(kind, rows_nI, weight_LOI, segments),
        stored=kind == "stored",
        bias_LO=here(bias_LO),
        prob_M=here(in_store(prob_n, base)),
    )
    expected_n = (big + prob_n * bias_L.repeat_interleave(torch.tensor(counts))).to(DTYPE)
    equal((real(out_NO, segments, False), expected_n[:, None].expand(-1, 40)))


@SMALL_TILES
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_scaled_row_that_is_not_finite_spoils_itself_alone(value):
    """Likewise a row of a weight: one column of its expert."""
    rows_nI, weight_LOI = torch.ones(70, 32), torch.ones(2, 40, 32)
    rows_nI[3, 5] = weight_LOI[1, 7, 9] = value
    given = operands("e4m3", rows_nI.to(DTYPE), weight_LOI.to(DTYPE), tiled([60, 10]))
    out_NO = gemm.rows_times_weights(*given, stored=False)
    found_nO = out_NO[:70].cpu()
    spoiled = torch.zeros(70, 40, dtype=torch.bool)
    spoiled[3] = spoiled[60:, 7] = True
    assert torch.equal(found_nO.isnan(), spoiled)
    assert (found_nO[~spoiled] == 32).all()


@SMALL_TILES
@ROWS
@STORED
def test_weight_gradients_are_added_in_fp32(counts, base, num_sources, stored):
    generator = torch.Generator().manual_seed(len(counts))
    segments = tiled(counts, base=base, num_sources=num_sources)
    num_rows, width_out, width_in = sum(counts), 72, 40

    def draw(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).to(DTYPE)

    grad_nO, rows_nI = draw(num_rows, width_out), draw(num_rows, width_in)
    parts = zip(grad_nO.float().split(counts), rows_nI.float().split(counts), strict=True)
    expected_LOI = torch.stack([grad.T @ rows for grad, rows in parts])
    given = operand(grad_nO, segments, stored), operand(rows_nI, segments, False), segments
    how = {"stored": stored}
    zeros = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    for dtype in (DTYPE, torch.float32):
        sums_LOI = torch.full_like(expected_LOI, 0.25, dtype=dtype, device=DEVICE)
        gemm.weight_gradients(*given, sums_LOI, zeros, **how)
        equal((sums_LOI, (expected_LOI + 0.25).to(dtype)))
    zeroed = torch.tensor([1, 7], dtype=torch.int32, device=DEVICE)
    for number in range(4):
        if number % 3 == 0:
            zeroed += 1
            sums_LOI.fill_(torch.nan)
        gemm.weight_gradients(*given, sums_LOI, zeroed, **how)
        equal((sums_LOI, expected_LOI * (number % 3 + 1)))
        assert zeroed[0] == 0
    equal((gemm.weight_gradients(*given, **how), expected_LOI.to(DTYPE)))


@pytest.mark.parametrize(("itemsize", "low", "high"), [(2, 96, 384), (4, 192, 768)])
@pytest.mark.parametrize("adds", [False, True])
def test_tiles_of_gradients_fit_a_multiprocessor(itemsize, low, high, adds):
    """Its 227 KiB hold what is read ahead and a part of what is stored; 1 KiB is each program's."""
    for rows in (low - 1, low, high, high + 1):
        tiles = gemm.gradient_tiles(rows, itemsize, adds)
        assert tiles.programs == (1 if adds or not low <= rows <= high else 2)
        ahead = tiles.stages * tiles.inner * (tiles.rows + tiles.columns) * 2
        part = tiles.rows * tiles.columns  # A quarter in fp32, a half in 16 bits.
        assert tiles.programs * (ahead + part + 2**10) <= 227 * 2**10


@pytest.mark.parametrize(
    ("dtype", "width", "message"),
    [
        (torch.float32, 8, "dtype must be torch.bfloat16 .* got torch.float32; train in bf16"),
        (torch.bfloat16, 12, r"sizes must be multiples of 8 .* got \(8, 12\); use an experts"),
    ],
)
def test_what_products_do_not_compute_is_refused(dtype, width, message):
    rows, weight_LOI = (torch.ones(*s, width, dtype=dtype) for s in ((8,), (1, 8)))
    with pytest.raises(ValueError, match=message):
        gemm.check_on_gpu(rows, weight_LOI)


@pytest.mark.gpu
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize(
    ("mean", "width_in", "width_out"), [(256, 2048, 1536), (512, 2880, 5760), (1024, 7168, 4096)]
)
def test_products_have_the_bits_of_torchs(mean, width_in, width_out, stored):
    """Experts of Qwen3, GPT-OSS and DeepSeek-V3, one of them without rows; other rows are NaN."""
    counts = [mean, 0, mean + 37, mean - 38, mean - 1, 1]
    segments = tiled(counts, base=333, num_sources=8)
    offsets_L = torch.tensor(counts).cumsum(0).int().cuda()

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(torch.bfloat16)

    rows_nI, grad_nO = draw(sum(counts), width_in), draw(sum(counts), width_out)
    rows, grad = (operand(value, segments, stored) for value in (rows_nI, grad_nO))
    weight_LOI = draw(len(counts), width_out, width_in)
    products = (rows, rows_nI, weight_LOI), (grad, grad_nO, weight_LOI.transpose(1, 2))
    for given, packed, weight in products:
        expected = torch._grouped_mm(packed, weight.transpose(1, 2), offs=offsets_L)
        out_NO = gemm.rows_times_weights(given, weight, segments, stored=stored)
        equal((real(out_NO, segments, False), expected))
    expected = torch._grouped_mm(grad_nO.T, rows_nI, offs=offsets_L)
    given = grad, operand(rows_nI, segments, False), segments
    equal((gemm.weight_gradients(*given, stored=stored), expected))
    sums_LOI = torch.zeros(expected.shape, device="cuda")
    zeroed = torch.zeros(2, dtype=torch.int32, device="cuda")
    gemm.weight_gradients(*given, sums_LOI, zeroed, stored=stored)
    equal((sums_LOI.to(torch.bfloat16), expected))


def padded(*rows: list[float]) -> Tensor:
    """Return rows that zeros make 72 wide, as wide as a tile or wider."""
    return torch.tensor([row + [0.0] * (72 - len(row)) for row in rows]).to(DTYPE)


@SMALL_TILES
def test_examples():
    segments, weight_LOI = tiled([1, 1], base=5), torch.zeros(2, 72, 72, dtype=DTYPE)
    weight_LOI[0, 0, 0] = weight_LOI[1, 0, 1] = 1
    given = operand(padded([1, 2], [3, 4]), segments, False), here(weight_LOI), segments
    assert gemm.rows_times_weights(*given, stored=False)[:2, 0].tolist() == [1, 4]
    buffer_NO = here(padded([7], [7]))
    at_M = here(torch.tensor([0] * 5 + addresses(buffer_NO, [1, 0])))
    gemm.rows_times_weights(*given, at_M=at_M, stored=False)
    assert buffer_NO[:, 0].tolist() == [4, 1]
    segments = tiled([2, 0, 1], base=7)
    grad, rows = padded([1], [2], [3]), padded([1], [10], [100])
    given = operand(grad, segments, False), operand(rows, segments, False), segments
    assert gemm.weight_gradients(*given, stored=False)[:, 0, 0].tolist() == [21, 0, 300]
    for zeroed, expected in ([0, 0], [22, 1, 301]), ([1, 0], [21, 0, 300]):
        sums_LOI = torch.ones(3, 72, 72, device=DEVICE)
        gemm.weight_gradients(*given, sums_LOI, here(zeroed).int(), stored=False)
        assert sums_LOI[:, 0, 0].tolist() == expected


def test_row_tiles_example(monkeypatch):
    monkeypatch.setattr(gemm, "_TILES", gemm.Tiles(rows=2))
    found = tiled([3, 0, 4], base=10).tiles
    assert found is not None
    found = found[:5]
    assert found[:, :4].tolist() == [[4, 0, 0, 0], *[[0, 0, 2, 10]] * 2, *[[2, 2, 2, 13]] * 2]
    assert found[1:4, 4].tolist() == [2, 0, 1]
