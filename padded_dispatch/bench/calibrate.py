"""`padded-dispatch calibrate`: fit the time model of `padded-dispatch tune` to your GPUs.

It runs two minutes of `padded-dispatch bench` on shapes, layouts and factors that separate the
coefficients, then fits; or it fits existing results. Cases that failed or were not started in time
are left out, and the fit lists the coefficients that the remaining rows do not determine.
"""

import argparse
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from padded_dispatch.bench.arguments import read_calibrate
from padded_dispatch.bench.cases import MODELS
from padded_dispatch.config import require
from padded_dispatch.tune.cost import LayerSizes, cost
from padded_dispatch.tune.time_model import NAMES, START, Measured, TimeModel, Work, fit, save
from padded_dispatch.utils.results import read_runs

_CASE = ("model", "ep", "tokens", "capacity_factor", "contender", "variant")


def main(argv: list[str]) -> int:
    """Measure and fit; return 0, or 1 when a case failed and was left out of the fit.

    Raises:
        ValueError: for mistakes in `argv`, and for rows that the model cannot be fitted to.
        SystemExit: see `start_workers`.
    """
    given = read_calibrate(argv)
    for option, path in (("--from", given.results), ("--check", given.check)):
        require(path is None or path.exists(), option, str(path), "be an existing results file")
    check = None if given.check is None else {"runs": read_runs("--check", given.check)}
    failed = 0 if given.results is not None else _measure(given, argv)
    calibration = calibrate({"runs": read_runs("--from", given.results or _rows_path(given.out))})
    save(calibration, given.out)
    sys.stdout.write(f"{table(calibration)}\n\n{calibration.describe()}\n")
    if check is not None:
        sys.stdout.write(f"\n{compare(calibration, check)}\n")
    return failed


def calibrate(results: dict[str, Any]) -> TimeModel:
    """Fit the time model to a results file of `padded-dispatch bench`.

    The fit uses our rows in a graph with balanced routing, for Megatron's experts (module) and
    packed experts, at the most frequent number of tokens, because `fixed_ms` depends on it. Three
    other kinds of rows are only compared with the fit: other numbers of tokens; stock drop-and-pad;
    batched experts, modelled as padded experts with one launch for all. Direct stores are left out:
    they send full slots only, over another wire; so are other pools, and what repeats a variant,
    such as `auto`.

    Raises:
        ValueError: when rows are from different machines, or do not fit the model.
    """
    rows, sources = _usable(results)
    usual = statistics.mode([row["tokens"] for row in rows]) if rows else 0
    return fit([_measured(row, usual) for row in rows], sources)


def compare(calibration: TimeModel, results: dict[str, Any]) -> str:
    """Return the errors of modelled times on another results file, one line per contender.

    Raises:
        ValueError: when no row suits the model, or the machine is of another kind.
    """
    rows, sources = _usable(results)
    kinds = sorted({_kind(about) for about in (*calibration.sources, *sources)})
    require(
        rows and len(kinds) == 1,
        "--check",
        f"{len(rows)} rows, machines {' and '.join(kinds)}",
        "hold rows of `padded-dispatch bench` in graphs, of the kind of machine that is calibrated",
        "give results of that machine",
    )
    errors: dict[str, list[tuple[float, str]]] = {}
    for row in rows:
        measured = _measured(row, calibration.num_tokens[0])
        error = calibration.ms(measured.work) / measured.ms - 1
        where = f"{row['model']}, EP {row['ep']}, factor {row['capacity_factor']:g}"
        errors.setdefault(measured.name, []).append((error, where))
    lines = [f"Modelled times beside {len(rows)} measured ones that were not fitted:"]
    for name, found in errors.items():
        usual = statistics.median(abs(error) for error, _ in found)
        worst, where = max(found, key=lambda pair: abs(pair[0]))
        lines.append(
            f"  {name}, {len(found)} rows: median error {usual:.1%}, largest {worst:+.1%} ({where})"
        )
    return "\n".join(lines)


def table(calibration: TimeModel) -> str:
    """Return the coefficients, one per line, with those marked that the rows determine."""
    lines = []
    for name in NAMES:
        value = getattr(calibration.coefficients, name)
        start = getattr(START, name)
        how = "from the rows" if name in calibration.determined else f"near its start, {start:g}"
        lines.append(f"{name:20} {value:10.4g}  {how}")
    return "\n".join(lines)


def _measure(given: argparse.Namespace, argv: list[str]) -> int:
    """Run the benchmark that writes the rows; return its exit code."""
    rows = _rows_path(given.out)
    require(
        not rows.exists(),
        "--out",
        str(given.out),
        f"be a new calibration, but {rows} exists",
        "fit that with --from, or take another name",
    )
    require(
        "RANK" not in os.environ,
        "RANK",
        os.environ.get("RANK"),
        "be unset, since calibrate starts its workers itself",
        "under torchrun run `padded-dispatch bench`, then `calibrate --from` its results",
    )
    flags = _bench_flags(given, argv)
    from padded_dispatch.bench import command as bench  # needs Megatron; a fit alone does not

    return bench.main(flags)


def _rows_path(out: Path) -> Path:
    return out.with_suffix(".rows.json")


def _usable(results: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows that suit the model, and the metadata of the runs that hold them.

    Of a case that was measured more than once, the last row counts: code gets better.
    """
    last: dict[tuple[Any, ...], tuple[dict[str, Any], int]] = {}
    kinds = set()
    for number, run in enumerate(results["runs"]):
        for row in filter(_is_usable, run["rows"]):
            last[tuple(row[name] for name in _CASE)] = row, number
            kinds.add(_kind(run["about"]))
    found = " and ".join(sorted(kinds))
    require(len(kinds) <= 1, "results", found, "be of one kind of machine", "fit each by itself")
    rows = [row for row, _ in last.values()]
    sources = [results["runs"][n]["about"] for n in sorted({n for _, n in last.values()})]
    return rows, sources


def _kind(about: dict[str, Any]) -> str:
    """Return the kind of machine without the number of GPUs: NVIDIA H200 of 8 x NVIDIA H200."""
    return about["machine"].split(" x ")[-1]


def _is_usable(row: dict[str, Any]) -> bool:
    return (
        row.get("contender") in ("ours", "stock-drop-pad")
        and row["variant"] in (None, "module", "packed", "batched")
        and row["graph"] == "layer"
        and row.get("main_grad", "none") == "none"
        and row["skew"] == "uniform"
        and row["capacity_factor"] is not None
        and row["error"] is None
    )


def _measured(row: dict[str, Any], num_tokens: int) -> Measured:
    """Convert a results row; it enters the fit only at `num_tokens` tokens."""
    shape = MODELS[row["model"]]
    config = shape.dispatch_config(row["capacity_factor"], row["ep"])
    sizes = LayerSizes(
        num_tokens=row["tokens"], hidden_size=shape.hidden_size, ffn_size=shape.ffn_size
    )
    slots = shape.num_experts * config.capacity(row["tokens"])
    found = cost(config, sizes, busiest_rows=row["fill"] * slots)  # balanced: all ranks alike
    variant = row["variant"]
    packed = variant == "packed"
    usual = row["tokens"] == num_tokens
    return Measured(
        work=Work(
            packed=packed,
            num_launched=0 if variant in ("packed", "batched") else config.num_local_experts,
            wire_bytes=found.wire_bytes,
            flops=found.packed_flops if packed else found.padded_flops,
        ),
        ms=row["ms"],
        name=" ".join(part for part in (row["contender"], variant) if part)
        + ("" if usual else f" with {row['tokens']:,} tokens"),
        num_ranks=row["ep"],
        num_tokens=row["tokens"],
        fits=usual and variant in ("module", "packed"),
    )


def _bench_flags(given: argparse.Namespace, argv: list[str]) -> list[str]:
    models = ["qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite"]
    num_gpus = torch.cuda.device_count()
    rule = "be at least 1, to measure CUDA graphs"
    require(num_gpus, "number of GPUs", num_gpus, rule, "fit existing results with --from")
    # Every rank of a group has the same number of experts, so of six GPUs four are used.
    experts = math.gcd(*(MODELS[model].num_experts for model in models))
    workers = given.workers or max(n for n in range(1, num_gpus + 1) if experts % n == 0)
    eps = sorted({1, workers}, reverse=True)  # the wire first, in case time runs out
    flags = ["--device", "cuda", "--workers", workers, "--ep", *eps, "--models", *models]
    flags += ["--capacity-factors", 1.0, 2.0, "--contenders", "module-graphed", "packed-graphed"]
    flags += ["--minutes", given.minutes, "--no-phases", "--out", _rows_path(given.out)]
    flags += ["--command", " ".join(["padded-dispatch calibrate", *argv])]
    if given.commit is not None:
        flags += ["--commit", given.commit]
    return [str(flag) for flag in flags]
