"""Which layers share a store, by their numbers and configs."""

from types import SimpleNamespace
from typing import Any

import pytest

from padded_dispatch import DispatchConfig, Store
from padded_dispatch.megatron.chunks import Chunk, join
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("one_process")

Joined = tuple[Chunk, list[int]]

BLOCK = {"recompute_granularity": "full", "recompute_method": "block"}
DISPATCH = DispatchConfig(num_experts=4, top_k=2, capacity_factor=1.5, capacity_pool="store")


def changed(**settings: Any) -> Any:
    """A config with settings that Megatron would want more ranks for."""
    return tiny.config(num_layers=8, later=settings)


def joined(config: Any, numbers: list[int], rank: int = 0, group: Any = None) -> list[Joined]:
    pipeline = SimpleNamespace(rank=lambda: rank)
    return [join(config, number, lambda: DISPATCH, pipeline, group) for number in numbers]


def calls_of(joined: list[Joined]) -> list[list[int]]:
    return [numbers for _, numbers in joined]


def stores_of(joined: list[Joined]) -> list[Store]:
    return [chunk.store for chunk, _ in joined]


def test_layers_of_a_model_share_a_store():
    first, second, third = stores_of(layers := joined(changed(), [1, 2, 5]))
    assert first is second is third
    assert calls_of(layers) == [[0], [1], [2]]
    assert first.sizes(10).num_rows == 3 * 20  # As many as one rank ever has.


def test_a_number_that_does_not_rise_begins_another_model():
    config = changed()
    first, second, third, fourth = stores_of(joined(config, [1, 2, 1, 2]))
    assert first is second is not third is fourth
    one, another = stores_of(joined(config, [1, 1]))
    assert one is not another


def test_other_configs_and_groups_have_other_stores():
    calls = [*joined(config := changed(), [1]), *joined(changed(), [2]), *joined(config, [3])]
    calls += joined(config, [4], 0, "group")
    assert len(set(map(id, stores_of(calls)))) == 4


def test_a_store_ends_with_its_layers():
    config = changed()
    calls = joined(config, [1])
    (first,) = stores_of(calls)
    del calls
    # A stage may begin with multi-token prediction, which has no layer before it.
    assert join(config, 9, lambda: DISPATCH, name="mtp.layers.0.layers.0.mlp")[1] == [0]
    later = joined(config, [2])
    assert stores_of(later) != [first] and calls_of(later) == [[0]]


@pytest.mark.parametrize(
    ("rank", "numbers", "stores"),
    [(0, [1, 2, 5, 6], [0, 0, 1, 1]), (1, [3, 4, 7, 8], [0, 0, 1, 1])],
)
def test_virtual_stages_have_stores_of_their_own(rank, numbers, stores):
    config = changed(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    found = stores_of(layers := joined(config, numbers, rank))
    distinct = list(dict.fromkeys(found))
    assert len(layers) == 4 and [distinct.index(store) for store in found] == stores


def test_stages_of_a_pattern_may_begin_before_their_share():
    config = changed(pipeline_model_parallel_size=2)
    first, *others = stores_of(joined(config, [3, 5, 6], rank=1))
    assert others == [first, first]


def test_a_layer_that_is_repeated_has_several_calls():
    """Multi-token prediction follows the last layer; parts of a sequence come one by one."""
    config = changed(mtp_num_layers=3, mtp_use_repeated_layer=True)
    assert calls_of(joined(config, [8, 9])) == [[0], [1, 2, 3]]
    assert calls_of(joined(changed(mlp_chunks_for_training=2), [1, 2])) == [[0, 1], [2, 3]]


def test_a_stages_last_layer_is_as_far_from_its_first_as_in_other_stages():
    config = changed(pipeline_model_parallel_size=2, recompute_num_layers=4, **BLOCK)
    assert calls_of(joined(config, [5, 6, 7, 8], rank=1)) == [[], [], [], []]
    config = changed(recompute_num_layers=2, **BLOCK)  # Of one stage.
    assert calls_of(joined(config, [1, 2, 3])) == [[], [], [0]]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        (BLOCK | {"recompute_num_layers": 2}, [[], [], [0]]),
        (BLOCK | {"recompute_method": "uniform"}, [[], [], []]),
        (tiny.RECOMPUTE, [[], [], []]),
        (tiny.RECOMPUTE | {"cuda_graph_impl": "local"}, [[0], [1], [2]]),  # Megatron does not.
        (tiny.RECOMPUTE | {"recompute_modules": ["core_attn"]}, [[0], [1], [2]]),
    ],
    ids=["block", "uniform", "moe", "local", "mlp"],
)
def test_layers_that_are_always_recomputed_have_no_room(settings, calls, rank):
    config = changed(pipeline_model_parallel_size=2, **settings)
    first = 4 * rank + 1
    assert calls_of(joined(config, [first, first + 1, first + 2], rank)) == calls
