"""Machines that ranks pretend to be on; the package has no such setting.

    torchrun ... -m tests.support.machines 2 -m padded_dispatch.megatron.run SCRIPT ...
    torchrun ... -m tests.support.machines 2 SCRIPT ...

run a module or a script with ranks that share one GPU, as if on two machines. NCCL must be 2.30 or
newer (LD_PRELOAD); it then goes over sockets between the machines. With `--own-gpus` behind the
number each rank has the GPU that torchrun gives it, and NCCL is not told: rails go over NVLink, or,
with NCCL_P2P_DISABLE and NCCL_SHM_DISABLE set to 1, over sockets.
"""

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from padded_dispatch.exchange import hosts
from padded_dispatch.exchange.collectives import Collectives
from padded_dispatch.exchange.direct import DirectStores
from padded_dispatch.exchange.hosts import groups_of, hosts_of, join
from padded_dispatch.exchange.rails import Rails

# What `hosts` remembers of each arrangement: tests of a process share groups. Two arrangements may
# join the same ranks, whose store has addresses from the first time.
_known: dict[str, dict[str, Any]] = {}
_joined: WeakKeyDictionary[dist.ProcessGroup, dict[Any, dist.ProcessGroup]] = WeakKeyDictionary()


def _join_once(group: dist.ProcessGroup, ranks: list[int], device: torch.device) -> Any:
    joined, key = _joined.setdefault(group, {}), (*ranks, device.type)
    if key not in joined:
        joined[key] = join(group, ranks, device)
    return joined[key]


@contextmanager
def ranks_on(machines: str) -> Iterator[None]:
    """Let rank r of the job be on machine `machines[r]`, a letter; "" changes nothing."""
    if not machines:
        yield
        return
    new = {"_hosts": WeakKeyDictionary(), "_groups": WeakKeyDictionary()}
    known = _known.setdefault(machines, new)
    machine = lambda: machines[dist.get_rank()]  # noqa: E731
    with patch.multiple(hosts, machine=machine, join=_join_once, **known):
        yield


def rails_of(num_local_experts: int, kind: str, device: torch.device) -> Rails:
    """Return rails around an exchange of this kind, over the default group; a collective call.

    `exchange.choose` makes no direct writes on a CPU.
    """
    group: Any = dist.group.WORLD
    hosts, (inside, rail) = hosts_of(group, device), groups_of(group, device)
    exchange: Any = Collectives(num_local_experts, inside)
    if kind == "direct":
        exchange = DirectStores(num_local_experts, group, hosts=hosts)
    return Rails(exchange, hosts, rail, device)


def machine_of(num_machines: int) -> str:
    """Return the machine of this rank of torchrun."""
    return f"machine{int(os.environ['RANK']) * num_machines // int(os.environ['WORLD_SIZE'])}"


def share_a_gpu(name: str) -> None:
    """Let this rank share one GPU, and let NCCL and torch see machine `name`."""
    folder = Path(gettempdir()) / name  # Torch's symmetric memory has its sockets there.
    folder.mkdir(exist_ok=True)
    os.environ |= {
        "NCCL_HOSTID": name,
        "TMPDIR": str(folder),
        "LOCAL_RANK": "0",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }


if __name__ == "__main__":
    number, *sys.argv = sys.argv[1:]
    name = machine_of(int(number))
    if sys.argv[0] == "--own-gpus":
        sys.argv.pop(0)
    else:
        share_a_gpu(name)
    with patch.object(hosts, "machine", partial(str, name)):
        if sys.argv[0] == "-m":
            module = sys.argv.pop(1)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
