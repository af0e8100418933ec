"""The assertion of `release`; `tests/experts/test_plain.py` has the rest, beside the plain rule."""

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
    layout.lay_out(ints([2]), top, first=False, limit=9)  # This pass breaks off.
    layout.release(top, found.offsets, found.before)
    with pytest.raises(Exception, match="given back"):
        layout.release(top, found.offsets, found.before)
