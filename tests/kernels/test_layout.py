"""The rule of the store on the device, beside a plain loop over water levels."""

import dataclasses

import pytest
import torch
from torch import Tensor

from padded_dispatch.kernels import layout
from tests.support.device import DEVICE, here


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def test_lay_out_example():
    top = ints([4, 4])
    found = layout.lay_out(ints([[3, 1], [2, 0]]), top, first=False, limit=8, most=9, later=3)
    assert found.offsets.tolist() == [4, 5, 6, 7, 7]
    assert found.level.item() == 1
    assert top.tolist() == [7, 10]
    layout.release(top, found)
    assert top.tolist() == [4, 4]


@pytest.mark.parametrize("num_sources", [1, 2, 5])
@pytest.mark.parametrize("num_experts", [1, 3, 16])
def test_lay_out_beside_a_loop(num_sources: int, num_experts: int):
    generator = torch.Generator().manual_seed(num_sources * 100 + num_experts)
    counters = [torch.zeros(n, dtype=torch.int64, device=DEVICE) for n in (num_experts, 1, 1)]
    kept_L, idle, max_need = counters
    expected_kept, expected_need, num_idle = torch.zeros(num_experts), 0, 0
    for trial in range(12):
        count = torch.randint(0, 9, (num_sources, num_experts), generator=generator)
        count[torch.rand(count.shape, generator=generator) < 0.3] = 0
        if trial == 0:
            count[:] = 0
        if trial == 1:
            count[:, 1:] = 0  # All rows for one expert.
        total, base = int(count.sum()), trial % 3 * 7
        room = max(0, total + trial % 5 - 3)
        limit, most = (base + room, 9999) if trial % 2 else (base + 9999, room)
        top = ints([base, 50])
        found = layout.lay_out(
            here(count.int()),
            top,
            first=base == 0,
            limit=limit,
            most=most,
            later=4,
            kept_L=kept_L,
            idle=idle,
            max_need=max_need,
        )
        level = max(w for w in range(10) if int(count.clamp(max=w).sum()) <= room)
        kept = count if total <= room else count.clamp(max=level)
        ends = kept.T.flatten().cumsum(0) + base
        assert found.offsets.tolist() == [base, *ends.tolist()]
        assert found.level.item() == (2**31 - 1 if total <= room else level)
        asked = 0 if base == 0 else 50
        assert top.tolist() == [int(ends[-1]), asked + total]
        expected_kept += kept.sum(0)
        expected_need = max(expected_need, asked + total + 4)
        num_idle += total == 0
    assert kept_L.tolist() == expected_kept.tolist()
    assert (idle.item(), max_need.item()) == (num_idle, expected_need)


def test_lay_out_without_a_stack():
    found = layout.lay_out(ints([[3], [2]]), None, first=True, limit=4, most=4, later=0)
    assert found.offsets.tolist() == [0, 2, 4]
    assert found.level.item() == 2


@pytest.mark.skipif(DEVICE == "cuda", reason="a failed assertion ends the device")
def test_rows_that_were_given_back_fail(monkeypatch: pytest.MonkeyPatch):
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True))
    top = ints([3, 3])
    found = layout.lay_out(ints([[2]]), top, first=False, limit=9, most=9, later=0)
    layout.release(top, found)
    with pytest.raises(Exception, match="given back"):
        layout.release(top, found)
