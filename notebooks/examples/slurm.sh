#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
# Two hosts of 8 GPUs: sbatch slurm.sh, in a checkout of Megatron-LM that has args.sh and models.sh.
set -eu
. ./args.sh
. ./models.sh
export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --cpu-bind=none torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$HEAD:29500" \
  -m padded_dispatch.megatron.run pretrain_gpt.py \
  "${ARGS[@]}" "${MODEL[@]}" "${PADDED[@]}" "${GRAPHS[@]}" \
  --expert-model-parallel-size 16 --global-batch-size 32 --use-distributed-optimizer "$@"
