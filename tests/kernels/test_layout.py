"""Assertions of the device; `tests/experts/test_plain.py` has the rest, beside the plain rule."""

import dataclasses

import pytest
import torch

from padded_dispatch.kernels import TOO_MANY, layout, plan, rows
from tests.support.device import DEVICE, here, ints

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a failed assertion ends the device")


@pytest.fixture(autouse=True)
def assertions(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True))


def test_counts_of_tokens_with_more_than_k_experts_fail():
    """On every rank, in the first kernel that reads them, whichever experts follow."""
    expert_TK, _, kept_E = plan.plan(here(torch.ones(3, 3, dtype=torch.bool)), 2)
    assert expert_TK.tolist() == [[0, 1]] * 3 and kept_E.tolist() == [TOO_MANY] * 3
    with pytest.raises(Exception, match="more experts than top_k"):
        layout.lay_out(kept_E[None], None, first=True, limit=9)
    with pytest.raises(Exception, match="more experts than top_k"):
        rows.zero_padding(here(torch.ones(6, 2)), None, kept_E[None])


def test_rows_that_were_given_back_fail():
    top = ints(3, 3, 9)
    found = layout.lay_out(ints([2]), top, first=False, limit=9)
    layout.lay_out(ints([2]), top, first=False, limit=9)  # This pass breaks off.
    layout.release(top, found.offsets, found.before)
    with pytest.raises(Exception, match="given back"):
        layout.release(top, found.offsets, found.before)
