"""Model FLOPs: what the mathematics needs, not what a program spends on it."""

from padded_dispatch.train.settings import VOCABULARY, ModelShape


def flops_per_token(model: ModelShape, num_layers: int, seq_length: int) -> int:
    """FLOPs of one training step per token: forward, and twice as much backward.

    A multiplication and its addition count 2. Per layer and token, forward:

    - attention projections: `2 * D * head_size * (2 * heads + 2 * kv_groups)`
    - scores and their use: `4 * heads * head_size * S / 2`; causal attention counts half, since a
      token sees half of the S positions on average
    - router: `2 * D * E`
    - experts: `6 * D * F` for each of the K active ones, and once more with the shared width; the
      others, padded rows and dropped tokens count nothing and change nothing

    and once `2 * D * 256` for the output layer. Norms, activations, the embedding and the optimizer
    are left out. Nothing is recomputed.

    Example: D=4, 2 heads of size 2, 1 group, E=3, K=2, F=5, one layer, S=6 gives
    3 * (96 + 48 + 24 + 240 + 2048) = 7368.
    """
    width = model.hidden_size
    projections = 4 * width * model.head_size * (model.num_heads + model.num_kv_groups)
    scores = 2 * model.num_heads * model.head_size * seq_length
    router = 2 * width * model.num_experts
    active_ffn_size = model.top_k * model.expert_ffn_size + (model.shared_ffn_size or 0)
    layer = projections + scores + router + 6 * width * active_ffn_size
    return 3 * (num_layers * layer + 2 * width * VOCABULARY)
