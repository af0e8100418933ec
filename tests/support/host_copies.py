"""One copy of a token per host, with slots fixed by capacity, beside what exists: simulated.

    alltoall   every (source, expert) slot
    rail       every token to every other host; slots inside a host
    copy       a token only to the hosts of its experts, into slots of (source, host); slots inside
               a host. A token without a slot loses all its rows on that host

Slots of (source, host) are the factor times the tokens that a balanced router sends to a host, at
most T. Slots of (source, expert) are ours. The first tokens keep their slots. Times of the links
are those of `padded_dispatch.tune.hosts`. NumPy alone.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.config import DispatchConfig
from padded_dispatch.tune.cost import LayerSizes
from padded_dispatch.tune.hosts import Links, over_hosts
from padded_dispatch.utils.routings import noisy_scores

_TOKENS, _PER_HOST, _SOURCES = 4096, 8, 8


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a MoE layer; each token has experts of at most `groups[1]` of `groups[0]` groups."""

    name: str
    num_experts: int
    top_k: int
    width: int
    groups: tuple[int, int] = (1, 1)


MODELS = (
    Model(name="Qwen3-30B-A3B", num_experts=128, top_k=8, width=2048),
    Model(name="GPT-OSS-20B", num_experts=32, top_k=4, width=2880),
    Model(name="GPT-OSS-120B", num_experts=128, top_k=4, width=2880),
    Model(name="DeepSeek-V3", num_experts=256, top_k=8, width=7168, groups=(8, 4)),
)


def tokens_per_host(model: Model, num_hosts: int) -> float:
    """Return the tokens of a source that a balanced router sends to a host.

    Without groups it is arithmetic: a token of Qwen3-30B-A3B has none of its 8 experts on one of 8
    hosts with probability 0.333, so 2,733 of 4,096 tokens go there. With groups it is drawn.
    """
    if model.groups[0] > 1:
        hosts_TH = hosts_of_tokens(routed(model, "uniform", _SOURCES), num_hosts)
        return float(hosts_TH.sum()) / num_hosts
    elsewhere = model.num_experts - model.num_experts // num_hosts
    none = math.comb(elsewhere, model.top_k) / math.comb(model.num_experts, model.top_k)
    return _TOKENS * (1 - none)


def hosts_of_tokens(map_TE: NDArray[np.bool_], num_hosts: int) -> NDArray[np.bool_]:
    """Return the hosts on which a token has experts, [T, H]."""
    return map_TE.reshape(len(map_TE), num_hosts, -1).any(2)


def routed(model: Model, skew: Literal["uniform", "lognormal"], source: int) -> NDArray[np.bool_]:
    """Return a map [T, E]; the same experts are popular with all sources (sigma 0.3)."""
    sigma = 0.3 if skew == "lognormal" else 0.0
    popularity = sigma * np.random.default_rng(0).normal(size=model.num_experts)
    scores_TE = noisy_scores(popularity, _TOKENS, seed=(1, source))
    num_groups, num_taken = model.groups
    if num_groups > 1:
        # A group's score is the sum of its two best experts, as in DeepSeek-V3.
        by_group = scores_TE.reshape(_TOKENS, num_groups, -1)
        best = np.sort(by_group, axis=2)[:, :, -2:].sum(2)
        left_out = np.argsort(best, axis=1)[:, :-num_taken]
        np.put_along_axis(by_group, left_out[:, :, None], -np.inf, axis=1)
    chosen = np.argpartition(scores_TE, -model.top_k, axis=1)[:, -model.top_k :]
    map_TE = np.zeros(scores_TE.shape, bool)
    np.put_along_axis(map_TE, chosen, True, axis=1)
    return map_TE


def _kept(asked: NDArray[np.bool_], slots: int) -> NDArray[np.bool_]:
    """Return which of the entries of each column are among its first `slots`."""
    return asked & (np.cumsum(asked, axis=0) <= slots)


def simulated(
    model: Model, num_ranks: int, factor: float, skew: Literal["uniform", "lognormal"]
) -> dict[str, Any]:
    """Return MB to other hosts there, dropped shares of the rows, and ms of a layer's links.

    Dropped by copies: on top of what slots of experts drop.
    """
    num_hosts = num_ranks // _PER_HOST
    config = DispatchConfig(
        num_experts=model.num_experts,
        top_k=model.top_k,
        capacity_factor=factor,
        num_ranks=num_ranks,
    )
    maps = [routed(model, skew, source) for source in range(_SOURCES)]
    to_hosts = [hosts_of_tokens(map_TE, num_hosts) for map_TE in maps]
    slots = min(_TOKENS, math.ceil(factor * tokens_per_host(model, num_hosts)))
    rows = sum(int(m.sum()) for m in maps)
    by_experts = [_kept(m, config.capacity(_TOKENS)) for m in maps]
    by_both = [
        kept & np.repeat(_kept(hosts, slots), model.num_experts // num_hosts, axis=1)
        for kept, hosts in zip(by_experts, to_hosts, strict=True)
    ]
    row_bytes = 2 * model.width
    sizes = LayerSizes(num_tokens=_TOKENS, hidden_size=model.width, ffn_size=1)
    links = Links()
    found = over_hosts(config, sizes, _PER_HOST, links).exchanges
    rail = (num_hosts - 1) * _TOKENS * row_bytes
    copy = (num_hosts - 1) * slots * row_bytes
    saved = 2 * (rail - copy)
    return {
        "check": "copies per host",
        "model": model.name,
        "ep": num_ranks,
        "hosts": num_hosts,
        "capacity_factor": factor,
        "skew": skew,
        "alltoall_mb": (num_hosts - 1)
        / num_hosts
        * model.num_experts
        * config.capacity(_TOKENS)
        * row_bytes
        / 1e6,
        "rail_mb": rail / 1e6,
        "copy_mb": copy / 1e6,
        "real_copies_mb": float(np.mean([h.sum() for h in to_hosts]))
        * (num_hosts - 1)
        / num_hosts
        * row_bytes
        / 1e6,
        "dropped_by_experts": 1 - sum(int(kept.sum()) for kept in by_experts) / rows,
        "dropped_by_copies": sum(
            int((one & ~both).sum()) for one, both in zip(by_experts, by_both, strict=True)
        )
        / rows,
        "alltoall_ms": found["alltoall"].ms,
        "rail_ms": found["two-level"].ms,
        "copy_ms": found["two-level"].ms - saved / links.network_gb_per_s / 1e6,
        "passed": True,
    }
