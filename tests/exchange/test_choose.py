"""Which exchange a layer takes, and what forbids direct stores."""

import json
import re
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from padded_dispatch.config import FIT, DispatchConfig
from padded_dispatch.exchange import choose as module
from padded_dispatch.exchange.agreement import Agreement
from padded_dispatch.exchange.choose import agree_on_shapes, choose
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


class LinkedStores(Stores):
    def __init__(self, num_local_experts: int, group: Any, *, over_nvlink: bool) -> None:
        super().__init__(num_local_experts, group, over_nvlink=False)


def chosen(kind: Any, stores: Any = LinkedStores, **changes: Any) -> tuple[Any, str]:
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


# What is compared.


def compared(config: DispatchConfig, num_tokens: int, **how: Any) -> dict[str, str]:
    """Return what `agree_on_shapes` gives the agreement."""
    agreement = Mock(Agreement)
    agree_on_shapes(agreement, config, torch.zeros(num_tokens, 3), (("rule", 7),), **how)
    (rules,), shapes = agreement.check.call_args
    return {name: str(value) for name, value in (*rules, *shapes.items())}


def test_all_that_decides_a_result_is_compared():
    found = compared(CONFIG, 8, layout="padded")
    sizes = {"T": "8", "D": "3", "C": "4", "rows": "16"}
    assert found == sizes | {
        "dtype": "torch.float32",
        "layout": "padded",
        "rule": "7",
        "gradients are enabled": "True",
        "num_experts": "4",
        "top_k": "2",
        "capacity_factor": "1.0",
        "alignment": "1",
        "capacity_pool": "expert",
        "policy": "probs",
        "num_ranks": "2",
        "etp_size": "1",
    }
    assert json.dumps(found)  # It travels as text.


def test_sizes_that_fit_are_no_part_of_it():
    config = DispatchConfig(num_experts=4, top_k=2, capacity_factor=FIT)
    for num_tokens in (3, 8):
        found = compared(config, num_tokens, any_tokens=True)
        assert (found["T"], found["C"], found["rows"]) == ("any but 0", "0", "0")


def test_no_tokens_raise_after_the_comparison():
    agreement = Mock(Agreement)
    with pytest.raises(ValueError, match=r"^num_tokens must be at least 1, got 0; pad the batch"):
        agree_on_shapes(agreement, CONFIG, torch.zeros(0, 3), (), any_tokens=True)
    assert agreement.check.call_args[1]["T"] == 0
