"""Grouped products against one product per expert, bit by bit.

Without a GPU they run in Triton's interpreter, which shows their logic; with one, as they are.
"""

import pytest
import torch
from torch import Tensor

from padded_dispatch.kernels import gemm
from padded_dispatch.kernels.grouped import add_bias
from padded_dispatch.routing import grouped
from tests.support.device import DEVICE, equal, here, ints

# The interpreter's products of bf16 are wrong (Triton 3.9): it multiplies the bits.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16

SMALL = gemm.Tiles(rows=64, columns=32, inner=16, stages=2, warps=4)


def by_expert(rows_NI: Tensor, weight_LOI: Tensor, offsets_L: Tensor) -> Tensor:
    parts, start = [], 0
    for weight_OI, end in zip(weight_LOI.float(), offsets_L.tolist(), strict=True):
        parts.append(rows_NI[start:end].float() @ weight_OI.T)
        start = end
    return torch.cat(parts).to(rows_NI.dtype)


@pytest.mark.parametrize(
    "counts", [[0, 0], [1], [0, 128, 129, 0, 127], [5000, 3, 2049], [3] * 150], ids=str
)
def test_row_tiles_are_the_specifications(counts):
    offsets_L = torch.tensor(counts).cumsum(0).int()
    expected = grouped.row_tiles(offsets_L, sum(counts) + 9)
    found = gemm.row_tiles(here(offsets_L), sum(counts) + 9)
    assert found.shape == expected.shape
    equal((found[: 1 + expected[0, 0]], expected[: 1 + expected[0, 0]]))


@pytest.mark.parametrize(
    ("transposed", "down"), [(False, False), (False, True), (True, True)], ids=str
)
@pytest.mark.parametrize(
    ("counts", "width_in", "width_out"),
    [
        ([0, 70, 0, 64, 1, 0], 24, 40),
        ([1], 24, 40),
        ([129, 0], 8, 8),
        ([0, 0], 24, 40),
        ([3] * 20, 8, 8),
        ([5, 1100, 3], 8, 8),
    ],
    ids=lambda c: f"{len(c)}" if isinstance(c, list) else None,
)
def test_each_expert_has_its_own_matrix(counts, width_in, width_out, transposed, down, monkeypatch):
    """Small whole numbers, whose sums are exact in any order; other rows are NaN.

    1,100 rows are more tiles than a group has.
    """
    monkeypatch.setattr(gemm, "_SMALL_WEIGHT", 0 if down else 2**30)
    generator = torch.Generator().manual_seed(len(counts) + width_in)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).to(DTYPE)

    num_rows = sum(counts)
    rows_NI = draw(num_rows + 5, width_in)
    rows_NI[num_rows:] = torch.nan
    if transposed:
        weight_LOI = draw(len(counts), width_in, width_out).transpose(1, 2)
    else:
        weight_LOI = draw(len(counts), width_out, width_in)
    offsets_L = torch.tensor(counts).cumsum(0).int()
    expected_NO = by_expert(rows_NI, weight_LOI, offsets_L)
    for _ in range(2):
        given = here(rows_NI), here(weight_LOI), here(offsets_L)
        out_NO = gemm.rows_times_weights(*given, tiles=SMALL)
        monkeypatch.setattr(gemm, "_multiprocessors", lambda device: 1)  # For the second time.
        assert out_NO.shape == (num_rows + 5, width_out)
        equal((out_NO[:num_rows], expected_NO))


def at(buffer_NO: Tensor, places: list[int]) -> Tensor:
    """Return the addresses of these rows of a buffer."""
    row_bytes = buffer_NO.shape[1] * buffer_NO.element_size()
    return here(buffer_NO.data_ptr() + row_bytes * torch.tensor(places, dtype=torch.int64))


@pytest.mark.parametrize(("transposed", "biased"), [(False, True), (True, False)])
@pytest.mark.parametrize(
    "counts", [[0, 70, 0, 64, 1, 0], [129, 0], [0, 0]], ids=lambda c: f"{len(c)}"
)
def test_rows_at_addresses_are_those_of_the_product(counts, transposed, biased):
    """In another order, with rows of a buffer between them that are not written."""
    generator = torch.Generator().manual_seed(len(counts))

    def draw(*shape: int) -> Tensor:
        return here(torch.randn(shape, generator=generator).to(DTYPE))

    num_rows, width_in, width_out = sum(counts) + 5, 24, 40
    rows_NI = draw(num_rows, width_in)
    rows_NI[num_rows - 5 :] = torch.nan
    if transposed:
        weight_LOI = draw(len(counts), width_in, width_out).transpose(1, 2)
    else:
        weight_LOI = draw(len(counts), width_out, width_in)
    offsets_L = here(torch.tensor(counts).cumsum(0).int())
    places = 2 * torch.randperm(num_rows, generator=generator)
    bias, probs_N = {}, here(torch.rand(num_rows, generator=generator))
    if biased:
        bias = {"bias_LO": draw(len(counts), width_out), "probs_N": probs_N}
    buffer_NO = torch.full((2 * num_rows, width_out), 7.0, dtype=DTYPE, device=DEVICE)
    addresses = at(buffer_NO, places.tolist())
    addresses[num_rows - 5 :] = 0  # They would crash.
    given = rows_NI, weight_LOI, offsets_L
    gemm.rows_times_weights_at(*given, addresses, **bias, tiles=SMALL)
    product_NO = gemm.rows_times_weights(*given, tiles=SMALL)
    if biased:
        add_bias(product_NO, bias["bias_LO"], probs_N, offsets_L)
    expected_NO = torch.full_like(buffer_NO, 7.0)
    expected_NO[here(places[: num_rows - 5])] = product_NO[: num_rows - 5]
    equal((buffer_NO, expected_NO))


def test_rows_behind_the_last_one_are_not_written(monkeypatch):
    filled = torch.full((9, 8), 7.0, dtype=DTYPE, device=DEVICE)
    monkeypatch.setattr(Tensor, "new_empty", lambda self, *shape, **kw: _taken(self, filled, shape))
    rows_NI = torch.ones(9, 8, dtype=DTYPE, device=DEVICE)
    weight_LOI = torch.ones(1, 8, 8, dtype=DTYPE, device=DEVICE)
    out_NO = gemm.rows_times_weights(rows_NI, weight_LOI, ints(4), tiles=SMALL)
    assert out_NO[:4].tolist() == [[8.0] * 8] * 4
    assert out_NO[4:].tolist() == [[7.0] * 8] * 5


@pytest.mark.parametrize(
    "counts", [[0, 70, 0, 64, 1, 0], [1], [129, 0], [0, 0]], ids=lambda c: f"{len(c)}"
)
def test_weight_gradients_are_added_in_fp32(counts):
    generator = torch.Generator().manual_seed(len(counts))
    num_rows, width_out, width_in = sum(counts), 72, 40

    def draw(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).to(DTYPE)

    grad_NO, rows_NI = draw(num_rows + 5, width_out), draw(num_rows + 5, width_in)
    grad_NO[num_rows:] = rows_NI[num_rows:] = torch.nan
    offsets_L = torch.tensor(counts).cumsum(0).int()
    start, expected_LOI = 0, torch.full((len(counts), width_out, width_in), 0.25)
    for expert, end in enumerate(offsets_L.tolist()):
        expected_LOI[expert] += grad_NO[start:end].float().T @ rows_NI[start:end].float()
        start = end
    given = [here(tensor) for tensor in (grad_NO, rows_NI, offsets_L)]
    sums_LOI = torch.full_like(expected_LOI, 0.25, device=DEVICE)
    gemm.add_weight_gradients(*given, sums_LOI, tiles=SMALL)
    equal((sums_LOI, expected_LOI))
    rounded_LOI = gemm.weight_gradients(*given, tiles=SMALL)
    equal((rounded_LOI, (expected_LOI - 0.25).to(DTYPE)))


@pytest.mark.parametrize(("rows", "adds"), [(256, True), (256, False), (1024, False)])
def test_tiles_of_gradients_fit_a_multiprocessor(rows, adds):
    """Its 227 KiB hold what is read ahead, and what is stored by half; 1 KiB is each program's."""
    tiles = gemm.gradient_tiles(8 * rows, 8, adds)
    ahead = tiles.stages * tiles.inner * (tiles.rows + tiles.columns) * 2
    stored = tiles.rows * tiles.columns // 2 * (4 if adds else 2)
    assert tiles.programs * (ahead + stored + 2**10) <= 227 * 2**10


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mean", "width_in", "width_out"), [(256, 2048, 1536), (512, 2880, 5760), (1024, 7168, 4096)]
)
def test_products_have_the_bits_of_torchs(mean, width_in, width_out):
    """Experts of Qwen3, GPT-OSS and DeepSeek-V3, one of them without rows; other rows are NaN."""
    counts = torch.tensor([mean, 0, mean + 37, mean - 38, mean - 1, 1])
    offsets_L, num_rows = counts.cumsum(0).int().cuda(), int(counts.sum())

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(torch.bfloat16)

    rows_NI, grad_NO = draw(num_rows + 5, width_in), draw(num_rows + 5, width_out)
    rows_NI[num_rows:] = grad_NO[num_rows:] = torch.nan
    weight_LOI = draw(len(counts), width_out, width_in)
    for rows, weight in ((rows_NI, weight_LOI), (grad_NO, weight_LOI.transpose(1, 2))):
        expected = torch._grouped_mm(rows, weight.transpose(1, 2), offs=offsets_L)[:num_rows]
        equal((gemm.rows_times_weights(rows, weight, offsets_L)[:num_rows], expected))
    expected = torch._grouped_mm(grad_NO.T, rows_NI, offs=offsets_L)
    equal((gemm.weight_gradients(grad_NO, rows_NI, offsets_L), expected))
    sums_LOI = torch.zeros(expected.shape, device="cuda")
    gemm.add_weight_gradients(grad_NO, rows_NI, offsets_L, sums_LOI)
    equal((sums_LOI.to(torch.bfloat16), expected))


def _taken(like: Tensor, filled: Tensor, shape: tuple[int, ...]) -> Tensor:
    return filled if shape == (9, 8) else torch.empty(shape, dtype=like.dtype, device=like.device)
