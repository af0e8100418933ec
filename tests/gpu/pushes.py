"""Direct stores beside an oracle, eagerly, over gloo: for ranks that share a GPU, and sanitizers.

    export TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1
    torchrun --no-python --nproc-per-node 2 compute-sanitizer --error-exitcode 9 \\
      python -m tests.gpu.pushes

`compute-sanitizer` may be left out. Exits with 1 if anything differs.
"""

import os
import sys

import torch
import torch.distributed as dist

from tests.support.direct_parity import Layer, eager_differs

LAYERS = {
    "odd": Layer(),
    "few rows of each expert": Layer(level=20),
    "more slots than tokens": Layer(slots=600),
    "one token": Layer(tokens=1, width=16, top_k=1, local_experts=1),
    "Qwen3": Layer(tokens=256, width=2048, top_k=8, local_experts=64),
    "GPT-OSS": Layer(tokens=130, width=2880, top_k=4, local_experts=16),
}


def main() -> int:
    """Run all layers; return 1 if one differs."""
    if not torch.cuda.is_available():
        sys.exit("this program needs a GPU, got none")
    os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gloo")
    found = {name: eager_differs(layer) for name, layer in LAYERS.items()}
    sys.stdout.write(f"rank {dist.get_rank()}, what differs: {found}\n")
    dist.destroy_process_group()
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
