"""From flags to settings: defaults, overrides, and every mistake in one line that names it."""

import dataclasses
from pathlib import Path

import pytest

from padded_dispatch.megatron.options import PaddedOptions
from padded_dispatch.train.arguments import parse, parser
from padded_dispatch.train.settings import PRESETS, Dispatch, Layout, Output, Recipe


@pytest.fixture(autouse=True)
def laptop(monkeypatch):
    """No GPU, and nobody's workers."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture
def eight_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)


def test_tiny_is_two_processes_with_half_of_the_experts_each():
    settings = parse([])
    assert settings.preset == "tiny" and settings.model == PRESETS["tiny"].model
    assert settings.layout == Layout(device="cpu", workers=2, ep=2)
    assert settings.dispatch == Dispatch(dispatcher="padded_alltoall", capacity_factor=1.25)
    assert settings.recipe.global_batch == 2 * settings.recipe.micro_batch
    assert settings.num_microbatches == 1
    assert settings.recipe.lr_decay == settings.output.steps == PRESETS["tiny"].steps
    assert settings.output.out is None


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_fits_eight_gpus(eight_gpus, preset):
    settings = parse(["--preset", preset])
    assert settings.layout == Layout(device="cuda", workers=8, ep=8)
    assert settings.recipe.num_layers == PRESETS[preset].num_layers


def test_defaults_follow_what_is_given(eight_gpus):
    flags = "--preset gpt-oss-20b --pp 2 --vpp 2 --tp 2 --sequence-parallel"
    settings = parse(flags.split())
    layout = settings.layout
    assert (layout.workers, layout.dp, layout.ep, layout.etp) == (8, 2, 4, 1)
    assert settings.recipe.global_batch == 4 and settings.num_microbatches == 2
    flags = "--dispatcher alltoall --steps 7 --micro-batch 3 --ep 2 --workers 4"
    settings = parse(flags.split())
    assert settings.dispatch.capacity_factor is None
    assert settings.recipe.global_batch == 12
    assert settings.recipe.lr_decay == settings.output.steps == 7


def test_torchrun_decides_the_number_of_workers(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert parse([]).layout == Layout(device="cpu", workers=4, ep=4)
    with pytest.raises(ValueError, match="workers=2 is not possible: torchrun started 4"):
        parse(["--workers", "2"])


GIVEN = {
    Recipe: {
        "num_layers": 4,
        "seq_length": 12,
        "micro_batch": 3,
        "global_batch": 12,
        "lr": 0.5,
        "lr_warmup": 0,
        "lr_decay": 9,
        "adam_state": "fp32",
        "balancing": "expert-bias",
        "router_skew": 0.5,
        "seed": 0,
        "deterministic": True,
    },
    Dispatch: {
        "dispatcher": "padded_alltoall",  # which alone can be traced
        "capacity_factor": 2.5,
        "drop_policy": "position",
        "shared_overlap": False,  # tiny has no shared experts
    },
    Layout: {
        "device": "cpu",
        "workers": 4,
        "tp": 1,
        "pp": 2,
        "vpp": 2,
        "ep": 1,
        "etp": 2,
        "sequence_parallel": True,
    },
    Output: {
        "steps": 8,
        "graph": "none",
        "graph_timeout": 2.5,
        "log_every": 2,
        "eval_every": 3,
        "eval_passes": 4,
        "out": Path("no/such/folder"),
        "save_every": 5,
        "resume": True,
        "tensorboard": True,
        "json": True,
        "results": Path("r.json"),
        "commit": "abc",
        "trace": Path("no/such/traces"),
        "trace_every": 6,
        "trace_gib": 0.5,
    },
}


def test_every_field_is_a_flag():
    argv = ["--padded-min-capacity", "3"]
    for fields in GIVEN.values():
        for name, value in fields.items():
            flag = name.replace("_", "-")
            known = {True: [f"--{flag}"], False: [f"--no-{flag}"]}
            argv += known[value] if isinstance(value, bool) else [f"--{flag}", str(value)]
    settings = parse(argv)
    assert settings.recipe == Recipe(**GIVEN[Recipe])
    assert settings.layout == Layout(**GIVEN[Layout])
    assert settings.output == Output(**GIVEN[Output])
    assert settings.dispatch == Dispatch(**GIVEN[Dispatch], padded=PaddedOptions(min_capacity=3))
    for cls, given in GIVEN.items():
        names = {option.name for option in dataclasses.fields(cls)}
        assert names - set(given) == ({"padded"} if cls is Dispatch else set())


def test_experts_need_no_prefix():
    short, long = parse(["--experts", "packed"]), parse(["--padded-experts", "packed"])
    assert short == long and short.dispatch.padded.experts == "packed"


def test_none_drops_nothing():
    for text in ("none", "no-drop"):
        assert parse(["--capacity-factor", text]).dispatch.capacity_factor is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--preset qwen3-30b-a3b", "preset=qwen3-30b-a3b is not possible on device=cpu"),
        ("--device cuda", "device=cuda is not possible: PyTorch sees no GPU"),
        ("--workers 3 --ep 2", "workers=3 is not possible: make it a multiple of etp"),
        ("--workers 3 --pp 2", "workers=3 is not possible: make it a multiple of tp"),
        ("--workers 3", "ep=3 is not possible: it must divide 8"),
        ("--tp 2 --sequence-parallel", "tp=2 is not possible: on a CPU"),
        ("--num-layers 3 --pp 2", "num_layers=3 is not possible: make it a multiple of pp"),
        ("--global-batch 7", "global_batch=7 is not possible: make it a multiple of micro_batch"),
        ("--vpp 2", "vpp=2 is not possible: it needs pp > 1"),
        (
            "--pp 2 --vpp 1 --micro-batch 4 --global-batch 12",
            "vpp=1 is not possible: it needs a multiple of pp=2",
        ),
        ("--steps 0", "steps=0 is not possible: give a number above 0"),
        ("--workers 0", "^workers=0 is not possible: give a number above 0$"),
        ("--tp 0", "^tp=0 is not possible: give a number above 0$"),
        ("--pp 0", "^pp=0 is not possible: give a number above 0$"),
        ("--ep 0", "^ep=0 is not possible: give a number above 0$"),
        ("--lr 0", "lr=0.0 is not possible: give a number above 0"),
        ("--lr-warmup -1", "lr_warmup=-1 is not possible: give 0 or more"),
        ("--adam-state bf16", "adam_state='bf16' is not possible: only Transformer Engine's Adam"),
        ("--seed -1", "seed=-1 is not possible: give 0 or more"),
        (f"--seed {2**63}", rf"seed={2**63} is not possible: give less than 2\*\*63$"),
        (
            "--capacity-factor -1",
            r"^capacity_factor=-1\.0 is not possible: give a number above 0, or",
        ),
        (
            "--capacity-factor inf",
            "^capacity_factor=inf is not possible: give a number above 0, or",
        ),
        (
            "--capacity-factor nan",
            "^capacity_factor=nan is not possible: give a number above 0, or",
        ),
        (
            "--num-layers 2 --padded-layer-factors 1:2,3:2",
            "^padded_layer_factors='1:2,3:2' is not possible: there is no layer 3; give numbers up "
            "to num_layers=2$",
        ),
        (
            "--dispatcher allgather --padded-experts packed",
            "^padded_experts='packed' is not possible: dispatcher=allgather has no such option; "
            "leave it out, and in compare give it to each contender of ours, behind its --vs$",
        ),
        (
            "--dispatcher alltoall-drop-pad --padded-policy random",
            "padded_policy='random' is not possible: dispatcher=alltoall-drop-pad has no such",
        ),
        (
            "--dispatcher alltoall-drop-pad --padded-eval-factor 2",
            "padded_eval_factor='2' is not possible: dispatcher=alltoall-drop-pad has no such",
        ),
        (
            "--dispatcher allgather --drop-policy position",
            "drop_policy='position' is not possible: dispatcher=allgather drops nothing",
        ),
        ("--dispatcher alltoall", "dispatcher='alltoall' is not possible: Megatron's needs a GPU"),
        ("--dispatcher allgather --capacity-factor 2", "capacity_factor=2.0 is not possible"),
        ("--shared-overlap", "shared_overlap=True is not possible: it needs a model with shared"),
        (
            "--dispatcher alltoall-drop-pad --capacity-factor none",
            "capacity_factor=None is not possible: alltoall-drop-pad needs a number",
        ),
        ("--save-every 2", "save_every=2 is not possible: it needs a folder"),
        (
            "--experts packed --exchange direct",
            "padded_exchange='direct' is not possible: GPUs of one host store to each other",
        ),
        ("--resume", "resume=True is not possible: it needs a folder"),
        ("--tensorboard", "tensorboard=True is not possible: it needs a folder"),
    ],
)
def test_mistakes_are_named(flags, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse(flags.split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tp 2", "tp=2 is not possible: Megatron trains experts"),
        ("--tp 8 --sequence-parallel", "tp=8 is not possible: it must divide 4"),
        ("--workers 16", "workers=16 is not possible: PyTorch sees 8 GPUs"),
    ],
)
def test_mistakes_on_gpus_are_named(eight_gpus, flags, message):
    with pytest.raises(ValueError, match=message):
        parse(flags.split())


def test_a_folder_with_a_run_is_not_written_over(tmp_path):
    (tmp_path / "checkpoints" / "unfinished").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").touch()
    already = rf"^out='{tmp_path}' is not possible: it holds a run already; "
    with pytest.raises(ValueError, match=f"{already}delete its metrics.jsonl, or choose another"):
        parse(["--out", str(tmp_path)])
    (tmp_path / "checkpoints" / "step-00000002").mkdir()
    with pytest.raises(ValueError, match=f"{already}add --resume to go on with it, or choose anot"):
        parse(["--out", str(tmp_path)])
    assert parse(["--out", str(tmp_path), "--resume"]).output.out == tmp_path


@pytest.mark.parametrize("flags", ["--out", "--resume --out", "--trace"])
def test_a_file_is_no_folder(tmp_path, flags):
    (tmp_path / "file").touch()
    name = flags.split("--")[-1]
    with pytest.raises(
        ValueError, match=rf"^{name}='{tmp_path}/file' is not possible: .* no folder"
    ):
        parse([*flags.split(), f"{tmp_path}/file"])


def test_help_names_every_default(capsys):
    with pytest.raises(SystemExit, match="0"):
        parser().parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--lr-warmup N steps over which the learning rate rises (default: 20)" in text
    assert "--num-layers N layers of the model (default: the preset's)" in text
    assert "--padded-min-capacity" in text
