"""Run the table of cases on this machine's GPUs, and write results rows.

    python -m tests.gpu --out notebooks/results/gpu.json --commit SHA

Runs all rows of `tests.gpu.table` that the machine has GPUs for, and loses a rank amid replays of
direct writes. The results file is complete after every row; a row that fails or times out does not
end the run. `--only TEXT` runs rows with this text in their check or name. `--part I N` runs every
N-th row, so that N commands share the table. `--ranks N` lets ranks share GPUs where there are
fewer: NCCL must be 2.30 or newer (LD_PRELOAD), or out of the way by `--gloo`, which serves direct
writes. `--cpu N` runs the rows that a CPU can, on N processes over gloo, in small sizes.
"""

import argparse
import itertools
import sys
from pathlib import Path

import torch

from padded_dispatch.utils.results import require_results
from tests.gpu.lost_rank import HOW, lost_rank
from tests.gpu.table import table
from tests.support.pool import WorkerPool
from tests.support.rows import Rows, found_by


def main() -> int:
    """Run all rows; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the results file")
    parser.add_argument("--commit", required=True, help="commit that this tree was made from")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT")
    parser.add_argument("--part", nargs=2, type=int, default=[0, 1], metavar=("I", "N"))
    parser.add_argument("--ranks", type=int, metavar="N", help="the most ranks, on any GPUs")
    parser.add_argument("--gloo", action="store_true", help="groups over gloo, also on GPUs")
    parser.add_argument("--replays", type=int, metavar="N", default=1000, help="of direct stores")
    parser.add_argument("--cpu", type=int, metavar="N", help="use N processes without GPUs")
    arguments = parser.parse_args()
    try:
        require_results("--out", arguments.out)
    except ValueError as error:
        parser.error(str(error))
    num_gpus = 0 if arguments.cpu else torch.cuda.device_count()
    num_ranks = arguments.cpu or (num_gpus and arguments.ranks) or num_gpus
    if not num_ranks:
        parser.error("this program needs a GPU, got none; set --cpu N to run without")

    part, num_parts = arguments.part
    numbers = itertools.count()

    def wanted(text: str) -> bool:
        named = any(one in text for one in arguments.only or [""])
        return named and next(numbers) % num_parts == part

    rows = Rows(arguments, num_gpus)
    device = "cuda" if num_gpus else "cpu"
    backend = "nccl" if num_gpus and not arguments.gloo else "gloo"
    pool = WorkerPool(1, backend=backend)
    for row in table(arguments.replays):
        fits = row.ranks <= num_ranks and (row.cpu or num_gpus)
        if not fits or not wanted(f"{row.check}: {row.name}"):
            continue
        if pool.num_workers != row.ranks:
            pool.end()
            pool = WorkerPool(row.ranks, backend=backend)
        named = {"check": row.check, "name": row.name, "ranks": row.ranks}
        rows.add(named | found_by(pool, row.run, *row.on(device)))
    pool.end()
    for how in HOW if num_gpus and num_ranks > 1 else ():
        if wanted(f"a rank {how}"):
            rows.add(lost_rank(num_ranks, how))
    return rows.exit_code()


if __name__ == "__main__":
    sys.exit(main())
