"""Which exchange a layer takes, and what forbids direct writes."""

import dataclasses
import re
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from padded_dispatch import exchange as module
from padded_dispatch.config import DispatchConfig
from padded_dispatch.exchange import choose
from padded_dispatch.exchange.collectives import Collectives
from padded_dispatch.exchange.hosts import Hosts, arranged
from padded_dispatch.exchange.rails import Rails

CUDA = torch.device("cuda")
GROUP: Any = Mock(**{"size.return_value": 2, "rank.return_value": 0})
CONFIG = DispatchConfig(
    num_experts=4, top_k=2, num_ranks=2, capacity_factor=1.0, capacity_pool="store"
)
CELLS = dataclasses.replace(CONFIG, capacity_pool="cells")


class Stores:
    """Direct writes that work, but over PCIe only."""

    num_sources = 2

    kind, num_local_experts = "direct", 2

    def __init__(
        self, num_local_experts: int, group: Any, *, over_nvlink: bool, hosts: Hosts | None = None
    ) -> None:
        assert (num_local_experts, group) == (2, GROUP)
        self.group, self.hosts = group, hosts
        if over_nvlink:
            raise ValueError("GPU 0, which has no NVLink to GPU 1")


def linked_stores(*args: Any, over_nvlink: bool, **given: Any) -> Stores:
    return Stores(*args, over_nvlink=False, **given)


def chosen(kind: Any, stores: Any = linked_stores, **changes: Any) -> tuple[Any, str]:
    """Choose with these stores, for ranks on `machines`, with `words`; "aa" is one host."""
    given = {"packed": True, "device": CUDA, "etp": None, "group": GROUP, "config": CONFIG}
    given |= changes
    config, group, etp_group = (given.pop(name) for name in ("config", "group", "etp"))
    hosts = arranged(given.pop("machines", "aa"), 0, **given.pop("words", {}))
    rails = Mock(
        side_effect=lambda inside, *args: Mock(spec=Rails, kind=inside.kind, inside=inside)
    )
    with (
        patch.object(module, "DirectStores", stores),
        patch.multiple(module, hosts_of=lambda *given: hosts, Rails=rails),
        patch.object(module, "groups_of", lambda *given: (GROUP, GROUP)),
    ):
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
        ({"packed": False}, "direct writes need experts='packed'"),
        ({"etp": GROUP}, "direct writes need expert_tensor_parallel_size=1, got 2"),
        ({"device": torch.device("cpu")}, "direct writes need tokens on GPUs, got cpu"),
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


def test_the_reason_names_nvlink_domains():
    words = {"kind": "NVLink domain"}
    _, reason = chosen("auto", words=words)
    assert reason == "the 2 ranks share an NVLink domain and reach each other's GPUs"
    _, reason = chosen("auto", machines="aabb", words=words)
    assert reason.startswith("2 NVLink domains of 2 ranks; the 2 ranks share an NVLink domain and")


def test_rails_cross_between_hosts_of_several_ranks():
    """Around direct writes, or around collectives inside of each host."""
    exchange, reason = chosen("auto", machines="aabb")
    assert isinstance(exchange, Rails) and isinstance(exchange.inside, Stores)
    assert exchange.inside.hosts is not None and exchange.kind == "direct"
    shares = "the 2 ranks share a host and reach each other's GPUs"
    assert reason == f"2 hosts of 2 ranks; {shares}"
    exchange, reason = chosen("auto", Stores, machines="aabb")
    assert isinstance(exchange, Rails) and isinstance(exchange.inside, Collectives)
    assert reason == "2 hosts of 2 ranks; GPU 0, which has no NVLink to GPU 1"
    for kind, device in (("alltoall", CUDA), ("auto", torch.device("cpu"))):
        exchange, _ = chosen(kind, machines="aabbcc", device=device)
        assert isinstance(exchange, Rails) and exchange.kind == "alltoall"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"machines": "aaab"}, "direct writes need several ranks on each host"),
        (
            {"machines": "aabb", "config": CELLS},
            "direct writes need capacity_pool='store' across hosts",
        ),
    ],
)
def test_what_crosses_without_a_rail(changes, reason):
    exchange, why = chosen("auto", **changes)
    assert isinstance(exchange, Collectives) and re.fullmatch(
        rf"\d hosts of \d ranks?; {reason}", why
    )
    assert exchange.num_away in (1, 2)
    with pytest.raises(ValueError, match=f"^exchange must be auto or .*, got 'direct'; {reason}"):
        chosen("direct", **changes)
    exchange, _ = chosen("alltoall", machines="aabb", etp=GROUP)
    assert isinstance(exchange, Collectives)
