"""Traces of models in which not all ranks have layers, or layers are captured."""

import pytest
from torch import nn

from padded_dispatch.megatron.megatron_lm import record_routing
from tests.megatron.test_telemetry import T, model
from tests.support import tiny

SIZES = {
    "num_microbatches": 1,
    "num_tokens": T,
    "every": 1,
    "steps_done": 0,
    "num_steps": 3,
    "max_bytes": 2**20,
}


def test_a_rank_without_layers_writes_nothing(tmp_path):
    with tiny.one_process():
        assert record_routing([nn.Linear(2, 2)], tmp_path / "traces", **SIZES) is None
    assert not (tmp_path / "traces").exists()


def test_captured_layers_are_refused(tmp_path):
    with tiny.one_process():
        chunk = model(1)
        chunk[0].cuda_graphs = ["a graph"]
        with pytest.raises(ValueError, match=r"^trace must start before layers are captured"):
            record_routing([chunk], tmp_path, **SIZES)
