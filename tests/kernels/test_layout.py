"""The rule of the store on the device; `tests/experts/test_plain.py` has an example, and more."""

import dataclasses

import pytest

from padded_dispatch.kernels import layout
from tests.support.device import DEVICE, ints


@pytest.mark.skipif(DEVICE == "cuda", reason="a failed assertion ends the device")
def test_rows_that_were_given_back_fail(monkeypatch: pytest.MonkeyPatch):
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True))
    top = ints(3, 3, 9)
    found = layout.lay_out(ints([2]), top, first=False, limit=9)
    layout.release(top, found)
    with pytest.raises(Exception, match="given back"):
        layout.release(top, found)


def test_lay_out_and_release_example():
    count_SL, top = ints([3, 1], [2, 0]), ints(4, 4, 7)
    found = layout.lay_out(count_SL, top, first=False, limit=7)
    assert found.offsets.tolist() == [1, 4, 6, 7, 7] and top.tolist() == [7, 10, 1]
    layout.release(top, found)
    assert top.tolist() == [4, 4, 1]
    found = layout.lay_out(count_SL, None, first=True, limit=5)
    assert (found.level.item(), found.offsets.tolist()) == (2, [0, 2, 4, 5, 5])
