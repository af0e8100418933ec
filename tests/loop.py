"""Run Megatron-LM's `pretrain_gpt.py` on CPUs: a tiny model, stock's dispatcher or ours.

    torchrun --nproc-per-node 2 -m tests.loop FOLDER --expert-model-parallel-size 2 \\
        --moe-token-dispatcher-type padded_alltoall --moe-expert-capacity-factor 8

FOLDER is a checkout of Megatron-LM. More flags may follow, also those of the padded dispatcher.
Where nothing is dropped, losses equal those of `--moe-token-dispatcher-type alltoall` on one rank,
`allgather` on several.
"""

import runpy
import sys

from padded_dispatch.megatron import megatron_on_cpu
from tests.support.fake_gpu import pretend

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
    pretend()
    sys.argv = ["run", f"{folder}/pretrain_gpt.py", *FLAGS.split(), *flags]
    with megatron_on_cpu():
        runpy.run_module("padded_dispatch.megatron.run", run_name="__main__")


if __name__ == "__main__":
    main()
