"""Traces that Megatron-Core's own tracer wrote: `--moe-routing-trace-path`, from 0.19.0 on.

`RouterTracer` of `megatron.core.transformer.moe.router_trace` writes one JSON object per line, step
and layer into `router_trace_rank{rank}.jsonl`, one file per rank:

    {"step": 7, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0,
     "num_tokens": 128, "topk": 8, "top_indices": [[12, 45, ...], ...]}

What it does not say, and what follows from that:

- Probabilities: such a trace has none. What-ifs of policies that need them are refused, and no
  probability mass is known; rows and tokens are.
- Numbers of experts and of ranks in an expert-parallel group: they are arguments.
- Layers are numbered within a pipeline stage; those of several stages under one number are taken
  together, and no factor for each layer can be set from such a trace. Layer l of multi-token
  prediction head i becomes `MTP_LAYERS * (i + 1) + l`.
- Which passes are missing: the tracer skips a pass in which some token has fewer than K experts,
  so with a capacity factor, whenever something was dropped. Trace without a factor.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.tune.trace import DEFAULT_MAX_BYTES, Trace, ascending, merge

MTP_LAYERS = 10_000

# One line is parsed at a time: about two million ids, or half a GiB of the emptiest nonsense.
_MAX_LINE_BYTES = 2**24


def load_megatron_traces(
    paths: Sequence[Path],
    *,
    num_experts: int,
    num_ranks: int,
    every: int = 1,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Trace:
    """Read what all ranks traced, line by line, into one trace without probabilities.

    Where tensor-parallel ranks route the same tokens (no sequence parallelism), give the files of
    the first of them only.

    Args:
        paths: files, and folders of which all `router_trace_rank*.jsonl` are taken.
        num_experts: experts in all (E).
        num_ranks: ranks that share an expert-parallel group (R).
        every: take steps that are multiples of this only.
        max_bytes: of all ids as they are kept, 2 bytes each; merging takes as much again.

    Raises:
        ValueError: names the file, the line, what is wrong there, and what to do.
        OSError: a file cannot be read.
    """
    files = [
        file
        for path in paths
        for file in (sorted(path.glob("router_trace_rank*.jsonl")) if path.is_dir() else [path])
    ]
    parts, names = [], []
    for file in files:
        part = _read_file(file, num_experts, num_ranks, every, max_bytes)
        if part is not None:
            parts.append(part)
            names.append(file)
            max_bytes -= part.num_bytes
    if not parts:
        given = ", ".join(str(path) for path in paths)
        raise ValueError(f"{given}: no record of a step that is a multiple of every={every}")
    return merge(parts, names)


def _read_file(
    file: Path, num_experts: int, num_ranks: int, every: int, max_bytes: int
) -> Trace | None:
    keys: list[tuple[int, int, int]] = []
    ids: list[NDArray[np.int16]] = []
    for where, record in _records(file):
        step, layer = _number(where, record, "step"), _layer(where, record)
        if step % every:
            continue
        keys.append((step, layer, _number(where, record, "rank")))
        ids.append(_ids(where, record, num_experts))
        if ids[-1].shape != ids[0].shape:
            raise ValueError(
                f"{where}: top_indices of shape {ids[-1].shape} after {ids[0].shape}: one trace "
                "has one number of tokens; split the file, or trace training steps only"
            )
        if len(ids) * ids[0].nbytes > max_bytes:
            raise ValueError(f"{where}: more than max_bytes={max_bytes}: raise it, or raise every")
    if not keys:
        return None
    steps_N, layers_N, ranks_N = np.array(keys, np.int64).T
    return Trace(
        num_experts=num_experts,
        top_k=ids[0].shape[1],
        num_ranks=num_ranks,
        steps=np.ascontiguousarray(steps_N),
        layers=layers_N.astype(np.int32),
        ranks=ranks_N.astype(np.int32),
        ids_NTK=np.stack(ids),
        probs_NTK=None,
    )


def _records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every line's object, and where it is."""
    with file.open("rb") as lines:
        number = 0
        while line := lines.readline(_MAX_LINE_BYTES + 1):
            number += 1
            where = f"{file}, line {number}"
            if len(line) > _MAX_LINE_BYTES:
                raise ValueError(f"{where}: longer than {_MAX_LINE_BYTES} bytes; not a trace")
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{where}: no JSON ({error}); a run that was killed leaves half a line, which "
                    "can be deleted"
                ) from None
            if not isinstance(record, dict):
                raise ValueError(f"{where}: {type(record).__name__} in place of an object")
            yield where, record


def _number(where: str, record: dict[str, Any], name: str) -> int:
    value = record.get(name)
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError(f"{where}: {name}={value!r:.80} is not possible: it is a number from 0 on")
    return value


def _layer(where: str, record: dict[str, Any]) -> int:
    layer = _number(where, record, "layer")
    match record.get("block"):
        case "decoder":
            return layer
        case "mtp":
            return MTP_LAYERS * (_number(where, record, "mtp_idx") + 1) + layer
        case block:
            raise ValueError(f"{where}: block={block!r:.80} is not possible: decoder or mtp")


def _ids(where: str, record: dict[str, Any], num_experts: int) -> NDArray[np.int16]:
    """[T, K], in the normal form of a trace."""
    shape = _number(where, record, "num_tokens"), _number(where, record, "topk")
    try:
        ids_TK = np.array(record.get("top_indices"))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{where}: top_indices is no table of numbers: {error}") from None
    if ids_TK.dtype != np.int64 or ids_TK.shape != shape or not all(shape):
        raise ValueError(
            f"{where}: top_indices is {ids_TK.dtype}{list(ids_TK.shape)}, and num_tokens, topk say "
            f"int64{list(shape)}"
        )
    if ids_TK.min() < 0 or ids_TK.max() >= num_experts:
        raise ValueError(
            f"{where}: top_indices from {ids_TK.min()} to {ids_TK.max()} are not possible with "
            f"num_experts={num_experts}: give the model's"
        )
    sorted_TK, _ = ascending(ids_TK.astype(np.int16), None)
    if (np.diff(sorted_TK, axis=1) == 0).any():
        raise ValueError(f"{where}: a token has the same expert twice")
    return sorted_TK
