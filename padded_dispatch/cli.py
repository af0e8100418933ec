"""The command `padded-dispatch`, which imports only the subcommand that is run.

A mistake of the user (`ValueError`) is one line and exit code 2, as argparse's own errors are.
Without a subcommand it prints its help.
"""

import argparse
import contextlib
import importlib
import os
import signal
import sys
import warnings
from pkgutil import resolve_name

# By command: the function that reads the command line, the function that runs with the result, and
# the help text. Reading does not import torch, so `--help` and a typo need not wait for it.
_COMMANDS = {
    "train": (
        "padded_dispatch.train.arguments:read",
        "padded_dispatch.train.command:train",
        "train a small Mixture-of-Experts GPT",
    ),
    "compare": (
        "padded_dispatch.train.arguments:read_compare",
        "padded_dispatch.train.command:compare",
        "train several contenders in the same processes",
    ),
    "bench": (
        "padded_dispatch.bench.cases:read_bench",
        "padded_dispatch.bench.command:main",
        "measure one layer, ours beside Megatron's",
    ),
    "tune": (
        "padded_dispatch.tune.command:read",
        "padded_dispatch.tune.command:main",
        "choose a capacity factor from routing traces",
    ),
}

# Warnings about what a user of this command cannot change. Megatron-Core warns at every import
# without Transformer Engine, and in 0.16 about the default of its own config. torch warns of
# functions that Megatron-Core calls by their former names.
_EXPECTED_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "`torch.distributed.",
)


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    if argv is None:
        # A bare `except:` around an optional import discards KeyboardInterrupt, and the run goes
        # on. The default action ends the process at any moment; its workers end with it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(
        prog="padded-dispatch",
        description="A Mixture-of-Experts token dispatcher with static shapes for Megatron-Core.",
        epilog="padded-dispatch COMMAND --help lists the flags of a command.",
    )
    version = importlib.import_module("padded_dispatch").__version__
    parser.add_argument("--version", action="version", version=f"padded-dispatch {version}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command, (*_, help) in _COMMANDS.items():
        commands.add_parser(command, help=help, add_help=False)
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name.startswith("-"):
        parser.parse_known_args([name, next(iter(_COMMANDS))])  # It exits for --help and --version.
        parser.error(f"COMMAND must come first, got {name!r}; see --help")
    parser.parse_args([name])  # It exits for an unknown command.
    _ignore_expected_warnings()
    try:
        reader, command, _ = _COMMANDS[name]
        given = resolve_name(reader)(rest)
        return resolve_name(command)(given)
    except ValueError as error:
        sys.stderr.write(f"padded-dispatch {name}: {error}\n")
        return 2
    except SystemExit as end:
        if argv is None and isinstance(end.code, int):
            # An interpreter that has imported torch takes seconds to exit.
            with contextlib.suppress(BrokenPipeError):  # after `| head`, for example
                sys.stdout.flush()
            os._exit(end.code)
        raise


def _ignore_expected_warnings() -> None:
    """Ignore the expected warnings here and, through the environment, in workers."""
    given = os.environ.get("PYTHONWARNINGS")
    ignored = [f"ignore:{message}" for message in _EXPECTED_WARNINGS]
    os.environ["PYTHONWARNINGS"] = ",".join([given, *ignored] if given else ignored)
    for message in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message)


if __name__ == "__main__":
    sys.exit(main())
