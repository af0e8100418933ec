"""From flags to settings: defaults, overrides, and one line for each mistake."""

import dataclasses
from pathlib import Path

import pytest

from padded_dispatch.megatron.options import PaddedOptions
from padded_dispatch.train.arguments import parse, parser
from padded_dispatch.train.settings import PRESETS, Dispatch, Layout, Output, Recipe


@pytest.fixture(autouse=True)
def laptop(monkeypatch):
    """A machine without a GPU, outside torchrun."""
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
    assert settings.output.run_dir is None and settings.output.out is None


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
    with pytest.raises(
        ValueError,
        match=r"^--workers must be 4, the processes that torch.*, got 2; leave",
    ):
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
        "run_dir": Path("no/such/folder"),
        "save_every": 5,
        "resume": True,
        "tensorboard": True,
        "json": True,
        "out": Path("r.json"),
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
        (
            "--preset qwen3-30b-a3b",
            "^--preset must be tiny on device=cpu, got 'qwen3-30b-a3b'; add --device",
        ),
        ("--device cuda", "^--device must be cpu where PyTorch sees no GPU, got 'cuda'$"),
        ("--workers 3 --ep 2", r"^--workers must be a multiple of etp \* pp \* ep=2, got 3$"),
        ("--workers 3 --pp 2", r"^--workers must be a multiple of tp \* pp=2, got 3$"),
        ("--workers 3", "^--ep must divide the 8 experts, got 3$"),
        ("--tp 2 --sequence-parallel", "^--tp must be 1 on a CPU, .*, got 2$"),
        ("--num-layers 3 --pp 2", r"^--num-layers must be a multiple of pp \* vpp=2, got 3$"),
        ("--global-batch 7", "^--global-batch must be a multiple of micro_batch .*=16, got 7$"),
        ("--vpp 2", "^--vpp must be left out at --pp 1, got 2$"),
        (
            "--pp 2 --vpp 1 --micro-batch 4 --global-batch 12",
            r"^--global-batch must be a multiple of .* \* pp=8 with --vpp, got 12$",
        ),
        ("--steps 0", "^--steps must be above 0, got 0$"),
        ("--workers 0", "^--workers must be above 0, got 0$"),
        ("--tp 0", "^--tp must be above 0, got 0$"),
        ("--pp 0", "^--pp must be above 0, got 0$"),
        ("--ep 0", "^--ep must be above 0, got 0$"),
        ("--lr 0", r"^--lr must be above 0, got 0\.0$"),
        ("--lr-warmup -1", "^--lr-warmup must be 0 or more, got -1$"),
        (
            "--adam-state bf16",
            "^--adam-state must be fp32 on a CPU, got 'bf16'; leave it out$",
        ),
        ("--seed -1", "^--seed must be 0 or more, got -1$"),
        (f"--seed {2**63}", rf"^--seed must be below 2\*\*63, got {2**63}$"),
        (
            "--capacity-factor -1",
            r"^--capacity-factor must be a number above 0, or 'none' to drop nothing, got -1\.0$",
        ),
        ("--capacity-factor inf", "^--capacity-factor must be a number above 0, .* got inf$"),
        ("--capacity-factor nan", "^--capacity-factor must be a number above 0, .* got nan$"),
        (
            "--num-layers 2 --padded-layer-factors 1:2,3:2",
            "^--padded-layer-factors must name layers from 1 to num_layers=2, got .*; leave "
            "out layer 3$",
        ),
        (
            "--dispatcher allgather --padded-experts packed",
            "^--padded-experts must be left out with --dispatcher allgather, got 'packed'; in "
            "compare, give it to each padded contender, behind its --vs$",
        ),
        (
            "--dispatcher alltoall-drop-pad --padded-policy random",
            "^--padded-policy must be left out with --dispatcher alltoall-drop-pad, got 'random';",
        ),
        (
            "--dispatcher alltoall-drop-pad --padded-eval-factor 2",
            "^--padded-eval-factor must be left out with --dispatcher alltoall-drop-pad, got .*2",
        ),
        (
            "--dispatcher allgather --drop-policy position",
            "^--drop-policy must be left out with --dispatcher allgather, which drops nothing, "
            "got 'position'$",
        ),
        (
            "--dispatcher alltoall",
            "^--dispatcher must be padded_alltoall, .* on a CPU, got 'alltoall'; add --device cuda",
        ),
        (
            "--dispatcher allgather --capacity-factor 2",
            r"^--capacity-factor must be left out with --dispatcher allgather, which .*, got 2\.0$",
        ),
        (
            "--shared-overlap",
            "^--shared-overlap must be left out without shared experts .*, got True; ",
        ),
        (
            "--dispatcher alltoall-drop-pad --capacity-factor none",
            "^--capacity-factor must be a number with --dispatcher alltoall-drop-pad, got 'none'$",
        ),
        ("--save-every 2", "^--save-every must come with a folder, got 2; give --run-dir$"),
        (
            "--experts packed --exchange direct",
            "^--padded-exchange must be auto, alltoall or two-level without several GPUs, .*, got "
            "'direct'; add --device cuda and an --ep of at least 2$",
        ),
        ("--resume", "^--resume must come with a folder, got True; give --run-dir$"),
        ("--tensorboard", "^--tensorboard must come with a folder, got True; give --run-dir$"),
    ],
)
def test_mistakes_are_named(flags, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse(flags.split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tp 2", "^--tp must come with --sequence-parallel, .*, got 2; add it$"),
        ("--tp 8 --sequence-parallel", "^--tp must divide the 4 attention heads, got 8$"),
        ("--workers 16", "^--workers must be at most 8, the GPUs that PyTorch sees, got 16$"),
    ],
)
def test_mistakes_on_gpus_are_named(eight_gpus, flags, message):
    with pytest.raises(ValueError, match=message):
        parse(flags.split())


def test_a_folder_with_a_run_is_not_written_over(tmp_path):
    (tmp_path / "checkpoints" / "unfinished").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").touch()
    already = rf"^--run-dir must hold no earlier run, got '{tmp_path}'; "
    with pytest.raises(ValueError, match=f"{already}delete its metrics.jsonl, or choose another"):
        parse(["--run-dir", str(tmp_path)])
    (tmp_path / "checkpoints" / "step-00000002").mkdir()
    with pytest.raises(ValueError, match=f"{already}add --resume to continue that run, or choose"):
        parse(["--run-dir", str(tmp_path)])
    assert parse(["--run-dir", str(tmp_path), "--resume"]).output.run_dir == tmp_path


@pytest.mark.parametrize("flags", ["--run-dir", "--resume --run-dir", "--trace"])
def test_a_file_is_no_folder(tmp_path, flags):
    (tmp_path / "file").touch()
    name = flags.split()[-1]
    with pytest.raises(ValueError, match=rf"^{name} must .*{tmp_path}/file"):
        parse([*flags.split(), f"{tmp_path}/file"])


def test_text_that_is_no_factor_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(["--capacity-factor", "abc"])
    assert capsys.readouterr().err.endswith(
        "error: argument --capacity-factor: must be a number above 0, or 'none' to drop nothing, "
        "got 'abc'\n"
    )


def test_padded_options_keep_their_own_defaults():
    assert parse([]).dispatch.padded == PaddedOptions()


def test_help_names_every_default(capsys):
    with pytest.raises(SystemExit, match="0"):
        parser().parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--lr-warmup N steps over which the learning rate rises (default: 20)" in text
    assert "--num-layers N layers of the model (default: the preset's)" in text
    assert "--padded-min-capacity" in text


def test_a_trace_is_named_by_one_flag():
    with pytest.raises(SystemExit):
        parse(["--padded-trace", "traces"])
    dispatch = dataclasses.replace(parse([]).dispatch, padded=PaddedOptions(trace="traces"))
    message = r"^padded\.trace must be None, .*, got 'traces'; set --trace$"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(parse([]), dispatch=dispatch)
