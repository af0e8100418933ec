"""Sizes of the MoE layers of public models, by name, for benchmarks, presets and plans."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """D, E, K and F of a Mixture-of-Experts layer; `ffn_size` is that of one expert."""

    hidden_size: int
    num_experts: int
    top_k: int
    ffn_size: int


SHAPES = {
    "qwen3-30b-a3b": LayerShape(hidden_size=2048, num_experts=128, top_k=8, ffn_size=768),
    "gpt-oss-20b": LayerShape(hidden_size=2880, num_experts=32, top_k=4, ffn_size=2880),
    "gpt-oss-120b": LayerShape(hidden_size=2880, num_experts=128, top_k=4, ffn_size=2880),
    "deepseek-v2-lite": LayerShape(hidden_size=2048, num_experts=64, top_k=6, ffn_size=1408),
    "deepseek-v3": LayerShape(hidden_size=7168, num_experts=256, top_k=8, ffn_size=2048),
}

# Mixture-of-Experts layers of these models.
MOE_LAYERS = {
    "qwen3-30b-a3b": 48,
    "gpt-oss-20b": 24,
    "gpt-oss-120b": 36,
    "deepseek-v2-lite": 26,
    "deepseek-v3": 58,
}
