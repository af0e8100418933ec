"""The padded dispatcher in Megatron-Core 0.16.1 to 0.19.0.

Two ways in. `install()` makes `moe_token_dispatcher_type="padded_alltoall"` work everywhere.
`padded_spec(spec)` puts `PaddedMoELayer` into a layer spec and patches nothing, except that a
config with CUDA graphs installs the guard of replays.
"""

from padded_dispatch.config import NO_DROP
from padded_dispatch.megatron.control import CapacityControl
from padded_dispatch.megatron.cpu import megatron_on_cpu
from padded_dispatch.megatron.dispatcher import PaddedAlltoAllTokenDispatcher
from padded_dispatch.megatron.graphs import GraphedMoELayer, LayerGraphs
from padded_dispatch.megatron.install import install, uninstall
from padded_dispatch.megatron.layer import PaddedMoELayer, padded_spec
from padded_dispatch.megatron.options import PaddedOptions
from padded_dispatch.megatron.retry import Retry
from padded_dispatch.megatron.router import protect
from padded_dispatch.megatron.telemetry import Telemetry

__all__ = [
    "NO_DROP",
    "CapacityControl",
    "GraphedMoELayer",
    "LayerGraphs",
    "PaddedAlltoAllTokenDispatcher",
    "PaddedMoELayer",
    "PaddedOptions",
    "Retry",
    "Telemetry",
    "install",
    "megatron_on_cpu",
    "padded_spec",
    "protect",
    "uninstall",
]
