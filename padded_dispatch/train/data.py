"""Training text, byte by byte: by default the source of Python's standard library.

A sample's bytes depend on its number and the seed alone: the number of ranks changes which rank
reads a sample, never which samples a step has.
"""

import functools
import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from padded_dispatch.config import require

# Tests and third-party packages differ from one installation to the next.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
_HELD_OUT = 20  # one file in twenty
_DOCUMENTS = ".md", ".rst", ".txt"


@functools.lru_cache(maxsize=1)  # Contenders read the same text, which may be large.
def load_corpus(text: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes to train on and bytes to evaluate on, from different files; uint8.

    Files of a folder are sorted by name, each followed by a zero byte. A file's name alone decides
    whether it is held out.

    Args:
        text: a folder, whose documents are held out. None is the standard library, of which one
            Python file in twenty is.

    Raises:
        ValueError: there is too little text for both parts.
    """
    root = Path(sysconfig.get_paths()["stdlib"] if text is None else text)
    endings = (".py",) if text is None else (".py", *_DOCUMENTS)
    train: list[bytes] = []
    held_out: list[bytes] = []
    for name in sorted(_files(root, endings, _SKIPPED if text is None else set())):
        is_held_out = name.endswith(_DOCUMENTS)
        if text is None:
            is_held_out = zlib.crc32(name.encode()) % _HELD_OUT == 0
        part = held_out if is_held_out else train
        try:
            part.append((root / name).read_bytes() + b"\0")
        except OSError as error:
            reason = f"{root / name} ({error.strerror})"
            raise ValueError(f"--text must be a folder of readable files, got {reason}") from None
    rule = "be a folder with Python files to train on and documents to evaluate on"
    require(train and held_out, "--text", str(root), rule)
    return np.frombuffer(b"".join(train), np.uint8), np.frombuffer(b"".join(held_out), np.uint8)


def _files(root: Path, endings: tuple[str, ...], skipped: set[str]) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - skipped
        for name in names:
            if name.endswith(endings) and os.path.isfile(os.path.join(folder, name)):
                yield Path(folder, name).relative_to(root).as_posix()


class Windows:
    """Sequences of a text in random order; equal numbers give equal samples.

    Args:
        text: uint8.
        seq_length: bytes that the model reads (S).
        seed: decides the order, which differs between passes over the text.

    Raises:
        ValueError: the text is shorter than one sample.
    """

    def __init__(self, text: np.ndarray, seq_length: int, seed: int) -> None:
        self.num_windows = (len(text) - 1) // seq_length
        rule = f"be less than the {len(text)} bytes to train on, or to evaluate on"
        require(self.num_windows >= 1, "--seq-length", seq_length, rule)
        self._text = text
        self._seq_length = seq_length
        self._seed = seed
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def sample(self, number: int) -> np.ndarray:
        """Return S + 1 bytes: the first S are the inputs, the last S the labels."""
        epoch, position = divmod(number, self.num_windows)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self._seed, epoch)).permutation(self.num_windows)
        start = self._order[position] * self._seq_length
        return self._text[start : start + self._seq_length + 1]

    def batch(self, first: int, size: int, device: torch.device) -> Tensor:
        """Return `size` samples from number `first` on, as int64 [size, S + 1] on `device`."""
        samples = np.stack([self.sample(first + i) for i in range(size)])
        batch = torch.from_numpy(samples)
        if device.type == "cuda":
            batch = batch.pin_memory()  # Otherwise the copy waits for all work on the device.
        return batch.to(device, non_blocking=True).long()
