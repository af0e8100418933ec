"""Pretrain a recipe of Megatron-Bridge with the padded dispatcher.

    torchrun --nproc-per-node 8 bridge_pretrain.py
    torchrun --nproc-per-node 8 bridge_pretrain.py checkpoints/iter_0000100/run_config.yaml

The second command takes our options from a run config that Bridge has saved: Bridge itself ignores
them when it loads one.
"""

import sys
from pathlib import Path

import yaml
from megatron.bridge.recipes.qwen import qwen3_30b_a3b_pretrain_config
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

from padded_dispatch.megatron import PaddedOptions, install


def main(run_config: str | None = None) -> None:
    saved = yaml.safe_load(Path(run_config).read_text()) if run_config else {"model": {}}
    install(PaddedOptions(**saved["model"].get("padded_dispatch", {})))  # Before the config.
    config = qwen3_30b_a3b_pretrain_config()
    config.model.moe_token_dispatcher_type = "padded_alltoall"
    # Bridge sets the dispatcher back to `flex` where a recipe names one of its back ends.
    config.model.moe_flex_dispatcher_backend = None
    config.model.moe_expert_capacity_factor = 1.25
    pretrain(config, forward_step)


if __name__ == "__main__":
    main(*sys.argv[1:])
