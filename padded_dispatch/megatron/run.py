"""Run a Megatron-LM script with the padded dispatcher at hand.

    python -m padded_dispatch.megatron.run [--padded-...] pretrain_gpt.py \\
        --moe-token-dispatcher-type padded_alltoall ...

Works under torchrun as well (`torchrun ... -m padded_dispatch.megatron.run pretrain_gpt.py ...`).
Options of ours come before the script, everything after it is the script's.
"""

import argparse
import runpy
import sys
from pathlib import Path

from padded_dispatch.megatron.install import install
from padded_dispatch.megatron.options import add_arguments, from_arguments


def main() -> None:
    """Install, then run the script as if it had been started itself."""
    parser = argparse.ArgumentParser(
        prog="python -m padded_dispatch.megatron.run", description="Run a Megatron-LM script."
    )
    add_arguments(parser)
    parser.add_argument("script", type=Path, help="for example pretrain_gpt.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    arguments = parser.parse_args()
    if not arguments.script.is_file():
        parser.error(f"script={arguments.script} is not possible: there is no such file")
    install(from_arguments(arguments))
    sys.argv = [str(arguments.script), *arguments.arguments]
    # As `python SCRIPT` does: the script's own folder first.
    sys.path.insert(0, str(arguments.script.resolve().parent))
    runpy.run_path(str(arguments.script), run_name="__main__")


if __name__ == "__main__":
    main()
