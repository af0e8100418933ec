"""The pass of packed experts on CPUs, and the store's rule; `test_dispatcher.py` has the oracle."""

import math

import numpy as np
import pytest
import torch

from padded_dispatch.experts import Activation, ExpertWeights, Sums, plain
from padded_dispatch.experts.store import Room
from padded_dispatch.kernels import layout
from tests.support import reference
from tests.support.device import equal, here


def test_a_store_by_hand():
    """The examples of the docstrings: 6 rows of 7 overwrite 3 of those before."""
    count_SL, top = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32), torch.tensor([4, 4, 7]).int()
    room = Room(limit=7, max_rows=7, share=1, top=top, first=False)
    found, there_top = plain.store_offsets(count_SL, room), here(torch.tensor([4, 4, 7]).int())
    in_kernel = layout.lay_out(here(count_SL), there_top, first=False, limit=7)
    assert found[0].tolist() == in_kernel.offsets.tolist() == [1, 4, 6, 7, 7]
    assert found[1].tolist() == in_kernel.level.tolist() == [plain.NO_LEVEL]
    assert top.tolist() == there_top.tolist() == [7, 10, 1]
    plain.release(top, found[0], found[2])
    layout.release(there_top, in_kernel.offsets, in_kernel.before)
    assert top.tolist() == there_top.tolist() == [4, 4, 1]
    # In 5 rows each (expert, source) keeps its first two, which fit exactly.
    found = plain.store_offsets(count_SL, Room(limit=5, max_rows=5, share=1))
    in_kernel = layout.lay_out(here(count_SL), None, first=True, limit=5)
    assert found[0].tolist() == in_kernel.offsets.tolist() == [0, 2, 4, 5, 5]
    assert found[1].tolist() == in_kernel.level.tolist() == [2]


def test_rows_are_given_back_in_reverse_order():
    top, count = torch.zeros(3, dtype=torch.int32), torch.tensor([[2]], dtype=torch.int32)
    first = plain.store_offsets(count, Room(limit=9, max_rows=9, share=1, top=top, first=True))
    second = plain.store_offsets(count, Room(limit=9, max_rows=9, share=1, top=top, first=False))
    plain.release(top, first[0], first[2])
    for top_3, offsets in ((top, second[0]), (torch.tensor([4, 9, 9]), torch.tensor([2, 3, 5]))):
        with pytest.raises(RuntimeError, match="given back before their last use"):
            plain.release(top_3, offsets, second[2])


@pytest.mark.parametrize("seed", range(20))
def test_the_rule_is_the_oracle_s_and_the_kernel_s(seed):
    generator = np.random.default_rng(seed)
    sources, experts = generator.integers(1, [9, 18])
    rows = int(generator.integers(1, 200))
    store = reference.Store(rows)
    top = torch.tensor([90, 120, 30], dtype=torch.int32)  # Of a pass that broke off.
    names = "no_room", "num_again", "max_need"
    counted = {name: torch.zeros(1, dtype=torch.int64) for name in names}
    counted["kept_L"] = torch.zeros(int(experts), dtype=torch.int64)
    need_before = 40 * seed  # Of other passes: sometimes more than this one needs.
    counted["max_need"].fill_(need_before)
    there_top, there = here(top.clone()), {name: here(v.clone()) for name, v in counted.items()}
    total_L, asked, passes = np.zeros(experts, int), 0, []
    for layer in range(5):
        count_SL = generator.integers(0, generator.integers(1, 9), (sources, experts))
        level = store.keep(count_SL)
        kept_SL = np.minimum(count_SL, level).astype(int)
        first = layer == 0
        room = Room(limit=rows, max_rows=rows, share=1, top=top, first=first)
        given = torch.from_numpy(count_SL).to(torch.int32)
        found = plain.store_offsets(given, room, **counted)
        in_kernel = layout.lay_out(here(given), there_top, first=first, limit=rows, **there)
        passes.append((found, in_kernel))
        wanted = store.base_Y[-1] + np.concatenate([[0], kept_SL.T.flatten().cumsum()])
        assert found[0].tolist() == wanted.tolist()
        assert found[1].item() == min(level, plain.NO_LEVEL)
        assert top.tolist() == [store.top, sum(store.asked_Y), store.low]
        total_L += kept_SL.sum(0)
        asked += int(count_SL.sum())
        assert counted["kept_L"].tolist() == total_L.tolist()
        assert counted["no_room"].item() == asked - total_L.sum()
        assert counted["max_need"].item() == max(need_before, store.need)
        assert counted["num_again"].item() == sum(store.again_Y)
        kernel = in_kernel.offsets, in_kernel.level, in_kernel.before
        equal(*zip(found, kernel, strict=True), (top, there_top))
        equal(*((value, there[name]) for name, value in counted.items()))
    for (offsets, _, before), in_kernel in reversed(passes):
        plain.release(top, offsets, before)
        layout.release(there_top, in_kernel.offsets, in_kernel.before)
        equal((top, there_top))
    assert top.tolist() == [0, 0, store.low]


def test_gradients_of_a_token_are_summed_in_fp32():
    """256 + 1 + 1 is 258 in bf16 if it is rounded once, and 256 if it is rounded twice."""
    values = torch.ones(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    rows = plain.take(values, torch.tensor([0, 0, 0]))
    rows.backward(torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16))
    assert values.grad.item() == 258
    summed = plain.add(torch.tensor([[256.0], [1.0], [1.0]]).bfloat16(), torch.zeros(3).int(), 1, 1)
    assert summed.dtype == torch.float32 and summed.item() == 258


def test_the_first_gradient_is_stored_and_the_next_one_added():
    """Of the two micro-batches of a step; DDP's buffer holds what the step before left."""
    weight = torch.ones(1, 2, 2, requires_grad=True)
    of_ddp, flags = torch.full((1, 2, 2), 7.0), torch.tensor([1, 0], dtype=torch.int32)
    sums = Sums(sums_LOI=of_ddp, spare_LOI=torch.empty(1, 2, 2), zeroed=flags)
    for factor, wanted in ((2.0, 2.0), (3.0, 5.0)):
        (plain._Weight.apply(weight, sums) * factor).sum().backward()
        assert of_ddp.unique().tolist() == [wanted] and flags[0] == 0


def test_bf16_rounds_once():
    """In bf16 1 + 2**-9 is 1, and so is its square; fp32 holds the sum, whose square rounds up."""
    fc1_NG, bias_G = torch.tensor([[1.0]]).bfloat16(), torch.tensor([2.0**-9]).bfloat16()
    square = Activation(function="squared_relu", gated=False)
    out = plain.activate(fc1_NG, torch.tensor([1.0]), square, bias_G)
    assert out.dtype == torch.bfloat16 and out.item() == 1.0 + 2.0**-7  # (1 + 2**-9)**2 = 1.0039
    # Of a whole expert fc1's result is rounded, so its square is 1; fc2's product, 1 + 2**-9, is
    # not before 2**-8 is added.
    weight, bias = torch.tensor([[[1.0, 2.0**-9]] * 2]).bfloat16(), torch.tensor([[0.0, 2.0**-8]])
    weights = ExpertWeights(fc1_LGD=weight, fc2_LDF=weight, fc2_bias_LD=bias.bfloat16())
    out = plain._experts(torch.ones(1, 2).bfloat16(), torch.ones(1), [1], weights, square)
    assert out.dtype == torch.bfloat16 and out.tolist() == [[1.0, 1.0 + 2.0**-7]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"function": "relu"}, "function must be one of silu, .*, got 'relu'$"),
        ({"clamp": 0.0}, r"clamp must be a number above 0, got 0\.0$"),
        ({"clamp": math.nan}, "clamp must be a number above 0, got nan$"),
        ({"clamp": "7"}, "clamp must be a number above 0, got '7'$"),
        ({"offset": math.nan}, "offset must be a finite number, got nan$"),
        ({"offset": "1"}, "offset must be a finite number, got '1'$"),
        ({"gated": None}, "gated must be True or False, got None$"),
        ({"gated": False, "clamp": 7.0}, r"gated must be True with clamp=7\.0 .* got False; leave"),
        ({"gated": False, "offset": 1.0}, r"gated must be True with .* offset=1\.0, got False"),
    ],
)
def test_wrong_values_are_refused(wrong, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Activation(**wrong)
