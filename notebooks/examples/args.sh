# A small model on mock data, to be replaced with yours, and the flags of the padded dispatcher.
ARGS=(
  --num-layers 4 --hidden-size 1024 --ffn-hidden-size 2048 --num-attention-heads 8
  --seq-length 1024 --max-position-embeddings 1024 --position-embedding-type rope
  --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
  --attention-dropout 0 --hidden-dropout 0 --transformer-impl transformer_engine --bf16
  --num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 768 --moe-grouped-gemm
  --moe-router-fusion --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
  --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --lr-decay-style constant
  --train-iters 30 --eval-iters 0 --eval-interval 1000 --log-interval 1
  --no-gradient-accumulation-fusion
  --mock-data --tokenizer-type NullTokenizer --vocab-size 4096
)
PADDED=(--moe-token-dispatcher-type padded_alltoall --moe-expert-capacity-factor 1.25)
# One graph per layer, of attention and the whole MoE layer. Megatron-Core 0.16 and 0.17 call the
# flag --cuda-graph-scope.
GRAPHS=(--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe --te-rng-tracker)
