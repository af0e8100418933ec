"""Kernels that move rows between tokens and experts, beside plain loops; memory is NaN before."""

from typing import Any

import pytest
import torch
from torch import Tensor

from padded_dispatch.experts.scaled import quantize
from padded_dispatch.kernels import Scaled, Segments, SlotList, layout, rows
from tests.support.device import DEVICE, addresses, here, ints, nan
from tests.support.threads import poisoned_memory

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


def random_plan(
    num_sources: int, num_tokens: int, top_k: int, num_experts: int, base: int, generator: Any
) -> dict[str, Any]:
    """Return plans of all sources and the row of each choice, by loops; two rows a cell have room.

    Experts are -1 to 5, ascending: 4 and 5 belong to other ranks.
    """
    expert = torch.randint(-1, 6, (num_sources, num_tokens, top_k), generator=generator).int()
    place, count = torch.zeros_like(expert), torch.zeros(num_experts, num_sources, dtype=torch.long)
    row_SPK, level = torch.full_like(expert, -1), 2
    choices = torch.cartesian_prod(*map(torch.arange, expert.shape)).tolist()
    for s, t, k in choices:
        e = int(expert[s, t, k])
        if 0 <= e < num_experts:
            place[s, t, k] = count[e, s]
            count[e, s] += 1
    offsets = torch.cat([torch.zeros(1), count.clamp(max=level).flatten().cumsum(0)]).int() + base
    for s, t, k in choices:
        e, n = int(expert[s, t, k]), int(place[s, t, k])
        if 0 <= e < num_experts:
            row_SPK[s, t, k] = offsets[e * num_sources + s] + n if n < level else -2
    prob = torch.rand(expert.shape, generator=generator)
    found = {"expert": expert, "place": place, "prob": prob, "offsets": offsets}
    return found | {"row_SPK": row_SPK, "level": level}


def listed_of(slots: list[int], rows_AK: Tensor, num_sources: int, num_slots: int) -> SlotList:
    """Return a list of these slots, with entries of a peer behind its length."""
    most, length = num_sources * num_slots, len(slots)
    stale = most - length
    row_AK = torch.cat([rows_AK.cpu().int(), torch.full((stale, rows_AK.shape[1]), 10**6)])
    return SlotList(
        slot_A=ints(*slots, *[10**6] * stale),
        length=ints(length),
        row_AK=here(row_AK.int()),
        prob_AK=nan(*row_AK.shape),
        num_sources=num_sources,
        num_slots=num_slots,
    )


@pytest.mark.parametrize("width", [1, 24, 2048, 2880])
@pytest.mark.parametrize("own", [None, 0, 1, 2])
def test_rows_of_a_list_beside_loops(monkeypatch, width: int, own: int | None):
    monkeypatch.setattr(rows, "_WARPS", 1)  # Programs take several entries each.
    monkeypatch.setattr(rows, "_CHUNK", 8)
    monkeypatch.setattr(layout, "_TILE", 8)  # Four blocks of slots, of two tiles each.
    monkeypatch.setattr(layout, "_MAX_BLOCKS", 4)
    num_sources, num_tokens, top_k, num_experts, base = 3, 5, 3, 4, 11
    generator = torch.Generator().manual_seed(width)
    tokens = torch.randn(num_sources, num_tokens, width, generator=generator).bfloat16()
    tokens[0, :4, -1] = torch.tensor([0.0, 2.0**-126, torch.inf, -torch.inf])
    plan = random_plan(num_sources, num_tokens, top_k, num_experts, base, generator)
    offsets, row_SPK = plan["offsets"], plan["row_SPK"]
    num_rows = int(offsets[-1]) - base
    homes = [nan(num_tokens * top_k, width, dtype=torch.bfloat16) for _ in range(num_sources)]
    prob_M = nan(base + num_rows)
    home_M = torch.zeros(base + num_rows, dtype=torch.int64, device=DEVICE)
    received, own_TD = here(tokens), None
    if own is not None:
        own_TD = received[own].clone()
        received = torch.cat([received[:own], received[own + 1 :]])
    where = segments(offsets.tolist(), num_experts, num_rows)
    given = here(plan["expert"]), here(plan["place"]), here(plan["prob"]), where.offsets
    listed = layout.list_slots(*given, ints(plan["level"]), num_experts)
    mine = {"own_TD": own_TD, "own": own}
    kept_SPD = torch.full_like(received, NAN)
    to_homes = {"homes_S": addresses(*homes)}
    first_ND = rows.spread_rows(
        received, listed, where, **mine, **to_homes, kept_SPD=kept_SPD, prob_M=prob_M, home_M=home_M
    )
    expected = nan(num_rows, width, dtype=torch.bfloat16)
    for s, t, k in torch.cartesian_prod(*map(torch.arange, row_SPK.shape)).tolist():
        row, slot = int(row_SPK[s, t, k]), t * top_k + k
        home_row = homes[s][slot]
        assert (home_row == 0).all() if row == -2 else home_row.isnan().all()
        if row >= 0:
            assert prob_M[row] == plan["prob"][s, t, k]
            assert home_M[row] == homes[s].data_ptr() + slot * width * 2
            expected[row - base] = here(tokens[s, t])
    same(first_ND, expected)
    has_rows = here((row_SPK >= 0).any(2))
    others = torch.arange(num_sources, device=DEVICE) != (-1 if own is None else own)
    same(kept_SPD, torch.where(has_rows[others, :, None], received, NAN))
    scaled = Scaled(
        values=nan(num_rows + 1, width).to(torch.float8_e4m3fn),
        scales=nan(num_rows + 1),
        dtype=torch.bfloat16,
    )
    again = kept_SPD, listed, where
    assert rows.spread_rows(*again, **mine, scaled=scaled, plain=False).shape == (0, width)
    same(rows.spread_rows(*again, **mine, scaled=scaled), expected)
    same(rows.spread_rows(*again, **mine), expected)
    quantized = quantize(torch.cat([expected.cpu(), nan(1, width).cpu()]))  # And nothing behind.
    same(scaled.scales, here(quantized.scales))
    finite = quantized.scales.isfinite()
    same(scaled.values[finite].float(), here(quantized.values[finite].float()))
    assert scaled.values[-1].float().isnan().all()
    # The transposes write what the list has, and nothing else.
    is_listed = here((row_SPK != -1).any(2))
    with poisoned_memory():
        back = rows.sum_slots(expected, listed, offsets=where.offsets, wide=True)
        taken = rows.send_numbers(prob_M, listed)
    times = here((row_SPK >= 0).sum(2, keepdim=True))
    sums = torch.where(times > 0, here(tokens.float()) * times, 0.0)
    same(back, torch.where(is_listed[..., None], sums, NAN))
    wanted = torch.where(row_SPK >= 0, plan["prob"], 0.0)
    same(taken, here(torch.where(row_SPK != -1, wanted, NAN)))
    beside_N = prob_M[base:].contiguous()
    sent = [nan(num_tokens, top_k) for _ in range(num_sources)]
    given = {"offsets": where.offsets, "homes_S": addresses(*sent) - 8, "home_at": 8}
    assert rows.send_numbers(beside_N, listed, **given).shape == (0,)
    same(torch.stack(sent), taken)


def test_nothing_behind_the_length_of_a_list_is_read():
    """There lie slots and rows of a peer, whose memory no kernel may touch."""
    rows_AK = ints([0, -1], [-2, 1])
    listed = listed_of([1, 2], rows_AK, num_sources=2, num_slots=3)
    tokens, home = here(torch.arange(6.0).view(2, 3, 1).expand(2, 3, 8)).contiguous(), nan(2, 6, 8)
    where = segments([0, 1, 2, 2, 2], 2, 2)
    to_homes = {"homes_S": addresses(home[0], home[1])}
    assert rows.spread_rows(tokens, listed, where, **to_homes)[:, 0].tolist() == [1, 2]
    assert (home == 0).nonzero()[:, :2].unique(dim=0).tolist() == [[0, 4]]
    with poisoned_memory():
        sums = rows.sum_slots(here(torch.ones(2, 8)), listed)
        numbers = rows.send_numbers(here(torch.tensor([3.0, 4.0])), listed)
    same(sums[..., 0], here([[NAN, 1, 1], [NAN, NAN, NAN]]))
    same(numbers, here([[[NAN, NAN], [3, NAN], [0, 4]], [[NAN, NAN]] * 3]))


def test_one_source_has_no_list():
    """Entry a is slot a, also of a token without an expert, whose sum is 0."""
    expert, place = ints([[0, -1], [-1, -1], [0, 1]]), ints([[0, -1], [-1, -1], [1, 0]])
    prob = here(torch.rand(1, 3, 2))
    listed = layout.list_slots(expert, place, prob, ints(4, 6, 7), ints(9), 2)
    assert listed.slot_A is None and listed.length is None
    assert listed.row_AK.tolist() == [[4, -1], [-1, -1], [5, 6]]
    sums = rows.sum_slots(here(torch.tensor([[1.0], [10], [100]])), listed, offsets=ints(4))
    assert sums.flatten().tolist() == [1, 0, 110]


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
    listed = listed_of([0], ints([0, 1, 2]), num_sources=1, num_slots=1)
    assert rows.sum_slots(given, listed, wide=True).dtype == torch.float32


@pytest.mark.parametrize("width", [1, 24, 2880])
def test_zero_padding(width: int):
    count = ints([1, 0, 3], [2, 3, 0])  # S = 2, L = 3
    cells, probs = nan(3 * 2 * 3, width), nan(3 * 2 * 3)
    rows.zero_padding(cells, probs, count)
    real = torch.arange(3, device=DEVICE) < count.T[..., None]
    same((cells == 0).all(1), ~real.flatten())
    same(probs == 0, ~real.flatten())
    assert bool(cells[real.flatten()].isnan().all())


def test_examples_of_lists():
    tokens, home = here(torch.tensor([1.0, 2, 9, 3]).view(2, 2, 1).expand(2, 2, 4)), nan(2, 4, 4)
    where, listed = segments([5, 6, 7, 7, 8], 2, 3), None
    expert, place = ints([[0, 2], [0, -1]], [[2, 3], [0, 1]]), ints([[0, 0], [1, -1]], [[0, 0]] * 2)
    listed = layout.list_slots(expert, place, nan(2, 2, 2), where.offsets, ints(1), 2)
    assert listed.length is not None and listed.slot_A is not None
    assert listed.length.item() == 3 and listed.slot_A[:3].tolist() == [0, 1, 3]
    assert listed.row_AK[:3].tolist() == [[5, -1], [-2, -1], [6, 7]]
    to = addresses(home[0], home[1])
    spread = rows.spread_rows(tokens.contiguous(), listed, where, homes_S=to)
    assert spread[:, 0].tolist() == [1, 3, 3]
    assert (home == 0).nonzero()[:, :2].unique(dim=0).tolist() == [[0, 2]]
    summed = rows.sum_slots(
        here(torch.tensor([[1.0], [10.0], [100.0]])),
        listed_of([0, 1], ints([2, -1], [0, 1]), num_sources=1, num_slots=2),
    )
    assert summed.flatten().tolist() == [100, 11]
    one_each = listed_of([0, 1], ints([6, -1], [-2, 5]), num_sources=2, num_slots=1)
    sent = rows.send_numbers(here([0.25, 0.5]), one_each, offsets=ints(5, 7))
    assert sent[0, 0, 0] == 0.5 and sent[1].tolist() == [[0, 0.25]]


def test_zero_padding_and_columns_examples():
    cells = nan(4, 1)
    rows.zero_padding(cells, None, ints([1, 0]))
    assert cells.flatten().nan_to_num(7).tolist() == [7, 0, 0, 0]
    assert rows._columns(2880) == (1024, 4)
