"""Each kind of synthetic trace has the property that it is named after."""

import numpy as np
import pytest

from padded_dispatch.tune.demand import demand_of
from padded_dispatch.tune.synthetic import KINDS, TraceSizes, synthetic_trace
from tests.support.traces import equal

SIZES = TraceSizes(num_steps=12, num_layers=2, num_ranks=4, num_tokens=97, num_experts=16, top_k=3)
MEAN = 97 * 3 / 16


def demand(kind: str, **kwargs) -> np.ndarray:
    """[step, layer, rank, expert]."""
    return demand_of(synthetic_trace(kind, SIZES, **kwargs)).counts


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(kind):
    trace = synthetic_trace(kind, SIZES, seed=3)
    assert (trace.ids_NTK.shape, set(trace.layers.tolist())) == ((12 * 2 * 4, 97, 3), {1, 2})
    assert (trace.ids_NTK >= 0).all()
    assert equal(trace, synthetic_trace(kind, SIZES, seed=3))
    assert not np.array_equal(trace.ids_NTK, synthetic_trace(kind, SIZES, seed=4).ids_NTK)
    assert trace.probs_NTK is not None
    # Three fp32 numbers, each rounded once, and added with two roundings.
    np.testing.assert_allclose(trace.probs_NTK.sum(2), 1, rtol=0, atol=4 * 2**-24)


def test_balanced_is_exact_and_uniform_is_balanced_on_average():
    assert set(demand("balanced").flatten().tolist()) == {int(MEAN), int(MEAN) + 1}
    total_E = demand("uniform").sum((0, 1, 2))
    # 96 records; a draw of 97 has a variance of at most 97 * 3 / 16.
    assert abs(total_E - 96 * MEAN).max() < 6 * np.sqrt(96 * MEAN)


@pytest.mark.parametrize("kind", ["lognormal", "hot-experts"])
def test_popular_experts_are_the_same_at_all_steps_and_ranks_and_strength_is_how_much(kind):
    found = demand(kind, strength=3.0)
    assert (found.sum((0, 2)).max(1) > 3 * 48 * MEAN).all()
    assert found.sum((0, 2)).argmax(1)[0] != found.sum((0, 2)).argmax(1)[1]
    for largest in found.argmax(3).swapaxes(0, 1):
        assert len(set(largest.flatten().tolist())) <= 4
    assert (demand(kind, strength=0) == demand("uniform")).all()


def test_topics_are_popular_experts_of_one_rank():
    found = demand("topics", strength=3.0)
    assert (found.sum(0).max(2) > 3 * 12 * MEAN).all()
    for total_RE in found.sum(0):  # of each layer
        assert len({int(total_E.argmax()) for total_E in total_RE}) > 1
    assert (found[:, :, 0] == demand("lognormal", strength=3.0)[:, :, 0]).all()


def test_drift_gets_worse():
    largest = demand("drift", strength=2.0).sum(2).max((1, 2))
    assert (demand("drift", strength=2.0)[0] == demand("uniform")[0]).all()
    assert largest[0] < 2 * 4 * MEAN < 4 * 4 * MEAN < largest[-1]
