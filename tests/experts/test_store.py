"""Stacks of a store: which one a call takes, where its rows may lie, and when they end."""

import copy
from typing import Any

import torch
from torch import Tensor

from padded_dispatch.config import FIT, NO_DROP, DispatchConfig
from padded_dispatch.experts import store as module
from padded_dispatch.experts.store import Room, Store, fitting, scratch
from padded_dispatch.memory import row_bytes

COUNT = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)


def config(factor: Any = 1.5, **changes: int) -> DispatchConfig:
    sizes = {"num_experts": 8, "top_k": 2, "num_ranks": 4, **changes}
    return DispatchConfig(capacity_factor=factor, capacity_pool="store", **sizes)


def make_store(*factors: float, **changes: int) -> Store:
    store = Store()
    for number, factor in enumerate(factors):
        assert store.add(lambda factor=factor: config(factor, **changes)) == number
    return store


def take(store: Store, *numbers: int, num_tokens: int = 10) -> Room:
    return store.take(numbers, num_tokens, COUNT)


def test_sizes():
    """Balanced: 10 tokens with 2 experts each are 20 rows on each of 4 ranks."""
    store = make_store(1.5, 0.5, 2.5)
    assert store.sizes(10).num_rows == 30 + 10 + 50
    assert store.num_shares(10) == 60
    store.add(lambda: config(FIT))  # It keeps no rows here.
    assert store.sizes(10).num_rows == 90
    rooms = [take(store, number) for number in range(3)]
    # All tokens of 4 ranks may have both experts here: 80 rows.
    assert {(room.limit, room.max_rows) for room in rooms} == {(90, 80)}
    assert [room.overwritten for room in rooms] == [True, True, False]  # Nothing follows the last.
    # Of 243 rows calls of 80 begin at 163 or behind, where two of them have ended.
    rooms = [take(make_store(*[4.0] * 3 + [0.0001] * 3), number) for number in range(6)]
    assert [room.overwritten for room in rooms] == [False, False, True, True, True, False]
    assert make_store(0.5, 1.0).sizes(10).num_rows == 80  # At least those of a layer,
    room = take(make_store(0.5), 0)  # which is all where there is one.
    assert (room.limit, room.max_rows, room.overwritten) == (80, 80, False)
    assert not take(make_store(4.0, 4.0), 0).overwritten  # Both fit, just.
    assert take(make_store(1.0, FIT, 1.0), 0).overwritten  # Not by the next, which keeps no rows.


def test_a_layer_without_a_limit_makes_room_for_others():
    store = make_store(1.0, NO_DROP, num_ranks=16, num_experts=32)
    rooms = [take(store, number) for number in range(2)]
    assert {(room.limit, room.max_rows) for room in rooms} == {(320, 320)}  # Not 5 * 20.


def test_most_rows_of_a_pass_are_five_shares_or_the_store():
    sizes = {"num_ranks": 32, "num_experts": 64}
    assert take(make_store(1.0, **sizes), 0).max_rows == 100  # Not 32 * 10 * 2.
    assert scratch(config(1.0, **sizes), 10, COUNT).limit == 100


def test_a_copy_has_stacks_of_its_own():
    store = make_store(1, 1)
    room = take(store, 0)
    copied = copy.deepcopy(store)
    other = take(copied, 0)
    assert copied._stacks == [other.stack] and store._stacks == [room.stack] != copied._stacks
    assert (other.first, take(store, 1).stack) == (True, room.stack)


def test_configs_are_asked_for_once_a_pass():
    store, asked = Store(), []
    for number in range(3):
        store.add(lambda number=number: asked.append(number) or config())
    rooms = [take(store, number) for number in range(3)]
    assert asked == [0, 1, 2]
    assert [room.limit for room in rooms] == [90, 90, 90]


def test_forward_passes_beside_backward_passes_of_another_micro_batch():
    """As in 1F1B: what is left of the early pass is never taken for the late one's."""
    store = make_store(1, 1, 1)
    early = [take(store, number) for number in range(3)]
    late = take(store, 0)
    early[2].close()
    early[1].close()
    later = take(store, 1)
    early[0].close()
    assert take(store, 2).stack is later.stack is late.stack


def test_backward_in_another_order_leaves_the_rows_of_calls_behind():
    """Where calls may overwrite rows, backward would compute some again over those in use."""
    store = make_store(4, 4, 4)
    rooms = [take(store, number) for number in range(3)]
    assert [room.gives_back() for room in rooms] == [False, False, True]
    del rooms[1]
    rooms[1].close()
    # Rows of the second lie below `top` still, so no call follows there.
    assert rooms[0].gives_back() and take(store, 1).stack is not rooms[0].stack
    assert rooms[0].gives_back() and not scratch(config(), 10, COUNT).gives_back()
    full = make_store(1, 1)
    first, second = take(full, 0), take(full, 1)
    assert first.overwritten and not first.gives_back()
    assert second.gives_back()


def test_no_call_follows_one_that_broke_off():
    """Its rows would lie behind rows of the dead, farther than those of the calls before it."""
    store = make_store(1, 1, 1)
    early, broken = take(store, 0), take(store, 1).stack
    room = take(store, 1)
    assert room.first and room.stack is not early.stack is broken
    assert take(store, 2).stack is room.stack


def test_a_layer_that_runs_repeatedly():
    store = make_store(1, 1, 1)
    first, again, more = take(store, 0), take(store, 1, 2), take(store, 1, 2)
    assert first.stack is again.stack is more.stack
    numbers = [room.number for room in (first, again, more)]
    assert numbers == [0, 1, 2]


def test_more_tokens_than_before():
    store = make_store(1)
    small = take(store, 0, num_tokens=10)
    small.close()
    large = take(store, 0, num_tokens=11)
    assert large.stack is not small.stack
    assert large.stack.num_rows == 88
    assert store._stacks == [large.stack]
    large.close()
    again = take(store, 0, num_tokens=10)
    assert again.stack is large.stack and again.limit == 80


def test_a_call_with_other_tokens_than_the_pass():
    store = make_store(1, 1)
    rooms = take(store, 0), take(store, 1, num_tokens=20), take(store, 1)
    assert [room.stack is rooms[0].stack for room in rooms] == [True, False, True]
    assert [room.max_rows for room in rooms] == [80, 160, 80]
    store.add(config)  # While a pass runs that began without it.
    assert take(store, 2).stack is not rooms[0].stack


def test_calls_on_another_device_have_other_stacks():
    """As where a model is tried on a CPU before it moves."""
    store, there = make_store(1, 1), COUNT.to("meta")
    room, moved = take(store, 0), store.take([1], 10, there)
    assert moved.first and moved.top.device == there.device
    moved.close()
    room.close()
    again = store.take([0], 10, there)
    assert again.stack is moved.stack and store._stacks == [moved.stack]


def test_buffers_are_made_once_for_each_shape():
    store = make_store(1)
    room = take(store, 0)
    like = torch.empty(0, dtype=torch.bfloat16)
    found = room.buffers(7, 6, like)
    assert room.buffers(9, 6, like) is found
    assert found.fc1_MG.shape == (80, 6)
    tensors: list[Tensor] = list(vars(found).values())
    assert sum(tensor.nbytes for tensor in tensors) == 80 * row_bytes(6, 2)
    assert room.buffers(7, 8, like) is not found
    assert room.buffers(7, 6, like.float()).fc1_MG.dtype == torch.float32


def test_scratch_and_fitting():
    room = scratch(config(1.5), 10, COUNT)
    assert room.top is room.stack is None
    assert (room.limit, room.max_rows, room.share) == (80, 80, 20)
    room = fitting(COUNT)
    assert (room.top, room.stack, room.limit, room.max_rows, room.share) == (None, None, 6, 6, 6)
    assert fitting(COUNT * 0).limit == 1


def test_a_capture_prefers_stacks_of_captures(monkeypatch):
    store, stacks = make_store(1, 1), []

    def capturing(captures: bool) -> None:
        monkeypatch.setattr(module, "is_capturing", lambda: captures)

    for captures in (True, False, True):
        capturing(captures)
        room = take(store, 0)
        # No call of the other kind follows there.
        capturing(not captures)
        assert take(store, 1).stack is not room.stack
        stacks.append(room.stack)
        room.close()
    assert stacks[0] is stacks[2] is not stacks[1]
    # A graph keeps a stack that is too small for a later one, and eager passes leave theirs.
    capturing(True)
    larger = take(store, 0, num_tokens=20).stack
    assert larger is not None and stacks[0] in store._stacks
    store = make_store(1)
    capturing(False)
    room = take(store, 0)
    room.close()
    capturing(True)
    assert take(store, 0).stack is room.stack


def test_release_frees_what_has_no_rows():
    store = make_store(1)
    room, other = take(store, 0), take(store, 0)
    other.close()
    store.release(captured=True)
    assert take(store, 0).stack is other.stack
    store.release(captured=False)
    assert store._stacks == [room.stack]
    later = take(store, 0)
    assert later.stack not in (room.stack, other.stack)
    assert later.first
