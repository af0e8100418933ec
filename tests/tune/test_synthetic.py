"""Each kind of synthetic trace has the property that it is named after."""

import numpy as np
import pytest

from padded_dispatch.tune.replay import replay
from padded_dispatch.tune.synthetic import KINDS, TraceSizes, synthetic_trace
from tests.support.traces import equal

SIZES = TraceSizes(num_steps=16, num_layers=2, num_ranks=4, num_tokens=97, num_experts=16, top_k=3)
MEAN = 97 * 3 / 16


def demand(kind: str, **kwargs) -> np.ndarray:
    """[step, layer, rank, expert]."""
    trace = synthetic_trace(kind, SIZES, **kwargs)
    return replay(trace, [1.0]).demand_by_expert.reshape(16, 2, 4, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(kind):
    trace = synthetic_trace(kind, SIZES, seed=3)
    assert trace.ids_NTK.shape == (16 * 2 * 4, 97, 3)
    assert equal(trace, synthetic_trace(kind, SIZES, seed=3))
    assert not np.array_equal(trace.ids_NTK, synthetic_trace(kind, SIZES, seed=4).ids_NTK)
    assert trace.probs_NTK is not None
    sums_NT = trace.probs_NTK.sum(2)
    # Three fp32 numbers, each rounded once, and added with two roundings.
    real_NT = trace.ids_NTK[..., 0] >= 0
    np.testing.assert_allclose(sums_NT[real_NT], 1, rtol=0, atol=4 * 2**-24)
    assert (sums_NT[~real_NT] == 0).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("ragged", "idle-rank")])
def test_every_token_has_all_its_experts(kind):
    assert (demand(kind).sum(3) == 97 * 3).all()


def test_balanced_is_exact():
    assert set(demand("balanced").flatten().tolist()) == {int(MEAN), int(MEAN) + 1}
    even = TraceSizes(num_steps=1, num_layers=1, num_ranks=2, num_tokens=32, num_experts=8, top_k=3)
    trace = synthetic_trace("balanced", even)
    assert (replay(trace, [1.0]).demand_by_expert == 12).all()


def test_uniform_is_balanced_on_average():
    total_E = demand("uniform").sum((0, 1, 2))
    # 128 records; a draw of 97 has a variance of at most 97 * 3 / 16.
    assert abs(total_E - 128 * MEAN).max() < 6 * np.sqrt(128 * MEAN)


@pytest.mark.parametrize("kind", ["zipf", "lognormal", "hot-experts", "hot-rank"])
def test_popular_experts_are_the_same_at_all_steps_and_ranks_and_strength_is_how_much(kind):
    found = demand(kind, strength=3.0)
    assert (found.sum((0, 2)).max(1) > 3 * 64 * MEAN).all()
    assert found.sum((0, 2)).argmax(1)[0] != found.sum((0, 2)).argmax(1)[1]
    # The largest expert of every record is one of at most four.
    for largestR in found.argmax(3).swapaxes(0, 1):
        assert len(set(largestR.flatten().tolist())) <= 4
    assert (demand(kind, strength=0) == demand("uniform")).all()


def test_topics_are_popular_experts_of_one_rank():
    found = demand("topics", strength=3.0)
    assert (found.sum(0).max(2) > 3 * 16 * MEAN).all()
    for total_RE in found.sum(0):  # of each layer
        assert len({int(total_E.argmax()) for total_E in total_RE}) > 1
    assert (demand("topics", strength=0) == demand("uniform")).all()
    assert (found[:, :, 0] == demand("lognormal", strength=3.0)[:, :, 0]).all()


def test_hot_sets():
    hot_LE = demand("hot-experts", strength=6.0).sum((0, 2)) > 2 * 64 * MEAN
    assert hot_LE.sum(1).tolist() == [2, 2]
    of_rank_LR = demand("hot-rank", strength=6.0).sum((0, 2)).reshape(2, 4, 4).sum(2)
    assert ((of_rank_LR > 0.9 * 64 * 97 * 3).sum(1) == 1).all()


def test_rotating_stays_for_four_steps():
    hot_SE = demand("rotating", strength=6.0)[:, 0].sum(1) > 2 * 4 * MEAN
    for start in range(0, 16, 4):
        assert (hot_SE[start : start + 4] == hot_SE[start]).all()
    assert len({tuple(hot_E.tolist()) for hot_E in hot_SE}) > 1


def test_burst_is_every_eighth_step():
    largest = demand("burst", strength=3.0).max((1, 2, 3))
    assert np.flatnonzero(largest > 3 * MEAN).tolist() == [7, 15]


def test_ragged_ranks_have_less_and_less_padding():
    assert (demand("ragged").sum(3) == 3 * np.array([24, 48, 72, 97])).all()


def test_an_idle_rank_asks_for_nothing():
    assert (demand("idle-rank").sum(3) == 3 * np.array([97, 97, 97, 0])).all()


def test_drift_gets_worse():
    largest = demand("drift", strength=2.0).sum(2).max((1, 2))
    assert (demand("drift", strength=2.0)[0] == demand("uniform")[0]).all()
    assert largest[0] < 2 * 4 * MEAN < 4 * 4 * MEAN < largest[-1]


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"kind must be one of balanced, uniform.*, got 'cold'"):
        synthetic_trace("cold", SIZES)
    with pytest.raises(ValueError, match="num_experts must be a multiple of num_ranks=3, got 8"):
        TraceSizes(num_steps=1, num_layers=1, num_ranks=3, num_tokens=2, num_experts=8, top_k=1)
