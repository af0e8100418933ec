"""What would stop a run is one line before a worker starts, and no job disturbs another."""

import dataclasses
import json
import os
import pickle
import shutil

import pytest

from padded_dispatch.train.arguments import parse
from padded_dispatch.train.check import held_folders
from padded_dispatch.train.command import main
from padded_dispatch.train.settings import Settings
from padded_dispatch.utils import lock


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Run as a user's command does, not under torchrun."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def settings(flags: str) -> Settings:
    return parse(f"--device cpu --workers 2 --steps 8 --trace-every 1 {flags}".split())


def test_a_run_holds_its_folders_to_its_end(tmp_path):
    run, trace = tmp_path / "run", tmp_path / "trace"
    with held_folders(settings(f"--run-dir {run} --trace {trace}")):
        for flags, option in (
            (f"--run-dir {run}", "--run-dir"),
            (f"--trace {trace}", "--trace"),
            (f"--trace {run}", "--trace"),
        ):
            message = rf"^{option} must be used by one job at a time; process {os.getpid()} on "
            with pytest.raises(ValueError, match=message), held_folders(settings(flags)):
                pass
    for flags in (f"--run-dir {run}", f"--trace {trace}", f"--run-dir {run} --trace {run}"):
        with held_folders(settings(flags)):
            pass
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        *[lock.NAME] * 2,
        "run",
        "trace",
    ]


def test_a_second_train_stops_before_its_workers_start(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("padded_dispatch.utils.launch.Workers", None)
    flags = f"--run-dir {tmp_path}"
    with (
        held_folders(settings(flags)),
        pytest.raises(ValueError, match=r"^--run-dir must be used by one job at a time"),
    ):
        main(flags.split())


def test_a_job_that_ended_meanwhile_leaves_its_rows(tmp_path):
    """Both were started at the same moment; the other was done before this one held the folder."""
    late = settings(f"--run-dir {tmp_path}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with (
        pytest.raises(ValueError, match=r"^--run-dir must hold no earlier run, got"),
        held_folders(late),
    ):
        pass


def test_only_rank_0_of_torchrun_holds_the_folders(tmp_path, monkeypatch):
    run = settings(f"--run-dir {tmp_path / 'run'}")
    monkeypatch.setenv("RANK", "1")
    with held_folders(run):
        assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_the_disk_cannot_take(tmp_path, monkeypatch):
    free = shutil.disk_usage(tmp_path)._replace(free=5 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    # 2 layers of 8 experts with 3 * 128 * 256 weights and 8 bytes each: 12 MiB.
    message = (
        rf"^--run-dir must be in a folder that takes 12 MiB, got '{tmp_path}'; 5 MiB are free: "
        "free space there, or name another$"
    )
    with (
        pytest.raises(ValueError, match=message),
        held_folders(settings(f"--run-dir {tmp_path} --save-every 4")),
    ):
        pass
    with held_folders(settings(f"--run-dir {tmp_path}")):
        pass


class Code:
    """An object whose pickle runs code."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_run_does_not_resume_from_a_broken_checkpoint(tmp_path):
    run = settings(f"--run-dir {tmp_path} --resume")
    newest = tmp_path / "checkpoints" / "step-00000004"
    newest.mkdir(parents=True)
    about = {"step": 4, "first_loss": 5.5, "factors": {}, "reads_above": {}}
    about["settings"] = run.as_json("model", "recipe", "dispatch", "layout")
    (newest / "run.json").write_text(json.dumps(about))
    (newest / ".metadata").write_bytes(pickle.dumps(Code(tmp_path / "made")))
    with pytest.raises(ValueError, match=r"step-00000004: \.metadata asks for"), held_folders(run):
        pass
    assert not (tmp_path / "made").exists()


def test_a_run_does_not_resume_over_lines_that_are_no_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("padded_dispatch.train.checkpoint.check_resumable", lambda settings: None)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n\x00\n')
    run = settings(f"--run-dir {tmp_path}" + " --resume")
    with pytest.raises(ValueError, match=r"metrics\.jsonl must hold .* in line 2"):
        held_folders(dataclasses.replace(run)).__enter__()
