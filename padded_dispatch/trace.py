"""Routing traces: the experts that every token asked for, in memory and on disk.

A record is one forward pass of one layer on one source rank: one micro-batch of one step. A step
with several micro-batches has several records of a (layer, rank), in their order. A token's expert
ids are in ascending order, then -1.

A file is a sequence of NumPy arrays, one for each recorded step, as `np.save` writes them. An
array's elements are records of fixed size, with the fields `step layer rank`, `_RUN_FIELDS`,
`probs ids`. Reading unpickles nothing. A last array that a killed process left incomplete is
skipped.

A recording is several files, `rank-RANK-step-STEP.npy`; STEP steps were done before the file. A
resumed run writes new files. `load_traces` takes a file's steps only up to the STEP of the next
file. The ranks of a killed run stop a step or two apart; `load_traces` leaves out the steps that
not all ranks recorded. If a rank lacks more steps, `recommend` reports its records as missing.

Letters: N records; T tokens of a record, padding included; K experts per token; E experts;
R source ranks in an expert-parallel group.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar, overload

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from padded_dispatch.config import CapacityPool, require

MAX_EXPERTS = 2**15 - 1  # ids are int16
HEADER_BYTES = 512  # of a step in a file, at most
_CODED_FIELDS = {  # Settings that a file stores as the index of their value here.
    "capacity_pool": (None, "cells", "store"),
}


@dataclass(frozen=True, kw_only=True)
class TracedRun:
    """Sizes and settings of a traced run, the same in all records.

    Args:
        num_tokens: tokens of a record, padding included (T).
        top_k: most experts of a token (K).
        num_experts: experts in all (E).
        num_ranks: R; source ranks 0 to R - 1 are one group, R to 2R - 1 the next.
        hidden_size: width of a row (D).
        fc1_width: columns of fc1's result, for an unsplit expert: 2F if it is gated, else F.
        capacity_pool: None if unknown.
        etp_size: ranks that split every expert between them; each of them is a source.

    Raises:
        ValueError: for a size out of range.
    """

    num_tokens: int
    top_k: int
    num_experts: int
    num_ranks: int
    hidden_size: int
    fc1_width: int
    capacity_pool: CapacityPool | None = None
    etp_size: int = 1

    def __post_init__(self) -> None:
        limits = {"num_experts": MAX_EXPERTS, "top_k": self.num_experts}
        limits["num_ranks"] = self.num_experts * max(1, self.etp_size)  # Each rank has an expert.
        for name in ("num_experts", "top_k", "num_tokens", "num_ranks", "hidden_size", "fc1_width"):
            value, limit = getattr(self, name), limits.get(name, 2**31 - 1)
            require(1 <= value <= limit, name, value, f"be from 1 to {limit}")
        etp, rule = self.etp_size, f"divide num_ranks={self.num_ranks}"
        require(etp >= 1 and self.num_ranks % etp == 0, "etp_size", etp, rule)


# The fields of the run in each record of a file, in this order; the shape of ids gives T and K.
_RUN_FIELDS = tuple(f.name for f in fields(TracedRun) if f.name not in ("num_tokens", "top_k"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Records:
    """Which records there are; a subclass adds arrays of what they hold, of N elements each.

    Args:
        run: sizes and settings of the run.
        steps: int64 [N], the training step of each record.
        layers: int32 [N], the number of the MoE layer of each record.
        ranks: int32 [N], the source rank of each record.
    """

    run: TracedRun
    steps: NDArray[np.int64]
    layers: NDArray[np.int32]
    ranks: NDArray[np.int32]

    @property
    def microbatches(self) -> NDArray[np.int64]:
        """Micro-batch of each record, [N]: its index among those of its (step, layer, rank)."""
        keys = np.stack([self.steps, self.layers, self.ranks])
        series = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
        order = np.argsort(series, kind="stable")
        ascending = series[order]
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order)) - np.searchsorted(ascending, ascending)
        return places

    def where(self, chosen: NDArray[np.bool_ | np.int64]) -> Self:
        """Return the records that `chosen` selects, as a mask or as a list of indices."""
        return replace(self, **{name: getattr(self, name)[chosen] for name in _arrays(self)})


_R = TypeVar("_R", bound=Records)


def _arrays(records: Records) -> list[str]:
    return [field.name for field in fields(records) if field.name != "run"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace(Records):
    """The rows that routers asked for, before anything was dropped.

    Args:
        ids_NTK: int16, experts in ascending order, then -1: for a padding token, and for a token
            with fewer than K experts.
        probs_NTK: float32, the probabilities of these experts, 0 where the id is -1.

    Raises:
        ValueError: for another shape, for experts out of range or order, or for probabilities that
            are none.
    """

    ids_NTK: NDArray[np.int16]
    probs_NTK: NDArray[np.float32]

    def __post_init__(self) -> None:
        num_records, *sizes = self.ids_NTK.shape
        expected, num_experts = [self.run.num_tokens, self.run.top_k], self.run.num_experts
        rule = f"be [N, T, K] with at least one record and [T, K] = {expected}"
        require(num_records >= 1 and sizes == expected, "ids_NTK.shape", self.ids_NTK.shape, rule)
        lowest, highest = self.ids_NTK.min(), self.ids_NTK.max()
        extreme = int(highest if lowest >= -1 else lowest)
        rule = f"be -1 or an expert below num_experts={num_experts}"
        require(-1 <= extreme < num_experts, "ids_NTK", extreme, rule)
        follows = self.ids_NTK[..., 1:] > self.ids_NTK[..., :-1]
        wrong = self.ids_NTK[~(follows | (self.ids_NTK[..., 1:] == -1)).all(-1)]
        rule = "have experts in ascending order, each once, then -1"
        require(not len(wrong), "ids_NTK", wrong[:1].tolist(), rule)
        wrong = self.probs_NTK[~((self.probs_NTK >= 0) & (self.probs_NTK < math.inf))]
        require(not len(wrong), "probs_NTK", wrong[:1].tolist(), "be finite, and at least 0")


def merge(parts: Mapping[Any, _R]) -> _R:
    """Merge at least one trace, such as one per rank, into one; `parts` has their names for errors.

    The records of the result are ordered by step, micro-batch, layer and rank.

    Raises:
        ValueError: the parts have different runs, or two hold the same (step, layer, rank).
    """
    first_name, first = next(iter(parts.items()))
    for name, part in parts.items():
        for field, expected in vars(first.run).items():
            value, rule = getattr(part.run, field), f"be {expected}, as in {first_name}"
            fix = "give files of one configuration"
            require(value == expected, f"{name}: {field}", value, rule, fix)
    seen: dict[tuple[int, ...], object] = {}
    for name, part in parts.items():
        keys = np.unique(np.stack([part.steps, part.layers, part.ranks]), axis=1)
        for step, layer, rank in keys.T.tolist():
            other_name = seen.setdefault((step, layer, rank), name)
            if other_name is not name:
                raise ValueError(
                    f"step {step}, layer {layer}, rank {rank} must be in one trace, got it in "
                    f"{other_name} and {name}; give every trace once"
                )
    arrays = {n: np.concatenate([getattr(t, n) for t in parts.values()]) for n in _arrays(first)}
    whole = replace(first, **arrays)
    order = np.lexsort((whole.ranks, whole.layers, whole.microbatches, whole.steps))
    return whole.where(order)


@overload
def load_traces(paths: Sequence[Path]) -> Trace: ...
@overload
def load_traces(paths: Sequence[Path], reduce: Callable[[Trace], _R]) -> _R: ...
def load_traces(paths: Sequence[Path], reduce: Callable[[Trace], Any] = lambda trace: trace) -> Any:
    """Read a recording of several files, such as one per rank, and merge them.

    Args:
        paths: files, and folders whose `*.npy` files are read. Steps that a resumed run repeated
            are taken once. The last steps of a run that a layer or rank lacks are left out.
        reduce: makes of a file's trace the records that are kept, before the next file is read.

    Raises:
        ValueError: names the file, what is wrong in it, and what to do; or no file has a step.
        OSError: a file cannot be read.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():  # `glob` would find nothing in a folder that cannot be read.
            files += sorted(file for file in path.iterdir() if file.suffix == ".npy")
        else:
            files.append(path)
    steps_done = {file: step for file in files if (step := steps_before(file)) is not None}
    # The steps of a file end where a later file of any rank begins. The same rank may have none: it
    # was killed before its first step, or its next file is on the disk of a host that left the run.
    starts = sorted({*steps_done.values()})
    ends: dict[int | None, int] = dict(pairwise(starts))
    traces: dict[Path, Records] = {}
    for file in files:
        whole = _load(file)
        if whole is not None:
            trace, whole = reduce(whole), None  # Two files need not fit into memory.
            kept = trace.steps <= ends.get(steps_done.get(file), math.inf)
            if kept.any():
                traces[file] = trace if kept.all() else trace.where(kept)
    if not traces:
        raise ValueError(
            f"{', '.join(str(path) for path in paths)} must hold a recorded step (*.npy), got "
            "none; give the folder of `train --trace`"
        )
    merged = merge(traces)
    kept, run_numbers = np.zeros(len(merged.steps), bool), np.searchsorted(starts, merged.steps)
    for number in np.unique(run_numbers):
        of_run = run_numbers == number
        kept |= of_run & (merged.steps <= _last_common_step(merged, of_run))
    return merged if kept.all() else merged.where(kept)


def steps_before(file: Path) -> int | None:
    """Return the STEP in the name of a recording's file; None for another name."""
    _, _, step = file.stem.partition("-step-")
    return int(step) if step.isdecimal() else None


def _last_common_step(trace: Records, of_run: NDArray[np.bool_]) -> int:
    """Return the last step that every (layer, rank) of a run has recorded.

    Ignore a (layer, rank) that stopped more than two recorded steps before the end of the run.
    """
    steps, keys = trace.steps[of_run], np.stack([trace.layers, trace.ranks])[:, of_run]
    _, series = np.unique(keys, axis=1, return_inverse=True)
    last = np.zeros(series.max() + 1, np.int64)
    np.maximum.at(last, series.reshape(-1), steps)
    return int(last[last >= np.unique(steps)[-3:][0]].min())


def record_bytes(num_tokens: int, top_k: int) -> int:
    """Return the bytes of one record in a file; the header of a step comes on top."""
    return _record_dtype(num_tokens, top_k).itemsize


def append(part: Trace, file: BinaryIO) -> None:
    """Append records to a file that was opened for binary writing, and flush it for readers."""
    records = np.empty(len(part.steps), _record_dtype(part.run.num_tokens, part.run.top_k))
    records["step"], records["layer"], records["rank"] = part.steps, part.layers, part.ranks
    for name in _RUN_FIELDS:
        value = getattr(part.run, name)
        records[name] = _CODED_FIELDS[name].index(value) if name in _CODED_FIELDS else value
    records["probs"], records["ids"] = part.probs_NTK, part.ids_NTK
    # Not `np.save`: on a full disk it may leave out the end of a small array without an error.
    npy.write_array_header_1_0(file, npy.header_data_from_array_1_0(records))
    file.write(records.data)
    file.flush()


_FIX = "give a file of `train --trace`"
_MAGIC = npy.magic(1, 0)


def _record_dtype(num_tokens: int, top_k: int) -> np.dtype:
    shape = num_tokens, top_k
    fields = [(name, "<i4") for name in ("layer", "rank", *_RUN_FIELDS)]
    return np.dtype([("step", "<i8"), *fields, ("probs", "<f4", shape), ("ids", "<i2", shape)])


def _load(path: Path) -> Trace | None:
    """Read the complete arrays of a file; None if there are none."""
    arrays: list[NDArray[np.void]] = []
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while (start := file.tell()) < size:
                magic = file.read(npy.MAGIC_LEN)
                file.seek(start)
                try:
                    arrays.append(npy.read_array(file, allow_pickle=False))
                except Exception as error:  # NumPy raises many types for broken headers.
                    # The last step may have been cut off, in its records or its header.
                    if file.tell() == size and _MAGIC.startswith(magic):
                        break
                    raise ValueError(f"must be a trace, got {error}; {_FIX}") from error
        return _trace(arrays) if arrays else None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _trace(arrays: Sequence[NDArray[np.void]]) -> Trace:
    first = arrays[0].dtype
    is_trace = first.names == _record_dtype(1, 1).names
    require(is_trace, "dtype", first, "be that of a trace", _FIX)
    for array in arrays:
        require(array.dtype == first, "dtype", array.dtype, f"be {first}, as in the first step")

    def joined(field: str) -> NDArray:
        return np.concatenate([array[field] for array in arrays])

    settings = np.unique(np.stack([joined(name) for name in _RUN_FIELDS], axis=1), axis=0).tolist()
    rule, fix = "be alike in all records", "record every configuration into its own file"
    require(len(settings) == 1, f"({', '.join(_RUN_FIELDS)})", settings, rule, fix)
    run_fields: dict[str, Any] = dict(zip(_RUN_FIELDS, settings[0], strict=True))
    for name, values in _CODED_FIELDS.items():
        number = run_fields[name]
        require(0 <= number < len(values), name, number, f"be below {len(values)}")
        run_fields[name] = values[number]
    ids_NTK = joined("ids")
    _, num_tokens, top_k = ids_NTK.shape
    return Trace(
        run=TracedRun(num_tokens=num_tokens, top_k=top_k, **run_fields),
        steps=joined("step"),
        layers=joined("layer"),
        ranks=joined("rank"),
        ids_NTK=ids_NTK,
        probs_NTK=joined("probs"),
    )
