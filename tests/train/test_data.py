"""The text, its split, and samples that depend on their number and the seed alone."""

import os
import sysconfig

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from padded_dispatch.train.data import Windows, load_corpus

CPU = torch.device("cpu")


def files(root, names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")


# The crc32 of these two names is a multiple of 20; that of no other name here is.
HELD_OUT = ["held/f6.py", "m30.py"]


def test_files_come_in_the_order_of_their_names_and_are_split_by_them(tmp_path, monkeypatch):
    files(tmp_path, ["b.py", "a/z.py", *HELD_OUT, "a.py", "notes.txt", "test/x.py", "a/tests/y.py"])
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    train, held_out = load_corpus.__wrapped__()
    assert train.tobytes() == b"# a.py\n\0# a/z.py\n\0# b.py\n\0"
    assert held_out.tobytes() == b"# held/f6.py\n\0# m30.py\n\0"
    (tmp_path / ".#a.py").symlink_to("nobody@nowhere")  # An editor's lock.
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"")
    train, held_out = found = load_corpus(str(tmp_path))
    assert load_corpus(str(tmp_path)) is found  # It is read once, whatever the contenders.
    assert train.tobytes().count(b"\0") == 7  # All files, tests too.
    assert held_out.tobytes() == b"\0# notes.txt\n\0"
    with pytest.raises(ValueError, match=r"^--text must be a folder with Python files .*held"):
        load_corpus(str(tmp_path / "held"))
    (tmp_path / "held" / "memory.py").symlink_to("/proc/self/mem")
    with pytest.raises(ValueError, match=r"^--text must be .* files, got .*memory.py \(Input/out"):
        load_corpus(str(tmp_path / "held"))
    message = "^--seq-length must be less than the 9 bytes to train on, or to evaluate on, got 9$"
    with pytest.raises(ValueError, match=message):
        Windows(np.zeros(9, np.uint8), 9, 1)


@given(
    num_windows=st.integers(1, 30),
    rest=st.integers(0, 4),
    seq_length=st.sampled_from([1, 3, 5]),
    seed=st.integers(0, 3),
)
def test_a_pass_shows_every_window_once(num_windows, rest, seq_length, seed):
    text = np.arange(num_windows * seq_length + 1 + min(rest, seq_length - 1)) % 251
    windows = Windows(text.astype(np.uint8), seq_length, seed)
    assert windows.num_windows == num_windows
    for epoch in (0, 3):
        numbers = range(epoch * num_windows, (epoch + 1) * num_windows)
        shown = sorted(windows.sample(n).tolist() for n in numbers)
        starts = range(0, num_windows * seq_length, seq_length)
        assert shown == sorted(text[s : s + seq_length + 1].tolist() for s in starts)


def test_a_sample_depends_on_its_number_and_the_seed_alone():
    text = np.random.default_rng(0).integers(0, 256, 7 * 11 + 1).astype(np.uint8)
    one, other = Windows(text, 7, 5), Windows(text, 7, 5)
    forwards = [one.sample(n).tolist() for n in range(33)]
    backwards = [other.sample(n).tolist() for n in reversed(range(33))]
    assert forwards == backwards[::-1]
    assert forwards != [Windows(text, 7, 6).sample(n).tolist() for n in range(33)]
    assert forwards[:11] != forwards[11:22]


def test_ranks_together_read_what_one_would_read():
    windows = Windows(np.arange(200, dtype=np.uint8), 6, 1)
    whole = windows.batch(4, 6, CPU)
    assert whole.dtype == torch.int64 and whole.shape == (6, 7)
    assert torch.equal(whole, torch.cat([windows.batch(n, 2, CPU) for n in (4, 6, 8)]))
    assert torch.equal(whole[:, 1:], whole[:, :-1] + 1)
