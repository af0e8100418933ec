"""A trace: which experts every token asked for, in some layers, at some steps, on some ranks.

A record is one pass of one layer on one source rank. Where a step has several passes
(micro-batches), its records of a (layer, rank) lie in the order of the passes. Arrays over records
start with N; the other letters are those of `padded_dispatch.config`.

Every trace has one normal form: a token's choices are in ascending expert order, then -1. That is
the order in which the dispatcher sees them, it makes a duplicate impossible to write down, and two
traces are equal when their arrays are.

A trace on disk: one NumPy array of records, `.npy`, that anything with NumPy can map or read.

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
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from padded_dispatch.config import require

MAX_EXPERTS = 2**15 - 1  # ids are int16


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """What routers asked for, before anything was dropped.

    Args:
        num_experts: experts in all (E).
        top_k: most experts of a token (K).
        num_ranks: source ranks that share an expert-parallel group (R); ranks 0 to R - 1 are one
            group, R to 2R - 1 the next.
        steps: int64 [N], the training step of each record.
        layers: int32 [N], the number of its MoE layer.
        ranks: int32 [N], its source rank.
        ids_NTK: int16 [N, T, K], experts in ascending order; then -1, for a padding token and for
            one with fewer than K experts.
        probs_NTK: float32 [N, T, K], their probabilities, finite, and 0 where the id is -1; None
            where nobody recorded them.

    Raises:
        ValueError: names the array, a value, where it is, and what to change.
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
        for name, least, most in (
            ("num_experts", 1, MAX_EXPERTS),
            ("top_k", 1, self.num_experts),
            ("num_ranks", 1, 2**31 - 1),
        ):
            value = getattr(self, name)
            require(least <= value <= most, name, value, f"give a number from {least} to {most}")
        shape = self.ids_NTK.shape
        require(
            len(shape) == 3 and min(shape) >= 1 and shape[2] == self.top_k,
            "ids_NTK.shape",
            shape,
            f"give [N, T, K] with at least one record, one token, and K = {self.top_k}",
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
            actual = f"{array.dtype}{list(array.shape)}"
            require(
                array.dtype == dtype and array.shape == expected,
                name,
                actual,
                f"give {dtype}{list(expected)}",
            )
        for name in ("steps", "layers", "ranks"):
            _check(name, getattr(self, name), getattr(self, name) < 0, "give 0 or more")
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

    def passes(self) -> NDArray[np.int64]:
        """[N], which pass of its step each record is: how often its (step, layer, rank) was before.

        Example: four records of one layer, steps 3, 3, 3, 4 on ranks 0, 1, 0, 0 give 0, 0, 1, 0.
        """
        keys_3N = np.stack([self.steps, self.layers, self.ranks])
        of_N = np.unique(keys_3N, axis=1, return_inverse=True)[1].reshape(-1)
        return running_count(of_N)

    def where(self, chosen_N: NDArray[np.bool_]) -> "Trace":
        """The records for which `chosen_N` is True, in their order."""
        return Trace(
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_ranks=self.num_ranks,
            steps=self.steps[chosen_N],
            layers=self.layers[chosen_N],
            ranks=self.ranks[chosen_N],
            ids_NTK=self.ids_NTK[chosen_N],
            probs_NTK=None if self.probs_NTK is None else self.probs_NTK[chosen_N],
        )

    def _check_choices(self) -> None:
        """Record by record, so that the check needs no memory of the trace's size."""
        for n, ids_TK in enumerate(self.ids_NTK):
            where = f"ids_NTK[{n}]"
            _check(
                where,
                ids_TK,
                (ids_TK < -1) | (ids_TK >= self.num_experts),
                f"give -1 or an expert below num_experts={self.num_experts}",
            )
            # As unsigned numbers, -1 is the largest: it may follow every expert, and itself.
            unsigned_TK = ids_TK.view(np.uint16)
            before, after = unsigned_TK[:, :-1], unsigned_TK[:, 1:]
            unordered = (before >= after) & (after != 2**16 - 1)
            _check(
                where,
                ids_TK[:, 1:],
                unordered,
                "give every expert of a token once, in ascending order, then -1; `ascending` sorts",
                offset=1,
            )
            if self.probs_NTK is not None:
                probs_TK = self.probs_NTK[n]
                where = f"probs_NTK[{n}]"
                _check(where, probs_TK, ~np.isfinite(probs_TK), "give finite probabilities")
                _check(
                    where, probs_TK, (ids_TK < 0) & (probs_TK != 0), "give 0 where there is no id"
                )


def ascending(
    ids: NDArray[np.int16], probs: NDArray[np.float32] | None
) -> tuple[NDArray[np.int16], NDArray[np.float32] | None]:
    """Sort every token's choices as a trace wants them: by expert, then -1. Shapes [..., K]."""
    order = np.argsort(ids.view(np.uint16), axis=-1, kind="stable")
    sorted_probs = None if probs is None else np.take_along_axis(probs, order, axis=-1)
    return np.take_along_axis(ids, order, axis=-1), sorted_probs


def merge(traces: Sequence[Trace], names: Sequence[object] | None = None) -> Trace:
    """One trace of several, for example of one per rank: records by step, pass, layer and rank.

    Probabilities are kept where all parts have them. `names`: of the parts, for errors.

    Raises:
        ValueError: the parts do not belong together, or hold the same (step, layer, rank) twice.
    """
    names = [f"part {i}" for i in range(len(traces))] if names is None else names
    first = traces[0]
    for part, of_part in zip(traces, names, strict=True):
        for name in ("num_experts", "top_k", "num_ranks", "num_tokens"):
            value, expected = getattr(part, name), getattr(first, name)
            remedy = f"all parts must have {expected}, as {names[0]} has"
            require(value == expected, f"{of_part}: {name}", value, remedy)
    keys = [np.stack([part.steps, part.layers, part.ranks]) for part in traces]
    distinct = np.concatenate([np.unique(key_3N, axis=1) for key_3N in keys], axis=1)
    times = np.unique(distinct, axis=1, return_counts=True)
    if (times[1] > 1).any():
        twice_3 = times[0][:, times[1] > 1][:, 0]
        step, layer, rank = twice_3.tolist()
        both = [
            str(name)
            for key_3N, name in zip(keys, names, strict=True)
            if (key_3N == twice_3[:, None]).all(0).any()
        ]
        raise ValueError(
            f"step {step}, layer {layer}, rank {rank} is in {' and '.join(both)}: give every "
            "recording once"
        )
    passes_N = np.concatenate([part.passes() for part in traces])
    steps_N, layers_N, ranks_N = np.concatenate(keys, axis=1)
    order_N = np.lexsort((ranks_N, layers_N, passes_N, steps_N))
    probs = [part.probs_NTK for part in traces]
    known = [probs_NTK for probs_NTK in probs if probs_NTK is not None]
    return Trace(
        num_experts=first.num_experts,
        top_k=first.top_k,
        num_ranks=first.num_ranks,
        steps=steps_N[order_N],
        layers=layers_N[order_N].astype(np.int32),
        ranks=ranks_N[order_N].astype(np.int32),
        ids_NTK=np.concatenate([part.ids_NTK for part in traces])[order_N],
        probs_NTK=np.concatenate(known)[order_N] if len(known) == len(probs) else None,
    )


def running_count(of_N: NDArray[np.integer]) -> NDArray[np.int64]:
    """[N], how often each value was there before.

    Example: 7, 5, 7, 7 gives 0, 0, 1, 2.
    """
    order_N = np.argsort(of_N, kind="stable")
    starts_N = np.ones(len(of_N), bool)
    starts_N[1:] = np.diff(of_N[order_N]) != 0
    positions_N = np.arange(len(of_N))
    first_N = np.maximum.accumulate(np.where(starts_N, positions_N, 0))
    count_N = np.empty(len(of_N), np.int64)
    count_N[order_N] = positions_N - first_N
    return count_N


def _check(name: str, array: NDArray, wrong: NDArray, remedy: str, *, offset: int = 0) -> None:
    """Raise for the first element that is `wrong`; `offset` is what its last index lacks."""
    if wrong.any():
        index = np.unravel_index(int(wrong.argmax()), wrong.shape)
        *others, last = (int(i) for i in index)
        place = ", ".join(str(i) for i in (*others, last + offset))
        require(False, f"{name}[{place}]", array[index].item(), remedy)


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
