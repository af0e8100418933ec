"""From flags to settings: defaults, overrides, and one line for each mistake."""

import dataclasses
import re
from pathlib import Path

import pytest

from padded_dispatch.megatron.options import PaddedOptions
from padded_dispatch.train.arguments import read_compare
from padded_dispatch.train.settings import PRESETS, Dispatch, Layout, Output, Recipe
from padded_dispatch.utils.flags import flag
from tests.support.tiny import parse


@pytest.fixture(autouse=True)
def laptop(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture
def eight_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)


def test_defaults_are_the_presets_and_the_options_own(capsys):
    settings = parse([])
    assert settings.preset == "tiny" and settings.model == PRESETS["tiny"].model
    assert settings.layout == Layout(device="cpu", workers=2, ep=2)
    assert settings.dispatch == Dispatch(dispatcher="padded_alltoall", capacity_factor=1.25)
    assert settings.dispatch.padded == PaddedOptions()
    assert settings.recipe.global_batch == 2 * settings.recipe.micro_batch
    assert settings.num_microbatches == 1
    assert settings.output.steps == PRESETS["tiny"].steps
    for text in ("none", "no-drop"):
        assert parse(["--capacity-factor", text]).dispatch.capacity_factor is None
    assert parse(["--experts", "packed"]) == parse(["--padded-experts", "packed"])
    for flags, code in (["--help"], 0), (["--capacity-factor", "abc"], 2):
        with pytest.raises(SystemExit, match=str(code)):
            parse(flags)
    found = capsys.readouterr()
    text = " ".join(found.out.split())
    assert "--seed N seed of the weights and of the order of the data (default: 1234)" in text
    assert "--num-layers N layers of the model (default: the preset's)" in text
    assert found.err.endswith("a number above 0, or 'none' to drop nothing, got 'abc'\n")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_fits_eight_gpus(eight_gpus, preset):
    settings = parse(["--preset", preset])
    assert settings.layout == Layout(device="cuda", workers=8, ep=8)
    assert settings.recipe.num_layers == PRESETS[preset].num_layers
    with pytest.raises(ValueError, match=r"^--workers must be at most 8, the GPUs"):
        parse(["--preset", preset, "--workers", "16"])


def test_defaults_follow_what_is_given(eight_gpus):
    flags = "--preset gpt-oss-20b --pp 2 --vpp 2 --tp 2"
    settings = parse(flags.split())
    layout = settings.layout
    assert (layout.workers, layout.dp, layout.ep, layout.etp) == (8, 2, 4, 1)
    assert settings.recipe.global_batch == 4 and settings.num_microbatches == 2
    flags = "--dispatcher alltoall --steps 7 --micro-batch 3 --ep 2 --workers 4"
    settings = parse(flags.split())
    assert settings.dispatch.capacity_factor is None
    assert settings.recipe.global_batch == 12
    assert settings.output.steps == 7


@pytest.mark.parametrize(
    ("flags", "ep"),
    [("--workers 3", 1), ("--workers 6", 2), ("--workers 16", 8), ("--workers 12 --pp 2", 2)],
)
def test_experts_divide_by_what_is_left_of_the_workers(flags, ep):
    layout = parse(flags.split()).layout
    assert (layout.ep, layout.dp) == (ep, layout.workers // layout.pp)


def test_torchrun_decides_the_number_of_workers(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert parse([]).layout.workers == 2  # Without a rank another program has set it.
    monkeypatch.setenv("RANK", "0")
    assert parse([]).layout == Layout(device="cpu", workers=4, ep=4)
    with pytest.raises(
        ValueError, match=r"^--workers must be 4, the processes that torch.*, got 2; leave"
    ):
        parse(["--workers", "2"])


def test_every_field_is_a_flag(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    listed = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    fields = [field for group in (Recipe, Layout, Output) for field in dataclasses.fields(group)]
    assert {flag(field.name) for field in fields} | {"--dispatcher"} <= listed
    flags = "--lr 0.5 --seed 0 --deterministic --pp 2 --vpp 1 --out r.json"
    settings = parse(flags.split())
    assert (settings.recipe.lr, settings.recipe.seed, settings.layout.vpp) == (0.5, 0, 1)
    assert settings.recipe.deterministic and settings.output.out == Path("r.json")
    padded = parse(["--padded-overflow-threshold", "0.5"]).dispatch.padded
    assert padded == PaddedOptions(overflow_threshold=0.5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--preset qwen3-30b-a3b", "--preset must be tiny on a CPU, got .*; run on a GPU"),
        ("--device cuda", "--device must be cpu where PyTorch sees no GPU, got 'cuda'$"),
        ("--workers 3 --ep 2", r"--workers must be a multiple of etp \* pp \* ep=2, got 3$"),
        ("--workers 3 --pp 2", r"--workers must be a multiple of tp \* pp=2, got 3$"),
        ("--workers 3 --ep 3", "--ep must divide the 8 experts, got 3; leave it out$"),
        ("--tp 2", "--tp must be 1 on a CPU, .*, got 2$"),
        ("--num-layers 3 --pp 2", r"--num-layers must be a multiple of pp \* vpp=2, got 3$"),
        ("--global-batch 7", "--global-batch must be a multiple of micro_batch .*=16, got 7$"),
        ("--vpp 2", "--vpp must be left out at --pp 1, got 2$"),
        (
            "--pp 2 --vpp 1 --micro-batch 4 --global-batch 12",
            r"--global-batch must be a multiple of 8, .* with --vpp, got 12$",
        ),
        *[
            (f"{name} 0", f"{name} must be above 0.*, got 0")
            for name in ("--steps", "--workers", "--lr")
        ],
        ("--workers 1 --pp 2", r"--workers must be a multiple of tp \* pp=2, got 1"),
        ("--lr inf", "--lr must be above 0 and finite, got inf$"),
        ("--padded-overflow-threshold 2", "--padded-overflow-threshold must be a share from 0 to"),
        ("--seed -1", r"--seed must be from 0 to 2\*\*63 - 1, got -1$"),
        ("--capacity-factor nan", "--capacity-factor must be .* above 0, .* got nan"),
        (
            "--dispatcher allgather --padded-experts packed",
            "--padded-experts must be left out with --dispatcher allgather, got 'packed'; in "
            "compare, give it behind the --vs of ours$",
        ),
        ("--dispatcher alltoall", "--dispatcher must be another one on a CPU, .*; run on a GPU"),
        (
            "--dispatcher allgather --capacity-factor 2",
            r"--capacity-factor must be left out with --dispatcher allgather, which .*, got 2\.0$",
        ),
        (
            "--dispatcher alltoall-drop-pad --capacity-factor none",
            "--capacity-factor must be at most 4, which drops nothing, with --dispatcher "
            "alltoall-drop-pad, got 'none'$",
        ),
        ("--exchange direct", "--padded-exchange must be auto or alltoall without several GPUs"),
        ("--trace traces --dispatcher allgather", "--padded-trace must be left out with --disp"),
        ("--graph layer", "--graph must be none on a CPU, got 'layer'; run on a GPU"),
        ("--trace /dev/null", "--trace must be a path in a writable folder, got '/dev/null'"),
    ],
)
def test_mistakes_are_named(flags, message):
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        parse(flags.split())
    assert "\n" not in str(caught.value)


def test_a_trace_is_named_by_one_flag(tmp_path):
    (tmp_path / "rank-0.npz").touch()
    with pytest.raises(ValueError, match=rf"^--trace must hold no earlier trace, got '{tmp_path}'"):
        parse(["--trace", str(tmp_path)])
    assert parse(["--trace", "traces"]) == parse(["--padded-trace", "traces"])


@pytest.mark.parametrize(
    ("flags", "contenders"),
    [
        (
            "--steps 5 --vs --graph layer --vs --seed 0 1 --capacity-factor 1 none --vs",
            [
                "--graph layer",
                "--seed 0 --capacity-factor 1",
                "--seed 0 --capacity-factor none",
                "--seed 1 --capacity-factor 1",
                "--seed 1 --capacity-factor none",
                "",
            ],
        ),
        ("--vs --deterministic --seed 3 4", [f"--deterministic --seed {seed}" for seed in (3, 4)]),
    ],
)
def test_a_list_behind_vs_is_a_grid(flags, contenders):
    assert [name for name, _ in read_compare(flags.split())] == contenders


def test_flags_before_vs_hold_for_all_and_those_behind_win():
    found = read_compare(["--seed", "7", "--steps", "5", "--vs", "--seed", "8", "9", "--vs"])
    assert [(given.seed, given.steps) for _, given in found] == [(8, 5), (9, 5), (7, 5)]
    with pytest.raises(ValueError, match=r"^--vs must be given at least once, got 0; add one"):
        read_compare([])
