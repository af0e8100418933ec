"""Exchange: move tokens to the ranks of their experts, and results home.

A token is sent once to each rank that holds one of its experts. It arrives at [source, slot], which
the source computes without counts of other ranks. The source's plan (`routing.Plan`) is sent with
the tokens. The receiver makes rows of the tokens (`experts`). It returns one row for each choice
(`direct`: stores between the GPUs of one host) or one sum for each of the tokens (`collectives`:
any backend). Between several hosts a rail is around either (`rails`). `agreement` first compares
shapes and rules over the ranks. A host is a machine or an NVLink domain (`hosts`).

Which of them a layer takes depends on settings and on machines, never on the routing, so a layer
keeps it. It is the same on all ranks. `"auto"` takes direct writes if the layer has packed experts,
no expert is split, and the GPUs of each host reach each other over NVLink. Else it takes
collectives, which move nothing if there is one rank. A rail needs packed experts that share a
store, and more than one rank on each host; elsewhere collectives cross between hosts.

Letters: see `padded_dispatch.config`.
"""

import torch
import torch.distributed as dist

from padded_dispatch.config import DispatchConfig, ExchangeKind, require
from padded_dispatch.exchange.collectives import Collectives, CollectiveWire
from padded_dispatch.exchange.direct import DirectStores, DirectWire
from padded_dispatch.exchange.hosts import groups_of, hosts_of
from padded_dispatch.exchange.rails import Rails, RailWire

# The exchange of a layer; its `start` returns the wire of one pass, forward and backward.
Exchange = Collectives | DirectStores | Rails
Wire = CollectiveWire | DirectWire | RailWire


def choose(
    config: DispatchConfig,
    group: dist.ProcessGroup | None,
    etp_group: dist.ProcessGroup | None,
    kind: ExchangeKind,
    *,
    packed: bool,
    device: torch.device,
) -> tuple[Exchange, str]:
    """Return the exchange of a layer and the reason, for the log; a collective call of `group`.

    The caller must first compare `kind` and `packed` over the ranks: only some choices run
    collectives. `device` is that of the tokens; groups are None for a single rank. The capacity
    pool of `config` must stay.

    Raises:
        ValueError: on all ranks, if "direct" was asked for and cannot work.
    """
    local = config.num_local_experts
    collectives = Collectives(local, group, etp_group)
    reason = ""
    if not packed:
        reason = "direct writes need experts='packed'"
    elif collectives.etp_group is not None:
        size = collectives.etp_group.size()
        reason = f"direct writes need expert_tensor_parallel_size=1, got {size}"
    elif device.type != "cuda":
        reason = f"direct writes need tokens on GPUs, got {device.type}"
    hosts = hosts_of(group, device) if group is not None and group.size() > 1 else None
    place = "an NVLink domain" if hosts is not None and hosts.kind != "host" else "a host"
    if hosts is not None and hosts.num_hosts == 1:
        hosts = None
    if hosts is not None:
        collectives.num_away = hosts.num_away
    shares = packed and config.capacity_pool == "store" and collectives.etp_group is None
    if hosts is not None and not reason:
        if not shares:
            reason = "direct writes need capacity_pool='store' across hosts"
        elif hosts.num_inside == 1:
            reason = "direct writes need several ranks on each host"
    require(kind != "direct" or not reason, "exchange", kind, "be auto or alltoall here", reason)
    if kind == "alltoall":
        reason = f'exchange="{kind}" was asked for'
    elif kind == "auto" and collectives.num_sources == 1:
        reason = "one rank"
    direct = None
    if not reason:
        try:
            direct = DirectStores(local, group, hosts=hosts, over_nvlink=kind == "auto")
            reason = f"the {direct.group.size()} ranks share {place} and reach each other's GPUs"
        except ValueError as error:
            if kind == "direct":
                raise
            reason = str(error)
    if hosts is None or group is None:
        return direct or collectives, reason
    reason = f"{hosts}; {reason}"
    if not shares or hosts.num_inside == 1:
        return collectives, reason
    inside, rail = groups_of(group, device)
    return Rails(direct or Collectives(local, inside), hosts, rail, device), reason
