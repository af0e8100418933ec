"""Ranks that pass different values all raise the same ValueError, and none waits.

Every function here runs on all ranks of a pool. If the run returns one error per rank, no rank was
left waiting.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from padded_dispatch import DispatchConfig, PaddedDispatcher
from padded_dispatch.config import NO_DROP
from padded_dispatch.exchange.agreement import Agreement, _new_mirror
from padded_dispatch.utils.launch import WorkerError
from tests.support.pool import WorkerPool

SAME = dict(T=5, D=3, E=4, K=2, capacity_factor=1.0, dtype=torch.float32)


def _steps(steps: list[dict[int, dict[str, Any]]]) -> None:
    """One dispatch per step; a step maps a rank to what it changes in `SAME`."""
    for deviations in steps:
        values = SAME | deviations.get(dist.get_rank(), {})
        config = DispatchConfig(
            num_experts=values["E"],
            top_k=values["K"],
            capacity_factor=values["capacity_factor"],
            num_ranks=dist.get_world_size(),
        )
        dispatcher = PaddedDispatcher(config, group=dist.group.WORLD)
        tokens_TD = torch.zeros(values["T"], values["D"], dtype=values["dtype"])
        probs_TE = torch.ones(values["T"], values["E"])
        dispatcher.dispatch(tokens_TD, probs_TE, probs_TE > 0)


def errors_of(pool: WorkerPool, fn: Any, *args: Any) -> list[str]:
    """Return the messages by rank; all ranks must raise a ValueError, and all workers live on."""
    with pytest.raises(WorkerError) as caught:
        pool.run(fn, *args, timeout_s=30)
    errors = caught.value.errors
    assert {type(error) for error in errors.values()} == {ValueError}
    assert sorted(errors) == list(range(pool.num_workers))
    return [str(errors[rank]) for rank in sorted(errors)]


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("T", 6, "T is 5 on rank 0, 6 on rank 1"),
        ("T", 0, "T is 5 on rank 0, 0 on rank 1"),
        ("D", 4, "D is 3 on rank 0, 4 on rank 1"),
        ("E", 8, "E is 4 on rank 0, 8 on rank 1"),
        ("K", 3, "K is 2 on rank 0, 3 on rank 1"),
        ("capacity_factor", 0.5, "C is 3 on rank 0, 2 on rank 1"),
        ("capacity_factor", NO_DROP, "C is 3 on rank 0, 5 on rank 1"),
        ("dtype", torch.float64, "dtype is torch.float32 on rank 0, torch.float64 on rank 1"),
        ("dtype", torch.int32, "dtype is torch.float32 on rank 0, torch.int32 on rank 1"),
    ],
)
def test_one_rank_differs(pool2, step, name, value, words):
    steps = [{}, {1: {name: value}}][2 - step :]
    first, second = errors_of(pool2, _steps, steps)
    assert first == second
    assert first.startswith("ranks disagree about a padded dispatch: ")
    assert words in first
    assert "Give every rank the same config" in first


def test_no_rank_has_tokens(pool2):
    first, second = errors_of(pool2, _steps, [{0: {"T": 0}, 1: {"T": 0}}])
    assert first == second
    assert first.startswith("num_tokens must ")
    assert ", got 0" in first
    assert "pad the batch" in first


def _grid_with_another_width_on_rank_3() -> None:
    """Expert-parallel groups {0, 1} and {2, 3}; their experts are split over {0, 2} and {1, 3}."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    rank = dist.get_rank()
    agreement = Agreement(groups[rank // 2], groups[2 + rank % 2])
    agreement.check(D=8)
    agreement.check(D=9 if rank == 3 else 8)


def test_a_difference_reaches_ranks_that_share_no_group_with_it(pool4):
    for message in errors_of(pool4, _grid_with_another_width_on_rank_3):
        assert "D is 8 on rank 0, 8 on rank 1, 8 on rank 2, 9 on rank 3" in message


def _layers_in_another_order() -> None:
    first, second = Agreement(dist.group.WORLD), Agreement(dist.group.WORLD)
    order = (first, first, second) if dist.get_rank() == 0 else (first, second, first)
    for layer in order:
        layer.check(D=8)


def test_another_order_of_calls_is_seen(pool2):
    for message in errors_of(pool2, _layers_in_another_order):
        assert "call number is 2 on rank 0, 1 on rank 1" in message


def _gather_ranks_through_a_mirror() -> list[int]:
    """Return all ranks, gathered while rank 0 is in one group more than rank 1."""
    dist.new_group([0])
    mirror = _new_mirror(dist.group.WORLD)
    gathered = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    mirror.allgather([gathered], [torch.tensor([dist.get_rank()])]).wait()
    return [int(rank) for rank in gathered]


def test_a_mirror_does_not_depend_on_other_groups(pool2):
    """On GPUs, where the group is NCCL's, each rank makes a gloo mirror of it."""
    ranks = pool2.run(_gather_ranks_through_a_mirror, timeout_s=30)
    assert ranks == [[0, 1], [0, 1]]


def _check_in_capture(num_tokens: int) -> None:
    agreement = Agreement(dist.group.WORLD)
    agreement.check(dtype=torch.float32, T=5)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        agreement.check(dtype=torch.float32, T=num_tokens)


def test_a_capture_accepts_only_shapes_of_an_eager_call(pool2):
    assert pool2.run(_check_in_capture, 5) == [None, None]
    for message in errors_of(pool2, _check_in_capture, 6):
        assert message == (
            "shapes inside a CUDA graph capture must be those of an earlier eager step, got T=6, "
            "dtype=torch.float32; run one eager step with the same shapes before capturing"
        )
