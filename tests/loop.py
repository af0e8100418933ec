"""Run Megatron-LM's `pretrain_gpt.py` on CPUs: a tiny model, stock's dispatcher or ours.

    torchrun --nproc-per-node 2 -m tests.loop FOLDER --expert-model-parallel-size 2 \\
        --moe-token-dispatcher-type padded_alltoall --moe-expert-capacity-factor 8

FOLDER is a checkout of Megatron-LM. More flags may follow, also those of the padded dispatcher.
Where nothing is dropped, losses equal those of `--moe-token-dispatcher-type alltoall` on one rank,
`allgather` on several. What the loop asks of a GPU is answered here, but not to our package.
"""

import runpy
import sys
import typing
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions

from padded_dispatch.megatron import megatron_on_cpu

FLAGS = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --swiglu "
    "--seq-length 64 --max-position-embeddings 64 --position-embedding-type rope --num-experts 8 "
    "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --transformer-impl local "
    "--untie-embeddings-and-output-weights --moe-router-topk 2 --moe-ffn-hidden-size 64 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-3 --lr-decay-style constant --clip-grad 0 --eval-iters 2 "
    "--eval-interval 3 --log-interval 1 --tokenizer-type NullTokenizer --vocab-size 512 "
    "--mock-data --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion "
    "--no-persist-layer-norm --no-bias-swiglu-fusion --distributed-backend gloo --no-load-rng "
    "--no-save-rng --train-iters 6"
)


def main() -> None:
    folder, *flags = sys.argv[1:]
    sys.path.insert(0, folder)
    cuda: Any = torch.cuda

    def is_available() -> bool:
        name = sys._getframe(1).f_globals["__name__"]
        return not name.startswith(("padded_dispatch", "torch."))

    cuda.is_available, cuda.device_count = is_available, lambda: 8
    cuda.get_device_capability = lambda *device: (9, 0)
    cuda.is_current_stream_capturing = lambda: False
    gpu = SimpleNamespace(total_memory=2**36, major=9, minor=0, name="H", multi_processor_count=132)
    cuda.get_device_properties = lambda *device: gpu
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "set_device"):
        setattr(cuda, name, lambda *device: 0)
    cuda.max_memory_reserved = cuda.memory_allocated
    for kind in ("Float", "Int", "Long"):
        setattr(cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
    torch.Tensor.pin_memory = lambda tensor, *device: tensor  # type: ignore[method-assign]
    init = dist.init_process_group
    dist.init_process_group = lambda **given: init(**(given | {"device_id": None}))
    typing.override = typing_extensions.override  # Python 3.12 has it.
    sys.argv = ["run", f"{folder}/pretrain_gpt.py", *FLAGS.split(), *flags]
    with megatron_on_cpu():
        runpy.run_module("padded_dispatch.megatron.run", run_name="__main__")


if __name__ == "__main__":
    main()
