"""Ranks of whole jobs, as threads of one process, start the same collectives in every situation."""

import pytest
import torch
import torch.distributed as dist

from tests.support.collectives import recorded
from tests.support.many_ranks import World, train
from tests.support.threads import run_on_threads


def test_all_ranks_of_a_job_start_the_same_collectives():
    world = World(ep=4, etp=2)
    records, steps = train(world, seed=6, num_steps=5)
    assert steps == (4, 1)
    assert records.differing() == []
    assert records.differing_orders(list(range(8))) == []
    started = {(name, len(group)) for name, group, _ in records.of_rank[0]}
    assert started >= {("all_to_all_single", 4), ("all_gather_single", 2), ("allreduce", 8)}
    assert ("reduce_scatter_single", 2) in started


def _one_differs(how: str) -> None:
    dist.all_reduce(torch.zeros(2))
    if dist.get_rank() < 2 or how == "size":
        dist.all_reduce(torch.zeros(2 + dist.get_rank() // 2))
    elif how == "collective":
        dist.barrier()


@pytest.mark.parametrize(
    ("how", "started", "error"),
    [
        ("size", "[('allreduce', (0, 1, 2), ((torch.float32, torch.Size([3])),))]", "equal size"),
        (
            "collective",
            "[('barrier', (0, 1, 2), ())]",
            "rank 0 started allreduce, ranks [2] barrier",
        ),
        ("nothing", "[]", "no rank is left that could join those that wait: ['[0, 1] in allreduce"),
    ],
)
def test_a_rank_that_starts_another_collective_is_found(how, started, error):
    with recorded(3) as records, pytest.raises(RuntimeError) as raised:
        run_on_threads(3, _one_differs, how)
    assert error in str(raised.value.__cause__)
    line = records.differing()[-1]
    assert line.startswith(f"collective 1 in group of 3: rank 2 started {started}, rank 0 [('allre")
