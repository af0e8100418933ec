"""Model shapes by name, with what it takes to train them by default."""

from dataclasses import dataclass

from padded_dispatch.train.settings import Device, ModelShape


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model's shape and defaults of its recipe.

    `device`: the only one that it can run on; None for any.
    """

    about: str
    model: ModelShape
    num_layers: int = 4
    seq_length: int = 4096
    micro_batch: int = 1
    steps: int = 100
    lr: float = 3e-4
    device: Device | None = "cuda"


PRESETS = {
    "tiny": Preset(
        about="two small layers of 8 experts, about a minute on two CPU cores",
        model=ModelShape(
            hidden_size=128,
            num_heads=4,
            num_kv_groups=2,
            head_size=32,
            num_experts=8,
            top_k=2,
            expert_ffn_size=256,
        ),
        num_layers=2,
        seq_length=64,
        micro_batch=8,
        steps=400,
        lr=5e-3,
        device=None,
    ),
    "qwen3-30b-a3b": Preset(
        about="layers of Qwen3-30B-A3B",
        model=ModelShape(
            hidden_size=2048,
            num_heads=32,
            num_kv_groups=4,
            head_size=128,
            num_experts=128,
            top_k=8,
            expert_ffn_size=768,
            qk_layernorm=True,
        ),
    ),
    "gpt-oss-20b": Preset(
        about="layers like GPT-OSS-20B's: no attention sinks, no sliding windows",
        model=ModelShape(
            hidden_size=2880,
            num_heads=64,
            num_kv_groups=8,
            head_size=64,
            num_experts=32,
            top_k=4,
            expert_ffn_size=2880,
            gpt_oss=True,
        ),
    ),
    "deepseek-v2-lite": Preset(
        about="layers like DeepSeek-V2-Lite's: two shared experts, but ordinary attention",
        model=ModelShape(
            hidden_size=2048,
            num_heads=16,
            num_kv_groups=16,
            head_size=128,
            num_experts=64,
            top_k=6,
            expert_ffn_size=1408,
            shared_ffn_size=2816,
        ),
    ),
}
