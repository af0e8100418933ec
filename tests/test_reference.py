"""The specification: its store and cells by hand, its gradients against differences.

Selection, plans, the wire and water levels are worked by hand where the package's code is tested,
which equals them.
"""

import math

import numpy as np
import pytest

from padded_dispatch import Activation
from tests.support import reference


def bools(*rows: str) -> np.ndarray:
    return np.array([[letter == "x" for letter in row] for row in rows])


def test_a_store_leaves_later_layers_their_share():
    """Three layers with 5 rows each, whose share is 4: at most 7, 11 and 15 rows are in use."""
    store = reference.Store([5] * 3, [4] * 3, [9] * 3)
    assert [store.keep(np.array([[count]])) for count in (8, 8, 2)] == [7, 4, math.inf]
    assert store.kept_Y == [7, 4, 2]
    assert store.need == 8 + 8 + 4  # What is left to the last layer counts, though it asks for 2.
    # A layer never has more than `most`, nor a later one less than it asks for within its share.
    store = reference.Store([30, 3], [20, 4], [9, 9])
    assert [store.keep(np.array([[count]])) for count in (12, 3)] == [9, math.inf]


def test_rows_above_the_level_of_their_rank_find_no_room():
    map_STE = np.stack([bools("xx", "xx", ".x"), bools("..", "xx", "x.")])
    found_STE = reference.found_room(map_STE, [1, math.inf])
    assert found_STE[0].tolist() == bools("xx", ".x", ".x").tolist()
    assert found_STE[1].tolist() == bools("..", "xx", "..").tolist()
    assert reference.counts(map_STE, 1, 2).tolist() == [[3], [1]]


def test_cells_are_blocks_of_sources():
    """One expert on rank 1, two sources, C = 2: source 0 fills one row, source 1 both."""
    rows_STE = np.stack([bools("..", "xx"), bools(".x", ".x")])
    tokens_STD = np.array([[[10.0], [11.0]], [[20.0], [21.0]]])
    probs_STE = np.arange(8.0).reshape(2, 2, 2)
    given = dict(capacity=2, rank=1, num_ranks=2)
    cells = reference.cells(tokens_STD, probs_STE, rows_STE, **given)
    assert cells.rows_LSCD.tolist() == [[[[11], [0]], [[20], [21]]]]
    assert cells.probs_LSC.tolist() == [[[3, 0], [5, 7]]]
    assert cells.source_LSC.tolist() == [[[0, -1], [1, 1]]]


def test_a_layer_by_hand():
    """Token 2 has two experts of two shards; its second row does not count."""
    weights = {
        "fc1_LGD": np.array([[[[1.0]], [[3.0]]], [[[2.0]], [[5.0]]]]),
        "fc2_LDF": np.ones((2, 2, 1, 1)),
        "fc2_bias_LD": np.full((2, 2, 1), 7.0),
    }
    activation = Activation(function="squared_relu", gated=False)
    given = np.array([[[2.0]]]), np.array([[[0.5, 0.25]]]), bools("x.")[None]
    (((out,),),) = reference.layer(*given, weights, activation)
    assert out == 0.5 * ((2 * 1) ** 2 + 7 + (2 * 2) ** 2 + 7)


@pytest.mark.parametrize(
    "activation",
    [
        Activation(),
        Activation(function="gelu", clamp=0.4),
        Activation(function="quick_gelu", clamp=0.6, offset=1.0),
        Activation(function="squared_relu", gated=False),
    ],
    ids=str,
)
def test_gradients_are_differences(activation):
    generator = np.random.default_rng(7)
    sources, tokens, experts, shards, hidden, ffn = 2, 4, 3, 2, 3, 2
    width = ffn * (2 if activation.gated else 1)
    shapes = {
        "fc1_LGD": (width, hidden),
        "fc2_LDF": (hidden, ffn),
        "fc1_bias_LG": (width,),
        "fc2_bias_LD": (hidden,),
    }
    values = {name: generator.normal(size=(shards, experts, *s)) for name, s in shapes.items()}
    values["tokens"] = generator.normal(size=(sources, tokens, hidden))
    values["probs"] = generator.random((sources, tokens, experts))
    rows_STE = generator.random((sources, tokens, experts)) < 0.6
    rows_STE[..., 1] = False  # An expert without a row.
    grad_STD = generator.normal(size=values["tokens"].shape)

    def given(of: dict[str, np.ndarray]) -> tuple:
        weights = {name: of[name] for name in shapes}
        return of["tokens"], of["probs"], rows_STE, weights, activation

    def product() -> float:
        return float((reference.layer(*given(values)) * grad_STD).sum())

    tokens_grad, probs_grad, grads = reference.layer_backward(*given(values), grad_STD)
    grads |= {"tokens": tokens_grad, "probs": probs_grad}
    step = 1e-6
    for name, value in values.items():
        for at in np.ndindex(value.shape):
            before = value[at]
            value[at] = before + step
            above = product()
            value[at] = before - step
            difference = (above - product()) / (2 * step)
            value[at] = before
            assert grads[name][at] == pytest.approx(difference, rel=1e-6, abs=1e-7), (name, at)
    assert not grads["fc1_LGD"][:, 1].any() and not grads["probs"][~rows_STE].any()
