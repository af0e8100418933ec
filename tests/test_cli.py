"""The command as a user runs it: in an empty folder, in separate processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from padded_dispatch import __version__, cli
from tests.support.processes import ENVIRONMENT, workers_of

COMMAND = [sys.executable, "-m", "padded_dispatch.cli"]
SMALL = "train --seq-length 24 --micro-batch 3 --lr-warmup 2"
LONG = "--steps 100000 --log-every 1 --save-every 1 --run-dir run"
# The environment of a user, but with one thread per process.
USERS = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONWARNINGS"}
USERS["OMP_NUM_THREADS"] = "1"


def our_words(stderr: str) -> str:
    """Remove known warnings: torch's about a CUDA compiler without a GPU, Python 3.12's when it
    compiles Megatron, and Megatron 0.19's about its GPTModel."""
    theirs = (
        r"^W\d{4} .*torch/utils/cpp_extension.*\n",
        r"^.*/megatron/.*SyntaxWarning.*\n  .*\n",
        r"^GPTModel IS DEPRECATED\. .*\n",
    )
    return re.sub("|".join(theirs), "", stderr, flags=re.MULTILINE)


def test_it_trains_evaluates_and_saves_in_an_empty_folder(tmp_path):
    flags = "--steps 4 --log-every 2 --eval-every 4 --save-every 4 --run-dir run"
    done = subprocess.run(
        [*COMMAND, *SMALL.split(), *flags.split()],
        cwd=tmp_path,
        env=USERS,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    patterns = [
        "padded-dispatch train",
        "  model       tiny: .*",
        "  parameters  .*",
        "  devices     2 processes on a CPU, expert parallel 2",
        "  dispatcher  padded_alltoall, capacity factor 1.25, policy probs",
        "  work        4 steps of 6 sequences of 24 bytes, from Python's own source",
        "  files       run: metrics.jsonl, a checkpoint every 4 steps",
        "starting 2 processes: 10 to 30 seconds",
        r"experts: module, exchange: alltoall",
        r"step 1/4  loss 5\.\d{4}  [\d,]+ tokens/s  \S+ GFLOP/s per process  fill .*  dropped .*",
        r"step 2/4  .*  \d+:\d\d left",
        r"step 4/4  .*%",
        r"step 4  held-out loss \d\.\d{4}",
        r"loss fell from 5\.\d\d to \d\.\d\d",
    ]
    lines = done.stdout.splitlines()
    assert len(lines) == len(patterns)
    assert all(re.fullmatch(p, line) for p, line in zip(patterns, lines, strict=True)), lines
    assert our_words(done.stderr) == ""
    assert (tmp_path / "run" / "checkpoints" / "step-00000004" / "run.json").exists()
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["kind"] for row in rows] == [
        *["train"] * 3,
        *("held-out", "moe", "moe-held-out"),
    ]


def test_under_torchrun_it_starts_no_processes(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--module"]
    done = subprocess.run(
        [sys.executable, *torchrun, *COMMAND[2:], *SMALL.split(), "--steps", "2", "--json"],
        cwd=tmp_path,
        env=USERS,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["kind"], row["step"]) for row in rows] == [
        ("train", 1),
        ("train", 2),
        ("moe", 2),
    ]


@contextmanager
def long_run(folder) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Yield a run that has done its second step, and its workers' process ids."""
    with subprocess.Popen(
        [*COMMAND, *SMALL.split(), *LONG.split()],
        cwd=folder,
        env=USERS,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            # Then the checkpoint of the first step is whole.
            assert any(line.startswith("step      2/") for line in process.stdout)
            yield process, workers_of(process.pid)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline, f"still there: {pids}"
        time.sleep(0.05)


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="looks into /proc")


@needs_proc
def test_ctrl_c_ends_everything_and_leaves_only_whole_checkpoints(tmp_path):
    with long_run(tmp_path) as (process, workers):
        assert len(workers) == 2
        os.killpg(process.pid, signal.SIGINT)  # A terminal signals all processes.
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGINT
        stopped, resume = our_words(stderr).splitlines()
        assert stopped == "SIGINT: stopping all workers"
        assert resume == f"to resume: padded-dispatch {SMALL} {LONG} --resume"
        wait_until_gone(workers)
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("step-*"):
        assert {path.name for path in checkpoint.iterdir()} == {
            ".metadata",
            "__0_0.distcp",
            "__1_0.distcp",
            "run.json",
        }


@needs_proc
def test_a_dead_worker_ends_the_job(tmp_path):
    with long_run(tmp_path) as (process, workers):
        os.kill(workers[1], signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 1
        failed, resume = stderr.splitlines()[-2:]
        assert failed == "rank 1 of 2 failed: ChildProcessError: killed by SIGKILL"
        assert resume.startswith("to resume: padded-dispatch train ")
        wait_until_gone(workers)


def test_ctrl_c_ends_a_command_that_is_importing(tmp_path):
    """Packages that Megatron imports try optional ones, and discard every exception."""
    (tmp_path / "slow.py").write_text(
        "import time\nprint('importing', flush=True)\n"
        "while True:\n    try: time.sleep(60)\n    except BaseException: pass\n"
    )
    code = (
        "import sys\nfrom padded_dispatch import cli\n"
        "cli._COMMANDS['train'] = ('slow:', 'slow', '')\n"
        "cli._module = __import__\nsys.argv[1:] = ['train']\ncli.main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=USERS, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(15) == -signal.SIGINT
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("train --ep 3", r"--workers must be a multiple of etp \* pp \* ep=3, got 2"),
        ("train --padded-min-capacity 0", "min_capacity must .*, got 0"),
        ("train --resume --run-dir nowhere", "--run-dir must hold a checkpoint, got 'nowhere'; l"),
        ("train --out /", "--out.*/.*; "),
        ("tune traces", "TRACE must be .*, got 'traces', which does not exist; "),
        ("tune --synthetic uniform --drop 5", "--drop must be .*, got 5.0; for 5 % set 0.05"),
        ("bench --device cuda", "--device must be cpu where PyTorch sees no GPU, got 'cuda'"),
        ("compare", "--vs must be given at least once, got 0; add one"),
        ("train --out /dev/null/r.json", "--out must .*/dev/null"),
        (
            "train --seq-length 10000000",
            "--seq-length must be less than the text's .* bytes, got 10000000",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, monkeypatch, tmp_path, flags, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("PYTHONWARNINGS", "")
    assert cli.main(flags.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"padded-dispatch {flags.split()[0]}: {message}", line)
    assert list(tmp_path.iterdir()) == []  # A mistyped folder is not made.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--no-such-flag", "COMMAND must come first, got '--no-such-flag'"),
        ("compare --vs --no-such-flag", "unrecognized arguments: --no-such-flag"),
        ("sweep --out r.json --factors 1 x", "argument --factors: must be a number .*, got 'x'"),
        ("bench --models x", "argument --models: invalid choice: 'x'"),
    ],
)
def test_an_error_names_its_command_and_flag_below_one_line_of_usage(capsys, flags, message):
    with pytest.raises(SystemExit):
        cli.main(flags.split())
    usage, error = capsys.readouterr().err.splitlines()
    command = flags.split("-")[0].split(" ")[0]
    assert usage.startswith(f"usage: padded-dispatch {command}")
    assert re.match(f"padded-dispatch ?{command}: error: {message}", error)


def test_without_a_command_all_are_listed(capsys):
    assert cli.main([]) == 0
    listed = capsys.readouterr().out
    assert [command for command in cli._COMMANDS if f"\n    {command}" not in listed] == []
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"padded-dispatch {__version__}\n"


def test_tensorboard_that_is_missing_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("PYTHONWARNINGS", "")
    monkeypatch.setattr("padded_dispatch.train.check.find_spec", lambda name: None)
    assert cli.main(["train", "--tensorboard", "--run-dir", str(tmp_path)]) == 2
    assert "pip install 'padded-dispatch[train]'" in capsys.readouterr().err


NEEDED = {"compare": ["--vs"], "sweep": ["--out", "r.json"], "calibrate": ["--out", "r.json"]}


@pytest.mark.parametrize("command", ["", *cli._COMMANDS])
def test_help_and_a_typo_need_no_torch(command):
    words = command.split()
    code = (
        "import sys; from padded_dispatch import cli\n"
        f"for argv, end in ({[*words, '--help']}, 0), "
        f"({[*words, *NEEDED.get(command, []), '--no-such-flag']}, 2):\n"
        "    try: cli.main(argv)\n"
        "    except SystemExit as exit: assert exit.code == end\n"
        "    else: raise AssertionError(argv)\n"
        "print({'torch', 'megatron', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"usage: padded-dispatch {command}".strip() in done.stdout
    assert done.stdout.splitlines()[-1] == "set()"
