"""`padded-dispatch bench` from a command line to a file; its layer and its timing."""

import dataclasses
import json
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher as Dispatcher

from padded_dispatch.bench import command
from padded_dispatch.bench.cases import (
    CONTENDERS,
    MODELS,
    STOCK,
    Case,
    Contender,
    read_bench,
    routing_scores,
)
from padded_dispatch.bench.layer import build, megatron_flags
from padded_dispatch.bench.measure import Passes, batches, cublas
from padded_dispatch.megatron import install, uninstall
from padded_dispatch.megatron.compat import training_stream
from tests.support import tiny
from tests.support.parity import megatron as megatron_groups
from tests.support.pool import WorkerError, end_groups
from tests.support.routings import routing_map
from tests.support.tiny import only_worker

CPU = torch.device("cpu")
QUICK = ["--device", "cpu", "--ep", "1", "--iterations", "1"]


def main(flags):
    return command.main(read_bench(flags))


def parse(flags):
    return command.resolve(read_bench(flags))


def _case(**changes):
    values = {"model": "tiny", "ep": 1, "tokens": 37, "skew": "hot", "contender": "module"}
    return Case(**({"capacity_factor": 4.0} | values | changes))


def _built(**changes):
    case = _case(**changes)
    return case, build(case, megatron_flags(case, on_gpu=False), CPU)


def _data(case, seed=0):
    return batches(case.shape, case.tokens, case.skew, seed=seed, dtype=torch.float32, device=CPU)


@pytest.fixture
def megatron():
    with tiny.one_process():
        install()
        yield
        uninstall()


@pytest.mark.parametrize("contender", ["module", "packed", "drop-pad"])
def test_the_routing_is_the_one_that_was_ordered(megatron, contender):
    case, layer = _built(contender=contender, skew="lognormal-0.6")
    (batch, *_) = _data(case, seed=3)
    probs = []
    layer.layer.router.register_forward_hook(lambda module, args, output: probs.append(output[0]))
    layer(batch.tokens, batch.logits)
    scores_TE = routing_scores(37, 8, skew="lognormal-0.6", seed=12)  # 4 per rank
    second_T1 = np.sort(scores_TE, axis=1)[:, -2:-1]
    np.testing.assert_array_equal(probs[0].detach() > 0, scores_TE >= second_T1)


def test_every_pass_has_a_fresh_batch_and_fresh_gradients(megatron):
    case, layer = _built()
    data = _data(case)
    passes = Passes(layer, data, graphed=False)
    expected = [layer(batch.tokens, batch.logits) for batch in data]
    weight = layer.layer.experts.local_experts[0].linear_fc1.weight
    grads = []
    for number in range(5):
        assert torch.equal(passes.run(number), expected[number % 4])
        grads.append(weight.grad.clone())
    assert not torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[4])


@pytest.mark.parametrize("main_grad", ["fused", "first"])
@pytest.mark.parametrize("contender", ["drop-pad", "module", "packed"])
def test_gradients_are_added_to_main_grad_once(megatron, contender, main_grad):
    """Over 5 passes of 4 batches; packed experts add theirs themselves, or store them."""
    case, fresh = _built(contender=contender)
    _, summed = _built(contender=contender)
    data = _data(case)
    passes = Passes(summed, data, graphed=False, main_grad=main_grad)
    single = Passes(fresh, data, graphed=False)
    single._grad = passes._grad
    expected = [torch.zeros_like(parameter) for parameter in fresh.parameters()]
    for number in range(5):
        passes.run(number)
        single.run(number)
        for total, parameter in zip(expected, fresh.parameters(), strict=True):
            total += parameter.grad
    are_stored = main_grad == "first" and contender == "packed"
    for total, of_last, parameter in zip(
        expected, fresh.parameters(), summed.parameters(), strict=True
    ):
        wanted = of_last.grad if are_stored and parameter.dim() == 3 else total
        torch.testing.assert_close(parameter.main_grad, wanted, rtol=1e-6, atol=1e-6)


def test_stock_and_ours_have_the_fusions_of_production():
    for contender in ("drop-pad-graphed", "auto-graphed"):
        flags = megatron_flags(_case(contender=contender, main_grad="fused"), on_gpu=True)
        assert (flags["moe_router_fusion"], flags["gradient_accumulation_fusion"]) == (True, True)
        assert flags["moe_permute_fusion"] == (contender != "auto-graphed")


def test_stocks_fused_experts_are_two_flags_beside_dropless(monkeypatch):
    fused = megatron_flags(_case(contender="fuser-graphed", capacity_factor=None), on_gpu=True)
    plain = megatron_flags(_case(contender="dropless", capacity_factor=None), on_gpu=True)
    more = {"use_transformer_engine_op_fuser": True, "moe_single_grouped_weight": True}
    assert fused == plain | more
    for backend, factor in (("hybridep", 1.25), ("ncclep", 1.3)):
        case = _case(contender=f"{backend}-graphed", capacity_factor=None)
        flags = fused | {
            "moe_token_dispatcher_type": "flex",
            "moe_flex_dispatcher_backend": backend,
            "moe_expert_rank_capacity_factor": factor,
        }
        assert megatron_flags(case, on_gpu=True) == flags
        assert not CONTENDERS[case.contender].keeps_counts  # There are none on the host.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    by_default = parse([]).contenders
    assert "auto-graphed" in by_default
    assert not {x for x in by_default if x.split("-")[0] in ("fuser", "hybridep", "ncclep")}
    assert parse(["--contenders", "fuser-graphed", "--ep", "1"]).workers == 1
    message = r"^--contenders must run on several ranks, got 'fuser-graphed'; leave it out, or set"
    with pytest.raises(ValueError, match=message):
        parse(["--contenders", "fuser-graphed", "--ep", "1", "2"])
    message = r"^--contenders must run on one rank, got 'ncclep'; leave it out, or set --ep 2$"
    with pytest.raises(ValueError, match=message):
        parse(["--contenders", "ncclep", "--ep", "1", "2"])
    message = (
        r"^--skews must be uniform, got \['hot'\]; leave --contenders hybridep out: it does not"
    )
    with pytest.raises(ValueError, match=message):
        parse(["--contenders", "auto", "hybridep", "--skews", "hot"])


@pytest.mark.parametrize(("model", "most"), [("qwen3-30b-a3b", 41728), ("gpt-oss-20b", 19200)])
def test_nccl_eps_budget_holds_experts_filled_to_256_rows(model, most):
    num_experts, top_k = MODELS[model].num_experts, MODELS[model].top_k
    padded = []
    for batch in range(4):
        counts_E = np.zeros(num_experts, dtype=np.int64)
        for rank in (0, 1):
            logits_TE = routing_scores(4096, num_experts, skew="uniform", seed=4 * rank + batch)
            chosen_TK = np.argsort(-logits_TE, axis=1)[:, :top_k]
            counts_E += np.bincount(chosen_TK.ravel(), minlength=num_experts)
        padded += (-(-counts_E // 256) * 256).reshape(2, -1).sum(1).tolist()
    assert max(padded) == most
    assert most <= 4096 * top_k * STOCK["ncclep"]["moe_expert_rank_capacity_factor"]


def test_a_dispatcher_that_exceeds_its_budget_has_no_figures(megatron, monkeypatch):
    monkeypatch.setitem(STOCK, "budget", {})
    within = Contender(name="stock-drop-pad", variant="budget")
    monkeypatch.setitem(CONTENDERS, "budget", within)
    settings, case = parse(QUICK), _case(contender="budget")
    assert command.measure(case, settings, CPU)["error"] is None
    over = torch.tensor([True])
    monkeypatch.setattr(Dispatcher, "check_over_budget", lambda self: over, raising=False)
    row = command.measure(case, settings, CPU)
    assert row["error"].startswith("RuntimeError: a rank got more rows than its budget has room")
    assert "ms" not in row
    over.fill_(False)
    assert command.measure(case, settings, CPU)["error"] is None


def test_stock_computes_the_same_from_counts_that_it_does_not_wait_for(megatron, monkeypatch):
    kept = Contender(name="stock-dropless", graph="layer")
    monkeypatch.setitem(CONTENDERS, "dropless-graphed", kept)
    case, stock = _built(contender="dropless-graphed", capacity_factor=None)
    _, ours = _built(contender="module")
    (batch, *_) = _data(case)
    found, expected = (layer(batch.tokens, batch.logits) for layer in (stock, ours))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    # A layer that waits would have the counts of the host's copy.
    assert not hasattr(stock.layer.token_dispatcher, "d2h_event")


def _run(tmp_path, *flags, main=main):
    out = tmp_path / "results" / "bench.json"
    sizes = ["--tokens", "19", "--iterations", "2"]
    code = main([*sizes, "--out", str(out), "--commit", "abc", *flags])
    (run,) = json.loads(out.read_text())["runs"]
    assert run["about"]["commit"] == "abc"
    assert [path.name for path in out.parent.iterdir()] == ["bench.json"]
    return code, run


def _one_fails():
    def figures(*args):
        if dist.get_rank() == 1:
            raise RuntimeError("no memory")
        return {"ms": 1.0}

    with patch.object(command, "_figures", figures):
        return command.measure(_case(), parse(QUICK), CPU)["error"]


def test_a_case_that_fails_on_one_rank_fails_on_all(pool2):
    assert pool2.run(_one_fails) == ["RuntimeError: no memory"] * 2


def _measured_by_workers(*flags):
    end_groups()  # The command makes its own.
    return main([*flags])


def test_command_on_cpus(pool2, tmp_path):
    flags = ["--device", "cpu", "--ep", "2", "--skews", "hot", "--capacity-factors", "1.25"]
    flags += ["--contenders", "drop-pad", "module", "packed"]
    code, run = _run(tmp_path, *flags, main=lambda given: pool2.run(_measured_by_workers, *given))
    assert code == [0, 0]
    stock, module, packed = rows = run["rows"]
    assert run["about"]["command"].startswith("padded-dispatch bench --tokens 19")
    assert [row["variant"] for row in rows] == [None, "module", "packed"]
    assert [row["error"] for row in rows] == [None] * 3
    assert all(row["ms"] == sorted(row["samples_ms"])[2] > 0 for row in rows)
    assert all(row.keys() == stock.keys() for row in rows)
    # Four batches on each of two ranks. C = ceil(38 / 8 * 1.25) = 6; a store drops nothing.
    demand = np.array([routing_map(19, 8, 2, skew="hot", seed=seed).sum(0) for seed in range(8)])
    cells = demand.reshape(2, 4, 2, 4).transpose(1, 2, 0, 3).reshape(8, 8)  # of a batch and rank
    in_cells, asked = np.minimum(cells, 6).sum(), cells.sum()
    assert in_cells < asked == 8 * 38
    for row, rows_kept in (stock, in_cells), (module, in_cells), (packed, asked):
        assert row["dropped"] == pytest.approx(1 - rows_kept / cells.sum(), abs=1e-15)
    given = {"exchange": "alltoall"}
    assert module["chosen"] == {"experts": "module", "capacity_pool": "cells", **given}
    assert packed["chosen"] == {"experts": "packed", "capacity_pool": "store", **given}
    assert [row["floor_ms"] for row in rows] == [None] * 3


def test_rows_of_an_interrupted_run_are_kept(monkeypatch, tmp_path, capsys):
    measured, out = iter([{"ms": 1.0}, {"ms": 2.0}]), tmp_path / "bench.jsonl"

    def measure(*args):
        for row in measured:
            return row
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setattr(command, "line", str)
    with only_worker(), pytest.raises(KeyboardInterrupt):
        main(["--device", "cpu", "--out", str(out), "--commit", "abc"])
    (run,) = json.loads(out.read_text())["runs"]
    assert run["about"]["commit"] == "abc"
    assert run["rows"] == [{"ms": 1.0}, {"ms": 2.0}]
    start, *lines = capsys.readouterr().out.splitlines()
    assert lines == ["{'ms': 1.0}", "{'ms': 2.0}"]
    assert start == "15 cases, a line for each; starting takes 10 to 30 seconds"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ep", "4", "3"], "ep must divide the number of processes, 4, got 3"),
        (["--ep", "0"], "ep must be at least 1, got 0"),
        (["--ep", "3"], "ep must divide the 8 experts of tiny, got 3"),
        (["--contenders", "module-graphed"], "contenders must run on a CPU, got 'module-graphed'"),
        (["--main-grad", "fused"], "main-grad must be none on a CPU, got 'fused'"),
        (["--iterations", "0"], "iterations must be at least 1, got 0"),
        (["--readme"], "readme must be left out without a GPU"),
        (["--kernels"], "kernels must be left out without a GPU"),
        (["--out", "/dev/null/r.json"], "out.*'?/dev/null"),
        (["--tokens", "0"], "tokens must .*, got 0"),
        *[
            (["--capacity-factors", x], f"capacity-factors must be above 0 and finite, got {x}")
            for x in ("-1.0", "nan", "inf")
        ],
    ],
)
def test_mistakes_are_found_before_there_are_workers(flags, message):
    with pytest.raises(ValueError, match=f"^--{message}"):
        parse(["--device", "cpu", *flags])


def test_processes_are_as_many_as_the_largest_group_needs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"^--ep must be at most 2, .*, got 3"):
        parse(["--device", "cuda", "--models", "tiny", "--ep", "3"])
    with pytest.raises(ValueError, match=r"^--kernels must be left out without --out, .* True$"):
        parse(["--kernels"])
    assert parse(["--device", "cpu"]).workers == 2
    assert parse(["--device", "cpu", "--ep", "1", "4"]).workers == 4
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")
    assert parse(["--device", "cpu", "--ep", "1", "4"]).workers == 8
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert {case.ep for case in parse([]).cases} == {8}


def test_the_readme_s_cases_do_not_depend_on_other_flags(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    settings = parse(["--readme", "--models", "tiny", "--tokens", "7"])
    assert settings.cases == parse(["--readme"]).cases and settings.readme
    assert {(case.ep, case.tokens, case.model) for case in settings.cases} == {
        (2, 4096, "qwen3-30b-a3b"),
        (2, 4096, "gpt-oss-20b"),
    }


def _fused_experts_differ(main_grad):
    """Return the relative differences from dropless, eager, with the same weights."""
    found, device = [], torch.device("cuda")
    with megatron_groups("cuda"), torch.cuda.stream(training_stream()):
        case, weights = _case(contender="dropless", tokens=512, skew="uniform"), []
        case = dataclasses.replace(case, capacity_factor=None, main_grad=main_grad)
        sizes = case.shape, case.tokens, case.skew
        data = batches(*sizes, seed=0, dtype=torch.bfloat16, device=device)
        for name in ("dropless", "fuser", "fuser-graphed"):
            one = dataclasses.replace(case, contender=name)
            layer = build(one, megatron_flags(one, on_gpu=True), device)
            experts = layer.layer.experts
            linears = experts.linear_fc1, experts.linear_fc2
            if name == "dropless":
                weights = [[p.detach().clone() for p in x.parameters()] for x in linears]
            else:
                with torch.no_grad():
                    for linear, given in zip(linears, weights, strict=True):
                        linear.weight.copy_(torch.stack(given))
            graphed = CONTENDERS[name].graph == "layer"
            passes = Passes(layer, data, graphed=graphed, main_grad=main_grad)
            passes._grad.fill_(0).add_(data[1].tokens)
            for parameter in layer.parameters():  # Warming up has added to them.
                if main_grad != "none":
                    parameter.main_grad.zero_()
            tensors = [passes.run(2).detach().clone(), passes._tokens.grad.clone()]
            source = "grad" if main_grad == "none" else "main_grad"
            for linear in linears:
                grads = [getattr(parameter, source) for parameter in linear.parameters()]
                tensors.append(torch.cat([grad.flatten() for grad in grads]))
            found.append([tensor.float() for tensor in tensors])
    exact, *others = found
    return [
        ((one - wanted).norm() / wanted.norm()).item()
        for other in others
        for one, wanted in zip(other, exact, strict=True)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("main_grad", ["none", "fused"])
def test_stocks_fused_experts_agree_with_its_others(gpu_pools, main_grad):
    """Their probabilities are in bf16. An older cuBLAS has no such products for Hopper."""
    version = tuple(map(int, (cublas(torch.device("cuda")) or "0").split(".")))
    if version < (13, 4):
        with pytest.raises(WorkerError, match="Single grouped parameters require"):
            gpu_pools[1].run(_fused_experts_differ, main_grad)
    else:
        (differences,) = gpu_pools[1].run(_fused_experts_differ, main_grad)
        assert max(differences) < 2e-2, differences


@pytest.mark.gpu
def test_command_on_a_gpu(tmp_path):
    flags = ["--capacity-factors", "1.5", "--main-grad", "none", "fused", "--kernels"]
    code, run = _run(tmp_path, "--ep", "1", "--models", "tiny", *flags)
    assert [row["error"] for row in run["rows"]] == [None] * len(run["rows"])
    assert code == 0
    assert all(len(row["sm_mhz"]) == 5 for row in run["rows"])
    assert all(100 < mhz < 5000 for row in run["rows"] for mhz in row["sm_mhz"])
    # An idle H200 takes 75 W, a busy one at most 700.
    watts = [row["joules"] / row["sustained_ms"] * 1e3 for row in run["rows"]]
    assert all(30 < power < 1500 for power in watts)
    rows = [row for row in run["rows"] if row["main_grad"] == "none"]
    assert len(run["rows"]) == 2 * len(rows)
    graphed = [row for row in rows if row["graph"] == "layer"]
    assert [row["contender"] for row in graphed] == ["stock-drop-pad", *["ours"] * 4]
    # The profiler looks into graphs.
    assert graphed[0]["kernels_ms"] and "_rows_times_weights_kernel" in graphed[1]["kernels_ms"]
    assert all(row["allocated_gib"] >= 0 for row in rows)
    known = torch.cuda.get_device_name() == "NVIDIA H200"
    assert all((row["floor_ms"] is not None) == known for row in rows)
