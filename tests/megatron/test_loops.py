"""Loops are followed: retries, figures of a line, traces; for our models only."""

import dataclasses
import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from padded_dispatch import recorder as recorders
from padded_dispatch.megatron import PaddedOptions, Passes, install, loops, record, steps, uninstall
from padded_dispatch.megatron.record import record_routing
from padded_dispatch.megatron.retry import Retry, dropping_nothing
from padded_dispatch.megatron.stacked_linear import has_own_weights
from padded_dispatch.trace import HEADER_BYTES, load_traces, record_bytes
from padded_dispatch.utils.logs import log_once
from tests.megatron.test_steps import T, model, run, watch
from tests.support import parity, tiny
from tests.support.pool import WorkerError
from tests.support.training import RETRIED, Training, draws, forward, world

MODULE = "megatron.training.training"
SUMS = "advanced iterations", "skipped iterations"


class Writer:
    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}
        self.flushed = 0

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.setdefault(name, []).append((step, float(value)))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.add_scalar(name, value, step)

    def flush(self) -> None:
        self.flushed += 1


def stand_in(monkeypatch: Any, sizes: Any) -> Any:
    """Put the module into `sys.modules`; `sizes` has `microbatches`, `seq` and `batch`.

    `lines`: step and means of each line that was printed. `calls`: the forward-backward function of
    each step. `before`: if set, called with the number of each step before it. `read`: readings
    before each step's checkpoint. `exits`: whether the rerun state machine ends the next step.
    `first`: the number of the first step among those to skip, 0 in 0.16.
    """
    module: Any = ModuleType(MODULE)
    module.lines, module.calls, module.read = [], [], []
    module.tensorboard, module.wandb, module.before, module.exits = Writer(), Writer(), None, False
    module.first = 1
    module.get_tensorboard_writer = lambda: module.tensorboard
    module.get_wandb_writer = lambda: module.wandb
    args = SimpleNamespace(
        iteration=0,
        curr_iteration=0,
        train_iters=6,
        iterations_to_skip=[],
        exit_interval=None,
        log_interval=2,
        moe_per_layer_logging=False,
        load=None,
        save=None,
        micro_batch_size=sizes.batch,
        seq_length=sizes.seq,
    )
    module.get_args = lambda: args

    def train_step(
        forward_step_func,
        data_iterator,
        model,
        optimizer,
        opt_param_scheduler,
        config,
        forward_backward_func,
        iteration=None,
    ):
        module.calls.append(forward_backward_func)
        for chunk in model:
            chunk.zero_grad_buffer()
        forward_backward_func(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=sizes.microbatches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        return {}, int(module.exits), module.exits, module.exits, 16 * module.exits, None, None, 0

    def training_log(
        loss_dict, total_loss_dict, iteration, skipped_iter, more=None, is_first_iteration=False
    ):
        for name, count in zip(SUMS, (1 - skipped_iter, skipped_iter), strict=True):
            total_loss_dict[name] = total_loss_dict.get(name, 0) + count
        if iteration % args.log_interval != 0 and not is_first_iteration:
            return
        done = max(1, total_loss_dict[SUMS[0]])
        means = {n: v.item() / done for n, v in total_loss_dict.items() if n not in SUMS}
        module.lines.append((iteration, means))
        if not is_first_iteration:
            total_loss_dict |= dict.fromkeys(SUMS, 0)

    def train(forward_step_func, model, data_iterator, config, forward_backward_func):
        total_loss_dict: dict[str, Any] = {}
        for iteration in range(args.iteration, args.train_iters):
            if iteration + module.first in args.iterations_to_skip:
                continue
            if module.before is not None:
                module.before(iteration)
            args.curr_iteration = iteration
            results, skipped, _, should_exit, *_ = module.train_step(
                forward_step_func,
                data_iterator,
                model,
                None,
                None,
                config,
                forward_backward_func,
                iteration=iteration,
            )
            if should_exit:
                break
            module.training_log(
                results,
                total_loss_dict,
                iteration + 1,
                skipped,
                is_first_iteration=iteration == args.iteration,
            )
            if module.checkpoint_and_decide_exit(model, iteration + 1):
                break

    def checkpoint_and_decide_exit(model, iteration):
        module.read.append(len(module.tensorboard.scalars.get("moe/dropped", ())))
        return iteration == args.exit_interval

    for function in (train, train_step, training_log, checkpoint_and_decide_exit):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


CASE = dataclasses.replace(RETRIED, microbatches=2)
NAMES = "train_step", "training_log"
FIGURES = ["moe/dropped", "moe/fill", "moe/needed_factor", "moe/expert_overload"]


@pytest.fixture
def loop(alone, monkeypatch) -> Iterator[Any]:
    """Provide a stand-in for Megatron-LM's module, which trains six steps, a line every two."""
    with world(CASE):
        yield stand_in(monkeypatch, CASE)
        uninstall()


def step(loop: Any, training: Training, number: int = 0) -> Any:
    loop.get_args().curr_iteration = number
    given = forward, draws(CASE), training.chunks, None, None, training.config
    return loop.train_step(*given, forward_backward_func=training.schedule)


def train(loop: Any, training: Training | None = None, **options: Any) -> Training:
    install(PaddedOptions(**options))
    training = training or Training(CASE, **options)
    loop.train(forward, training.chunks, draws(CASE), training.config, training.schedule)
    return training


def test_steps_are_repeated_and_retries_shown(loop):
    stock = [getattr(loop, name) for name in NAMES]
    install(PaddedOptions(on_overflow="retry"))
    loop.get_args().train_iters = 20
    training = Training(CASE, on_overflow="retry")
    for number in (7, 8):
        step(loop, training, number)
    sums: dict[str, Any] = {}
    loop.training_log({"lm loss": torch.ones(1)}, sums, 8, 0)
    assert next(iter(sums)) == "lm loss"
    ((number, line),) = loop.lines
    sums = {}
    for skipped in (1, 0):  # As with fp16's first scales.
        loop.training_log({"lm loss": torch.ones(1)}, sums, 8, skipped)
    assert next(name for name in sums if name not in SUMS) == "lm loss"
    uninstall()
    first, second = loop.calls
    assert isinstance(first, Retry) and first is second
    assert (first.num_retried, first.num_steps) == (2, 2)
    for writer in (loop.tensorboard, loop.wandb):
        assert writer.scalars["moe/retried_steps"] == [(8, 1.0), (9, 2.0)]
    assert (number, line["moe/retried_steps"]) == (8, 2.0)
    assert line["moe/dropped"] > 0
    assert [getattr(loop, name) for name in NAMES] == stock


def test_retries_go_on_where_the_forward_backward_function_changes(loop):
    install(PaddedOptions(on_overflow="retry"))
    training = Training(CASE, on_overflow="retry")
    step(loop, training, 0)
    training.schedule = functools.partial(training.schedule)
    step(loop, training, 1)
    first, second = loop.calls
    assert first is second and second.forward_backward_func is training.schedule
    assert (second.num_retried, second.num_steps) == (2, 2)
    assert loop.tensorboard.scalars["moe/retried_steps"] == [(1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("experts", ["packed", "module", "stock"])
def test_weights_of_an_optimizer_that_are_in_another_order_are_refused(loop, experts):
    """As after a checkpoint in the format `dp_reshardable` that other experts wrote."""

    ddp = {"use_distributed_optimizer": True}
    case = dataclasses.replace(CASE, dtype=torch.bfloat16, ddp=ddp)
    training = Training(case, experts="packed" if experts == "packed" else "module")
    if experts == "stock":
        training.config.moe_token_dispatcher_type = "alltoall"
    optimizer = training.optimizer
    assert has_own_weights(training.chunks, optimizer) and has_own_weights(training.chunks, None)
    *_, weight = training.moe[0][1].experts.parameters()
    weight.main_param.copy_(weight.main_param.flip(0))
    install()
    given = forward, None, training.chunks, optimizer, None, training.config, training.schedule
    with pytest.raises(
        ValueError, match=r"^optimizer must hold the weights of the model's experts"
    ):
        loop.train_step(*given)
    for part in optimizer.chained_optimizers:  # A precision-aware optimizer has them elsewhere.
        groups = zip(part.shard_float16_groups, part.shard_fp32_from_float16_groups, strict=True)
        for own, mains in groups:
            part.optimizer.state |= {
                weight: {"master_param": main} for weight, main in zip(own, mains, strict=True)
            }
            mains[:] = [None] * len(mains)
    assert not has_own_weights(training.chunks, optimizer)


@pytest.mark.parametrize("kind", ["stock", "dense"])
def test_other_models_train_as_before(loop, monkeypatch, kind):
    install()
    training = Training(CASE)
    if kind == "stock":
        training.config.moe_token_dispatcher_type = "alltoall"
    else:
        training.config.num_moe_experts = None
        training.schedule = lambda **given: []
    monkeypatch.setattr("padded_dispatch.megatron.loops._Run", None)  # Would raise.
    step(loop, training)
    loop.training_log({}, {}, 2, 0)
    assert loop.calls == [training.schedule] and loop.lines == [(2, {})]


def _follows(rank_of_layers: int | None, rank_of_others: int | None = None) -> bool:
    """Return whether this rank follows the steps of a model that `padded_spec` built.

    The optimizer of `rank_of_others` holds the weights of other experts.
    """
    config = SimpleNamespace(moe_token_dispatcher_type="alltoall", num_moe_experts=2)
    if dist.get_rank() == rank_of_layers:
        config.has_padded_layers = True
    else:  # An encoder, for example.
        config.num_moe_experts = None
    with (
        patch.object(loops, "_Run", lambda *given, **named: True),
        patch.object(loops, "has_own_weights", lambda *given: dist.get_rank() != rank_of_others),
    ):
        loop = loops._Loop(lambda arguments: None)  # pyright: ignore
        return bool(loop._run_of([SimpleNamespace(config=config)], None, None))  # pyright: ignore


def test_a_stage_without_layers_follows_those_that_have_some(pool2):
    """What follows calls collectives."""
    assert pool2.run(_follows, 1) == [True, True]
    assert pool2.run(_follows, None) == [False, False]


def test_all_ranks_refuse_an_optimizer_that_one_finds_wrong(pool2):
    """A rank with one expert sees no difference."""
    with pytest.raises(WorkerError) as caught:
        pool2.run(_follows, None, 1)
    said = [str(error) for error in caught.value.errors.values()]
    assert len(said) == 2 and all(one.startswith("optimizer must hold") for one in said)


def _refused_on_stages(folder: Path) -> list[str]:
    """Return the errors of a stage with a layer, or without one, of a pipeline of two."""
    words, sizes = [], {"num_layers": 2, "pipeline_model_parallel_size": 2}
    args = SimpleNamespace(save_activations_interval=10)
    sizes_of_steps: Any = {"steps_done": 0, "num_steps": 3, "left_out": [], "exit_interval": None}
    writers: Any = {"tensorboard": None, "wandb": None, "per_layer": False}
    settings = loops._Settings(
        **sizes_of_steps, **writers, log_interval=2, batch_tokens=T, flags=args
    )
    passes = Passes(num_microbatches=1, num_tokens=T, num_steps=3)
    with (
        parity.megatron("cpu", pipeline_model_parallel_size=2),
        patch.object(loops, "get_num_microbatches", lambda: 1),
    ):
        layer = model(2, experts="packed", pipeline_dtype=torch.float32, **sizes)
        chunks = [dense(layer.config) if dist.get_rank() == 0 else layer]
        chunks[0].config.mlp_chunks_for_training = 2
        for start in (
            lambda: loops._Run(chunks, settings),
            lambda: record_routing(chunks, folder, passes, steps_done=0),
        ):
            with pytest.raises(ValueError) as error:
                start()
            words.append(str(error.value))
    return words


def test_what_a_layer_does_not_support_is_refused_on_stages_without_layers_too(pool2, tmp_path):
    first, second = pool2.run(_refused_on_stages, tmp_path)
    assert first == second
    assert first[0].startswith("--save-activations-interval must be left out: ")
    assert first[1].startswith("mlp_chunks_for_training must be 1 with a trace")


def test_a_loop_that_is_imported_later_is_followed_once_a_config_is_made(loop, monkeypatch, caplog):
    monkeypatch.delitem(sys.modules, MODULE)
    install()
    assert MODULE not in sys.modules
    monkeypatch.setitem(sys.modules, MODULE, loop)
    stock = loop.train_step
    Training(CASE)
    followed = loop.train_step
    assert followed.__wrapped__ is stock
    Training(CASE)
    assert loop.train_step is followed
    uninstall()
    assert loop.train_step is stock
    for name in NAMES:
        delattr(loop, name)
    log_once.cache_clear()
    install()
    assert not any(hasattr(loop, name) for name in NAMES)
    lost = "some figures, retries or traces are missing in a training loop, because it has no "
    assert [text for text in caplog.messages if text.startswith("some figures")] == [
        f"{lost}{MODULE}.{name}" for name in NAMES
    ]


@pytest.mark.parametrize(("interval", "read"), [(2, [1, 2, 4, 6]), (1, [1, 2, 3, 4, 5, 6])])
def test_figures_of_a_line_are_those_of_the_steps_since_the_last_one(loop, caplog, interval, read):
    loop.get_args().log_interval = interval
    training = Training(CASE)
    counts = [watch(layer) for _, layer in training.moe]
    shares = []

    def note(step: int) -> None:
        if step not in read:
            return
        demand, kept = (
            sum(getattr(count, name).sum() for count in counts) for name in ("demand_E", "kept_E")
        )
        shares.append(1 - kept / demand)
        for count in counts:
            count.__init__()

    loop.before = note
    train(loop, training)
    note(6)
    steps, lines = zip(*loop.lines, strict=True)
    assert list(steps) == read and all(list(line) == FIGURES for line in lines)
    assert [line["moe/dropped"] for line in lines] == pytest.approx(shares, rel=1e-12)
    assert len(set(shares)) > 3 and min(shares) > 0
    written = loop.tensorboard.scalars
    assert [step for step, _ in written["moe/dropped"]] == read
    assert [share for _, share in written["moe/dropped"]] == pytest.approx(shares, rel=1e-12)
    assert written == loop.wandb.scalars
    assert loop.tensorboard.flushed == 1
    assert not any("layer" in name or "held-out" in name for name in written)
    first, second, third = [text for text in caplog.messages if "found no room" in text]
    assert "at step 1 " in first and "at step 2 " in second
    assert ("at step 4 " if interval == 1 else "5 to 6 ") in third


def test_steps_behind_the_last_line_are_read_where_the_loop_ends_early(loop):
    loop.get_args().log_interval, loop.get_args().exit_interval = 4, 3
    train(loop)
    written = loop.tensorboard.scalars["moe/dropped"]
    assert [step for step, _ in written] == [1, 3] and written == loop.wandb.scalars["moe/dropped"]
    loop.get_args().exit_interval = None
    for loop.first, left_out, read in (
        (1, [], [1, 1, 1, 2, 2, 3]),
        (1, [2, 6], [1, 1, 2, 3]),
        (0, [1, 5], [1, 1, 2, 3]),
    ):
        loop.get_args().iterations_to_skip, loop.read, loop.tensorboard = left_out, [], Writer()
        train(loop)
        assert loop.read == read  # That of the last step comes before its checkpoint.


def test_steps_before_an_exit_of_the_rerun_state_machine_are_read(loop):
    """It ends the loop between a step and its line."""
    loop.get_args().log_interval = 4
    loop.before = lambda step: setattr(loop, "exits", step == 2)
    train(loop)
    assert [step for step, _ in loop.lines] == [1]
    assert [step for step, _ in loop.tensorboard.scalars["moe/dropped"]] == [1, 3]
    assert loop.tensorboard.flushed == 1


def evaluate(training: Training) -> None:
    batches = iter([{"ids": torch.zeros(CASE.batch, CASE.seq + 1, dtype=torch.int64)}])
    for chunk in training.chunks:
        chunk.eval()
    with torch.no_grad():
        forward(batches, training.chunks[0])
    for chunk in training.chunks:
        chunk.train()


def test_evaluation_behind_a_line_is_written_with_the_next(loop):
    training, log = Training(CASE), loop.training_log

    def log_and_evaluate(*args: Any, **kwargs: Any) -> None:
        log(*args, **kwargs)
        evaluate(training)

    with patch.object(loop, "training_log", log_and_evaluate):
        train(loop, training)
    scalars = loop.tensorboard.scalars
    lines = [step for step, _ in scalars["moe/dropped"]]
    assert [step for step, _ in scalars["moe-held-out/dropped"]] == lines[1:]


def test_evaluation_does_not_mix_with_training(loop):
    training = Training(CASE)
    loop.before = lambda step: evaluate(training) if step == 3 else None
    train(loop, training)
    evaluated, loop.tensorboard = loop.tensorboard.scalars, Writer()
    loop.before = None
    train(loop)
    alone = loop.tensorboard.scalars
    assert {n: v for n, v in evaluated.items() if n in alone} == alone
    held_out = evaluated.keys() - alone.keys()
    assert held_out == {name.replace("moe/", "moe-held-out/") for name in alone}
    assert evaluated["moe-held-out/dropped"] == [(4, 0.0)]


def test_an_overflow_ends_the_run_at_the_line(loop):
    with pytest.raises(RuntimeError, match=r"^on_overflow='error': .* layer . found no .* step 1 "):
        train(loop, on_overflow="error")
    ((number, line),) = loop.lines
    assert (len(loop.calls), number) == (1, 1) and line["moe/dropped"] > 0
    assert loop.tensorboard.flushed == 1


def test_an_overflow_behind_the_last_line_is_written_before_it_ends_the_run(loop):
    loop.get_args().log_interval, loop.get_args().exit_interval = 4, 3
    training = Training(CASE, on_overflow="error")
    layers = [layer for _, layer in training.moe]
    with ExitStack() as fits, pytest.raises(RuntimeError, match="in steps 2 to 3"):
        fits.enter_context(dropping_nothing(layers))
        loop.before = lambda step: fits.close() if step == 2 else None
        train(loop, training, on_overflow="error")
    assert [step for step, _ in loop.tensorboard.scalars["moe/dropped"]] == [1, 3]
    assert loop.tensorboard.scalars == loop.wandb.scalars and loop.tensorboard.flushed == 1


def test_a_trace_holds_all_steps_of_a_run_and_of_its_resumption(loop, tmp_path, caplog):
    args = loop.get_args()
    (earlier := tmp_path / "rank-00007-step-00000000.npy").touch()
    train(loop, trace=str(tmp_path))
    words = f"{tmp_path}: traces of steps after 0, of an earlier run, are deleted"
    assert words in caplog.messages and not earlier.exists()
    args.iteration, args.train_iters = 4, 7
    train(loop, trace=str(tmp_path))
    trace = load_traces([tmp_path])
    assert sorted(set(trace.steps.tolist())) == [1, 2, 3, 4, 5, 6, 7]
    assert len(trace.steps) == 7 * CASE.microbatches * 2
    assert trace.ids_NTK.shape[1:] == (CASE.batch * CASE.seq, CASE.top_k)
    assert (trace.run.num_experts, trace.run.num_ranks, set(trace.ranks.tolist())) == (4, 1, {0})


def dense(config: Any = None) -> nn.Module:
    stage = nn.Linear(2, 2)
    stage.config = config or model(1).config
    return stage


@pytest.mark.parametrize("rank", [0, 1])
def test_a_resumed_run_shares_its_file_out_to_the_steps_that_are_left(tmp_path, caplog, rank):
    """Rank 0 says it, also as a stage without a layer to record, where other ranks have them."""
    passes = Passes(num_microbatches=1, num_tokens=T, num_steps=100)
    with tiny.one_process():
        of_step = record_bytes(T, model(1).config.moe_router_topk) + HEADER_BYTES
        for number, every in ((4, 1), (2, 2)):
            with patch.object(recorders, "MAX_BYTES", number * of_step):
                recorder = record_routing([model(1)], tmp_path, passes, steps_done=96)
                assert recorder is not None and recorder.every == every
                caplog.clear()
                log_once.cache_clear()
                with patch.object(record.dist, "get_rank", lambda: rank):
                    stage = record_routing([dense()], tmp_path, passes, steps_done=96)
                    assert stage is None
            said = any("one step in 2 is traced" in line for line in caplog.messages)
            assert said == (every == 2 and rank == 0)


def test_a_resumed_run_of_fewer_ranks_leaves_no_file_of_steps_that_it_repeats(tmp_path):
    passes = Passes(num_microbatches=1, num_tokens=T, num_steps=9)
    for rank in (0, 1):
        for steps_done in (0, 4, 8):
            (tmp_path / f"rank-{rank:05d}-step-{steps_done:08d}.npy").touch()
    others = "rank-00000-step-00000008 (1).npy"  # Not a name of ours.
    (tmp_path / others).touch()
    with tiny.one_process():
        record_routing([model(1)], tmp_path, passes, steps_done=4)
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {others, *(f"rank-{rank:05d}-step-00000000.npy" for rank in (0, 1))}


def test_a_second_model_ends_the_trace_of_the_first_in_its_folder(tmp_path, caplog):
    """Both would write to one file, over each other. A trace that has ended is not named."""
    passes = Passes(num_microbatches=1, num_tokens=T, num_steps=9)
    with tiny.one_process():
        models = [model(1, trace=str(tmp_path)) for _ in range(2)]
        hooks, asked = [], []
        for number, chunk in enumerate(models):
            hooks.append(steps.StepHooks([chunk], passes=passes))
            run(chunk[0], number)
            hooks[0].after_step()
        chunk[0].token_dispatcher.observers.append(
            SimpleNamespace(observe=lambda asked_TE, *_: asked.append(asked_TE.clone()))
        )
        for number in (3, 4):
            run(models[0][0], number)
            run(chunk[0], 10 * number)
            for one in hooks:
                one.after_step()
        hooks[1].recorder.close()
        record_routing([model(1)], tmp_path, passes, steps_done=2)
    found = load_traces([tmp_path])
    assert found.steps.tolist() == [1, 2]
    for ids_TK, map_TE in zip(found.ids_NTK, asked, strict=True):
        assert ids_TK.tolist() == [row.nonzero().flatten().tolist() for row in map_TE]
    (line,) = [text for text in caplog.messages if "another model" in text]
    assert line.endswith(": the trace of another model ends; give each model a folder of its own")


@pytest.mark.parametrize("has_layers", [True, False])
def test_a_trace_says_once_that_steps_have_got_more_micro_batches(
    loop, tmp_path, caplog, monkeypatch, has_layers
):
    if not has_layers:
        monkeypatch.setattr(steps, "record_routing", lambda *args, **sizes: None)
    with patch.object(loops, "get_num_microbatches", lambda: 1 + len(loop.calls)):
        train(loop, trace=str(tmp_path))
    words = "the trace has the last 1 micro-batches of each step, as many as its first step had"
    assert caplog.messages.count(words) == 1


def test_a_run_that_fails_keeps_its_trace(loop, tmp_path):
    def fail(step: int) -> None:
        if step == 3:
            raise SystemExit("a signal")

    loop.before = fail
    with pytest.raises(SystemExit, match="a signal"):
        train(loop, trace=str(tmp_path))
    uninstall()  # As at the end of the process, what follows the loop is gone.
    trace = load_traces([tmp_path])
    assert sorted(set(trace.steps.tolist())) == [1, 2, 3]


def test_a_trace_that_cannot_be_written_ends_the_run_before_its_first_step(loop):
    with pytest.raises(ValueError, match=r"^trace must be a path in a writable folder, got"):
        train(loop, trace="/proc/none")


@pytest.mark.parametrize(
    ("name", "value", "fix", "experts"),
    [
        ("save-tokens-per-expert-interval", 10, "set --padded-trace FOLDER", ("packed", "module")),
        ("save-activations-interval", 10, "set --padded-experts module", ("packed",)),
        ("save-dgrads-interval", 10, "set --padded-experts module", ("packed",)),
        ("save-wgrads-interval", 10, "", ()),
        ("flextron", True, "set --padded-experts module", ("packed",)),
        ("modelopt_enabled", True, "set --padded-experts module", ("packed",)),
        ("freeze-all-layers", True, "use Megatron's own dispatcher", ("packed", "module")),
        ("rl-inference-expert-model-parallel-size", 2, "set --padded-experts module", ("packed",)),
        ("rl-inference-expert-model-parallel-size", 1, "", ()),  # As in training.
    ],
)
def test_what_reads_parts_that_experts_lack_is_refused_before_the_first_step(
    loop, name, value, fix, experts
):
    """Packed experts have no linears whose rows Megatron could read, but weights with gradients."""
    setattr(loop.get_args(), name.replace("-", "_"), value)
    for kind in experts:
        with pytest.raises(ValueError, match=rf"^(--)?{name} must be .*, got {value}; {fix}"):
            train(loop, experts=kind)
        assert not loop.calls
    for kind in {"packed", "module"} - {*experts}:
        train(loop, experts=kind)


def test_what_cannot_be_traced(tmp_path):
    """A rank without layers writes nothing; graphs would hold, and parts cut, what is recorded."""
    passes = Passes(num_microbatches=1, num_tokens=T, num_steps=3)
    with tiny.one_process():
        assert record_routing([dense()], tmp_path / "traces", passes, steps_done=0) is None
        assert not (tmp_path / "traces").exists()
        chunk = model(1)
        chunk[0].cuda_graphs = ["a graph"]
        with pytest.raises(ValueError, match=r"^trace must start before layers are captured"):
            record_routing([chunk], tmp_path, passes, steps_done=0)
        for name, value, only in (
            ("mlp_chunks_for_training", 2, 1),
            ("mtp_use_repeated_layer", True, False),
        ):
            chunk = model(1)
            setattr(chunk[0].config, name, value)
            with pytest.raises(ValueError, match=rf"^{name} must be {only} with a trace"):
                record_routing([chunk], tmp_path, passes, steps_done=0)
