"""`padded-dispatch train` before and after its workers."""

import io
import subprocess
import sys

import pytest

from padded_dispatch.train import command
from tests.support.processes import ENVIRONMENT


@pytest.mark.parametrize(
    ("flags", "code"), [("--help", 0), ("train --help", 0), ("train --stepz 3", 2), ("trian", 2)]
)
def test_help_and_a_typo_need_no_torch(flags, code):
    script = (
        "import sys; from padded_dispatch import cli\n"
        f"try: cli.main({flags.split()!r})\n"
        f"except SystemExit as end: assert end.code == {code}\n"
        "heavy = {'torch', 'megatron', 'numpy', 'matplotlib', 'triton'}\n"
        "assert not heavy & {name.split('.')[0] for name in sys.modules}"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


class Fell:
    fell = True


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def run(monkeypatch):
    """Run the command with a stand-in for workers; return its exit code and its output."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)

    def run(flags, start_workers, stream):
        monkeypatch.setattr("padded_dispatch.utils.launch.start_workers", start_workers)
        monkeypatch.setattr("sys.stdout", stream)
        return command.main(flags.split()), stream.getvalue()

    return run


def finish(fn, args, num_workers):
    assert fn is command.work and num_workers == 2
    return Fell


def test_a_pipe_gets_the_header_and_no_suggestions(run):
    code, shown = run("", finish, io.StringIO())
    assert code == 0
    assert shown.splitlines()[0] == "padded-dispatch train"
    assert shown.splitlines()[-1] == "starting 2 processes: 10 to 30 seconds"


def test_a_terminal_sees_what_takes_seconds_and_what_to_try_next(run):
    _, shown = run("", finish, Terminal())
    first = shown.index("importing PyTorch ... 0 s\r\x1b[K")
    second = shown.index("importing Megatron-Core, to check the settings ... 0 s")
    assert first < shown.index("padded-dispatch train\n") < second < shown.index("starting 2")
    assert shown.endswith("  see all flags:\n    padded-dispatch train --help\n")


def test_json_is_all_that_json_shows(run):
    assert run("--json", finish, Terminal()) == (0, "")


def test_only_the_first_rank_of_torchrun_writes(run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert run("", finish, Terminal()) == (0, "")


@pytest.mark.parametrize("code", [130, 143, 1])
def test_a_run_that_ends_early_names_the_command_to_resume(run, capsys, tmp_path, code):
    def end(fn, args, num_workers):
        (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
        raise SystemExit(code)

    flags = f"--save-every 2 --run-dir {tmp_path}"
    with pytest.raises(SystemExit, match=str(code)):
        run(flags, end, io.StringIO())
    assert capsys.readouterr().err == f"to resume: padded-dispatch train {flags} --resume\n"
