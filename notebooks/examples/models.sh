# Sizes of larger models: MODEL behind ARGS replaces those of `args.sh`.
QWEN3=(  # Qwen3-30B-A3B
  --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32
  --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm
  --seq-length 4096 --max-position-embeddings 4096 --rotary-base 1000000
  --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --vocab-size 151936
  --micro-batch-size 1
)
GPT_OSS=(  # GPT-OSS-120B, without biases, sinks, windows and its activation
  --num-layers 36 --hidden-size 2880 --ffn-hidden-size 2880 --num-attention-heads 64
  --group-query-attention --num-query-groups 8 --kv-channels 64
  --seq-length 4096 --max-position-embeddings 4096 --rotary-base 150000
  --num-experts 128 --moe-router-topk 4 --moe-ffn-hidden-size 2880 --vocab-size 201088
  --micro-batch-size 1
)
MODEL=("${QWEN3[@]}")
