#!/bin/bash
# Train on the GPUs of one host: EP=8 FOLDER/one_host.sh, in a checkout of Megatron-LM. Each expert
# is on one of the GPUs, and EP must divide the number of experts.
set -eu
. "$(dirname "$0")/args.sh"
EP=${EP:-8}
torchrun --nproc-per-node "$EP" -m padded_dispatch.megatron.run pretrain_gpt.py \
  "${ARGS[@]}" "${PADDED[@]}" "${GRAPHS[@]}" \
  --expert-model-parallel-size "$EP" --global-batch-size $((2 * EP)) \
  --use-distributed-optimizer "$@"
