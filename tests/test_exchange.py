"""Which exchange a layer takes, and what forbids direct stores."""

import re
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from padded_dispatch import exchange as module
from padded_dispatch.config import DispatchConfig
from padded_dispatch.exchange import choose
from padded_dispatch.exchange.collectives import Collectives

CUDA = torch.device("cuda")
GROUP: Any = Mock(**{"size.return_value": 2, "rank.return_value": 0})
CONFIG = DispatchConfig(num_experts=4, top_k=2, num_ranks=2, capacity_factor=1.0)


class Stores:
    """Direct stores that work, but over PCIe only."""

    num_sources = 2

    def __init__(self, num_local_experts: int, group: Any, *, over_nvlink: bool) -> None:
        assert (num_local_experts, group) == (2, GROUP)
        self.group = group
        if over_nvlink:
            raise ValueError("GPU 0, which has no NVLink to GPU 1")


def linked_stores(num_local_experts: int, group: Any, *, over_nvlink: bool) -> Stores:
    return Stores(num_local_experts, group, over_nvlink=False)


def chosen(kind: Any, stores: Any = linked_stores, **changes: Any) -> tuple[Any, str]:
    given = {"packed": True, "device": CUDA, "etp": None, "group": GROUP, "config": CONFIG}
    given |= changes
    config, group, etp_group = (given.pop(name) for name in ("config", "group", "etp"))
    with patch.object(module, "DirectStores", stores):
        return choose(config, group, etp_group, kind, **given)


def test_auto_takes_direct_stores_over_nvlink():
    for kind in ("auto", "direct"):
        exchange, reason = chosen(kind)
        assert isinstance(exchange, Stores)
        assert reason == "the 2 ranks share a host and reach each other's GPUs"
    exchange, reason = chosen("auto", Stores)
    assert (exchange.kind, reason) == ("alltoall", "GPU 0, which has no NVLink to GPU 1")
    assert isinstance(chosen("direct", Stores)[0], Stores)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"packed": False}, "direct stores need experts='packed'"),
        ({"etp": GROUP}, "direct stores need expert_tensor_parallel_size=1, got 2"),
        ({"device": torch.device("cpu")}, "direct stores need tokens on GPUs, got cpu"),
    ],
)
def test_what_needs_collectives(changes, reason):
    exchange, why = chosen("auto", **changes)
    assert isinstance(exchange, Collectives)
    assert exchange.num_sources == (4 if "etp" in changes else 2)
    with pytest.raises(ValueError, match=f"^exchange must be auto or .*, got 'direct'; {reason}$"):
        chosen("direct", **changes)
    assert re.fullmatch(reason, why)
    assert chosen("alltoall", **changes)[1] == 'exchange="alltoall" was asked for'


def test_one_rank_moves_nothing():
    for kind in ("auto", "alltoall"):
        exchange, reason = chosen(kind, group=None, config=DispatchConfig(num_experts=2, top_k=1))
        assert exchange.kind == "none"
    assert reason == 'exchange="alltoall" was asked for'
