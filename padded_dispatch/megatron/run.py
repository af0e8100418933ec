"""Run a Megatron-LM script after `install()`, so that it can use the padded dispatcher.

    python -m padded_dispatch.megatron.run [--padded-...] pretrain_gpt.py \\
        --moe-token-dispatcher-type padded_alltoall ...

Works under torchrun too (`torchrun ... -m padded_dispatch.megatron.run pretrain_gpt.py ...`). Flags
before the script are options of the padded dispatcher; everything after it goes to the script.
"""

import argparse
import contextlib
import importlib
import re
import runpy
import sys
from pathlib import Path

from padded_dispatch.megatron.installer import install
from padded_dispatch.megatron.options import add_arguments, from_arguments


def main() -> None:
    """Install, then run the script as if it had been started directly."""
    parser = argparse.ArgumentParser(
        prog="python -m padded_dispatch.megatron.run", description="Run a Megatron-LM script."
    )
    add_arguments(parser)
    parser.add_argument("script", type=Path, help="for example pretrain_gpt.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    arguments = parser.parse_args()
    if not arguments.script.is_file():
        parser.error(f"script must be an existing file, got {str(arguments.script)!r}")
    try:
        options = from_arguments(arguments)
    except ValueError as error:
        parser.error(_name_flag(str(error)))
    sys.argv = [str(arguments.script), *arguments.arguments]
    # Like `python SCRIPT`, which puts the script's folder first.
    sys.path.insert(0, str(arguments.script.resolve().parent))
    # `install` follows Megatron-LM's loop. A script that needs it fails by itself without it.
    with contextlib.suppress(ImportError):
        importlib.import_module("megatron.training.training")
    install(options)
    runpy.run_path(str(arguments.script), run_name="__main__")


def _name_flag(message: str) -> str:
    """Replace the option that an error of `PaddedOptions` begins with by its flag.

    Example: "grow_after must ..." becomes "--padded-grow-after must ...".
    """
    return re.sub(r"^\w+", lambda name: f"--padded-{name[0].replace('_', '-')}", message)


if __name__ == "__main__":
    main()
