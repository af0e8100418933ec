"""padded_dispatch: a Mixture-of-Experts token dispatcher with static shapes."""

from padded_dispatch.config import BufferBytes, DispatchConfig, Policy, Remedy
from padded_dispatch.dispatcher import Dispatched, PaddedDispatcher
from padded_dispatch.exchange import ExpertInput
from padded_dispatch.ops.overflow import select_with_remedy
from padded_dispatch.ops.plan import DispatchPlan, make_plan
from padded_dispatch.ops.select import Selection, select

__all__ = [
    "BufferBytes",
    "DispatchConfig",
    "DispatchPlan",
    "Dispatched",
    "ExpertInput",
    "PaddedDispatcher",
    "Policy",
    "Remedy",
    "Selection",
    "make_plan",
    "select",
    "select_with_remedy",
]
