"""A trace on disk: one NumPy array of records, `.npy`, that anything with NumPy can map or read.

A record is a structure of fixed size, `step layer rank num_experts num_ranks probs ids`; the shape
of `ids` is [T, K]. So the header decides every size, and it is compared with the size of the file
before any of it is read: nothing is compressed that could grow, nothing is unpickled, and what is
read is at most the file. Records are appended, so a recording needs no memory for the whole; the
header holds their number and is written last, so what a killed process leaves is a trace, too.

A recording is several files, `rank-RANK-step-STEP.npy` of `train --trace`. A run that is resumed
writes other files from its checkpoint's step on, and what a crash undid is in the files before:
`load_traces` takes of each file the steps before the next ones begin. The ranks of a killed run
stop a step or two apart, and such an end is left out, too; where a rank lacks more, it is missing,
which whoever reads the trace has to say.
"""

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from padded_dispatch.tune.trace import Trace, merge

DEFAULT_MAX_BYTES = 4 * 2**30

_MAX_HEADER_BYTES = 1024  # of which a trace needs about 300
_CHUNK_BYTES = 2**24  # read at a time


def load_trace(path: Path, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Trace:
    """Read a trace.

    Args:
        path: of a file written by `save_trace` or `TraceWriter`.
        max_bytes: the largest file to be read; reading it takes that much memory and 16 MiB.

    Raises:
        ValueError: names the file, what is wrong in it, and what to do.
        OSError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            dtype, num_records = _read_header(file)
            _check_size(file, dtype, num_records, max_bytes)
            return _read_records(file, dtype, num_records)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace; a file that is there is replaced."""
    with TraceWriter(path) as writer:
        writer.append(trace)


def load_traces(paths: Sequence[Path], *, max_bytes: int = DEFAULT_MAX_BYTES) -> Trace:
    """Read a recording of several files, such as one per rank, and merge them.

    Args:
        paths: files, and folders of which all `*.npy` files are taken. What a resumed run did
            again, and steps at the end that some layer or rank lacks, are left out.
        max_bytes: for all files together; merging them takes as much memory again.

    Raises:
        ValueError: as `load_trace` and `padded_dispatch.tune.trace.merge`; or there is no file.
        OSError: a file cannot be read.
    """
    files = [
        file for path in paths for file in (sorted(path.glob("*.npy")) if path.is_dir() else [path])
    ]
    if not files:
        raise ValueError(f"{', '.join(str(path) for path in paths)}: no trace (*.npy) is there")
    ends = _ends(files)
    traces: dict[Path, Trace] = {}
    for file in files:
        trace = load_trace(file, max_bytes=max_bytes)
        max_bytes -= trace.num_bytes
        kept_N = trace.steps <= ends.get(file, math.inf)
        if kept_N.any():
            traces[file] = trace if kept_N.all() else trace.where(kept_N)
    merged = merge(list(traces.values()), list(traces))
    last, steps = _last_common_step(merged), np.unique(merged.steps)
    return merged.where(merged.steps <= last) if last in steps[-3:-1] else merged


def _ends(files: Sequence[Path]) -> dict[Path, int]:
    """Of every file whose run was resumed: the step after which other files of its folder go on.

    Those of any rank: of one that was killed before its first step there are none.
    """
    files_of: dict[Path, dict[int, list[Path]]] = {}
    for file in files:
        _, _, step = file.stem.partition("-step-")
        if step.isdigit():
            files_of.setdefault(file.parent, {}).setdefault(int(step), []).append(file)
    ends = {}
    for files_from in files_of.values():
        for step, following in pairwise(sorted(files_from)):
            ends |= dict.fromkeys(files_from[step], following)
    return ends


def _last_common_step(trace: Trace) -> int:
    """The earliest of the last steps of every (layer, rank)."""
    _, of_N = np.unique(np.stack([trace.layers, trace.ranks]), axis=1, return_inverse=True)
    last = np.zeros(of_N.max() + 1, np.int64)
    np.maximum.at(last, of_N.reshape(-1), trace.steps)
    return int(last.min())


def record_bytes(num_tokens: int, top_k: int) -> int:
    """Bytes of one record with probabilities in a file."""
    return _record_dtype(num_tokens, top_k, probs=True).itemsize


class TraceWriter:
    """Appends records to a new file. All parts have the same sizes, which the first one decides.

    Args:
        path: made by the first part; a file that is there is replaced.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._dtype = np.dtype([])
        self._sizes = 0, 0
        self._num_records = 0

    def append(self, part: Trace) -> None:
        """Add the records of `part`.

        Raises:
            ValueError: its sizes are not those of the records before.
        """
        dtype = _record_dtype(part.num_tokens, part.top_k, probs=part.probs_NTK is not None)
        sizes = part.num_experts, part.num_ranks
        if self._file is None:
            self._file = self._path.open("wb")
            self._dtype, self._sizes = dtype, sizes
            self._write_header(self._file)
        if (dtype, sizes) != (self._dtype, self._sizes):
            raise ValueError(
                f"part={dtype.descr}, (E, R)={sizes} is not possible: the records before it have "
                f"{self._dtype.descr}, {self._sizes}; write another file"
            )
        step = max(1, _CHUNK_BYTES // dtype.itemsize)
        for start in range(0, part.num_records, step):
            self._file.write(_records(part, dtype, slice(start, start + step)).tobytes())
        self._num_records += part.num_records
        self._write_header(self._file)

    def close(self) -> None:
        """Nothing can be appended any more."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _write_header(self, file: BinaryIO) -> None:
        file.seek(0)
        # NumPy leaves room for the first axis to grow, so this is as long every time.
        header = {"descr": npy.dtype_to_descr(self._dtype), "fortran_order": False}
        npy.write_array_header_1_0(file, header | {"shape": (self._num_records,)})
        file.seek(0, os.SEEK_END)
        file.flush()


def _record_dtype(num_tokens: int, top_k: int, *, probs: bool) -> np.dtype:
    choices = num_tokens, top_k
    fields = [(name, "<i4") for name in ("layer", "rank", "num_experts", "num_ranks")]
    with_probs = [("probs", "<f4", choices)] if probs else []
    return np.dtype([("step", "<i8"), *fields, *with_probs, ("ids", "<i2", choices)])


def _records(part: Trace, dtype: np.dtype, chosen: slice) -> NDArray[np.void]:
    records = np.empty(len(part.steps[chosen]), dtype)
    records["step"] = part.steps[chosen]
    records["layer"] = part.layers[chosen]
    records["rank"] = part.ranks[chosen]
    records["num_experts"] = part.num_experts
    records["num_ranks"] = part.num_ranks
    records["ids"] = part.ids_NTK[chosen]
    if part.probs_NTK is not None:
        records["probs"] = part.probs_NTK[chosen]
    return records


def _read_header(file: BinaryIO) -> tuple[np.dtype, int]:
    """The type and number of records; every other content raises."""
    try:
        version = npy.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"version {version} of .npy")
        shape, _, dtype = npy.read_array_header_1_0(file, max_header_size=_MAX_HEADER_BYTES)
    # What NumPy raises for nonsense depends on the nonsense.
    except Exception as error:
        raise ValueError(f"not a trace ({error}): give what the recorder wrote") from error
    names = dtype.names or ()
    if "ids" not in names or len(dtype["ids"].shape) != 2:
        raise ValueError(f"dtype={dtype} is not a trace's: it needs ids of shape [T, K]")
    expected = _record_dtype(*dtype["ids"].shape, probs="probs" in names)
    if dtype != expected or len(shape) != 1 or shape[0] < 1:
        raise ValueError(
            f"dtype={dtype} of shape {shape} is not a trace's: it needs {expected} of shape [N], "
            "with at least one record"
        )
    return dtype, shape[0]


def _check_size(file: BinaryIO, dtype: np.dtype, num_records: int, max_bytes: int) -> None:
    start = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(start)
    if size > max_bytes:
        raise ValueError(
            f"{size} bytes are more than max_bytes={max_bytes}: raise it, or record fewer steps"
        )
    expected = start + num_records * dtype.itemsize
    # A writer that was killed leaves rows behind that the header does not know yet.
    if size < expected:
        raise ValueError(
            f"it has {size} bytes, and {num_records} records need {expected}: it was cut off; copy "
            "it again"
        )


def _read_records(file: BinaryIO, dtype: np.dtype, num_records: int) -> Trace:
    num_tokens, top_k = dtype["ids"].shape
    shape = num_records, num_tokens, top_k
    has_probs = "probs" in (dtype.names or ())
    steps_N, sizes_N2 = np.empty(num_records, np.int64), np.empty((num_records, 2), np.int32)
    layers_N, ranks_N = np.empty(num_records, np.int32), np.empty(num_records, np.int32)
    ids_NTK = np.empty(shape, np.int16)
    probs_NTK = np.empty(shape, np.float32) if has_probs else None
    step = max(1, _CHUNK_BYTES // dtype.itemsize)
    for start in range(0, num_records, step):
        here = slice(start, min(start + step, num_records))
        records = np.fromfile(file, dtype, here.stop - here.start)
        steps_N[here], layers_N[here] = records["step"], records["layer"]
        ranks_N[here], ids_NTK[here] = records["rank"], records["ids"]
        sizes_N2[here, 0], sizes_N2[here, 1] = records["num_experts"], records["num_ranks"]
        if probs_NTK is not None:
            probs_NTK[here] = records["probs"]
    differs_N = (sizes_N2 != sizes_N2[0]).any(1)
    if differs_N.any():
        n = int(differs_N.argmax())
        raise ValueError(
            f"record {n} has (num_experts, num_ranks) = {sizes_N2[n].tolist()}, and the first "
            f"{sizes_N2[0].tolist()}: record every configuration into a file of its own"
        )
    num_experts, num_ranks = sizes_N2[0].tolist()
    return Trace(
        num_experts=num_experts,
        top_k=top_k,
        num_ranks=num_ranks,
        steps=steps_N,
        layers=layers_N,
        ranks=ranks_N,
        ids_NTK=ids_NTK,
        probs_NTK=probs_NTK,
    )
