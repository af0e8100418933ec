"""Run a Megatron-LM script after `install()`, so that it can use the padded dispatcher.

    torchrun --nproc-per-node 8 -m padded_dispatch.megatron.run pretrain_gpt.py \\
        --moe-token-dispatcher-type padded_alltoall --padded-layer-factors 1:2.0 ...

Works without torchrun too (`python -m padded_dispatch.megatron.run pretrain_gpt.py ...`). The first
word that is no option of the padded dispatcher is the script. `--padded-...` may stand anywhere,
before the script or among its arguments; all other words go to the script, in their order.

The command line is read before torch is imported.
"""

import argparse
import contextlib
import importlib
import runpy
import sys
from pathlib import Path

from padded_dispatch.megatron.options import PaddedOptions, add_arguments, from_arguments
from padded_dispatch.utils.flags import similar

_PARSER = argparse.ArgumentParser(
    prog="python -m padded_dispatch.megatron.run",
    usage="python -m padded_dispatch.megatron.run [OPTIONS] SCRIPT [OPTIONS AND ARGUMENTS]",
    description="Run a Megatron-LM script, such as pretrain_gpt.py. Options of the padded "
    "dispatcher may stand anywhere on the line; all else goes to the script.",
    add_help=False,  # Behind the script, --help is the script's.
    allow_abbrev=False,  # A flag of the script may be the beginning of one of ours.
)
add_arguments(_PARSER)


def main() -> None:
    """Install, then run the script as if it had been started directly."""
    options, script, arguments = read(sys.argv[1:])
    if not Path(script).is_file():
        _PARSER.error(f"SCRIPT must be an existing file, got {script!r}; start it in its folder")
    sys.argv = [script, *arguments]
    # Like `python SCRIPT`, which puts the script's folder first.
    sys.path.insert(0, str(Path(script).resolve().parent))
    # Import Megatron-LM's loop for `install` to wrap. A script that needs it fails without it.
    with contextlib.suppress(ImportError):
        importlib.import_module("megatron.training.training")
    importlib.import_module("padded_dispatch.megatron.installer").install(options)
    mirror = importlib.import_module("padded_dispatch.exchange.mirror")
    with mirror.absent_ranks_named():
        runpy.run_path(script, run_name="__main__")


def read(argv: list[str]) -> tuple[PaddedOptions, str, list[str]]:
    """Return the options, the path of the script, and the script's arguments.

    Raises:
        SystemExit: for `--help` before the script, and for mistakes.
    """
    given, words = _PARSER.parse_known_args(argv)
    if words[:1] in (["-h"], ["--help"]):
        _PARSER.print_help()
        _PARSER.exit()
    if not words:
        _PARSER.error("SCRIPT must be given, for example pretrain_gpt.py")
    script, *arguments = words
    padded = [word for word in words if word.startswith("--padded-")]
    unknown = [word for word in padded if not word.startswith("--padded-vocab-size")]  # Megatron's.
    if unknown:
        rule = "must be an option of the padded dispatcher, and stand before any '--'"
        name = unknown[0].partition("=")[0]
        known = _PARSER._option_string_actions
        fix = "move it there" if name in known else similar(name, known, "see --help")
        _PARSER.error(f"{name} {rule}; {fix}")
    if script.startswith("-"):
        _PARSER.error(f"SCRIPT must stand before its own arguments, got {script!r} first")
    try:
        return from_arguments(given), script, arguments
    except ValueError as error:
        _PARSER.error(str(error))


if __name__ == "__main__":
    main()
