"""A trace has one normal form, and parts of it come together again."""

import numpy as np
import pytest

from padded_dispatch.trace import Trace, ascending, merge, running_count
from tests.support.traces import equal, small_trace


def arrays(**changes) -> dict:
    """Two records of three tokens, two of four experts each."""
    values = dict(
        num_experts=4,
        top_k=2,
        num_ranks=2,
        steps=np.array([7, 7]),
        layers=np.array([1, 1], np.int32),
        ranks=np.array([0, 1], np.int32),
        ids_NTK=np.array([[[0, 3], [1, 2], [2, -1]], [[-1, -1], [0, 1], [1, 3]]], np.int16),
        probs_NTK=np.array([[[0.5, 0.5], [1, 0], [1, 0]], [[0, 0], [0.25, 1], [1, 1]]], np.float32),
    )
    return values | changes


def test_sizes_and_bytes():
    trace = Trace(**arrays())
    assert (trace.num_records, trace.num_tokens, trace.num_bytes) == (2, 3, 2 * (8 + 8 + 36))
    assert Trace(**arrays(probs_NTK=None)).num_bytes == 2 * (8 + 8 + 12)


def changed(name, index, value):
    array = arrays()[name].copy()
    array[index] = value
    return arrays(**{name: array})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (arrays(num_experts=0), r"num_experts must be from 1 to 32767, got 0"),
        (arrays(num_experts=2**15), r"num_experts must be from 1 to 32767, got 32768"),
        (arrays(top_k=5), r"top_k must be from 1 to 4, got 5"),
        (arrays(top_k=1), r"ids_NTK.shape must be .* K = 1, got \(2, 3, 2\)"),
        (arrays(num_ranks=0), "num_ranks must be from 1 to .*, got 0"),
        (arrays(steps=np.array([7])), r"steps must be int64\[2\], got 'int64\[1\]'"),
        (arrays(steps=np.array([7, 7], object)), r"steps must be int64\[2\], got 'object\[2\]'"),
        (
            arrays(probs_NTK=np.zeros((2, 3, 2))),
            r"probs_NTK must be float32.*, got 'float64\[2, 3, 2\]'",
        ),
        (
            arrays(probs_NTK=np.zeros((2, 3, 1), np.float32)),
            r"probs_NTK must be float32\[2, 3, 2\], got 'float32\[2, 3, 1\]'",
        ),
        (changed("steps", 1, -1), r"steps\[1\] must be 0 or more, got -1"),
        (changed("ranks", 0, -3), r"ranks\[0\] must be 0 or more, got -3"),
        (
            changed("ids_NTK", (1, 2, 1), 4),
            r"ids_NTK\[1\]\[2, 1\] must be .* below num_experts=4, got 4",
        ),
        (
            changed("ids_NTK", (0, 1, 0), -2),
            r"ids_NTK\[0\]\[1, 0\] must be -1 or an expert .*, got -2",
        ),
        (
            changed("ids_NTK", (1, 2, 1), 1),
            r"ids_NTK\[1\]\[2, 1\] must list every expert .* once.*, got 1; sort",
        ),
        (
            changed("ids_NTK", (0, 0, 0), -1),
            r"ids_NTK\[0\]\[0, 1\] must .* ascending order, then -1, got 3; sort",
        ),
        (
            changed("probs_NTK", (1, 1, 0), np.nan),
            r"probs_NTK\[1\]\[1, 0\] must be finite, got nan",
        ),
        (
            changed("probs_NTK", (1, 1, 0), -np.inf),
            r"probs_NTK\[1\]\[1, 0\] must be finite, got -inf",
        ),
        (
            changed("probs_NTK", (0, 2, 1), 0.5),
            r"probs_NTK\[0\]\[2, 1\] must be 0 where .*, got 0.5",
        ),
    ],
)
def test_anything_else_is_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        Trace(**values)


def test_choices_sort_into_the_normal_form():
    ids = np.array([[5, -1, 2], [-1, -1, 0]], np.int16)
    probs = np.array([[0.5, 0, 0.2], [0, 0, 1]], np.float32)
    sorted_ids, sorted_probs = ascending(ids, probs)
    assert sorted_ids.tolist() == [[2, 5, -1], [0, -1, -1]]
    np.testing.assert_array_equal(sorted_probs, np.float32([[0.2, 0.5, 0], [1, 0, 0]]))
    assert ascending(ids, None)[1] is None


def test_running_count():
    assert running_count(np.array([7, 5, 7, 7])).tolist() == [0, 0, 1, 2]
    assert running_count(np.array([], np.int64)).tolist() == []


def test_microbatches_are_counted_within_a_step_layer_and_rank():
    trace = small_trace(steps=[3, 3, 3, 4, 3], layers=[1, 1, 1, 1, 2], ranks=[0, 1, 0, 0, 0])
    assert trace.microbatches().tolist() == [0, 0, 1, 0, 0]


def test_parts_come_together_in_one_order():
    whole = small_trace(
        steps=[3, 3, 3, 3, 4, 4], layers=[1, 1, 1, 1, 1, 1], ranks=[0, 1, 0, 1, 0, 1]
    )
    assert whole.microbatches().tolist() == [0, 0, 1, 1, 0, 0]
    parts = [whole.where(whole.ranks == rank) for rank in (1, 0)]
    assert equal(merge(parts), whole)
    assert equal(merge([whole.where(whole.steps == step) for step in (4, 3)]), whole)


def test_probabilities_are_kept_where_all_parts_have_them():
    whole = small_trace(steps=[3, 3], layers=[1, 1], ranks=[0, 1])
    first = whole.where(whole.ranks == 0)
    second = small_trace(steps=[3], layers=[1], ranks=[1], probs=False)
    assert merge([first, second]).probs_NTK is None


def test_parts_that_do_not_match_are_refused():
    trace = small_trace(steps=[3], layers=[1], ranks=[0])
    with pytest.raises(ValueError, match="step 3, layer 1, rank 0 is in part 0 and part 1; give"):
        merge([trace, trace])
    other = small_trace(steps=[4], layers=[1], ranks=[0], num_ranks=3)
    with pytest.raises(ValueError, match=r"b: num_ranks must be 2, as in a, got 3"):
        merge([trace, other], ["a", "b"])
