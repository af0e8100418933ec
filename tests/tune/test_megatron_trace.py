"""Traces of Megatron's tracer are read; any other content is an error that names its line."""

import json

import numpy as np
import pytest
import torch

from padded_dispatch.tune.demand import demand_of
from padded_dispatch.tune.megatron_trace import load_megatron_traces


def record(**changes) -> dict:
    values = {
        "step": 7,
        "stage": "pre_dispatch",
        "block": "decoder",
        "layer": 3,
        "rank": 0,
        "num_tokens": 3,
        "topk": 2,
        "top_indices": [[5, 1], [0, 4], [2, 3]],
    }
    return values | changes


def write(path, *records) -> None:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


def read(path, **changes):
    return load_megatron_traces([path], **(dict(num_experts=6, num_ranks=2) | changes))


def test_a_folder_of_ranks_becomes_one_trace(tmp_path):
    for rank in (1, 0):
        write(
            tmp_path / f"router_trace_rank{rank}.jsonl",
            record(rank=rank),
            record(rank=rank, layer=0, block="mtp", mtp_idx=1, top_indices=[[0, 1]] * 3),
            record(rank=rank, step=8, top_indices=[[4, rank], [0, 4], [2, 3]]),
        )
    (tmp_path / "logits_rank0.bin").write_bytes(b"something else")
    write(tmp_path / "router_trace_rank2.jsonl")  # A rank without records is no part of it.
    with pytest.raises(ValueError, match="must hold at least one record, got none"):
        read(tmp_path / "router_trace_rank2.jsonl")
    trace = read(tmp_path)
    assert (trace.num_experts, trace.top_k, trace.num_ranks) == (6, 2, 2)
    assert trace.steps.tolist() == [7, 7, 7, 7, 8, 8]
    assert trace.layers.tolist() == [3, 3, 20_000, 20_000, 3, 3]
    assert trace.ranks.tolist() == [0, 1, 0, 1, 0, 1]
    assert trace.ids_NTK[0].tolist() == [[1, 5], [0, 4], [2, 3]]
    assert trace.ids_NTK[5].tolist() == [[1, 4], [0, 4], [2, 3]]
    assert trace.probs_NTK is None
    assert demand_of(trace).counts.sum((2, 3)).tolist() == [[12, 12], [12, 0]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"step": -1}, "step must be a whole number from 0, got -1"),
        ({"layer": 10**30}, "layer must .*, got 1000"),
        ({"block": "encoder"}, "block must be decoder or mtp, got 'encoder'"),
        ({"block": "mtp"}, "mtp_idx must .*, got None"),
        ({"top_indices": [[0, 6], [0, 1], [0, 1]]}, "top_indices must .*=6, got '0 to 6'; give"),
        ({"top_indices": [[0, 1], [4, 4], [0, 1]]}, "top_indices must name each expert of a .*"),
        ({"top_indices": [[0, 1], [4]]}, "top_indices must be a table of numbers"),
        ({"top_indices": [[0.5, 1]] * 3}, r"top_indices .* int64\[3, 2\], .* 'float64\[3, 2\]'"),
        (
            {"top_indices": [[0, 1]] * 4, "num_tokens": 4},
            r"top_indices.shape must be \(3, 2\), .*, got \(4, 2\); trace",
        ),
        ('{"step": 7, "top_in', "must be one JSON object, got .*; .* half line"),
        ("[" * 100_000, "must be one JSON object, got "),
        ("\x00\xff", "must be one JSON object, got "),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    path = tmp_path / "router_trace_rank0.jsonl"
    text = line if isinstance(line, str) else json.dumps(record(**line))
    path.write_text(f"{json.dumps(record())}\n{text}", encoding="latin1")
    with pytest.raises(ValueError, match=rf"router_trace_rank0\.jsonl, line 2:? ?{message}"):
        read(path)


def test_what_megatron_writes(tmp_path):
    router_trace = pytest.importorskip(
        "megatron.core.transformer.moe.router_trace", reason="Megatron-Core 0.19 has it"
    )
    ids_TYK = torch.tensor([[[5, 1], [0, 2]], [[3, 4], [2, 1]], [[0, 5], [4, 3]]])
    tracer = router_trace.RouterTracer(str(tmp_path), 9, rank=1, training_mode=True)
    for step in (40, 41):
        tracer.record_indices(ids_TYK)
        tracer.record_indices([ids_TYK[:, 0]], layer_ids=[0], block="mtp", mtp_idx=0)
        tracer.advance_step(step)
    trace = read(tmp_path)
    assert trace.steps.tolist() == [40] * 3 + [41] * 3
    assert trace.layers.tolist() == [0, 1, 10_000] * 2
    assert trace.ranks.tolist() == [1] * 6
    np.testing.assert_array_equal(trace.ids_NTK[0], ids_TYK[:, 0].sort(1).values)
    np.testing.assert_array_equal(trace.ids_NTK[4], ids_TYK[:, 1].sort(1).values)
