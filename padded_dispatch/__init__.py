"""padded_dispatch: a Mixture-of-Experts token dispatcher with static shapes.

The public API is what this package and `padded_dispatch.megatron` export.
"""

from padded_dispatch.config import NO_DROP, BufferBytes, DispatchConfig, Policy, Remedy
from padded_dispatch.dispatcher import Dispatched, PaddedDispatcher
from padded_dispatch.exchange import ExpertInput
from padded_dispatch.experts import ExpertWeights, grouped_mlp
from padded_dispatch.ops.activation import Activation
from padded_dispatch.ops.overflow import select_with_remedy
from padded_dispatch.ops.plan import DispatchPlan, make_plan
from padded_dispatch.ops.select import Selection, select

__version__ = "0.1.0"

__all__ = [
    "NO_DROP",
    "Activation",
    "BufferBytes",
    "DispatchConfig",
    "DispatchPlan",
    "Dispatched",
    "ExpertInput",
    "ExpertWeights",
    "PaddedDispatcher",
    "Policy",
    "Remedy",
    "Selection",
    "__version__",
    "grouped_mlp",
    "make_plan",
    "select",
    "select_with_remedy",
]
