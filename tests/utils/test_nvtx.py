"""NVTX ranges of the stages, forward and backward."""

import pytest
import torch

from padded_dispatch import DispatchConfig, PaddedDispatcher
from padded_dispatch.utils import nvtx
from padded_dispatch.utils.nvtx import nvtx_range


@pytest.fixture
def shown(monkeypatch) -> list[str]:
    """Record the name of each range as it opens and "-" as it ends, as if PyTorch had NVTX."""
    events: list[str] = []
    monkeypatch.setattr(nvtx, "_HAS_NVTX", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", events.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: events.append("-"))
    return events


def test_every_stage_has_a_name_in_order(shown):
    """One rank, cells: nothing travels, and the stages are named all the same."""
    dispatcher = PaddedDispatcher(DispatchConfig(num_experts=2, top_k=1))
    tokens_TD = torch.ones(3, 2, requires_grad=True)
    map_TE = torch.eye(2, dtype=torch.bool)[[0, 1, 1]]
    sent = dispatcher.dispatch(tokens_TD, torch.ones(3, 2), map_TE)
    dispatcher.combine(sent.expert_input.rows_ND, sent).sum().backward()
    names = [name.removeprefix("padded_dispatch.") for name in shown if name != "-"]
    assert names == ["select", "plan", "dispatch", "exchange", "combine", "exchange"]
    assert shown.count("-") == len(names)


def test_a_range_ends_with_an_error_and_needs_nvtx(shown, monkeypatch):
    @nvtx_range("select")
    def fails() -> None:
        raise KeyError

    for expected in (["padded_dispatch.select", "-"], []):
        with pytest.raises(KeyError):
            fails()
        assert shown == expected
        shown.clear()
        monkeypatch.setattr(nvtx, "_HAS_NVTX", False)
