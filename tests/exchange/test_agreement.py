"""A disagreement between ranks is the same ValueError on all of them, never a wait.

Every function here runs on all ranks of a pool. That a run in which all ranks raised comes back at
all, with one error per rank, shows that nobody was left waiting.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from padded_dispatch import DispatchConfig, PaddedDispatcher
from padded_dispatch.exchange.agreement import Agreement, _new_mirror
from padded_dispatch.utils.launch import WorkerError, WorkerPool

SAME = dict(T=5, D=3, E=4, K=2, capacity_factor=1.0, dtype=torch.float32)


def _steps(steps: list[dict[int, dict[str, Any]]]) -> None:
    """One dispatch per step; a step gives each rank its deviations from `SAME`."""
    for deviations in steps:
        facts = SAME | deviations.get(dist.get_rank(), {})
        config = DispatchConfig(
            num_experts=facts["E"],
            top_k=facts["K"],
            capacity_factor=facts["capacity_factor"],
            num_ranks=dist.get_world_size(),
        )
        dispatcher = PaddedDispatcher(config, group=dist.group.WORLD)
        tokens_TD = torch.zeros(facts["T"], facts["D"], dtype=facts["dtype"])
        probs_TE = torch.ones(facts["T"], facts["E"])
        dispatcher.dispatch(tokens_TD, probs_TE, probs_TE > 0)


def errors_of(pool: WorkerPool, fn: Any, *args: Any) -> list[str]:
    """Messages by rank; all ranks must raise a ValueError, and all workers live on."""
    with pytest.raises(WorkerError) as caught:
        pool.run(fn, *args, timeout_s=30)
    errors = caught.value.errors
    assert {type(error) for error in errors.values()} == {ValueError}
    assert sorted(errors) == list(range(pool.num_workers))
    return [str(errors[rank]) for rank in sorted(errors)]


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(
    ("fact", "value", "words"),
    [
        ("T", 6, "T is 5 on rank 0, 6 on rank 1"),
        ("T", 0, "T is 5 on rank 0, 0 on rank 1"),
        ("D", 4, "D is 3 on rank 0, 4 on rank 1"),
        ("E", 8, "E is 4 on rank 0, 8 on rank 1"),
        ("K", 3, "K is 2 on rank 0, 3 on rank 1"),
        ("capacity_factor", 0.5, "C is 3 on rank 0, 2 on rank 1"),
        ("capacity_factor", None, "C is 3 on rank 0, 5 on rank 1"),
        ("dtype", torch.float64, "dtype is torch.float32 on rank 0, torch.float64 on rank 1"),
        ("dtype", torch.int32, "dtype is torch.float32 on rank 0, torch.int32 on rank 1"),
    ],
)
def test_one_rank_differs(pool2, step, fact, value, words):
    steps = [{}, {1: {fact: value}}][2 - step :]
    first, second = errors_of(pool2, _steps, steps)
    assert first == second
    assert first.startswith("ranks disagree about a padded dispatch: ")
    assert words in first
    assert "Give every rank the same config" in first


def test_no_rank_has_tokens(pool2):
    first, second = errors_of(pool2, _steps, [{0: {"T": 0}, 1: {"T": 0}}])
    assert first == second
    assert first.startswith("num_tokens=0 is not possible: ")


def _grid_with_another_width_on_rank_3() -> None:
    """Expert-parallel groups {0, 1} and {2, 3}; their experts are split over {0, 2} and {1, 3}."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    rank = dist.get_rank()
    agreement = Agreement(groups[rank // 2], groups[2 + rank % 2])
    agreement.check(dtype=torch.float32, D=8)
    agreement.check(dtype=torch.float32, D=9 if rank == 3 else 8)


def test_a_difference_reaches_ranks_that_share_no_group_with_it(pool4):
    for message in errors_of(pool4, _grid_with_another_width_on_rank_3):
        assert "D is 8 on rank 0, 8 on rank 1, 8 on rank 2, 9 on rank 3" in message


def _layers_in_another_order() -> None:
    first, second = Agreement(dist.group.WORLD), Agreement(dist.group.WORLD)
    order = (first, first, second) if dist.get_rank() == 0 else (first, second, first)
    for layer in order:
        layer.check(dtype=torch.float32, D=8)


def test_another_order_of_calls_is_seen(pool2):
    for message in errors_of(pool2, _layers_in_another_order):
        assert "call number is 2 on rank 0, 1 on rank 1" in message


def _twins_of_ranks_with_different_numbers_of_groups() -> list[int]:
    """Rank 0 is in one group more than rank 1."""
    dist.new_group([0])
    mirror = _new_mirror(dist.group.WORLD)
    everyone = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    mirror.allgather([everyone], [torch.tensor([dist.get_rank()])]).wait()
    return [int(rank) for rank in everyone]


def test_a_twin_does_not_depend_on_other_groups(pool2):
    """Where the data's group is not gloo itself, as on GPUs, a mirror is made of it."""
    ranks = pool2.run(_twins_of_ranks_with_different_numbers_of_groups, timeout_s=30)
    assert ranks == [[0, 1], [0, 1]]


def _check_in_capture(num_tokens: int) -> None:
    agreement = Agreement(dist.group.WORLD)
    agreement.check(dtype=torch.float32, T=5)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        agreement.check(dtype=torch.float32, T=num_tokens)


def test_in_a_capture_only_what_was_agreed_on_passes(pool2):
    assert pool2.run(_check_in_capture, 5) == [None, None]
    for message in errors_of(pool2, _check_in_capture, 6):
        assert message == (
            "T=6, dtype=torch.float32 is first seen inside a CUDA graph capture: run one eager "
            "step with the same shapes before capturing"
        )
