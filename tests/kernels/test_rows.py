"""Kernels that move rows between tokens and experts, beside plain loops; memory is NaN before."""

import pytest
import torch
from torch import Tensor

from padded_dispatch.experts.scaled import quantize
from padded_dispatch.kernels import Scaled, Segments, rows
from tests.support.device import DEVICE, addresses, here, ints, nan

NAN = float("nan")


def same(got: Tensor, expected: Tensor) -> None:
    """Assert equal bits; NaN equals NaN."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def segments(offsets: list[int], num_experts: int, num_rows: int) -> Segments:
    return Segments(
        offsets=ints(*offsets),
        num_experts=num_experts,
        num_sources=(len(offsets) - 1) // num_experts,
        num_rows=num_rows,
        num_expected=num_rows,
    )


@pytest.mark.parametrize("width", [1, 24, 2048, 2880])
@pytest.mark.parametrize("own", [None, 0, 1, 2])
def test_rows_that_a_plan_finds_beside_loops(width: int, own: int | None):
    num_sources, num_tokens, top_k, num_experts, base = 3, 5, 3, 4, 11
    generator = torch.Generator().manual_seed(width)
    tokens = torch.randn(num_sources, num_tokens, width, generator=generator).bfloat16()
    tokens[0, :4, -1] = torch.tensor([0.0, 2.0**-126, torch.inf, -torch.inf])
    # Experts -1 to 5, ascending: 4 and 5 belong to other ranks.
    expert = torch.randint(-1, 6, (num_sources, num_tokens, top_k), generator=generator)
    place, count = torch.zeros_like(expert), torch.zeros(num_experts, num_sources, dtype=torch.long)
    for s, t, k in torch.cartesian_prod(*map(torch.arange, expert.shape)).tolist():
        e = int(expert[s, t, k])
        if 0 <= e < num_experts:
            place[s, t, k] = count[e, s]
            count[e, s] += 1
    level = 2
    kept = count.clamp(max=level)
    offsets = torch.cat([torch.zeros(1), kept.flatten().cumsum(0)]).int() + base
    num_rows = int(kept.sum())
    homes = [nan(num_tokens * top_k, width, dtype=torch.bfloat16) for _ in range(num_sources)]
    prob = torch.rand(expert.shape, generator=generator)
    prob_M = nan(base + num_rows)
    home_M = torch.zeros(base + num_rows, dtype=torch.int64, device=DEVICE)
    received, own_TD = here(tokens), None
    if own is not None:
        own_TD = received[own].clone()
        received = torch.cat([received[:own], received[own + 1 :]])
    where = segments(offsets.tolist(), num_experts, num_rows)
    row_SPK = here(torch.empty_like(expert.int()))
    mine = {"own_TD": own_TD, "own": own, "homes_S": addresses(*homes)}
    kept_SPD = torch.full_like(received, NAN)
    first_ND = rows.spread_rows(
        received,
        row_SPK,
        where,
        **mine,
        kept_SPD=kept_SPD,
        expert_SPK=here(expert.int()),
        place_SPK=here(place.int()),
        prob_SPK=here(prob),
        level=ints(level),
        prob_M=prob_M,
        home_M=home_M,
    )
    expected = nan(num_rows, width, dtype=torch.bfloat16)
    for s, t, k in torch.cartesian_prod(*map(torch.arange, expert.shape)).tolist():
        e, slot = int(expert[s, t, k]), t * top_k + k
        home_row = homes[s][slot]
        if not 0 <= e < num_experts:
            assert row_SPK[s, t, k] == -1 and home_row.isnan().all()
        elif place[s, t, k] >= level:
            assert row_SPK[s, t, k] == -2 and (home_row == 0).all()
        else:
            row = int(offsets[e * num_sources + s] + place[s, t, k])
            assert row_SPK[s, t, k] == row and home_row.isnan().all()
            assert prob_M[row] == prob[s, t, k]
            assert home_M[row] == homes[s].data_ptr() + slot * width * 2
            expected[row - base] = here(tokens[s, t])
    same(first_ND, expected)
    has_rows = (row_SPK >= 0).any(2)
    others = torch.arange(num_sources, device=DEVICE) != (-1 if own is None else own)
    same(kept_SPD, torch.where(has_rows[others, :, None], received, NAN))
    for home in homes:
        home.fill_(NAN)
    scaled = Scaled(
        values=nan(num_rows + 1, width).to(torch.float8_e4m3fn),
        scales=nan(num_rows + 1),
        dtype=torch.bfloat16,
    )
    given = kept_SPD, row_SPK, where
    assert rows.spread_rows(*given, **mine, scaled=scaled, plain=False).shape == (0, width)
    same(rows.spread_rows(*given, **mine, scaled=scaled), expected)
    same(rows.spread_rows(*given, **mine), expected)
    quantized = quantize(torch.cat([expected.cpu(), nan(1, width).cpu()]))  # And nothing behind.
    same(scaled.scales, here(quantized.scales))
    finite = quantized.scales.isfinite()
    same(scaled.values[finite].float(), here(quantized.values[finite].float()))
    assert scaled.values[-1].float().isnan().all()
    lost = (row_SPK == -2).flatten(1)
    for s, home in enumerate(homes):
        same((home == 0).all(1), lost[s])
    # The transposes.
    back = rows.sum_rows(expected, row_SPK, offsets=where.offsets, wide=True)
    times = (row_SPK >= 0).sum(2, keepdim=True)
    same(back, torch.where(times > 0, here(tokens.float()) * times, 0.0))
    taken = rows.take(prob_M, row_SPK)
    same(taken, torch.where(row_SPK >= 0, here(prob), 0.0))
    same(rows.take(prob_M[base:].contiguous(), row_SPK, where.offsets), taken)


def test_sum_rows_example():
    given = here(torch.tensor([[1.0], [10.0], [100.0], [1000.0]]))
    index = ints([2, -1], [0, 1])
    assert rows.sum_rows(given, index).tolist() == [[100], [11]]
    assert rows.sum_rows(given, index, choices=True).tolist() == [[1], [1100]]


def test_sum_rows_rounds_once():
    """256 + 1 + 1 is 258 in bf16; rounded after each addition it is 256."""
    given = here(torch.tensor([[256.0], [1.0], [1.0]])).bfloat16()
    summed = rows.sum_rows(given, ints([0, 1, 2]))
    assert summed.dtype == torch.bfloat16 and summed.item() == 258
    assert rows.sum_rows(given, ints([0, 1, 2]), wide=True).dtype == torch.float32


@pytest.mark.parametrize("width", [1, 24, 2880])
def test_zero_padding(width: int):
    count = ints([1, 0, 3], [2, 3, 0])  # S = 2, L = 3
    cells, probs = nan(3 * 2 * 3, width), nan(3 * 2 * 3)
    rows.zero_padding(cells, probs, count)
    real = torch.arange(3, device=DEVICE) < count.T[..., None]
    same((cells == 0).all(1), ~real.flatten())
    same(probs == 0, ~real.flatten())
    assert bool(cells[real.flatten()].isnan().all())


def test_spread_and_take_examples():
    tokens, offsets = here([[[1.0] * 4], [[2.0] * 4]]), segments([5, 6, 8], 2, 3)
    assert rows.spread_rows(tokens, ints([[6, 5]], [[-1, 7]]), offsets)[:, 0].tolist() == [1, 1, 2]
    row_SPK, home = ints([[0, 0]] * 3), nan(6, 4)
    expert_SPK, place_SPK = ints([[0, 1], [1, 7], [1, -1]]), ints([[0, 0], [1, 0], [2, 0]])
    found = {"expert_SPK": expert_SPK, "place_SPK": place_SPK, "level": ints(1)}
    abc, two = here([[[1.0] * 4, [2.0] * 4, [3.0] * 4]]), segments([5, 6, 7], 2, 2)
    spread = rows.spread_rows(abc, row_SPK, two, homes_S=addresses(home), **found)
    assert row_SPK.tolist() == [[[5, 6], [-2, -1], [-2, -1]]] and (spread == 1).all()
    same(home, here([[NAN, NAN, 0, NAN, 0, NAN]]).T.expand(6, 4))
    taken = rows.take(here([0.25, 0.5]), ints([[6, 5]], [[-1, -2]]), ints(5, 7))
    assert taken.tolist() == [[[0.5, 0.25]], [[0, 0]]]


def test_zero_padding_and_columns_examples():
    cells = nan(4, 1)
    rows.zero_padding(cells, None, ints([1, 0]))
    assert cells.flatten().nan_to_num(7).tolist() == [7, 0, 0, 0]
    assert rows._columns(2880) == (1024, 4)
