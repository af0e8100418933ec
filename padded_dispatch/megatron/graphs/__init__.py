"""CUDA graphs of models with the padded dispatcher, made by Megatron-Core.

`capture`: graphs of a model's layers (`LayerGraphs`) or of a whole iteration (`IterationGraph`).
`guard`: before a replay, raise if a setting that is baked into the graph has changed.
"""
