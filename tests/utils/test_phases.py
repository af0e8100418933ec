"""NVTX ranges of the stages, forward and backward."""

import sys
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from padded_dispatch.utils.phases import nvtx_range


@pytest.fixture
def shown(monkeypatch) -> Iterator[list[str]]:
    """Record the name of each range as it opens and "-" as it ends, as if PyTorch had NVTX."""
    events: list[str] = []
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", events.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: events.append("-"))
    with patch.dict(sys.modules):  # Functions are decorated as their modules are imported.
        for name in [name for name in sys.modules if name.partition(".")[0] == "padded_dispatch"]:
            del sys.modules[name]
        yield events


def test_every_stage_has_a_name_in_order(shown):
    """One rank, cells: nothing travels, and the stages are named all the same."""
    from padded_dispatch import DispatchConfig, PaddedDispatcher

    dispatcher = PaddedDispatcher(DispatchConfig(num_experts=2, top_k=1))
    tokens_TD = torch.ones(3, 2, requires_grad=True)
    map_TE = torch.eye(2, dtype=torch.bool)[[0, 1, 1]]
    sent = dispatcher.dispatch(tokens_TD, torch.ones(3, 2), map_TE)
    dispatcher.combine(sent.expert_input.rows_ND, sent).sum().backward()
    names = [name.removeprefix("padded_dispatch.") for name in shown if name != "-"]
    assert names == ["select", "plan", "dispatch", "exchange", "combine", "exchange"]
    assert shown.count("-") == len(names)


def test_a_range_ends_with_an_error_and_needs_nvtx(shown, monkeypatch):
    def fails() -> None:
        raise KeyError

    for expected in (["padded_dispatch.select", "-"], []):
        with pytest.raises(KeyError):
            nvtx_range("select")(fails)()
        assert shown == expected
        shown.clear()
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
