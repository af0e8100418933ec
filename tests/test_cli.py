"""The command as a user runs it: in an empty folder, in separate processes."""

import os
import re
import shlex
import signal

import pytest

from padded_dispatch import __version__, cli
from tests.support.processes import ENVIRONMENT, python, started, still_living, workers_of

SMALL = ["-m", "padded_dispatch.cli", "train", "--seq-length", "24", "--micro-batch", "3"]
# The environment of a user, but with one thread per process.
OURS = "PYTHONWARNINGS", "TORCHDYNAMO_DISABLE"
USERS = {name: value for name, value in ENVIRONMENT.items() if name not in OURS}
USERS["OMP_NUM_THREADS"] = "1"


def our_words(stderr: str) -> str:
    """Remove known warnings: torch's about a CUDA compiler without a GPU, and Python 3.12's when it
    compiles Megatron."""
    theirs = (
        r"^W\d{4} .*torch/utils/cpp_extension.*\n",
        r"^.*/megatron/.*SyntaxWarning.*\n  .*\n",
    )
    return re.sub("|".join(theirs), "", stderr, flags=re.MULTILINE)


FIGURES = (
    r"\| loss \d\.\d{4} \| lr \S+ \| \S+ ms \| [\d,]+ tokens/s \| dropped .*% \| recomputed .*%"
)
PATTERNS = [
    "starting 2 processes: 10 to 30 seconds",
    "tiny, 2 layers, 2 of 8 experts per token; padded_alltoall, capacity factor 1.25; "
    r"2 processes \(cpu\), EP 2",
    r"packed experts \(they compute real rows only\); collectives .*; one store for the rows .*",
    *[rf"step    {number}/5000 {FIGURES}" for number in (1, 2, 3)],
    r"step 3 \| held-out loss \d\.\d{4}",
    rf"step    4/5000 {FIGURES}",
]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="looks into /proc")
def test_it_trains_in_an_empty_folder_until_ctrl_c_ends_all_processes(tmp_path):
    flags = ["--steps", "5000", "--log-every", "1", "--eval-every", "3", "--trace", "traces"]
    with started(*SMALL, *flags, cwd=tmp_path, env=USERS) as process:
        # torch up to 2.10 tells of gloo's connections there.
        lines = (line for line in process.stdout if "peer ranks" not in line)
        for pattern, line in zip(PATTERNS, lines, strict=False):
            assert re.fullmatch(pattern, line.rstrip("\n")), line
        workers = workers_of(process.pid)
        assert len(workers) == 2
        os.killpg(process.pid, signal.SIGINT)  # A terminal signals all processes.
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert our_words(stderr).splitlines() == ["SIGINT: stopping all workers"]
    assert [path.name for path in tmp_path.iterdir()] == ["traces"]
    assert len(list((tmp_path / "traces").iterdir())) == 2
    assert still_living(workers) == []


def test_ctrl_c_ends_a_command_that_is_importing(tmp_path):
    """Packages that Megatron imports try optional ones, and discard every exception."""
    (tmp_path / "slow.py").write_text(
        "import time\nprint('importing', flush=True)\n"
        "while True:\n    try: time.sleep(60)\n    except BaseException: pass\n"
    )
    code = (
        "import sys\nfrom padded_dispatch import cli\n"
        "cli.resolve_name = lambda place: __import__('slow')\n"
        "sys.argv[1:] = ['train']\ncli.main()"
    )
    with started("-c", code, cwd=tmp_path, env=USERS) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("train --ep 3", r"--workers must be a multiple of etp \* pp \* ep=3, got 2"),
        ("tune traces --drop 5", "--drop must be .*, got 5.0; for 5 % set 0.05"),
        ("bench --device cuda", "--device must be cpu where PyTorch sees no GPU, got 'cuda'"),
        (
            "train --seq-length 10000000",
            "--seq-length must be less than the .* bytes to train on, or to evaluate on, got "
            "10000000",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, monkeypatch, tmp_path, flags, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("PYTHONWARNINGS", "")
    assert cli.main(flags.split()) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert shown.out == ""
    assert re.match(f"padded-dispatch {flags.split()[0]}: {message}", line)
    assert list(tmp_path.iterdir()) == []  # A mistyped folder is not made.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--no-such-flag", "COMMAND must come first, got '--no-such-flag'; see --help"),
        ("trian", "argument COMMAND: invalid choice: 'trian' .choose from '?train'?, '?compare"),
        ("train --stepz 9", "unrecognized arguments: --stepz 9; did you mean --steps?"),
        ("train --stepz=9", "unrecognized arguments: --stepz=9; did you mean --steps?"),
        ("train ''", "unrecognized arguments: ; --help lists the flags"),
        ("compare --vs --no-such-flag", "unrecognized arguments: --no-such-flag; --help lists"),
        ("bench --models x", "argument --models: invalid choice: 'x'"),
    ],
)
def test_an_error_names_what_was_mistyped_below_one_line_of_usage(capsys, flags, message):
    with pytest.raises(SystemExit, match="2"):
        cli.main(shlex.split(flags))
    usage, error = capsys.readouterr().err.splitlines()
    command = flags.split()[0] if flags.split()[0] in cli._COMMANDS else ""
    assert usage.startswith(f"usage: padded-dispatch {command}")
    assert re.match(f"padded-dispatch ?{command}: error: {message}", error)


def test_help_and_a_typo_need_no_torch():
    code = (
        "import sys; from padded_dispatch import cli\n"
        "for words in [], *[[command] for command in cli._COMMANDS]:\n"
        "    typo = ['--vs'] * (words == ['compare']) + ['--no-such-flag']\n"
        "    for flags, end in (['--help'], 0), (typo, 2):\n"
        "        try: cli.main([*words, *flags])\n"
        "        except SystemExit as exit: assert exit.code == end\n"
        "        else: raise AssertionError(words)\n"
        "try: cli.main(['--version'])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'megatron', 'matplotlib'} & set(sys.modules))"
    )
    printed = python("-c", code)
    listed = re.findall(r"^    (\w+)  ", printed, re.MULTILINE)
    assert listed[: len(cli._COMMANDS)] == [*cli._COMMANDS]
    shown = re.findall(r"^usage: padded-dispatch (\w+)", printed, re.MULTILINE)
    assert shown == [*cli._COMMANDS]
    assert printed.splitlines()[-2:] == [f"padded-dispatch {__version__}", "set()"]


def test_the_package_runs_as_the_command():
    assert python("-m", "padded_dispatch", "--version") == f"padded-dispatch {__version__}\n"
