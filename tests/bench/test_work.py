"""`padded-dispatch bench` from a command line to a file; its layer and its timing."""

import json

import numpy as np
import pytest
import torch

from padded_dispatch.bench import work
from padded_dispatch.bench.cases import Case
from padded_dispatch.bench.command import main, parse
from padded_dispatch.bench.layer import OPTIONS, build, stock_flags
from padded_dispatch.bench.measure import Passes, batches
from padded_dispatch.megatron import PaddedOptions, install, uninstall
from padded_dispatch.utils.routings import routing_scores
from tests.support import tiny
from tests.support.inline_pool import only_worker
from tests.support.routings import routing_map

CPU = torch.device("cpu")


def _case(**changes):
    values = {"model": "tiny", "ep": 1, "tokens": 37, "skew": "hot", "contender": "module"}
    return Case(**({"capacity_factor": 4.0} | values | changes))


@pytest.fixture
def megatron():
    with tiny.one_process():
        install()
        yield
        uninstall()


@pytest.mark.parametrize(
    ("contender", "factor"),
    [("module", 4.0), ("packed", 4.0), ("drop-pad", 4.0), ("allgather", None)],
)
def test_the_routing_is_the_one_that_was_ordered(megatron, contender, factor):
    case = _case(contender=contender, capacity_factor=factor, skew="lognormal-0.6")
    (batch, *_) = batches(case, seed=3, dtype=torch.float32, device=CPU)
    layer = build(case, stock_flags(case, on_gpu=False, router_fusion=False), CPU)
    probs = []
    layer.layer.router.register_forward_hook(lambda module, args, output: probs.append(output[0]))
    layer(batch.tokens, batch.logits)
    scores_TE = routing_scores(37, 8, 2, skew="lognormal", sigma=0.6, seed=12)  # 4 per rank
    second_T1 = np.sort(scores_TE, axis=1)[:, -2:-1]
    np.testing.assert_array_equal(probs[0].detach() > 0, scores_TE >= second_T1)


def test_variants_are_the_options_experts(megatron):
    experts = [
        build(case, stock_flags(case, on_gpu=False, router_fusion=False), CPU).layer.experts
        for case in (_case(contender="module"), _case(contender="packed"))
    ]
    assert [type(found).__name__ for found in experts] == ["SequentialMLP", "StackedExperts"]


def test_auto_is_the_options_untouched_and_its_row_has_what_was_chosen(megatron):
    assert OPTIONS["auto"] == PaddedOptions()

    flags = ["--device", "cpu", "--workers", "1", "--iterations", "1", "--repeats", "1"]
    row = work.measure(_case(contender="auto"), parse(flags), CPU)
    assert (row["error"], row["contender"], row["variant"]) == (None, "ours", "auto")
    assert row["chosen"] == {"experts": "module", "exchange": "none"}


def test_the_sweep_of_defaults_is_one_command(monkeypatch):
    """The cases of `notebooks/results/defaults.json`: auto beside every explicit choice."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    models = ["qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite"]
    contenders = [f"{name}-graphed" for name in ("auto", "packed", "batched", "direct")]
    settings = parse(
        f"--device cuda --workers 2 --ep 2 1 --models {' '.join(models)} --contenders "
        f"{' '.join(contenders)} --tokens 512 4096 16384 --capacity-factors 1.0 1.25 2.0 "
        "--no-phases".split()
    )
    assert [case.ep for case in settings.cases] == [2] * 27 * 4 + [1] * 27 * 3
    for ep, number in ((2, 4), (1, 3)):
        block = [case for case in settings.cases if case.ep == ep]
        for i in range(0, len(block), number):  # one after the other, on the same batches
            together = block[i : i + number]
            assert [case.contender for case in together] == contenders[:number]
            assert len({(c.model, c.tokens, c.capacity_factor) for c in together}) == 1


def test_every_pass_has_a_fresh_batch_and_fresh_gradients(megatron):
    case = _case()
    data = batches(case, seed=0, dtype=torch.float32, device=CPU)
    flags = stock_flags(case, on_gpu=False, router_fusion=False)
    layer = build(case, flags, CPU)
    passes = Passes(layer, data, graphed=False)
    expected = [layer(batch.tokens, batch.logits) for batch in data]
    weight = layer.layer.experts.local_experts[0].linear_fc1.weight
    grads = []
    for number in range(5):
        assert torch.equal(passes.run(number), expected[number % 4])
        grads.append(weight.grad.clone())
    assert not torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[4])


@pytest.mark.parametrize("contender", ["drop-pad", "module", "packed"])
def test_gradients_are_added_to_main_grad_once(megatron, contender):
    """Over 5 passes of 4 batches; packed experts add theirs themselves."""
    case = _case(contender=contender, main_grad="separate")
    data = batches(case, seed=0, dtype=torch.float32, device=CPU)
    flags = stock_flags(case, on_gpu=False, router_fusion=False)
    fresh, summed = build(case, flags, CPU), build(case, flags, CPU)
    passes = Passes(summed, data, graphed=False, main_grad=case.main_grad)
    single = Passes(fresh, data, graphed=False)
    single._grad = passes._grad
    expected = [torch.zeros_like(parameter) for parameter in fresh.parameters()]
    for number in range(5):
        passes.run(number)
        single.run(number)
        for total, parameter in zip(expected, fresh.parameters(), strict=True):
            total += parameter.grad
    for total, parameter in zip(expected, summed.parameters(), strict=True):
        torch.testing.assert_close(parameter.main_grad, total, rtol=1e-6, atol=1e-6)


def test_fused_gradients_are_asked_of_megatron():
    flags = stock_flags(_case(main_grad="fused"), on_gpu=True, router_fusion=False)
    assert flags["gradient_accumulation_fusion"]


def test_idle_rank_gets_nothing():
    case = _case(ep=2, skew="idle-rank")
    for batch in batches(case, seed=0, dtype=torch.float32, device=CPU):
        assert batch.logits.topk(2).indices.max() < 4


def _run(tmp_path, *flags):
    out = tmp_path / "results" / "bench.json"
    sizes = ["--tokens", "19", "--iterations", "2", "--repeats", "3"]
    code = main([*sizes, "--out", str(out), "--commit", "abc", *flags])
    (run,) = json.loads(out.read_text())["runs"]
    assert run["about"]["commit"] == "abc"
    assert [path.name for path in out.parent.iterdir()] == ["bench.json"]
    return code, run


def test_command_on_cpus(tmp_path):
    code, run = _run(tmp_path, "--ep", "2", "1", "--capacity-factors", "1", "2", "--device", "cpu")
    assert code == 0
    rows = run["rows"]
    assert run["about"]["command"].startswith("padded-dispatch bench --tokens 19")
    found = [(r["ep"], r["contender"], r["variant"], r["capacity_factor"]) for r in rows]
    ours = [("ours", variant) for variant in ("auto", "module", "packed", "batched")]
    dropping = [("stock-drop-pad", None), *ours]
    block = [
        ("stock-allgather", None, None),
        *((*contender, factor) for factor in (1, 2) for contender in dropping),
    ]
    assert found == [(ep, *row) for ep in (2, 1) for row in block]
    assert [row["error"] for row in rows] == [None] * 22
    assert all(row["ms"] == sorted(row["samples_ms"])[1] > 0 for row in rows)
    assert all(row.keys() == rows[0].keys() for row in rows)
    # Rows beyond C = ceil(38 / 8 * 2) = 10 are dropped; two ranks have four batches each.
    maps = [routing_map(19, 8, 2, seed=seed) for seed in range(8)]
    mean_kept = sum(np.minimum(map_TE.sum(0), 10).sum() for map_TE in maps) / 8
    assert rows[7]["fill"] == pytest.approx(mean_kept / 80, abs=1e-6)
    assert rows[0]["fill"] is None
    assert [row["floor_ms"] for row in rows] == [None] * 22


def test_a_case_that_fails_is_a_row(megatron, monkeypatch):
    def refuse(case, flags, device):
        raise RuntimeError("no such layer")

    settings = parse(["--device", "cpu", "--workers", "1", "--iterations", "1", "--repeats", "1"])
    good = work.measure(_case(), settings, CPU)
    monkeypatch.setattr(work, "build", refuse)
    bad = work.measure(_case(), settings, CPU)
    assert (good["error"], bad["error"]) == (None, "RuntimeError: no such layer")
    assert bad["ms"] is None
    assert bad.keys() == good.keys()


def test_no_case_starts_when_time_is_over(capfd):
    with only_worker():
        assert main(["--device", "cpu", "--minutes", "0"]) == 0
    assert "16 of 16 cases were not started" in capfd.readouterr().out


def test_rows_of_an_interrupted_run_are_kept(monkeypatch, tmp_path, capfd):
    measured, out = iter([{"ms": 1.0}, {"ms": 2.0}]), tmp_path / "bench.jsonl"

    def measure(*args):
        for row in measured:
            return row
        raise KeyboardInterrupt

    monkeypatch.setattr(work, "measure", measure)
    monkeypatch.setattr(work, "line", str)
    flags = ["--device", "cpu", "--out", str(out), "--commit", "abc", "--command", "as typed"]
    with only_worker(), pytest.raises(KeyboardInterrupt):
        main(flags)
    (run,) = json.loads(out.read_text())["runs"]
    assert (run["about"]["commit"], run["about"]["command"]) == ("abc", "as typed")
    assert run["rows"] == [{"ms": 1.0}, {"ms": 2.0}]
    assert capfd.readouterr().out == "{'ms': 1.0}\n{'ms': 2.0}\n"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["alltoall"], ["drop-pad", "packed"]),
        (["direct"], ["drop-pad", "direct-graphed"]),
        (["alltoall", "direct"], ["drop-pad", "packed", "direct-graphed"]),
    ],
)
def test_exchanges_choose_among_our_contenders(monkeypatch, flags, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    contenders = ["--contenders", "drop-pad", "packed", "direct-graphed"]
    settings = parse([*contenders, "--device", "cuda", "--models", "tiny", "--exchange", *flags])
    assert [case.contender for case in settings.cases if case.capacity_factor == 1] == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ep", "3"], "ep must divide workers=2, got 3"),
        (["--contenders", "module-graphed"], "contenders must run on a CPU, got 'module-graphed'"),
        (
            ["--contenders", "module", "--exchange", "direct"],
            "exchange must be one that a contender uses on device=cpu with these --ep, got "
            "'direct'; add such contenders, or leave --exchange out",
        ),
        (["--exchange", "direct"], "exchange must be one that a contender uses on device=cpu"),
        (
            ["--contenders", "drop-pad", "module", "--exchange", "alltoall", "direct"],
            "exchange must be one that a contender uses on device=cpu with these --ep, got 'dir",
        ),
        (["--main-grad", "fused"], "main-grad must be none or separate on a CPU, got 'fused'"),
        (["--repeats", "0"], "repeats must be at least 1, got 0"),
        (["--workers", "0"], "workers must be at least 1, got 0"),
        (["--minutes", "-1"], "minutes must be 0 or more, got -1.0"),
        (["--out", "/dev/null/r.json"], "out.*'?/dev/null"),
        (["--tokens", "0"], "tokens must .*, got 0"),
        (["--capacity-factors", "-1"], "capacity-factors must .*, got -1.0"),
        (["--skews", "idle-rank", "--ep", "1"], "skews must leave .* ep=1, got 'idle-rank'"),
    ],
)
def test_mistakes_are_found_before_there_are_workers(flags, message):
    with pytest.raises(ValueError, match=f"^--{message}"):
        parse(["--device", "cpu", *flags])


def test_no_contender_fixes_the_exchange_auto(capsys):
    with pytest.raises(SystemExit):
        parse(["--device", "cpu", "--exchange", "auto"])
    assert "invalid choice: 'auto'" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--exchange", "direct"]])
def test_direct_stores_need_ranks(monkeypatch, flags):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    given = ["--device", "cuda", "--models", "tiny", "--contenders", "direct", "--ep", "1", *flags]
    rule = "exchange must be one that .* these --ep" if flags else "contenders must run .* --ep"
    with pytest.raises(ValueError, match=f"^--{rule}"):
        parse(given)


def test_more_workers_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="workers must be at most 2, the GPUs here, got 3"):
        parse(["--device", "cuda", "--models", "tiny", "--workers", "3"])


@pytest.mark.gpu
def test_command_on_a_gpu(tmp_path):
    flags = ["--capacity-factors", "1.5", "--main-grad", "none", "separate", "fused"]
    code, run = _run(tmp_path, "--workers", "1", "--models", "tiny", *flags)
    assert [row["error"] for row in run["rows"]] == [None] * len(run["rows"])
    assert code == 0
    assert run["about"]["max_sm_mhz"] > 0
    assert all(len(row["sm_mhz"]) == 3 for row in run["rows"])
    rows = [row for row in run["rows"] if row["main_grad"] == "none"]
    assert len(run["rows"]) == 3 * len(rows)
    graphed = [row for row in rows if row["graph"] == "layer"]
    assert [row["contender"] for row in graphed] == ["stock-drop-pad", *["ours"] * 6]
    # A kernel that only we have, and one that both have: the profiler looks into graphs.
    assert graphed[1]["phases_ms"]["plan"] > 0
    assert graphed[1]["phases_ms"]["gemm"] > 0
    assert all(row["floor_ms"] > 0 and row["allocated_gib"] >= 0 for row in rows)
