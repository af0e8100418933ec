"""The commands of padded_dispatch/megatron/RECIPES.md, expanded by bash as on a user's machine."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "padded_dispatch" / "megatron" / "RECIPES.md"
LAUNCHER = ["-m", "padded_dispatch.megatron.run"]
GRAPHS_018 = "layers, 0.18 and later"
GRAPHS_016 = "layers, 0.16 and 0.17"

# Commands of a cluster; `torchrun` prints its words, one a line, after an empty line.
_STAND_INS = """set -eu
torchrun() { printf '\\n'; printf '%s\\n' "$@"; }
padded-dispatch() { :; }
srun() { "$@"; }
scontrol() { printf 'host0\\nhost1\\n'; }
NODE_RANK=1 MASTER_ADDR=host0 SLURM_JOB_NODELIST='host[0-1]' SLURM_NNODES=2 SLURM_JOB_ID=7
. ./args.sh
"""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of the page: words for torchrun before the launcher, words for it behind it."""

    torchrun: list[str]
    launcher: list[str]


def recipes() -> dict[str, str]:
    """Return the bash blocks by the names in the comments before them."""
    found = re.findall(
        r"^<!-- recipe: (.*?) -->\n\n```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    return dict(found)


def expand(name: str, folder: Path, *, graphs: str = GRAPHS_018) -> Command:
    """Run a block in bash with stand-ins for its programs, and return what torchrun would get.

    Args:
        name: of the recipe.
        folder: gets args.sh.
        graphs: the recipe that GRAPHS comes from.
    """
    blocks = recipes()
    (folder / "args.sh").write_text(blocks["args.sh"])
    (array,) = re.findall(r"^GRAPHS=.*$", blocks[graphs], re.MULTILINE)
    done = subprocess.run(
        ["bash", "-c", f"{_STAND_INS}{array}\n{blocks[name]}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.split("\n\n")[-1].strip("\n").split("\n")
    start = words.index(LAUNCHER[0])
    assert words[start : start + 2] == LAUNCHER
    return Command(torchrun=words[:start], launcher=words[start + 2 :])
