"""Run the recipes of padded_dispatch/megatron/RECIPES.md in a checkout of Megatron-LM.

    python -m tests.gpu.recipes --megatron-lm PATH --logs logs

It needs torchrun, Transformer Engine and as many GPUs as `--gpus`. Each recipe of one host runs as
it stands on the page, but for the number of GPUs. The block that `padded-dispatch tune` printed
about the recorded trace is then pasted and run. Each has a log with its output and exit code.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.recipes import GRAPHS_016, GRAPHS_018, recipes

ROOT = Path(__file__).parents[2]
PASTED = "pasted"


def main(argv: list[str]) -> int:
    """Run the recipes; return 0 if all of them trained to their last iteration."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.recipes", description=__doc__)
    parser.add_argument("--megatron-lm", type=Path, required=True, help="checkout of Megatron-LM")
    parser.add_argument("--logs", type=Path, required=True, help="folder for the logs")
    parser.add_argument("--gpus", type=int, default=1, help="of the recipe for one host")
    parser.add_argument("--recipes", nargs="+", help="names (None: those for its version)")
    given = parser.parse_args(argv)
    given.logs.mkdir(parents=True, exist_ok=True)
    has_modules = (
        "cuda_graph_modules"
        in (
            given.megatron_lm / "megatron" / "core" / "transformer" / "transformer_config.py"
        ).read_text()
    )
    graphs = GRAPHS_018 if has_modules else GRAPHS_016
    names = given.recipes or ["eager", graphs, "one host", "trace", PASTED]
    failed = [name for name in names if not _run(name, given, graphs)]
    return 1 if failed else 0


def _run(name: str, given: argparse.Namespace, graphs: str) -> bool:
    """Run a recipe, write its log, print its result; return whether it trained to the end."""
    blocks = recipes()
    (array,) = re.findall(r"^GRAPHS=.*$", blocks[graphs], re.MULTILINE)
    try:
        block = _pasted(given.megatron_lm) if name == PASTED else blocks[name]
    except FileNotFoundError as error:  # `trace` has failed.
        sys.stdout.write(f"FAILED  {name}  {error}\n")
        return False
    block = block.replace("EP=8", f"EP={given.gpus}")
    done = subprocess.run(
        ["bash", "-euxc", f"{blocks['args.sh']}\n{array}\n{block}"],
        cwd=given.megatron_lm,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    path = given.logs / f"{re.sub('[^a-z0-9.]+', '_', name)}.log"
    path.write_text(f"{done.stdout}\nexit code {done.returncode}\n")
    iterations = re.findall(r"^.*iteration +(\d+)/ *(\d+).*$", done.stdout, re.MULTILINE)
    trained = done.returncode == 0 and bool(iterations) and iterations[-1][0] == iterations[-1][1]
    sys.stdout.write(f"{'ok' if trained else 'FAILED'}  {name}  {path}\n")
    return trained


def _pasted(checkout: Path) -> str:
    """Return the block for Megatron-LM that `padded-dispatch tune` wrote, for one GPU."""
    text = (checkout / "tune" / "settings.md").read_text()
    first = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]
    return first.replace("--nproc-per-node auto", "--nproc-per-node 1")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
