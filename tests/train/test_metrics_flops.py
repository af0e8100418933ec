"""Model FLOPs against sums written out by hand."""

from padded_dispatch.train.metrics import flops_per_token
from padded_dispatch.train.settings import PRESETS, ModelShape


def test_the_docstring_example():
    shape = ModelShape(
        hidden_size=4,
        num_heads=2,
        num_kv_groups=1,
        head_size=2,
        num_experts=3,
        top_k=2,
        ffn_size=5,
    )
    projections = 2 * 4 * (2 * 2) + 2 * (2 * 4 * 2) + 2 * (2 * 2) * 4  # q, k and v, output
    scores = 2 * (2 * 2 * 2) * 3  # two products, three positions on average, all heads
    router, experts, head = 2 * 4 * 3, 2 * (3 * 2 * 4 * 5), 2 * 4 * 256
    assert (projections, scores, router, experts, head) == (96, 48, 24, 240, 2048)
    assert flops_per_token(shape, num_layers=1, seq_length=6) == 7368


def test_shared_experts_count_and_idle_experts_do_not():
    model = PRESETS["deepseek-v2-lite"].model
    per_layer = (
        4 * 2048 * 16 * 128 * 2  # projections: as many heads for keys as for queries
        + 2 * 2048 * 4096  # scores
        + 2 * 2048 * 64  # router
        + 6 * 2048 * (6 + 2) * 1408  # six of 64 experts and two shared ones
    )
    expected = 3 * (4 * per_layer + 2 * 2048 * 256)
    assert flops_per_token(model, num_layers=4, seq_length=4096) == expected
