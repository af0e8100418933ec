"""A written trace is read again; any other content is a clear error and runs no code."""

import ast
import io
import pickle
import tracemalloc
import zipfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib import format as npy

from padded_dispatch.trace import TraceWriter, load_trace, load_traces, merge, save_trace
from tests.support.traces import equal, small_trace


def trace(**kwargs):
    return small_trace(steps=[3, 3, 8], layers=[0, 1, 0], ranks=[1, 1, 1], **kwargs)


@pytest.mark.parametrize("probs", [True, False])
def test_what_was_written_is_read(tmp_path, probs):
    save_trace(trace(probs=probs), tmp_path / "trace.npy")
    assert equal(load_trace(tmp_path / "trace.npy"), trace(probs=probs))


def test_numpy_alone_can_read_it(tmp_path):
    save_trace(trace(), tmp_path / "trace.npy")
    records = np.load(tmp_path / "trace.npy", mmap_mode="r", allow_pickle=False)
    assert records["layer"].tolist() == [0, 1, 0]
    assert records["num_experts"].tolist() == [6, 6, 6]
    np.testing.assert_array_equal(records["ids"], trace().ids_NTK)


def test_every_part_is_in_the_file_at_once(tmp_path):
    path = tmp_path / "trace.npy"
    whole = trace()
    with closing(TraceWriter(path)) as writer:
        for n in range(12):
            writer.append(whole)
            assert load_trace(path).num_records == 3 * (n + 1)
    np.testing.assert_array_equal(load_trace(path).ids_NTK, np.tile(whole.ids_NTK, (12, 1, 1)))


def test_a_writer_without_records_leaves_no_file(tmp_path):
    TraceWriter(tmp_path / "trace.npy").close()
    assert list(tmp_path.iterdir()) == []


def test_a_kill_before_the_first_records_leaves_the_file_before_it(tmp_path, monkeypatch):
    """A file without records is no trace, and `tune` would refuse the whole recording for it."""

    def killed(*args) -> None:
        raise KeyboardInterrupt

    for before in (None, trace()):
        path = tmp_path / f"{before is not None}.npy"
        if before is not None:
            save_trace(before, path)
        with monkeypatch.context() as patches, closing(TraceWriter(path)) as writer:
            patches.setattr("padded_dispatch.trace._records", killed)
            with pytest.raises(KeyboardInterrupt):
                writer.append(trace(probs=False))
        assert [equal(load_trace(found), trace()) for found in tmp_path.glob("*.npy")] == (
            [] if before is None else [True]
        )
        save_trace(trace(probs=False), path)
        assert equal(load_trace(path), trace(probs=False))
        path.unlink()
    assert list(tmp_path.iterdir()) == []


def test_rows_beyond_the_count_in_the_header_are_left_out(tmp_path):
    path = tmp_path / "trace.npy"
    save_trace(trace(), path)
    path.write_bytes(path.read_bytes() + b"half a record")
    assert equal(load_trace(path), trace())


@pytest.mark.parametrize("other", [trace(num_tokens=4), trace(num_ranks=1), trace(probs=False)])
def test_a_file_has_one_size_of_records(tmp_path, other):
    with closing(TraceWriter(tmp_path / "trace.npy")) as writer:
        writer.append(trace())
        with pytest.raises(
            ValueError, match=r"part must have the fields .*, got .*; write another file"
        ):
            writer.append(other)


def test_files_and_folders_are_merged(tmp_path):
    parts = [small_trace(steps=[1, 2], layers=[0, 0], ranks=[rank] * 2) for rank in range(3)]
    (tmp_path / "two").mkdir()
    save_trace(parts[2], tmp_path / "one.npy")
    save_trace(parts[0], tmp_path / "two" / "b.npy")
    save_trace(parts[1], tmp_path / "two" / "a.npy")
    paths = [tmp_path / "one.npy", tmp_path / "two"]
    assert equal(load_traces(paths), merge(parts))
    with pytest.raises(
        ValueError, match=r"b\.npy: its bytes must be at most max_bytes=\d+, got \d+; raise it"
    ):
        load_traces(paths, max_bytes=800)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ValueError, match=r"empty: the folder must hold traces \(\*\.npy\), got none"
    ):
        load_traces([tmp_path / "empty"])


def test_steps_that_a_resumed_run_repeats_are_taken_once(tmp_path):
    """The run was killed after step 29 and resumed from the checkpoint of step 20."""

    def run(rank, steps, seed):
        num = len(steps)
        return small_trace(
            steps=list(steps), layers=[1] * num, ranks=[rank] * num, num_ranks=2, seed=seed
        )

    for rank in (0, 1):
        before, after = run(rank, range(1, 30), rank), run(rank, range(21, 41), 2 + rank)
        save_trace(before, tmp_path / f"rank-{rank:05d}-step-00000000.npy")
        save_trace(after, tmp_path / f"rank-{rank:05d}-step-00000020.npy")
    whole = merge(
        [run(rank, range(1, 30), rank).where(np.arange(1, 30) <= 20) for rank in (0, 1)]
        + [run(rank, range(21, 41), 2 + rank) for rank in (0, 1)]
    )
    assert equal(load_traces([tmp_path]), whole)


def test_ranks_of_a_killed_run_end_together(tmp_path):
    save_trace(small_trace(steps=[1, 2, 3], layers=[1] * 3, ranks=[0] * 3), tmp_path / "0.npy")
    save_trace(small_trace(steps=[1, 2], layers=[1] * 2, ranks=[1] * 2), tmp_path / "1.npy")
    found = load_traces([tmp_path])
    assert (found.steps.tolist(), found.ranks.tolist()) == ([1, 1, 2, 2], [0, 1, 0, 1])


def test_a_rank_that_stopped_early_is_missing_and_shortens_nothing(tmp_path):
    steps = list(range(1, 9))
    save_trace(small_trace(steps=steps, layers=[1] * 8, ranks=[0] * 8), tmp_path / "0.npy")
    save_trace(small_trace(steps=[1, 2], layers=[1] * 2, ranks=[1] * 2), tmp_path / "1.npy")
    found = load_traces([tmp_path])
    assert found.steps[found.ranks == 0].tolist() == steps
    assert found.steps[found.ranks == 1].tolist() == [1, 2]


def test_repeated_steps_end_for_ranks_without_a_new_file_too(tmp_path):
    for rank, start, last in ((0, 0, 6), (1, 0, 6), (0, 4, 8)):
        num = last - start
        save_trace(
            small_trace(
                steps=list(range(start + 1, last + 1)), layers=[1] * num, ranks=[rank] * num
            ),
            tmp_path / f"rank-{rank:05d}-step-{start:08d}.npy",
        )
    found = load_traces([tmp_path])
    assert found.steps[found.ranks == 1].tolist() == [1, 2, 3, 4]
    assert found.steps[found.ranks == 0].tolist() == list(range(1, 9))


def test_files_that_do_not_match_are_named(tmp_path):
    save_trace(trace(), tmp_path / "a.npy")
    save_trace(trace(num_tokens=4), tmp_path / "b.npy")
    with pytest.raises(ValueError, match=r"b\.npy: num_tokens must be \d+, as in .*a\.npy, got 4"):
        load_traces([tmp_path])
    save_trace(trace(), tmp_path / "b.npy")
    with pytest.raises(ValueError, match=r"is in .*a\.npy and .*b\.npy; give every recording once"):
        load_traces([tmp_path])


def saved(array, *, allow_pickle=False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=allow_pickle)
    return file.getvalue()


def good(tmp_path) -> np.ndarray:
    """Return the records of a valid file, to be changed."""
    save_trace(trace(), tmp_path / "good.npy")
    return np.load(tmp_path / "good.npy")


def refuse(tmp_path, content: bytes, message: str, **kwargs) -> None:
    """Check that reading `content` raises the file's name and `message`, in less than a MiB."""
    path = tmp_path / "bad.npy"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rf"bad\.npy: .*{message}"):
            load_trace(path, **kwargs)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_is_unpickled(tmp_path):
    target = tmp_path / "exploded"
    pickled = pickle.dumps(Bomb(target))
    objects = np.empty(1, object)
    objects[0] = Bomb(target)
    refuse(tmp_path, pickled, "not a trace")
    refuse(tmp_path, saved(objects, allow_pickle=True), "dtype must have a field ids of shape")
    dtype = np.dtype([("step", "O"), ("ids", "<i2", (2, 2))])
    refuse(tmp_path, header(dtype, (1,)) + pickled, "not a trace: it must be")
    assert not target.exists()


def header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    descr = npy.dtype_to_descr(dtype)
    npy.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


def test_an_archive_is_refused_before_it_unfolds(tmp_path):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ids.npy", bytes(2**24))
    assert len(file.getvalue()) < 2**15
    refuse(tmp_path, file.getvalue(), "not a trace")


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_file_that_was_cut_off(tmp_path, size):
    save_trace(trace(), tmp_path / "good.npy")
    content = (tmp_path / "good.npy").read_bytes()
    refuse(tmp_path, content[:size], "it was cut off: copy it again|not a trace")


def test_wrong_sizes_in_a_header(tmp_path):
    dtype = good(tmp_path).dtype
    refuse(
        tmp_path,
        header(dtype, (10**15,)) + bytes(200),
        r"its bytes must be at least \d+ for 1000000000000000 records, got \d+",
    )
    refuse(tmp_path, header(dtype, (0,)), "at least one record")
    refuse(tmp_path, header(dtype, (-3,)), "at least one record")
    refuse(tmp_path, header(dtype, (1, 1)), r"not a trace: it must be .* of shape \(1, 1\)")
    huge = b"[('ids', '<i2', (2147483647, 2147483647))]"
    for text in (
        b"{'descr': %s, 'fortran_order': False, 'shape': (1,)}" % huge,
        b"(" * 900,
        b"(" * 60000,
    ):
        size = len(text).to_bytes(2, "little")
        refuse(tmp_path, npy.magic(1, 0) + size + text, "not a trace")


def test_a_file_beyond_the_limit(tmp_path):
    content = saved(good(tmp_path))
    message = f"its bytes must be at most max_bytes=99, got {len(content)}; raise it"
    refuse(tmp_path, content, message, max_bytes=99)
    (tmp_path / "good.npy").write_bytes(content)
    load_trace(tmp_path / "good.npy", max_bytes=len(content))


def test_other_types(tmp_path):
    refuse(
        tmp_path,
        saved(np.zeros((3, 4))),
        "not a trace: dtype must have a field ids of shape .*, got float64",
    )
    for old, new in (("<f4", "<f8"), ("<i2", ">i2"), ("layer", "lair")):
        descr = repr(good(tmp_path).dtype.descr).replace(old, new)
        array = np.zeros(3, np.dtype(ast.literal_eval(descr)))
        refuse(tmp_path, saved(array), "not a trace: it must be")


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("ids", (2, 4, 0), 6, r"ids_NTK\[2\]\[4, 0\] must be .* below num_experts=6, got 6"),
        ("ids", (1, 0, 0), -2, r"ids_NTK\[1\]\[0, 0\] must be .*, got -2"),
        ("ids", (1, 0), 3, r"ids_NTK\[1\]\[0, 1\] must list every expert of a token once.*, got 3"),
        ("probs", (1, 0, 0), np.nan, r"probs_NTK\[1\]\[0, 0\] must be finite, got nan"),
        ("probs", (0, 3, 1), np.inf, r"probs_NTK\[0\]\[3, 1\] must be finite, got inf"),
        ("layer", 1, -1, r"layers\[1\] must be 0 or more, got -1"),
        (
            "num_experts",
            1,
            7,
            r"record 1: \(num_experts, num_ranks\) must be \[6, 2\], .*, got \[7, 2\]",
        ),
        ("num_experts", slice(None), 2**30, "num_experts must be from 1 to 32767, got 1073741824"),
    ],
)
def test_wrong_values(tmp_path, field, index, value, message):
    array = good(tmp_path)
    array[field][index] = value
    refuse(tmp_path, saved(array), message)


@given(position=st.integers(0, 255), byte=st.integers(0, 255))
def test_any_byte_of_the_header_may_be_wrong(tmp_path_factory, position, byte):
    folder = tmp_path_factory.mktemp("header")
    content = bytearray(saved(good(folder)))
    content[position] = byte
    (folder / "changed.npy").write_bytes(content)
    try:
        read = load_trace(folder / "changed.npy")
    except ValueError as error:
        assert "changed.npy" in str(error)
    else:
        assert read.num_records in (1, 2, 3)
