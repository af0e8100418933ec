"""Snapshots equal a count on the host, over all ranks, layers and stages, each counted once."""

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from padded_dispatch.config import NO_DROP
from padded_dispatch.megatron import LayerGraphs, Passes, StepHooks, steps
from padded_dispatch.megatron.record import record_routing
from padded_dispatch.megatron.retry import Retry
from padded_dispatch.megatron.telemetry import scalars
from tests.support import parity, tiny

pytestmark = pytest.mark.usefixtures("one_process")

E, T = tiny.NUM_EXPERTS, 13


def model(*numbers: int | None, **settings: Any) -> Any:
    """Build a chunk with one layer per number; `settings` are fields of the config or options.

    A layer with None has no number, as one that no transformer layer surrounds.
    """
    default = {"eval_factor": NO_DROP, "experts": "module"}
    config = tiny.config(moe_expert_capacity_factor=0.5, **default | settings)
    chunk: Any = nn.Sequential()
    for number in numbers:
        layer = tiny.layer(config, number or 1, padded=True)
        if number is None:
            layer.layer_number = layer.router.layer_number = None
        chunk.append(layer)
    chunk.config = config
    return chunk


class HostCount:
    def __init__(self) -> None:
        self.demand_E = np.zeros(E, dtype=np.int64)
        self.kept_E = np.zeros(E, dtype=np.int64)
        self.largest = 0

    def observe(self, asked_TE, probs_TE, selection):
        demand_E = asked_TE.numpy().sum(0)
        self.demand_E += demand_E
        self.kept_E += np.minimum(demand_E, selection.capacity)
        self.largest = max(self.largest, int(demand_E.max()))


def watch(layer: Any) -> HostCount:
    count = HostCount()
    layer.token_dispatcher.observers.append(count)
    return count


def run(layer: Any, seed: int, *, training: bool = True) -> None:
    layer.train(training)
    with torch.set_grad_enabled(training):
        layer(tiny.tokens(T, seed=seed))


def test_snapshots_come_one_step_after_each_read_was_started():
    """Reads start in the first step, which a run should not wait for, and in steps 3, 6 and 9.

    The last one is pending when a pass later all counts are asked for.
    """
    chunk = model(1)
    counts = watch(chunk[0])
    hooks = StepHooks([model(), chunk], every=3)  # The first stage may be empty.
    found = {}
    for step in range(1, 10):
        run(chunk[0], step)
        found[step] = hooks.after_step()
    run(chunk[0], 10)
    found[10] = hooks.read()
    found = {step: snapshots for step, snapshots in found.items() if snapshots is not None}
    ends = {step: (one.step, one.num_steps) for step, one in found.items()}
    assert ends == {2: (1, 1), 4: (3, 2), 7: (6, 3), 10: (9, 3)}
    parts = [snapshots.training for snapshots in found.values()]
    assert [int(part.counts["num_passes"][0]) for part in parts] == [1, 2, 3, 4]
    assert sum(part.counts["demand_E"][0] for part in parts).tolist() == counts.demand_E.tolist()
    assert sum(part.counts["kept_E"][0] for part in parts).tolist() == counts.kept_E.tolist()
    assert max(int(part.max_need_Y[0]) for part in parts) == counts.largest


def overflowing(numbers: tuple[int, ...] = (1, 2), **options: Any) -> tuple[Any, StepHooks]:
    """Return a chunk whose layer 2 drops more than the others, and its hooks."""
    chunk = model(*numbers, **options)
    for layer in chunk:
        if layer.layer_number == 2:  # All tokens choose experts 0 and 1: 26 rows for 8 slots.
            tiny.ask_for(layer, 0, 1)
    return chunk, StepHooks([chunk], every=2)


def passes(chunk: Any) -> None:
    for layer in chunk:
        layer.train()(torch.cat([torch.ones(T, 1, 1), torch.randn(T, 1, tiny.HIDDEN - 1)], -1))


def test_drops_are_said_in_words_and_more_and_more_rarely(caplog):
    chunk, hooks = overflowing()
    passes(chunk)
    assert hooks.after_step() is None and caplog.messages == []
    snapshots = hooks.take()
    of_all = snapshots.training.figures()["dropped"]
    assert caplog.messages == [] and hooks.follow(snapshots) is snapshots
    # The 13 tokens want 2 of 4 experts; at factor 0.5 an expert has 4 slots, and needs 13.
    assert caplog.messages == [
        f"69.23% of the rows of layer 2 found no room at step 1 ({of_all:.2%} of all rows); "
        "moe_expert_capacity_factor=2 would have held all layers: set it, or on_overflow='retry' "
        "(warning 1)"
    ]
    for _ in range(16):
        passes(chunk)
        hooks.after_step()
    ends = [text.rpartition("(")[2] for text in caplog.messages]
    assert ends == [f"warning {n})" for n in (1, 2, 4, 8)]
    assert "layer 2 found no room in steps 5 to 6 (" in caplog.messages[2]


def test_a_factor_for_all_layers_takes_the_place_of_those_for_some(caplog):
    chunk, hooks = overflowing(num_layers=2, layer_factors={2: 0.5})
    passes(chunk)
    hooks.read()
    without = "; moe_expert_capacity_factor=2 without layer_factors would have held all layers: "
    assert without in caplog.messages[0]


@pytest.mark.parametrize(
    "options", [{"on_overflow": "retry"}, {"overflow_threshold": 0.7}], ids=lambda given: [*given]
)
def test_what_is_repeated_or_below_the_threshold_is_not_said(caplog, options):
    chunk, hooks = overflowing(**options)
    for layer in chunk:
        layer.token_dispatcher.configs.retry = object
    passes(chunk)
    assert hooks.read().training.dropped_share.all()
    assert caplog.messages == []


def test_an_error_ends_the_run_and_needs_telemetry():
    chunk = model(1, on_overflow="error")
    words = "^a training loop must have StepHooks to follow on_overflow='error', got none"
    with pytest.raises(ValueError, match=words):
        run(chunk[0], 1)
    run(chunk[0], 1, training=False)
    hooks = StepHooks([chunk])
    run(chunk[0], 1)
    del hooks
    with pytest.raises(ValueError, match=words):
        run(chunk[0], 1)
    chunk, hooks = overflowing(on_overflow="error", overflow_threshold=0.1)
    passes(chunk)
    hooks.after_step()
    words = r"^on_overflow='error': 69.23% of the rows of layer 2 .*, or raise overflow_th.*0.1$"
    with pytest.raises(RuntimeError, match=words):
        hooks.after_step()


def test_an_early_read_loses_nothing_of_a_pending_one():
    chunk = model(1)
    counts = watch(chunk[0])
    hooks = StepHooks([chunk], every=1)
    run(chunk[0], 1)
    assert hooks.after_step() is None
    snapshot = hooks.read().training
    assert snapshot.counts["demand_E"][0].tolist() == counts.demand_E.tolist()
    assert snapshot.max_need_Y[0] == counts.largest
    empty = hooks.read().training
    assert not empty.counts["demand_E"].any() and empty.max_need_Y[0] == 0 and empty.figures() == {}


def test_the_factor_that_a_store_needs_is_relative_to_the_layers_that_share_it():
    """On one rank two layers fill just two shares, in each of three passes."""
    chunk = model(1, 2, experts="packed")
    hooks = StepHooks([chunk])
    for seed in range(3):
        hidden_states = tiny.tokens(T, seed=seed)
        for layer in chunk:
            hidden_states, _ = layer.train()(hidden_states)
        hidden_states.sum().backward()
    run(chunk[0], 3, training=False)
    snapshots = hooks.read()
    snapshot, alone = snapshots.training, snapshots.evaluation  # Which keeps no rows of others.
    assert alone.share_rows_Y.tolist() == [T * tiny.TOP_K, 0]
    assert snapshot.share_rows_Y.tolist() == 2 * [2 * T * tiny.TOP_K]
    assert snapshot.figures_of_layers()["needed_factor"] == [0.5, 1.0]
    assert snapshot.figures()["dropped"] == 0.0


def test_earlier_counts_are_left_out_and_totals_may_wrap():
    chunk = model(1)
    run(chunk[0], 1)
    counters = chunk[0].token_dispatcher.counters
    before = int(counters.num_positions)
    counters.demand_E.fill_(2**63 - 1)
    hooks = StepHooks([chunk])
    run(chunk[0], 2)
    assert before == T and (counters.demand_E < 0).any()
    snapshot = hooks.read().training
    assert snapshot.counts["num_positions"].tolist() == [T]
    assert snapshot.counts["demand_E"].sum() == T * tiny.TOP_K


def test_scalars_have_megatrons_kind_of_names():
    chunk = model(2, 3)
    hooks = StepHooks([chunk], steps_done=40)
    run(chunk[0], 1)
    snapshots = hooks.read()
    written = scalars(snapshots)
    assert snapshots.step == 40
    assert written["moe/dropped"] == snapshots.training.figures()["dropped"]
    assert len(written) == len(snapshots.training.figures())
    of_layers = scalars(snapshots, per_layer=True)
    assert of_layers["moe/fill_layer_1"] == snapshots.training.figures_of_layers()["fill"][0]
    assert of_layers["moe/fill_layer_2"] == 0.0
    assert not any(name.startswith("moe-held-out") for name in of_layers)
    assert set(of_layers) == {*written, *(f"{name}_layer_{y}" for name in written for y in (1, 2))}


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [((None,), [1]), ((None, None), [1, 2]), ((None, 3), [4, 3]), ((2, 3, 2), [2, 3, 4])],
)
def test_layers_without_a_number_of_their_own_follow_the_others(numbers, expected):
    chunk = model(*numbers)
    counts = watch(chunk[0])
    hooks = StepHooks([chunk])
    run(chunk[0], 1)
    training = hooks.read().training
    assert hooks.layers == tuple(sorted(expected))
    first = hooks.layers.index(expected[0])
    assert training.counts["demand_E"][first].tolist() == counts.demand_E.tolist()
    del hooks
    alone = StepHooks([chunk[0]])
    run(chunk[0], 2)
    assert alone.read().training.counts["num_positions"].tolist() == [T]


NO_LIST = r"chunks must be a list of the model's chunks on this rank, at least one, got "


@pytest.mark.parametrize(
    "use",
    [
        StepHooks,
        lambda chunks: Retry(lambda **given: [], chunks),
        lambda chunks: LayerGraphs(chunks, seq_length=1, micro_batch=1),
    ],
    ids=["StepHooks", "Retry", "LayerGraphs"],
)
def test_a_model_without_a_list_is_refused(use):
    for chunks, shown in ((nn.Linear(1, 1), "'Linear'"), ([], r"\[\]")):
        with pytest.raises(ValueError, match=rf"^{NO_LIST}{shown}; give \[model\] if"):
            use(chunks)


def test_a_model_without_padded_layers_is_refused():
    chunk: Any = nn.Sequential(nn.Linear(2, 2))
    chunk.config = tiny.config()
    missing = r"chunks must have a layer with moe_token_.*, got none on any rank; set it"
    with pytest.raises(ValueError, match=missing):
        StepHooks([chunk])
    with pytest.raises(ValueError, match=r"^every must be an int of at least 1, .*, got 0$"):
        StepHooks([chunk], every=0)


@pytest.mark.parametrize("name", ["num_microbatches", "num_tokens", "num_steps", "every"])
@pytest.mark.parametrize("number", [0, -1, 1.5, True, None])
def test_sizes_of_a_trace_that_are_no_counts_are_refused(name, number):
    """With num_microbatches=0 a run would record nothing, and not say so."""
    sizes: dict[str, Any] = {"num_microbatches": 1, "num_tokens": 4, "num_steps": 3}
    words = re.escape(f"{name} must be an int of at least 1, below 2**31, got {number}")
    with pytest.raises(ValueError, match=f"^{words}$"):
        Passes(**sizes | {name: number})


def test_a_model_with_other_hooks_is_refused():
    """A read sets the largest need to zero, so the second would advise a factor of 0."""
    chunk = model(1)
    hooks = StepHooks([chunk])
    run(chunk[0], 1)
    with pytest.raises(ValueError, match=r"^chunks must have no other StepHooks: with two, "):
        StepHooks([chunk])
    assert hooks.read().training.needed_factor.tolist() > [1.0]
    del hooks
    run(chunk[0], 1)
    assert StepHooks([chunk]).layers == (1,)


def test_a_factor_of_a_layer_without_experts_is_refused():
    StepHooks([model(2, 7, is_hybrid_model=True, num_layers=8, layer_factors={7: 2.0})])
    words = r"layer_factors must name layers with experts, \(2, 7\), by .*; leave out layer 3"
    with pytest.raises(ValueError, match=words):
        StepHooks([model(2, 7, is_hybrid_model=True, num_layers=8, layer_factors={3: 2.0})])
    with pytest.raises(ValueError, match=r"\(1, 2\), by Megatron's numbers, .* leave out layer 2"):
        # They share a number, as a hybrid stack has them for different tokens.
        StepHooks([model(1, 1, is_hybrid_model=True, num_layers=2, layer_factors={2: 2.0})])


def _over_two_ranks() -> tuple[Any, Any]:
    with parity.megatron("cpu", expert_model_parallel_size=2):
        chunk = model(1, 2)
        # In the second layer all tokens choose experts 0 and 1, which are on rank 0.
        tiny.ask_for(chunk[1], 0, 1)
        mine = [watch(layer) for layer in chunk]
        hooks = StepHooks([chunk])
        for step in range(3):
            run(chunk[0], step)
            chunk[1](torch.rand(T, 1, tiny.HIDDEN))
        snapshot = hooks.read().training
        return snapshot, [(count.demand_E, count.kept_E, count.largest) for count in mine]


def test_two_ranks_are_summed(pool2):
    (snapshot, first), (again, second) = pool2.run(_over_two_ranks)
    for y in range(2):
        assert snapshot.counts["demand_E"][y].tolist() == (first[y][0] + second[y][0]).tolist()
        assert snapshot.counts["kept_E"][y].tolist() == (first[y][1] + second[y][1]).tolist()
        assert snapshot.max_need_Y[y] == max(first[y][2], second[y][2])
    assert np.array_equal(snapshot.counts["demand_E"], again.counts["demand_E"])
    assert snapshot.counts["num_passes"].tolist() == [6, 6]
    assert snapshot.figures_of_layers()["rank_overload"][1] == 2.0


def _over_two_stages(on_overflow: Any) -> tuple[Any, Any, str]:
    with parity.megatron("cpu", pipeline_model_parallel_size=2):
        sizes = {"num_layers": 2, "pipeline_dtype": torch.float32}
        numbers = (dist.get_rank() + 1,)
        chunk, hooks = overflowing(numbers, on_overflow=on_overflow, **sizes)
        [mine] = [watch(layer) for layer in chunk]
        passes(chunk)
        try:
            return hooks.read().training, mine.demand_E, ""
        except RuntimeError as error:
            return None, mine.demand_E, str(error)


def test_every_stage_sees_all_layers_and_raises_their_errors(pool2):
    (_, _, first), (_, _, second) = pool2.run(_over_two_stages, "error")
    assert first == second and "of layer 2 found no room at step 0" in first
    (snapshot, first, _), (_, second, _) = pool2.run(_over_two_stages, "warn")
    assert snapshot.layers_Y.tolist() == [1, 2]
    assert snapshot.counts["demand_E"].tolist() == [first.tolist(), second.tolist()]
    assert snapshot.counts["num_passes"].tolist() == [1, 1]


def _differs(name: str, values: tuple[Any, Any]) -> str:
    """Return the error of replicas, or of stages of a pipeline, whose first one has no layer."""
    given = {name: values[dist.get_rank()]}
    names = "chunks", "every", "passes", "steps_done"
    arguments = {name: given.pop(name) for name in names if name in given}
    with parity.megatron("cpu"):
        chunk = model(*([] if arguments and dist.get_rank() == 0 else [1]), **given)
        with pytest.raises(ValueError) as error:
            StepHooks(**{"chunks": [chunk], **arguments})
        return str(error.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("every", (2, 3)),
        ("every", (0, 10)),
        ("steps_done", (0, 40)),
        ("on_overflow", ("warn", "retry")),
    ],
)
def test_ranks_that_differ_all_raise_the_same_error(pool2, name, values):
    """Else one would read, or end the run, while the others are in another collective."""
    first, second = pool2.run(_differs, name, values)
    shown = f"{values[0]} on rank 0, {values[1]} on rank 1"
    assert first == second
    assert first == f"{name} must be the same on all ranks, got {shown}; set one of these values"


def test_a_rank_with_wrong_arguments_does_not_leave_its_peers_waiting(pool2):
    """They would be in the exchange of settings; here all raise what differs."""
    sizes = Passes(num_microbatches=1, num_tokens=1, num_steps=1)
    for values, shown in (
        (([], nn.Linear(1, 1)), "chunks must .*, got list on rank 0, Linear on rank 1; "),
        ((None, sizes), "passes must .*, got False on rank 0, True on rank 1; "),
    ):
        name = shown.split()[0]
        first, second = pool2.run(_differs, name, values)
        assert first == second and re.match(shown, first)


def _traced(folder: str) -> str:
    """Record into a folder of which each host has its own; here it is a file on rank 1."""
    sizes = Passes(num_microbatches=1, num_tokens=T, num_steps=1)
    with parity.megatron("cpu"):
        mine = record_routing
        if dist.get_rank():
            mine = lambda chunks, _, *given, **how: record_routing(  # noqa: E731
                chunks, Path("/dev/null"), *given, **how
            )
        with patch.object(steps, "record_routing", mine), pytest.raises(ValueError) as error:
            StepHooks([model(1, trace=folder)], passes=sizes)
        return str(error.value)


def test_a_folder_that_one_rank_cannot_write_is_named_on_all(pool2, tmp_path):
    """That rank alone would raise, and its peers would wait for it in the first read."""
    first, second = pool2.run(_traced, str(tmp_path))
    assert first == second
    assert first.startswith("trace must be ") and first.endswith(" (on rank 1)")


def _over_tensor_parallel_ranks() -> Any:
    sizes = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    with parity.megatron("cpu", **sizes):
        chunk = model(1, tensor_model_parallel_size=2)
        hooks = StepHooks([chunk])
        chunk.eval()
        hidden = torch.ones(T, 1, tiny.HIDDEN)
        with torch.no_grad():
            chunk(hidden)
            chunk[0](hidden, padding_mask=torch.ones(1, T, dtype=torch.bool))
        return hooks.read().evaluation


def _again_on_ranks_that_split_experts() -> tuple[float, int, int]:
    sizes = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    settings = sizes | {"sequence_parallel": True, "experts": "packed"}
    with parity.megatron("cpu", **sizes):
        chunk = model(1, 2, 3, **settings)
        hooks = StepHooks([chunk])
        hidden = torch.ones(T, 1, tiny.HIDDEN).requires_grad_()
        for layer in chunk:
            hidden, _ = layer(hidden)
        hidden.sum().backward()
        counters = [layer.token_dispatcher.counters for layer in chunk]
        again, asked = (
            sum(int(getattr(one, name).sum()) for one in counters)
            for name in ("num_again", "demand_E")
        )
        return hooks.read().training.figures()["recomputed"], again, asked


def test_rows_that_are_computed_again_count_once_where_ranks_split_experts(pool2):
    """Both get the same rows, of tokens of both."""
    (share, again, asked), same = pool2.run(_again_on_ranks_that_split_experts)
    assert same == (share, again, asked)
    assert again > 0 and share == again / (2 * asked)


def test_tokens_that_tensor_parallel_ranks_share_count_once(pool2):
    for snapshot in pool2.run(_over_tensor_parallel_ranks):
        assert snapshot.counts["num_positions"].tolist() == [2 * T]
