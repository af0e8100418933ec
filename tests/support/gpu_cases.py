"""The run of a GPU program's cases, each on as many processes as it has ranks."""

import argparse
import dataclasses
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from padded_dispatch.utils.launch import WorkerError
from tests.support.gpu_rows import Rows, wants
from tests.support.pool import WorkerPool

CASE_S = 240.0

# Libraries read these when they are loaded, so they are set before a worker starts.
ENVIRONMENT = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    # Direct stores do not need multicast, which some hosts offer to some GPUs only.
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def run_case(pool: WorkerPool, check: str, run: Callable[[Any], Any], case: Any) -> dict[str, Any]:
    """Run a case; return its row: the case, its findings, and whether it passed.

    Args:
        pool: with as many workers as the case has ranks; closed after an error.
        check: the name of the check.
        run: runs on every rank with the case, and returns its `Findings`.
        case: a dataclass.
    """
    started = time.monotonic()
    row: dict[str, Any] = {"check": check, "passed": False, **dataclasses.asdict(case)}
    row |= {"contender": "ours", "facts": None, "failures": None}
    try:
        found = pool.run(run, case, timeout_s=CASE_S)
    except WorkerError as error:
        # Remove tracebacks, which contain paths of the machine.
        row["failures"] = [re.sub(r"\nTraceback.*?(?=\nrank \d|\Z)", "", str(error), flags=re.S)]
        pool.close()  # Their leftover state could break the next case.
    else:
        row["facts"] = found[0].facts
        failures = {f"rank {r}: {text}" for r, f in enumerate(found) for text in f.failures()}
        row["failures"] = sorted(failures)[:20]
        row["passed"] = not failures
    return row | {"seconds": round(time.monotonic() - started, 2)}


def run_cases(
    arguments: argparse.Namespace,
    environment: dict[str, str],
    checks: Iterable[tuple[str, Callable[[Any], Any], Any]],
    *,
    seen: Callable[[dict[str, Any]], None] = lambda row: None,
) -> int:
    """Run the wanted cases that the machine has ranks for; return 1 if one failed.

    Args:
        arguments: of the command line, see `gpu_rows.parsed`.
        environment: see `Rows`.
        checks: arguments of `run_case`; a case may be None, which is left out.
        seen: called with each row.
    """
    rows = Rows(arguments, arguments.num_gpus, environment)
    pool = WorkerPool(1, backend=arguments.backend)
    for check, run, case in checks:
        if case is None or case.ranks > arguments.num_ranks or not wants(arguments, case.name):
            continue
        if pool.num_workers != case.ranks:
            pool.close()
            pool = WorkerPool(case.ranks, backend=arguments.backend)
        row = run_case(pool, check, run, case)
        rows.add(row)
        seen(row)
    pool.close()
    return rows.exit_code()
