"""Ranks that pass different values all raise the same ValueError, and none waits.

A rank that waits for a call that another does not make raises, too, and names it.

Every function here runs on all ranks of a pool. If the run returns one error per rank, no rank was
left waiting.
"""

import json
import os
import re
import tracemalloc
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from padded_dispatch import DispatchConfig, PaddedDispatcher
from padded_dispatch.exchange import agreement as agreement_module
from padded_dispatch.exchange import mirror as mirror_module
from padded_dispatch.exchange.agreement import Agreement, agree_on_shapes
from padded_dispatch.exchange.mirror import AbsentRanksError
from tests.support.graph_protocol import pretend_capture
from tests.support.pool import WorkerError, WorkerPool
from tests.support.threads import grid, run_on_threads

CONFIG = DispatchConfig(num_experts=4, top_k=2, num_ranks=2, capacity_factor=1.0)


def errors_of(pool: WorkerPool, fn: Any, *args: Any) -> list[str]:
    """Return the messages by rank; all ranks must raise a ValueError, and all workers live on."""
    with pytest.raises(WorkerError) as caught:
        pool.run(fn, *args, timeout_s=30)
    errors = caught.value.errors
    assert {type(error) for error in errors.values()} == {ValueError}
    assert sorted(errors) == list(range(pool.num_workers))
    return [str(errors[rank]) for rank in sorted(errors)]


def _grid_with_another_width_on_rank_3() -> None:
    """Expert-parallel groups {0, 1} and {2, 3}; their experts are split over {0, 2} and {1, 3}."""
    agreement = Agreement(*grid(2, 2)[:2])
    agreement.check(D=8)
    agreement.check(D=9 if dist.get_rank() == 3 else 8)


def test_a_difference_reaches_ranks_that_share_no_group_with_it(pool4):
    for message in errors_of(pool4, _grid_with_another_width_on_rank_3):
        assert "D is 8 on ranks 0-2, 9 on rank 3" in message


def _layers_in_another_order() -> None:
    first, second = Agreement(dist.group.WORLD), Agreement(dist.group.WORLD)
    order = (first, first, second) if dist.get_rank() == 0 else (first, second, first)
    for layer in order:
        layer.check(D=8)


def test_another_order_of_calls_is_seen(pool2):
    for message in errors_of(pool2, _layers_in_another_order):
        assert "call number is 2 on rank 0, 1 on rank 1" in message


class _NoText:
    def __str__(self) -> str:
        raise TypeError("no text")


def _a_call_that_rank_1_tries_twice() -> None:
    agreement = Agreement(dist.group.WORLD)
    if dist.get_rank() == 1:
        with pytest.raises(TypeError, match="no text"):
            agreement.check(D=_NoText())
    agreement.check(D=8)


def test_another_number_of_calls_is_seen(pool2):
    """All else is equal: rank 1's first call broke off before it could compare anything."""
    for message in errors_of(pool2, _a_call_that_rank_1_tries_twice):
        assert "call number is 1 on rank 0, 2 on rank 1" in message


def _other_layers(numbers: list[int | None], chosen: list[int]) -> None:
    """Each rank calls one of two layers, for the first time; they have these numbers on it."""
    group, me = dist.new_group(), dist.get_rank()
    agreements = [Agreement(group), Agreement(group)]
    for agreement in agreements:
        if numbers[me] is not None:
            agreement.name_layer(numbers[me])
    agreements[chosen[me]].check(D=8)


@pytest.mark.parametrize(
    ("numbers", "chosen", "callers"),
    [
        ([None, None], [0, 1], ("dispatcher 1", "dispatcher 2")),
        ([3, 3], [0, 1], ("layer 3 (dispatcher 1)", "layer 3 (dispatcher 2)")),
        ([4, 5], [0, 0], ("layer 4 (dispatcher 1)", "layer 5 (dispatcher 1)")),
        ([None, 1], [0, 0], ("dispatcher 1", "layer 1 (dispatcher 1)")),
    ],
)
def test_another_layer_is_seen(pool2, numbers, chosen, callers):
    words = f"caller is {callers[0]} on rank 0, {callers[1]} on rank 1. "
    for message in errors_of(pool2, _other_layers, numbers, chosen):
        assert message == (
            f"ranks disagree about a padded dispatch: {words}Give every rank the same config and "
            "batches of the same shape."
        )


def _one_more_call(rank: int, device: str = "cpu") -> str:
    """Return the error of the rank that makes a third call, while its peer is in a collective."""
    limit_s = 1.0
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        limit_s = 2.0
    group = dist.new_group()
    config = DispatchConfig(num_experts=4, top_k=4, num_ranks=2)
    with pytest.MonkeyPatch.context() as monkeypatch:
        # NCCL's own watchdog has the group's limit; this wait must end long before.
        monkeypatch.setattr(mirror_module, "time_limit", lambda group: limit_s)
        dispatcher = PaddedDispatcher(config, group=group)
    tokens_TD, probs_TE = torch.ones(3, 8, device=device), torch.ones(3, 4, device=device)
    words = ""
    for _ in range(2):
        dispatcher.dispatch(tokens_TD, probs_TE, probs_TE > 0)
    if dist.get_rank() == rank:
        with pytest.raises(AbsentRanksError) as caught:
            dispatcher.dispatch(tokens_TD, probs_TE, probs_TE > 0)
        words = str(caught.value)
    summed = torch.ones(5, 5, device=device)
    dist.all_reduce(summed, group=group)
    assert (summed == 2).all()
    return words


@pytest.mark.multi_gpu
def test_a_rank_that_waits_beside_nccl_raises(gpu_pools):
    words, nothing = gpu_pools[2].run(_one_more_call, 0, "cuda", timeout_s=120)
    assert nothing == "" and words.startswith(
        "all 2 ranks of the layer must come to call 4 of disp"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_makes_one_more_call_or_one_less(pool2, rank):
    """Gloo would abort the process if the two collectives met in one group."""
    words = pool2.run(_one_more_call, rank, timeout_s=60)
    assert words[1 - rank] == ""
    # The first call of an agreement is that of the exchange's arguments.
    assert words[rank].startswith(
        "all 2 ranks of the layer must come to call 4 of dispatcher 1 within 1 s, got no call from "
        f"rank {1 - rank}; the last call that all made: call 3 of dispatcher 1; "
    )


def _largest_on_a_grid() -> list[int]:
    """Ranks 0 and 1, and 0 and 2, share a group: rank 3 is connected by theirs."""
    with torch.device("meta"):  # As models are built whose weights come later.
        agreement, rank = Agreement(*grid(2, 2)[:2]), dist.get_rank()
        agreement.check(T=5)
    return [agreement.largest(number) for number in (rank, 7 - rank, 5)]


def test_the_largest_number_of_all_connected_ranks(pool4):
    assert pool4.run(_largest_on_a_grid) == [[3, 7, 5]] * 4
    assert Agreement(None).largest(4) == 4


def _breaks_off_before_largest(rank: int) -> str:
    agreement = Agreement(dist.group.WORLD)
    agreement.check(T=5)
    with pytest.raises(ValueError) as error:
        if dist.get_rank() == rank:
            agreement.check(T=6)
        else:
            agreement.largest(3)
    return str(error.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_breaks_off_before_the_largest_number(pool2, rank):
    """Gloo would abort the process if the two gathered rows of other sizes."""
    numbers, sizes = [1, 1], ["absent", "absent"]
    numbers[rank], sizes[rank] = 2, "6"
    differing = [
        f"{name} is {of[0]} on rank 0, {of[1]} on rank 1"
        for name, of in (("call number", numbers), ("T", sizes))
    ]
    words = f"ranks disagree about a padded dispatch: {'; '.join(differing)}. Give every rank"
    assert all(said.startswith(words) for said in pool2.run(_breaks_off_before_largest, rank))


def _absent_from_largest() -> str:
    group = dist.new_group()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(mirror_module, "time_limit", lambda group: 1.0)
        agreement = Agreement(group)
    agreement.check(T=5)
    words = ""
    if dist.get_rank() == 0:
        with pytest.raises(AbsentRanksError) as error:
            agreement.largest(3)
        words = str(error.value)
    dist.barrier()
    return words


def test_a_rank_that_is_absent_from_the_largest_number(pool2):
    words, _ = pool2.run(_absent_from_largest)
    assert words.startswith(
        "all 2 ranks of the layer must come to the largest T of call 1 of dispatcher 1 within 1 s, "
        "got no call from rank 1; the last call that all made: call 1 of dispatcher 1; "
    )


def test_calls_with_ever_new_shapes_leave_little_behind(monkeypatch):
    """T may change from call to call, and there is an agreement for each layer."""
    monkeypatch.setattr(agreement_module, "mirror_of", lambda *_: Mock(num_agreements=0))
    monkeypatch.setattr(Agreement, "_gather", lambda *_: None)
    agreement = Agreement(Mock(**{"size.return_value": 2}))
    rules = tuple((f"rule {number}", number) for number in range(9))

    def call(*numbers: int) -> None:
        for number in range(*numbers):
            agreement.check(rules, T=number, probs_TE=(number, 8))

    call(2000)
    tracemalloc.start()
    try:
        call(2000, 6000)
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert left < 4000 * 300
    with pretend_capture():
        call(0, 6000, 1000)  # All that were compared are remembered.


def test_one_rank_compares_nothing(monkeypatch):
    monkeypatch.setattr(agreement_module, "mirror_of", lambda *_: pytest.fail("made a mirror"))
    agreement = Agreement(None)
    agreement.check((("seed", 1),), T=5)
    agreement.check(T=6)


def _check_in_capture(num_tokens: int) -> None:
    agreement = Agreement(dist.group.WORLD)
    agreement.check(dtype=torch.float32, T=5)
    with pretend_capture():
        agreement.check(dtype=torch.float32, T=num_tokens)


def test_a_capture_accepts_only_shapes_of_an_eager_call(pool2):
    assert pool2.run(_check_in_capture, 5) == [None, None]
    for message in errors_of(pool2, _check_in_capture, 6):
        assert message == (
            "shapes inside a CUDA graph capture must be those of an earlier eager step, got "
            "dtype=torch.float32, T=6; run one eager step with the same shapes before capturing"
        )


def _capture_behind_a_difference() -> None:
    agreement, num_tokens = Agreement(dist.group.WORLD), 5 + dist.get_rank()
    with pytest.raises(ValueError, match="ranks disagree"):
        agreement.check(T=num_tokens)
    with pretend_capture():
        agreement.check(T=num_tokens)


def test_a_capture_refuses_shapes_that_differed(pool2):
    for message in errors_of(pool2, _capture_behind_a_difference):
        assert message.startswith("shapes inside a CUDA graph capture must be those of an earlier")


def test_all_that_decides_a_result_is_compared():
    agreement = Mock(Agreement)
    agree_on_shapes(agreement, CONFIG, torch.zeros(8, 3), (("rule", 7),), layout="padded")
    (rules,), shapes = agreement.check.call_args
    found = {name: str(value) for name, value in (*rules, *shapes.items())}
    assert found == {
        "T": "8",
        "D": "3",
        "dtype": "torch.float32",
        "device": "cpu",
        "layout": "padded",
        "rule": "7",
        "gradients are enabled": "True",
        "pass keeps what backward reads": "True",
        "tokens need gradients": "False",
        "the pass before broke off": "False",
        "config is that of the pass that is recomputed": "True",
        "num_experts": "4",
        "top_k": "2",
        "capacity_factor": "1.0",
        "alignment": "1",
        "capacity_pool": "cells",
        "policy": "probs",
        "num_ranks": "2",
        "etp_size": "1",
    }
    assert json.dumps(found)  # It travels as text.


def test_no_tokens_raise_after_the_comparison():
    agreement = Mock(Agreement)
    with pytest.raises(ValueError, match=r"^num_tokens must be at least 1, got 0; pad the batch"):
        agree_on_shapes(agreement, CONFIG, torch.zeros(0, 3), (), any_tokens=True)
    assert agreement.check.call_args[1]["T"] == 0


def _behind_a_pass_that_broke_off(ranks: tuple[int, ...]) -> list[str]:
    agreement, tokens_TD = Agreement(dist.group.WORLD), torch.zeros(3, 4)
    config = DispatchConfig(num_experts=4, top_k=2, num_ranks=2)
    found = []
    for broke_off in (dist.get_rank() in ranks, False):
        try:
            agree_on_shapes(agreement, config, tokens_TD, (), broke_off=broke_off)
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (
            (0, 1),
            "^the pass before this one must run to its end on all ranks, got",
        ),
        ((1,), "the pass before broke off is False on rank 0, True on rank 1"),
    ],
)
def test_a_pass_that_broke_off_raises_on_all_ranks_and_the_next_one_runs(ranks, words):
    for first, second in run_on_threads(2, _behind_a_pass_that_broke_off, ranks):
        assert re.search(words, first) and second == ""
