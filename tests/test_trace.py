"""A trace has one normal form; what is written is read; other content is an error and runs no code.

Parts of a recording come together again, also after a run that was killed or resumed.
"""

import io
import os
import pickle
import resource
import weakref

import numpy as np
import pytest

from padded_dispatch import trace as traces
from padded_dispatch.trace import (
    HEADER_BYTES,
    Records,
    Trace,
    TracedRun,
    append,
    load_traces,
    merge,
)
from tests.support.traces import equal, of_run, save, small_trace, traced_run

FILE_SIZE = resource.RLIMIT_FSIZE


def run(**changes) -> TracedRun:
    """Three tokens of a record, two of four experts each."""
    return traced_run(**dict(num_tokens=3, top_k=2, num_experts=4, num_ranks=2) | changes)


def arrays(**changes) -> dict:
    values = dict(
        steps=np.array([7, 7]),
        layers=np.array([1, 1], np.int32),
        ranks=np.array([0, 1], np.int32),
        ids_NTK=np.array([[[0, 3], [1, 2], [2, -1]], [[-1, -1], [0, 1], [1, 3]]], np.int16),
        probs_NTK=np.array([[[0.5, 0.5], [1, 0], [1, 0]], [[0, 0], [0.25, 1], [1, 1]]], np.float32),
    )
    return values | changes


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(num_experts=2**15), r"num_experts must be from 1 to 32767, got 32768"),
        (dict(top_k=5), r"top_k must be from 1 to 4, got 5"),
        (dict(num_tokens=0), "num_tokens must be from 1 to .*, got 0"),
        (dict(fc1_width=0), "fc1_width must be from 1 to .*, got 0"),
        (dict(hidden_size=2**31), "hidden_size must be from 1 to 2147483647, got 2147483648"),
        (dict(num_ranks=2**31 - 1), "num_ranks must be from 1 to 4, got 2147483647"),
        (dict(num_ranks=10, etp_size=2), "num_ranks must be from 1 to 8, got 10"),
        (dict(etp_size=3), "etp_size must divide num_ranks=2, got 3"),
        (dict(etp_size=0), "etp_size must divide num_ranks=2, got 0"),
    ],
)
def test_a_run_of_other_sizes_is_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        run(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (arrays(run=run(top_k=1)), r"ids_NTK.shape must be .*\[3, 1\], got \(2, 3, 2\)"),
        (arrays(ids_NTK=arrays()["ids_NTK"][:0]), r"ids_NTK.shape must be .*, got \(0, 3, 2\)"),
        (arrays(ids_NTK=arrays()["ids_NTK"] * 2), "ids_NTK must be -1 or .*=4, got -2"),
        (arrays(ids_NTK=arrays()["ids_NTK"] + 1), "ids_NTK must be .* num_experts=4, got 4"),
        (arrays(ids_NTK=arrays()["ids_NTK"] * 0), r"ids_NTK must have .* -1, got \[\[0, 0\]\]"),
        (arrays(probs_NTK=arrays()["probs_NTK"] * np.nan), "probs_NTK must be finite.* got .nan"),
        (arrays(probs_NTK=arrays()["probs_NTK"] - 9), "probs_NTK must be .* at least 0, got .-"),
    ],
)
def test_anything_else_is_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        Trace(**dict(run=run()) | values)


def test_parts_come_together_by_step_microbatch_layer_and_rank():
    steps, layers, ranks = [3] * 8 + [4] * 4, [1, 1, 2, 2] * 3, [0, 1] * 6
    whole = small_trace(steps=steps, layers=layers, ranks=ranks)
    parts = [whole.where(whole.ranks == rank) for rank in (1, 0)]
    assert equal(merge(dict(enumerate(parts))), whole)
    assert equal(merge({step: whole.where(whole.steps == step) for step in (4, 3)}), whole)


def test_parts_that_do_not_match_are_refused():
    trace = small_trace(steps=[3], layers=[1], ranks=[0])
    with pytest.raises(ValueError, match="rank 0 must be in one trace, got it in a and b; give"):
        merge({"a": trace, "b": trace})
    other = small_trace(steps=[4], layers=[1], ranks=[0], num_ranks=3)
    with pytest.raises(ValueError, match=r"b: num_ranks must be 2, as in a, got 3; give files"):
        merge({"a": trace, "b": other})


def of_rank(rank, steps, seed=0) -> Trace:
    num = len(steps)
    return small_trace(steps=[*steps], layers=[1] * num, ranks=[rank] * num, seed=seed)


def recorded(**kwargs) -> Trace:
    return small_trace(steps=[3, 3, 8, 8], layers=[0, 1, 0, 1], ranks=[1] * 4, **kwargs)


def test_what_was_appended_is_read(tmp_path):
    """By any reader at once, and by NumPy alone."""
    path = tmp_path / "trace.npy"
    whole = of_run(recorded(), etp_size=2, capacity_pool="store")
    with path.open("wb") as file:
        for step in (3, 8):
            append(whole.where(whole.steps == step), file)
            assert equal(load_traces([path]), whole.where(whole.steps <= step))
        assert path.stat().st_size <= 2 * HEADER_BYTES + 4 * (28 + 15 * 6)
    with path.open("rb") as file:
        records = np.load(file, allow_pickle=False)
        assert (records["layer"].tolist(), np.load(file)["step"].tolist()) == ([0, 1], [8, 8])
    # Files of earlier runs have these numbers, too.
    assert records["capacity_pool"].tolist() == [2] * 2
    np.testing.assert_array_equal(records["ids"], whole.ids_NTK[:2])


def test_a_killed_process_leaves_the_steps_before(tmp_path):
    """Cut anywhere: whole steps are read, and a file without one is no part of a recording."""
    whole, path = recorded(), tmp_path / "rank-1.npy"
    first, both = io.BytesIO(), io.BytesIO()
    append(whole.where(whole.steps == 3), first)
    append(whole.where(whole.steps == 3), both)
    append(whole.where(whole.steps == 8), both)
    end = len(first.getvalue())
    for size in range(end, len(both.getvalue()), 7):
        path.write_bytes(both.getvalue()[:size])
        assert load_traces([path]).steps.tolist() == [3, 3]
    other = small_trace(steps=[3], layers=[0], ranks=[0])
    save(other, tmp_path / "rank-0.npy")
    for size in (0, 256, end - 1):
        path.write_bytes(both.getvalue()[:size])
        assert equal(load_traces([tmp_path]), other)
        with pytest.raises(ValueError, match=r"rank-1\.npy must hold a recorded step .*, got none"):
            load_traces([path])


def test_a_disk_that_has_no_room_for_the_end_of_a_step_is_an_error(tmp_path):
    whole, path, (limit, most) = recorded(), tmp_path / "trace.npy", resource.getrlimit(FILE_SIZE)
    with path.open("wb") as file:
        append(whole, file)
        room = file.tell() - 1
    with path.open("wb") as file, pytest.raises(OSError):
        resource.setrlimit(FILE_SIZE, (room, most))
        try:
            append(whole, file)
        finally:
            resource.setrlimit(FILE_SIZE, (limit, most))


def test_files_and_folders_are_merged(tmp_path):
    parts = [of_rank(rank, [1, 2]) for rank in range(3)]
    (tmp_path / "two").mkdir()
    save(parts[2], tmp_path / "one.npy")
    save(parts[0], tmp_path / "two" / "b.npy")
    save(parts[1], tmp_path / "two" / "a.npy")
    (tmp_path / "two" / "notes.txt").write_text("no trace")
    paths = [tmp_path / "one.npy", tmp_path / "two"]
    assert equal(load_traces(paths), merge(dict(enumerate(parts))))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty must hold a recorded step \(\*\.npy\), got none"):
        load_traces([tmp_path / "empty"])
    save(recorded(num_tokens=4), tmp_path / "two" / "a.npy")
    with pytest.raises(ValueError, match=r"a\.npy: num_tokens must be 5, as in .*one\.npy, got 4"):
        load_traces(paths)
    with (tmp_path / "two" / "a.npy").open("ab") as file:
        append(recorded(), file)
    with pytest.raises(ValueError, match=r"a\.npy: dtype must be .*, as in the first step"):
        load_traces(paths)


def test_what_a_file_holds_is_freed_before_the_next_is_read(monkeypatch, tmp_path):
    """A trace of a hundred steps has a GiB for each rank."""
    for rank in range(3):
        save(of_rank(rank, [1, 2]), tmp_path / f"{rank}.npy")
    held, load = [], traces._load

    def load_alone(file):
        assert [array for array in held if array() is not None] == []
        return load(file)

    def reduced(trace):
        held.append(weakref.ref(trace.ids_NTK))
        which = {name: getattr(trace, name) for name in ("run", "steps", "layers", "ranks")}
        return Records(**which)

    whole = load_traces([tmp_path])
    monkeypatch.setattr(traces, "_load", load_alone)
    found = load_traces([tmp_path], reduced)
    assert len(held) == 3 and found.run == whole.run
    for name in ("steps", "layers", "ranks", "microbatches"):
        assert getattr(found, name).tolist() == getattr(whole, name).tolist()


@pytest.mark.parametrize("folders", [("both", "both"), ("host 0", "host 1")])
@pytest.mark.parametrize("last", [21, 22, 40])
@pytest.mark.parametrize("ranks_again", [(0, 1), (0,)])
def test_steps_that_a_resumed_run_repeats_are_taken_once(tmp_path, ranks_again, folders, last):
    """The run was killed after step 29 and resumed from step 20; rank 1 may have left it."""
    paths = [tmp_path / name for name in folders]
    for path in paths:
        path.mkdir(exist_ok=True)

    before = [of_rank(rank, range(1, 30), seed=rank) for rank in (0, 1)]
    after = [of_rank(rank, range(21, last + 1), seed=2 + rank) for rank in ranks_again]
    for rank, trace in enumerate(before):
        save(trace, paths[rank] / f"rank-{rank:05d}-step-00000000.npy")
    for rank, trace in zip(ranks_again, after, strict=True):
        save(trace, paths[rank] / f"rank-{rank:05d}-step-00000020.npy")
    kept = [trace.where(trace.steps <= 20) for trace in before]
    found = load_traces(sorted({*paths}))
    assert equal(found, merge(dict(enumerate([*kept, *after]))))


def test_ranks_of_each_run_that_was_killed_end_together(tmp_path):
    """Behind a checkpoint of step 20 rank 1 had not yet written it; the next run was killed, too.

    Ranks that stopped more than two steps before the others, 2 and 3, shorten nothing.
    """
    ends = {0: (20, 26), 1: (18, 25), 2: (5, None), 3: (17, 23)}
    for rank, lasts in ends.items():
        for begun, last in zip((0, 20), lasts, strict=True):
            if last is not None:
                path = tmp_path / f"rank-{rank:05d}-step-{begun:08d}.npy"
                save(of_rank(rank, range(begun + 1, last + 1)), path)
    found = load_traces([tmp_path])
    kept = {0: (18, 25), 1: (18, 25), 2: (5, 20), 3: (17, 23)}
    for rank, (first, second) in kept.items():
        steps = [*range(1, first + 1), *range(21, second + 1)]
        assert found.steps[found.ranks == rank].tolist() == steps


def file_of(array, *, allow_pickle=False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=allow_pickle)
    return file.getvalue()


def good() -> np.ndarray:
    file = io.BytesIO()
    append(recorded(), file)
    file.seek(0)
    return np.load(file)


def refuse(tmp_path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.npy"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"bad\.npy.* must .*{message}"):
        load_traces([path])


class Bomb:
    """Makes a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content in (pickle.dumps(Bomb()), file_of(np.array([Bomb()]), allow_pickle=True)):
        refuse(tmp_path, content, "be a trace, got")
    assert os.listdir(tmp_path) == ["bad.npy"]


def test_other_arrays_and_other_content(tmp_path):
    for other in (np.zeros(3), np.zeros(1, [("ids", "<i2", (5, 3))])):
        refuse(tmp_path, file_of(other), "be that of a trace, got")
    for content in (b"PK\3\4", b"PK\3\4" * 99, file_of(good()) + b"something else"):
        refuse(tmp_path, content, "be a trace, got")
    array = good()
    array["num_experts"][1] = 7
    first, other = (rf"\[{experts}, 2, 64, 96, 0, 1\]" for experts in (6, 7))
    refuse(tmp_path, file_of(array), rf"be alike in all records, got \[{first}, {other}\]")
    for number in (3, -1):
        array = good()
        array["capacity_pool"] = number
        refuse(tmp_path, file_of(array), f"be below 3, got {number}")
    array = good()
    array["num_ranks"], array["etp_size"] = 3, 2
    refuse(tmp_path, file_of(array), "divide num_ranks=3, got 2")
