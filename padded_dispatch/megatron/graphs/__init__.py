"""CUDA graphs of models with the padded dispatcher, made by Megatron-Core or by PyTorch.

`capture`: graphs of a model's layers (`LayerGraphs`) or of a whole iteration (`IterationGraph`).
`standalone`: graphs of one MoE layer without a transformer layer around it (`GraphedMoELayer`).
`selftest`: after a capture, compare replays with eager runs bit by bit.
`guard`: before a replay, raise if a setting that is baked into the graph has changed.
`memory`: estimate what graphs will hold; explain out-of-memory errors.
"""

from padded_dispatch.megatron.graphs.capture import IterationGraph, LayerGraphs
from padded_dispatch.megatron.graphs.standalone import GraphedMoELayer

__all__ = ["GraphedMoELayer", "IterationGraph", "LayerGraphs"]
