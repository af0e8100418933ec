"""Read the traces of Megatron-Core's own tracer: `--moe-routing-trace-path`, from 0.19.0 on.

`RouterTracer` of `megatron.core.transformer.moe.router_trace` writes one JSON object per line, step
and layer into `router_trace_rank{rank}.jsonl`, one file per rank:

    {"step": 7, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0,
     "num_tokens": 128, "topk": 8, "top_indices": [[12, 45, ...], ...]}

These files lack probabilities, and the numbers of experts and of ranks in an expert-parallel group,
which are arguments. Layers are numbered within a pipeline stage; those of several stages with one
number are merged, so such a trace gives no factors per layer. Layer l of multi-token prediction
head i becomes `MTP_LAYERS * (i + 1) + l`. The tracer skips a micro-batch in which some token has
fewer than K experts: trace without a capacity factor.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from padded_dispatch.config import require
from padded_dispatch.trace import Trace, ascending, merge

MTP_LAYERS = 10_000


def load_megatron_traces(paths: Sequence[Path], *, num_experts: int, num_ranks: int) -> Trace:
    """Read the files of all ranks, line by line, into one trace without probabilities.

    Where tensor-parallel ranks route the same tokens (no sequence parallelism), give only the files
    of the first of them.

    Args:
        paths: files, and folders whose `router_trace_rank*.jsonl` are taken.
        num_experts: experts in all (E).
        num_ranks: ranks that share an expert-parallel group (R).

    Raises:
        ValueError: names the file, the line, what is wrong there, and what to do.
        OSError: a file cannot be read.
    """
    parts: dict[Path, Trace] = {}
    for path in paths:
        for file in sorted(path.glob("router_trace_rank*.jsonl")) if path.is_dir() else [path]:
            part = _read_file(file, num_experts, num_ranks)
            if part is not None:
                parts[file] = part
    if not parts:
        given = ", ".join(str(path) for path in paths)
        raise ValueError(
            f"{given}: the files must hold at least one record, got none; give files of Megatron's "
            "tracer"
        )
    return merge(list(parts.values()), list(parts))


def _read_file(file: Path, num_experts: int, num_ranks: int) -> Trace | None:
    keys: list[tuple[int, int, int]] = []
    ids: list[NDArray[np.int16]] = []
    for where, record in _records(file):
        step, layer = _number(where, record, "step"), _number(where, record, "layer")
        block, fix = record.get("block"), "give a file of Megatron's tracer"
        require(block in ("decoder", "mtp"), f"{where}: block", block, "be decoder or mtp", fix)
        if block == "mtp":
            layer += MTP_LAYERS * (_number(where, record, "mtp_idx") + 1)
        keys.append((step, layer, _number(where, record, "rank")))
        ids.append(_ids(where, record, num_experts))
        shape = ids[0].shape
        rule, fix = f"be {shape}, as in the records before", "trace training steps only"
        require(ids[-1].shape == shape, f"{where}: top_indices.shape", ids[-1].shape, rule, fix)
    if not keys:
        return None
    steps, layers, ranks = np.array(keys, np.int64).T
    return Trace(
        num_experts=num_experts,
        top_k=ids[0].shape[1],
        num_ranks=num_ranks,
        steps=np.ascontiguousarray(steps),
        layers=layers.astype(np.int32),
        ranks=ranks.astype(np.int32),
        ids_NTK=np.stack(ids),
        probs_NTK=None,
    )


def _records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place of every line and its object."""
    fix = "give a file of Megatron's tracer; delete the half line that a killed run leaves"
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file}, line {number}"
            try:
                record: Any = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            require(isinstance(record, dict), where, line[:40], "be one JSON object", fix)
            yield where, record


def _number(where: str, record: dict[str, Any], name: str) -> int:
    value = record.get(name)
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError(f"{where}: {name} must be a whole number from 0, got {value!r:.80}")
    return value


def _ids(where: str, record: dict[str, Any], num_experts: int) -> NDArray[np.int16]:
    """Return the ids of a record in the normal form of a trace, [T, K]."""
    shape = _number(where, record, "num_tokens"), _number(where, record, "topk")
    try:
        ids_TK = np.array(record.get("top_indices"))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{where}: top_indices must be a table of numbers ({error})") from None
    require(
        ids_TK.dtype == np.int64 and ids_TK.shape == shape and all(shape),
        f"{where}: top_indices",
        f"{ids_TK.dtype}{list(ids_TK.shape)}",
        f"be [num_tokens, topk] = int64{list(shape)}, not empty",
    )
    require(
        ids_TK.min() >= 0 and ids_TK.max() < num_experts,
        f"{where}: top_indices",
        f"{ids_TK.min()} to {ids_TK.max()}",
        f"be from 0 to below num_experts={num_experts}",
        "give the model's num_experts",
    )
    sorted_TK, _ = ascending(ids_TK.astype(np.int16), None)
    if (np.diff(sorted_TK, axis=1) == 0).any():
        raise ValueError(f"{where}: top_indices must name each expert of a token once")
    return sorted_TK
