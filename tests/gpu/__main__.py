"""Run the table of cases on this machine's GPUs, and write results rows.

    python -m tests.gpu --out notebooks/results/gpu.json --commit SHA

Runs all rows of `tests.gpu.table` that the machine has GPUs for, and loses a rank amid replays of
direct stores. The results file is complete after every row; a row that fails or times out does not
end the run. `--only TEXT` runs rows with this text in their check or name. `--ranks N` lets ranks
share GPUs where there are fewer: NCCL must be 2.30 or newer (LD_PRELOAD). `--cpu N` runs the rows
that a CPU can, on N processes over gloo, in small sizes.
"""

import argparse
import dataclasses
import sys
from typing import Any

import torch

from tests.gpu.lost_rank import HOW, lost_rank
from tests.gpu.table import Row, table
from tests.support.pool import WorkerPool
from tests.support.rows import Rows, add_results, found_by, parse


def main() -> int:
    """Run all rows; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_results(parser)
    parser.add_argument("--only", action="append", default=[], metavar="TEXT")
    parser.add_argument("--ranks", type=int, metavar="N", help="the most ranks, on any GPUs")
    parser.add_argument("--cpu", type=int, metavar="N", help="use N processes without GPUs")
    arguments = parse(parser)
    num_gpus = 0 if arguments.cpu else torch.cuda.device_count()
    num_ranks = arguments.cpu or (num_gpus and arguments.ranks) or num_gpus
    if not num_ranks:
        parser.error("this program needs a GPU, got none; set --cpu N to run without")

    def wanted(text: str) -> bool:
        return any(one in text for one in arguments.only or [""])

    rows = Rows(arguments, num_gpus)
    device, backend = ("cuda", "nccl") if num_gpus else ("cpu", "gloo")
    pool = WorkerPool(1, backend=backend)
    for row in table():
        fits = row.ranks <= num_ranks and (row.cpu or num_gpus)
        if not fits or not wanted(f"{row.check}: {row.name}"):
            continue
        if pool.num_workers != row.ranks:
            pool.end()
            pool = WorkerPool(row.ranks, backend=backend)
        given = row.on(device)
        rows.add({**fields(row, given[0]), **found_by(pool, row.run, *given)})
    pool.end()
    for how in HOW if num_gpus and num_ranks > 1 else ():
        if wanted(f"a rank {how}"):
            rows.add(lost_rank(num_ranks, how))
    return rows.exit_code()


def fields(row: Row, case: Any) -> dict[str, Any]:
    """Return what a row of results says about its case: the fields that are not the default."""
    default = {f.name: f.default for f in dataclasses.fields(case)}
    changed = {n: v for n, v in vars(case).items() if v not in (default[n], {}) and n != "name"}
    changed |= {"ways": list(row.more[0])} if row.more and isinstance(row.more[0], dict) else {}
    words = {
        n: v if isinstance(v, int | float | str | list) else str(v) for n, v in changed.items()
    }
    return {"check": row.check, "name": row.name, "ranks": row.ranks, "case": words}


if __name__ == "__main__":
    sys.exit(main())
