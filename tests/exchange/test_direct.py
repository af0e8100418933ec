"""Direct writes on threads as ranks, with the kernels of a GPU in Triton's interpreter.

See `tests.support.direct_parity` for payloads, and `tests.support.threads`. Memory is NaN
before it is written.
"""

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from padded_dispatch.exchange import symmetric_memory
from padded_dispatch.exchange.symmetric_memory import Shape, buffers_for
from padded_dispatch.kernels import direct as kernels
from padded_dispatch.kernels import gemm, rows
from tests.support.device import INTERPRETED
from tests.support.direct_parity import Layer, differences, expected, forward, make_inputs
from tests.support.graph_protocol import pretend_capture
from tests.support.machines import ranks_on
from tests.support.threads import ThreadMemory, run_on_threads, threads_as_ranks

CPU = torch.device("cpu")
# The interpreter multiplies the bits of bf16.
SMALL = Layer(tokens=3, width=8, top_k=2, local_experts=2, dtype=torch.float16)
WIDE = dataclasses.replace(SMALL, tokens=5, width=16, top_k=3, local_experts=3)

pytestmark = INTERPRETED


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with threads_as_ranks():
        yield


def _direct(layers: list[Layer]) -> tuple[list[str], int]:
    """Run all forward passes, then all backward passes; return what differs, and barriers."""
    exchanges = [layer.direct(CPU) for layer in layers]
    inputs = [make_inputs(layer, "uniform", seed, CPU) for seed, layer in enumerate(layers)]
    waiting = [forward(*one) for one in zip(exchanges, layers, inputs, strict=True)]
    found = []
    for backward, layer, given in zip(waiting, layers, inputs, strict=True):
        found += differences(backward(), expected(layer, given))
    return found, ThreadMemory.num_barriers[dist.get_rank()]


def test_layers_of_different_shapes_share_memory(caplog):
    layers = [SMALL, WIDE, SMALL, WIDE]
    with caplog.at_level("INFO", "padded_dispatch"):
        assert run_on_threads(2, _direct, layers) == [([], 16)] * 2
    # One line of the job for each allocation.
    line = "direct exchange: 0.00 GiB on each of 2 ranks, shared by all layers, for"
    assert caplog.messages == [f"{line} 3 tokens", f"{line} 5 tokens"]


def _different_tokens() -> list[str]:
    layer = dataclasses.replace(SMALL, tokens=dist.get_rank() + 2, slots=5)
    return _direct([layer])[0]


def test_ranks_may_have_different_numbers_of_tokens():
    assert run_on_threads(4, _different_tokens) == [[]] * 4


@pytest.mark.parametrize("machines", ["aabb", "abba", "aabbcc"])
def test_direct_stores_inside_of_hosts(machines):
    layer = dataclasses.replace(SMALL, machines=machines)
    wide = dataclasses.replace(WIDE, machines=machines)
    layers = [layer, wide, dataclasses.replace(wide, sends_again=True)]
    with ranks_on(machines):
        found = run_on_threads(len(machines), _direct, layers)
    # Barriers are of the ranks of a host.
    assert found == [([], 12)] * len(machines)


# Buffers.


def _shape(num_slots: int, **changes: Any) -> Shape:
    given = dict(num_slots=num_slots, top_k=2, num_local_experts=2, width=8)
    return Shape(**given | {"dtype": torch.bfloat16} | changes)


def _memories() -> list[list[int]]:
    """Return the bytes that this rank holds after each shape: of arrivals, of what comes home."""
    group, found = dist.group.WORLD, []
    for shape in (_shape(256), _shape(100), _shape(300), _shape(256), _shape(256, top_k=1)):
        buffers = buffers_for(group, shape, torch.device("cpu"))
        assert buffers.rows_SPD.shape == (1, shape.num_slots, 8)
        assert buffers.home_QD.shape == (shape.num_slots * shape.top_k, 8)
        shared = symmetric_memory.shared_memory(group)
        found.append([memory.num_bytes for memory in (*shared.arriving, *shared.coming)])
    return found


def test_layers_share_memory_and_a_larger_shape_gets_more():
    # 256 slots: 8 columns of the other source, 3 numbers for each choice of both, counts; 512 rows
    # of 8 columns, and numbers.
    arriving, coming = 256 * (16 + 2 * 3 * 8) + 256, 512 * 16 + 512 * 4
    grown = [arriving, arriving * 3 // 2 + 128, coming, coming * 3 // 2]
    for found in run_on_threads(2, _memories):
        assert found == [[arriving, coming]] * 2 + [grown] * 3


def _does_not_fit() -> str:
    with pytest.raises(ValueError) as refused:
        buffers_for(dist.group.WORLD, _shape(2**16, width=2**10), torch.device("cpu"))
    return str(refused.value)


def _does_not_fit_inside_of_a_host() -> str:
    layer = dataclasses.replace(SMALL, machines="aabb")
    with pytest.raises(ValueError) as refused:
        forward(layer.direct(CPU), layer, make_inputs(layer, "uniform", 0, CPU))
    return str(refused.value)


def test_buffers_that_do_not_fit_are_refused_on_all_ranks():
    """Of all hosts, if they do not fit on one rank of one."""
    free = lambda device: 2 ** (40 - 12 * dist.get_rank())  # noqa: E731
    with patch.object(symmetric_memory, "_free_bytes", free):
        for message in run_on_threads(2, _does_not_fit):
            assert message.startswith("the buffers of exchange='direct' must fit on every rank")
            assert "got 0.38 GiB for Shape(num_slots=65536, " in message
            assert "0.25 GiB free; lower the number of tokens per rank, or set" in message
        with ranks_on("aabb"):
            found = run_on_threads(4, _does_not_fit_inside_of_a_host)
    assert len({*found}) == 1 and "a rank with 0.00 GiB free; lower" in found[0]


def test_a_new_shape_in_a_capture_is_refused():
    words = r"must exist before .* one eager step with the same shap"
    with pretend_capture(), pytest.raises(ValueError, match=words):
        buffers_for(dist.ProcessGroup(0, 1), _shape(1), torch.device("cpu"))


# A pass that breaks off.


# In a push, behind it, and in the product that stores rows at home; the one that fails, by rank.
STEPS = (kernels, "push"), (rows, "spread_rows"), (gemm, "rows_times_weights")
_failing = threading.local()


def _may_fail(module: Any, name: str) -> Any:
    step = getattr(module, name)

    def run(*args: Any, **given: Any) -> Any:
        if getattr(_failing, "name", "") == name:
            raise MemoryError
        return step(*args, **given)

    return patch.object(module, name, run)


def _broke_off(layer: Layer) -> list[bool]:
    """Return the answers behind a whole pass, behind those without a return, and once more."""
    exchange, inputs, found = layer.direct(CPU), make_inputs(layer, "uniform", 0, CPU), []
    for _, name in STEPS:
        backward = forward(exchange, layer, inputs)
        found.append(exchange.broke_off())
        _failing.name = name
        with pytest.raises(MemoryError):
            backward()
        _failing.name = ""
        other = layer.direct(CPU)  # Of another layer: they share the memory.
        with pretend_capture():
            found.append(other.broke_off())
        found += [other.broke_off(), exchange.broke_off()]
    forward(exchange, layer, inputs)()
    return [*found, exchange.broke_off()]


@pytest.mark.parametrize("machines", ["", "abba"])
def test_a_push_without_its_return_is_told_once(machines):
    """Also one inside of a host, behind what a rail has brought."""
    ranks = len(machines) or 2
    with ranks_on(machines), ExitStack() as steps:
        for step in STEPS:
            steps.enter_context(_may_fail(*step))
        layer = dataclasses.replace(SMALL, machines=machines)
        found = run_on_threads(ranks, _broke_off, layer)
    assert found == [[False, False, True, False] * 3 + [False]] * ranks
