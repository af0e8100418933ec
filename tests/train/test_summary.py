"""What a run is, how it goes on after Ctrl-C, and what is suggested after it."""

import dataclasses

import pytest
from megatron.core import parallel_state

from padded_dispatch.train.arguments import parse
from padded_dispatch.train.model import build_chunks, transformer_config
from padded_dispatch.train.settings import PRESETS
from padded_dispatch.train.summary import header, how_to_resume, next_steps, num_parameters
from padded_dispatch.train.world import megatron_state
from tests.support import tiny


@pytest.fixture(autouse=True)
def laptop(monkeypatch):
    """A machine without a GPU, outside torchrun."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


HEADER = """\
padded-dispatch train
  model       tiny: 2 layers, hidden size 128, top 2 of 8 experts of size 256
  parameters  1.7 million, of which a token uses 0.6 million
  devices     2 processes on a CPU, expert parallel 2
  dispatcher  padded_alltoall, capacity factor 1.25, policy probs
  work        400 steps of 16 sequences of 64 bytes, from Python's own source"""


def test_header_fits_80_columns():
    assert header(parse([]), 80) == HEADER


def test_header_of_everything_else():
    flags = (
        "--dispatcher alltoall-drop-pad --workers 1 --steps 1 --global-batch 8 --run-dir r "
        "--save-every 5 --out o.json"
    )
    assert header(parse(flags.split()), 60).splitlines()[3:] == [
        "  parameters  1.7 million, of which a token uses 0.6 million",
        "  devices     1 process on a CPU",
        "  dispatcher  alltoall-drop-pad, capacity factor 1.25",
        "  work        1 step of 8 sequences of 64 bytes, from",
        "              Python's own source",
        "  files       r: metrics.jsonl, a checkpoint every 5 steps;",
        "              o.json: results",
    ]
    flags = "--capacity-factor none --experts packed --padded-policy random --trace t"
    lines = header(parse(flags.split()), 100).splitlines()
    assert (
        "  dispatcher  padded_alltoall, no row is dropped, policy random, experts packed" in lines
    )
    assert "  files       t: routing traces" in lines
    lines = header(parse(["--dispatcher", "allgather"]), 100).splitlines()
    assert "  dispatcher  allgather" in lines


def test_header_on_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    flags = "--preset deepseek-v2-lite --pp 2 --graph layer --exchange alltoall"
    lines = header(parse(flags.split()), 130).splitlines()
    assert lines[1].endswith("top 6 of 64 experts of size 1,408, shared experts of size 2,816")
    assert lines[3] == "  devices     8 processes on 8 GPUs, expert parallel 4, pipeline parallel 2"
    assert lines[4].endswith("policy probs, exchange alltoall")
    assert lines[6] == "  CUDA graphs layer"


@pytest.mark.parametrize("change", [{}, {"gpt_oss": True}, {"qk_layernorm": True}, {"shared": 24}])
def test_parameters_are_those_of_the_model(change):
    model = dataclasses.replace(
        PRESETS["tiny"].model,
        hidden_size=48,
        num_experts=3,
        shared_ffn_size=change.get("shared"),
        **{name: value for name, value in change.items() if name != "shared"},
    )
    settings = parse(["--workers", "1", "--num-layers", "3", "--ep", "1"])
    settings = dataclasses.replace(settings, model=model)
    with tiny.one_process(), megatron_state(settings):
        assert parallel_state.get_expert_model_parallel_world_size() == 1
        chunks = build_chunks(settings, transformer_config(settings))
    counted = sum(p.numel() for chunk in chunks for p in chunk.parameters())
    every, active = num_parameters(model, 3)
    assert every == counted
    expert = sum(
        p.numel() for name, p in chunks[0].named_parameters() if "local_experts.0." in name
    )
    assert every - active == expert


def test_how_to_resume(tmp_path):
    folder = tmp_path / "my run"
    flags = ["--save-every", "20", "--run-dir", str(folder)]
    assert how_to_resume(parse([]), []) == (
        "nothing was saved; --run-dir PATH --save-every N keep checkpoints to resume from"
    )
    settings = parse(flags)
    assert how_to_resume(settings, flags) == "no checkpoint yet; the first one comes after step 20"
    (folder / "checkpoints" / "unfinished").mkdir(parents=True)
    assert how_to_resume(settings, flags).startswith("no checkpoint yet")
    (folder / "checkpoints" / "step-00000020").mkdir()
    expected = f"to resume: padded-dispatch train --save-every 20 --run-dir '{folder}' --resume"
    assert how_to_resume(settings, flags) == expected
    assert how_to_resume(settings, [*flags, "--resume"]) == expected


def test_torchrun_has_a_command_of_its_own(monkeypatch):
    settings = parse([])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert how_to_resume(settings, []) is None


def test_next_steps_are_commands_that_are_accepted():
    argv = ["--steps", "8", "--run-dir", "r", "--save-every", "2", "--seed", "3", "--resume"]
    steps = dict(next_steps(parse(argv), argv))
    assert steps == {
        "record what the routers ask for": (
            "padded-dispatch train --steps 8 --seed 3 --trace traces"
        ),
        "choose a capacity factor from it": (
            "padded-dispatch tune traces --hidden-size 128 --ffn-size 256"
        ),
        "train on": (
            "padded-dispatch train --run-dir r --save-every 2 --seed 3 --steps 16 --lr-decay 8 "
            "--resume"
        ),
        "see all flags": "padded-dispatch train --help",
    }
    assert parse(steps["train on"].split()[2:]).recipe.lr_decay == 8
    argv = ["--steps", "8", "--trace=here", "--trace-every", "4"]
    assert dict(next_steps(parse(argv), argv))["choose a capacity factor from it"] == (
        "padded-dispatch tune here --hidden-size 128 --ffn-size 256"
    )
    argv = ["--dispatcher", "allgather"]
    assert list(dict(next_steps(parse(argv), argv))) == ["see all flags"]
