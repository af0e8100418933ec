"""Routing traces: the experts that every token asked for, in memory and on disk.

A record is one forward pass of one layer on one source rank: one micro-batch of one step. A step
with several micro-batches has several records of a (layer, rank), in their order.

A trace has one normal form: a token's expert ids in ascending order, then -1. The dispatcher sees
them in this order, no token names an expert twice, and two traces are equal when their arrays are.

On disk a trace is one NumPy array of records in a `.npy` file, which anything with NumPy can map.
A record is a structure of fixed size, `step layer rank num_experts num_ranks probs ids`; `ids` has
shape [T, K]. The header therefore decides every size, and it is compared with the size of the file
before the rest is read. Nothing is decompressed or unpickled, so reading takes at most the size of
the file. Records are appended, so recording needs no memory for the whole trace. The header holds
the number of records and is written last, and the file gets its name when it has records: the file
of a process that was killed at any moment is a trace, too.

A recording is several files, `rank-RANK-step-STEP.npy` of `train --trace`. A resumed run writes
new files from its checkpoint's step on, and the files before them still hold the steps that the
crash undid. `load_traces` takes from each file only the steps before the next file begins. The
ranks of a killed run stop a step or two apart; `load_traces` leaves out such an end as well. Where
a rank lacks more than that, its records are missing, and `recommend` reports it.

Letters: N records; T tokens of a record, padding included; K experts per token; E experts;
R source ranks in an expert-parallel group.
"""

import math
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from padded_dispatch.config import require

MAX_EXPERTS = 2**15 - 1  # ids are int16
DEFAULT_MAX_BYTES = 4 * 2**30

_MAX_HEADER_BYTES = 1024  # a trace needs about 300
_CHUNK_BYTES = 2**24  # read or written at a time


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """The rows that routers asked for, before anything was dropped.

    Args:
        num_experts: experts in all (E).
        top_k: most experts of a token (K).
        num_ranks: source ranks that share an expert-parallel group (R); ranks 0 to R - 1 are one
            group, R to 2R - 1 the next.
        steps: int64 [N], the training step of each record.
        layers: int32 [N], the number of its MoE layer.
        ranks: int32 [N], its source rank.
        ids_NTK: int16, experts in ascending order, then -1: for a padding token, and for a token
            with fewer than K experts.
        probs_NTK: float32, the probabilities of these experts, finite, and 0 where the id is -1;
            None where they were not recorded.

    Raises:
        ValueError: names the array, a value, its place, and what to change.
    """

    num_experts: int
    top_k: int
    num_ranks: int
    steps: NDArray[np.int64]
    layers: NDArray[np.int32]
    ranks: NDArray[np.int32]
    ids_NTK: NDArray[np.int16]
    probs_NTK: NDArray[np.float32] | None

    def __post_init__(self) -> None:
        for name, most in (
            ("num_experts", MAX_EXPERTS),
            ("top_k", self.num_experts),
            ("num_ranks", 2**31 - 1),
        ):
            value = getattr(self, name)
            require(1 <= value <= most, name, value, f"be from 1 to {most}")
        shape = self.ids_NTK.shape
        require(
            len(shape) == 3 and min(shape) >= 1 and shape[2] == self.top_k,
            "ids_NTK.shape",
            shape,
            f"be [N, T, K] with at least one record, one token, and K = {self.top_k}",
        )
        arrays = {
            "steps": (self.steps, np.dtype(np.int64), shape[:1]),
            "layers": (self.layers, np.dtype(np.int32), shape[:1]),
            "ranks": (self.ranks, np.dtype(np.int32), shape[:1]),
            "ids_NTK": (self.ids_NTK, np.dtype(np.int16), shape),
        }
        if self.probs_NTK is not None:
            arrays["probs_NTK"] = (self.probs_NTK, np.dtype(np.float32), shape)
        for name, (array, dtype, expected) in arrays.items():
            require(
                array.dtype == dtype and array.shape == expected,
                name,
                f"{array.dtype}{list(array.shape)}",
                f"be {dtype}{list(expected)}",
            )
        for name in ("steps", "layers", "ranks"):
            _check(name, getattr(self, name), getattr(self, name) < 0, "be 0 or more")
        self._check_choices()

    @property
    def num_records(self) -> int:
        """Records (N)."""
        return self.ids_NTK.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of a record, padding included (T)."""
        return self.ids_NTK.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self.steps, self.layers, self.ranks, self.ids_NTK, self.probs_NTK)
        return sum(array.nbytes for array in arrays if array is not None)

    def microbatches(self) -> NDArray[np.int64]:
        """Return the micro-batch of each record within its step, [N].

        It is the number of earlier records with the same (step, layer, rank).

        Example: four records of one layer, steps 3, 3, 3, 4 on ranks 0, 1, 0, 0 give 0, 0, 1, 0.
        """
        keys = np.stack([self.steps, self.layers, self.ranks])
        return running_count(np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1))

    def where(self, chosen: NDArray[np.bool_]) -> "Trace":
        """Return the records for which `chosen` is True, in their order."""
        return replace(
            self,
            steps=self.steps[chosen],
            layers=self.layers[chosen],
            ranks=self.ranks[chosen],
            ids_NTK=self.ids_NTK[chosen],
            probs_NTK=None if self.probs_NTK is None else self.probs_NTK[chosen],
        )

    def _check_choices(self) -> None:
        """Check ids and probabilities one record at a time, to need little memory."""
        for n, ids_TK in enumerate(self.ids_NTK):
            name = f"ids_NTK[{n}]"
            outside = (ids_TK < -1) | (ids_TK >= self.num_experts)
            _check(
                name, ids_TK, outside, f"be -1 or an expert below num_experts={self.num_experts}"
            )
            # As unsigned numbers, -1 is the largest: it may follow every expert, and itself.
            unsigned_TK = ids_TK.view(np.uint16)
            before, after = unsigned_TK[:, :-1], unsigned_TK[:, 1:]
            _check(
                name,
                ids_TK[:, 1:],
                (before >= after) & (after != 2**16 - 1),
                "list every expert of a token once, in ascending order, then -1",
                "sort with `ascending`",
                first_column=1,
            )
            if self.probs_NTK is not None:
                name, probs_TK = f"probs_NTK[{n}]", self.probs_NTK[n]
                _check(name, probs_TK, ~np.isfinite(probs_TK), "be finite")
                padded = (ids_TK < 0) & (probs_TK != 0)
                _check(name, probs_TK, padded, "be 0 where there is no id")


def ascending(
    ids: NDArray[np.int16], probs: NDArray[np.float32] | None
) -> tuple[NDArray[np.int16], NDArray[np.float32] | None]:
    """Sort every token's choices into the normal form: by expert, then -1. Shapes [..., K]."""
    order = np.argsort(ids.view(np.uint16), axis=-1, kind="stable")
    sorted_probs = None if probs is None else np.take_along_axis(probs, order, axis=-1)
    return np.take_along_axis(ids, order, axis=-1), sorted_probs


def merge(traces: Sequence[Trace], names: Sequence[object] | None = None) -> Trace:
    """Merge traces, such as one per rank, into one.

    Its records are ordered by step, micro-batch, layer and rank. Probabilities are kept where all
    parts have them.

    Args:
        traces: the parts, at least one.
        names: of the parts, for errors.

    Raises:
        ValueError: the parts differ in a size, or hold the same (step, layer, rank) twice.
    """
    names = [f"part {i}" for i in range(len(traces))] if names is None else names
    first = traces[0]
    for part, part_name in zip(traces, names, strict=True):
        for field in ("num_experts", "top_k", "num_ranks", "num_tokens"):
            value, expected = getattr(part, field), getattr(first, field)
            require(
                value == expected,
                f"{part_name}: {field}",
                value,
                f"be {expected}, as in {names[0]}",
            )
    keys = [np.stack([part.steps, part.layers, part.ranks]) for part in traces]
    distinct = np.concatenate([np.unique(key, axis=1) for key in keys], axis=1)
    distinct, counts = np.unique(distinct, axis=1, return_counts=True)
    if (counts > 1).any():
        twice = distinct[:, counts > 1][:, 0]
        step, layer, rank = twice.tolist()
        both = [
            str(name)
            for key, name in zip(keys, names, strict=True)
            if (key == twice[:, None]).all(0).any()
        ]
        raise ValueError(
            f"step {step}, layer {layer}, rank {rank} is in {' and '.join(both)}; give every "
            "recording once"
        )
    microbatches = np.concatenate([part.microbatches() for part in traces])
    steps, layers, ranks = np.concatenate(keys, axis=1)
    order = np.lexsort((ranks, layers, microbatches, steps))
    probs = [part.probs_NTK for part in traces if part.probs_NTK is not None]
    return Trace(
        num_experts=first.num_experts,
        top_k=first.top_k,
        num_ranks=first.num_ranks,
        steps=steps[order],
        layers=layers[order].astype(np.int32),
        ranks=ranks[order].astype(np.int32),
        ids_NTK=np.concatenate([part.ids_NTK for part in traces])[order],
        probs_NTK=np.concatenate(probs)[order] if len(probs) == len(traces) else None,
    )


def running_count(values: NDArray[np.integer]) -> NDArray[np.int64]:
    """Count how often each value occurs before its place, [N].

    Example: 7, 5, 7, 7 gives 0, 0, 1, 2.
    """
    order = np.argsort(values, kind="stable")
    starts = np.ones(len(values), bool)
    starts[1:] = np.diff(values[order]) != 0
    places = np.arange(len(values))
    first = np.maximum.accumulate(np.where(starts, places, 0))
    counts = np.empty(len(values), np.int64)
    counts[order] = places - first
    return counts


def _check(
    name: str, array: NDArray, wrong: NDArray, rule: str, fix: str = "", *, first_column: int = 0
) -> None:
    """Raise for the first `wrong` element; `array` begins at `first_column` of its whole."""
    if wrong.any():
        index = np.unravel_index(int(wrong.argmax()), wrong.shape)
        *others, last = (int(i) for i in index)
        place = ", ".join(str(i) for i in (*others, last + first_column))
        require(False, f"{name}[{place}]", array[index].item(), rule, fix)


def load_traces(paths: Sequence[Path], *, max_bytes: int = DEFAULT_MAX_BYTES) -> Trace:
    """Read a recording of several files, such as one per rank, and merge them.

    Args:
        paths: files, and folders whose `*.npy` files are taken. Steps that a resumed run did again
            are taken once; steps at the end that some layer or rank lacks are left out.
        max_bytes: for all files together; merging them takes as much memory again.

    Raises:
        ValueError: as `load_trace` and `merge`; or there is no file.
        OSError: a file cannot be read.
    """
    files = [
        file for path in paths for file in (sorted(path.glob("*.npy")) if path.is_dir() else [path])
    ]
    if not files:
        raise ValueError(
            f"{', '.join(str(path) for path in paths)}: the folder must hold traces (*.npy), got "
            "none; give the folder of `train --trace`"
        )
    last_steps = _last_steps(files)
    traces: dict[Path, Trace] = {}
    for file in files:
        trace = load_trace(file, max_bytes=max_bytes)
        max_bytes -= trace.num_bytes
        kept = trace.steps <= last_steps.get(file, math.inf)
        if kept.any():
            traces[file] = trace if kept.all() else trace.where(kept)
    merged = merge(list(traces.values()), list(traces))
    last, steps = _last_common_step(merged), np.unique(merged.steps)
    return merged.where(merged.steps <= last) if last in steps[-3:-1] else merged


def _last_steps(files: Sequence[Path]) -> dict[Path, int]:
    """Return the last valid step of every file whose run was resumed later.

    The later files of any rank count: a rank killed before its first step has none.
    """
    files_of: dict[Path, dict[int, list[Path]]] = {}
    for file in files:
        _, _, step = file.stem.partition("-step-")
        if step.isdigit():
            files_of.setdefault(file.parent, {}).setdefault(int(step), []).append(file)
    last_steps = {}
    for files_from in files_of.values():
        for step, following in pairwise(sorted(files_from)):
            last_steps |= dict.fromkeys(files_from[step], following)
    return last_steps


def _last_common_step(trace: Trace) -> int:
    """Return the earliest of the last steps of every (layer, rank)."""
    _, series = np.unique(np.stack([trace.layers, trace.ranks]), axis=1, return_inverse=True)
    last = np.zeros(series.max() + 1, np.int64)
    np.maximum.at(last, series.reshape(-1), trace.steps)
    return int(last.min())


def load_trace(path: Path, *, max_bytes: int = DEFAULT_MAX_BYTES) -> Trace:
    """Read a trace.

    Args:
        path: a file written by `save_trace` or `TraceWriter`.
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
    """Write a trace; an existing file is replaced."""
    with closing(TraceWriter(path)) as writer:
        writer.append(trace)


def record_bytes(num_tokens: int, top_k: int) -> int:
    """Return the bytes of one record with probabilities in a file."""
    return _record_dtype(num_tokens, top_k, probs=True).itemsize


class TraceWriter:
    """A file that records are appended to; the first part decides the sizes of all.

    Args:
        path: the first part creates it, with its records; an existing file is replaced.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unfinished = path.with_name(f"{path.name}.unfinished")
        self._file: BinaryIO | None = None
        self._dtype = np.dtype([])
        self._sizes = 0, 0
        self._num_records = 0

    def append(self, part: Trace) -> None:
        """Add the records of `part`.

        Raises:
            ValueError: its sizes differ from those of the records before.
        """
        dtype = _record_dtype(part.num_tokens, part.top_k, probs=part.probs_NTK is not None)
        sizes = part.num_experts, part.num_ranks
        first = self._file is None
        if self._file is None:
            self._file = self._unfinished.open("wb")
            self._dtype, self._sizes = dtype, sizes
            self._write_header(self._file)
        require(
            (dtype, sizes) == (self._dtype, self._sizes),
            "part",
            (dtype.descr, sizes),
            f"have the fields and (E, R) of the records before it, {self._dtype.descr} and "
            f"{self._sizes}",
            "write another file",
        )
        step = max(1, _CHUNK_BYTES // dtype.itemsize)
        for start in range(0, part.num_records, step):
            self._file.write(_records(part, dtype, slice(start, start + step)).tobytes())
        self._num_records += part.num_records
        self._write_header(self._file)
        if first:
            self._unfinished.replace(self._path)

    def close(self) -> None:
        """Close the file; nothing can be appended afterwards."""
        if self._file is not None:
            self._file.close()

    def _write_header(self, file: BinaryIO) -> None:
        file.seek(0)
        # NumPy leaves room for the first axis to grow, so the header keeps its length.
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
    """Return the type and the number of records; raise for any other content."""
    try:
        version = npy.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"version {version} of .npy")
        shape, _, dtype = npy.read_array_header_1_0(file, max_header_size=_MAX_HEADER_BYTES)
    # NumPy raises many types of exception for broken headers.
    except Exception as error:
        raise ValueError(f"not a trace ({error}); give a file of `train --trace`") from error
    names = dtype.names or ()
    if "ids" not in names or len(dtype["ids"].shape) != 2:
        raise ValueError(
            f"not a trace: dtype must have a field ids of shape [T, K], got {dtype}; give a file "
            "of `train --trace`"
        )
    expected = _record_dtype(*dtype["ids"].shape, probs="probs" in names)
    if dtype != expected or len(shape) != 1 or shape[0] < 1:
        raise ValueError(
            f"not a trace: it must be {expected} of shape [N] with at least one record, got "
            f"{dtype} of shape {shape}; give a file of `train --trace`"
        )
    return dtype, shape[0]


def _check_size(file: BinaryIO, dtype: np.dtype, num_records: int, max_bytes: int) -> None:
    start = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(start)
    require(
        size <= max_bytes,
        "its bytes",
        size,
        f"be at most max_bytes={max_bytes}",
        "raise it (--max-gib), or record fewer steps",
    )
    expected = start + num_records * dtype.itemsize
    # A killed writer leaves rows behind that the header does not count yet; fewer are an error.
    require(
        size >= expected,
        "its bytes",
        size,
        f"be at least {expected} for {num_records} records",
        "it was cut off: copy it again",
    )


def _read_records(file: BinaryIO, dtype: np.dtype, num_records: int) -> Trace:
    num_tokens, top_k = dtype["ids"].shape
    shape = num_records, num_tokens, top_k
    has_probs = "probs" in (dtype.names or ())
    steps, sizes = np.empty(num_records, np.int64), np.empty((num_records, 2), np.int32)
    layers, ranks = np.empty(num_records, np.int32), np.empty(num_records, np.int32)
    ids_NTK = np.empty(shape, np.int16)
    probs_NTK = np.empty(shape, np.float32) if has_probs else None
    step = max(1, _CHUNK_BYTES // dtype.itemsize)
    for start in range(0, num_records, step):
        here = slice(start, min(start + step, num_records))
        records = np.fromfile(file, dtype, here.stop - here.start)
        steps[here], layers[here] = records["step"], records["layer"]
        ranks[here], ids_NTK[here] = records["rank"], records["ids"]
        sizes[here, 0], sizes[here, 1] = records["num_experts"], records["num_ranks"]
        if probs_NTK is not None:
            probs_NTK[here] = records["probs"]
    differs = (sizes != sizes[0]).any(1)
    n = int(differs.argmax())
    require(
        not differs.any(),
        f"record {n}: (num_experts, num_ranks)",
        sizes[n].tolist(),
        f"be {sizes[0].tolist()}, as in the first record",
        "record every configuration into its own file",
    )
    num_experts, num_ranks = sizes[0].tolist()
    return Trace(
        num_experts=num_experts,
        top_k=top_k,
        num_ranks=num_ranks,
        steps=steps,
        layers=layers,
        ranks=ranks,
        ids_NTK=ids_NTK,
        probs_NTK=probs_NTK,
    )
