"""`padded-dispatch calibrate`: a time model of your own GPUs for `padded-dispatch tune`.

Two minutes of `padded-dispatch bench` on shapes, layouts and factors that tell the coefficients
apart, then a fit; or the fit alone, to results that are already there. Cases that fail, or that
time does not suffice for, are left out of the fit, which says what the others do not decide.
"""

import argparse
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from padded_dispatch.bench.cases import MODELS
from padded_dispatch.config import DispatchConfig, require
from padded_dispatch.tune.cost import LayerSizes, cost
from padded_dispatch.tune.time_model import NAMES, START, Measured, TimeModel, Work, fit, save
from padded_dispatch.utils.results import read_runs

_CASE = ("model", "ep", "tokens", "capacity_factor", "contender", "variant")


def main(argv: list[str]) -> int:
    """Measure and fit; 0, or 1 when a case failed, which the fit then does without.

    Raises:
        ValueError: the user's mistakes, and rows that the model does not fit.
        SystemExit: see `start_workers`.
    """
    given = _parser().parse_args(argv)
    for option, path in (("from", given.results), ("check", given.check)):
        require(path is None or path.exists(), option, str(path), "there is no such file")
    check = None if given.check is None else {"runs": read_runs("check", given.check)}
    failed = 0 if given.results is not None else _measure(given, argv)
    calibration = calibrate({"runs": read_runs("from", given.results or _rows_path(given.out))})
    save(calibration, given.out)
    sys.stdout.write(f"{table(calibration)}\n\n{calibration.describe()}\n")
    if check is not None:
        sys.stdout.write(f"\n{compare(calibration, check)}\n")
    return failed


def calibrate(results: dict[str, Any]) -> TimeModel:
    """Fit the model to what a results file of `padded-dispatch bench` holds.

    It is fitted to our own rows in a graph, with routing in balance and the most usual number of
    tokens, since `fixed_ms` is of as many: Megatron's experts (module) and packed ones. Rows with
    other numbers of tokens, and those that compute as many slots otherwise, are compared with it:
    stock drop-and-pad's, and batched experts, which are modelled as padded ones with one launch for
    all. Direct stores are left out: they send full slots only, over another wire.

    Raises:
        ValueError: when rows are of different machines, or do not fit the model.
    """
    rows, sources = _usable(results)
    usual = statistics.mode([row["tokens"] for row in rows]) if rows else 0
    return fit([_measured(row, usual) for row in rows], sources)


def compare(calibration: TimeModel, results: dict[str, Any]) -> str:
    """How far modelled times are from those of another results file, a line for each contender.

    Raises:
        ValueError: for a file without rows of the model's, or of another kind of machine.
    """
    rows, sources = _usable(results)
    kinds = sorted({_kind(about) for about in (*calibration.sources, *sources)})
    if not rows or len(kinds) > 1:
        raise ValueError(
            f"check with {len(rows)} rows of {' and '.join(kinds)} is not possible: give rows of "
            "`padded-dispatch bench`, in graphs, of the kind of machine that was calibrated"
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
    """The coefficients, one a line, and which of them the rows decide."""
    lines = []
    for name in NAMES:
        value = getattr(calibration.coefficients, name)
        start = getattr(START, name)
        how = "from the rows" if name in calibration.determined else f"near its start, {start:g}"
        lines.append(f"{name:20} {value:10.4g}  {how}")
    return "\n".join(lines)


def _measure(given: argparse.Namespace, argv: list[str]) -> int:
    """Write the rows of a benchmark; its exit code."""
    rows = _rows_path(given.out)
    if rows.exists():
        raise ValueError(
            f"out={given.out} is not possible: {rows} is there already; fit it with --from, or "
            "take another name"
        )
    if "RANK" in os.environ:
        raise ValueError(
            f"RANK={os.environ['RANK']} is not possible: calibrate starts its own processes; under "
            "torchrun run `padded-dispatch bench`, and give its results to calibrate --from"
        )
    flags = _bench_flags(given, argv)
    from padded_dispatch.bench import command as bench  # needs Megatron; a fit alone does not

    return bench.main(flags)


def _rows_path(out: Path) -> Path:
    return out.with_suffix(".rows.json")


def _usable(results: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the model's, and what the runs that hold some are about.

    Of a case that was measured more than once the last row counts: code gets better.
    """
    last: dict[tuple[Any, ...], tuple[dict[str, Any], int]] = {}
    kinds = set()
    for number, run in enumerate(results["runs"]):
        for row in filter(_is_usable, run["rows"]):
            last[tuple(row[name] for name in _CASE)] = row, number
            kinds.add(_kind(run["about"]))
    if len(kinds) > 1:
        found = " and ".join(sorted(kinds))
        raise ValueError(f"results of {found} are not possible: calibrate for one")
    rows = [row for row, _ in last.values()]
    sources = [results["runs"][n]["about"] for n in sorted({n for _, n in last.values()})]
    return rows, sources


def _kind(about: dict[str, Any]) -> str:
    """Of "8 x NVIDIA H200" the last part: how many does not matter."""
    return about["machine"].split(" x ")[-1]


def _is_usable(row: dict[str, Any]) -> bool:
    return (
        row.get("contender") in ("ours", "stock-drop-pad")
        and row["variant"] != "direct"
        and row["graph"] == "layer"
        and row["skew"] == "uniform"
        and row["capacity_factor"] is not None
        and row["error"] is None
    )


def _measured(row: dict[str, Any], num_tokens: int) -> Measured:
    """Of a row; it fits if it is of `num_tokens`, among others."""
    shape = MODELS[row["model"]]
    config = DispatchConfig(
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        capacity_factor=row["capacity_factor"],
        num_ranks=row["ep"],
    )
    sizes = LayerSizes(
        num_tokens=row["tokens"], hidden_size=shape.hidden_size, ffn_size=shape.ffn_size
    )
    slots = shape.num_experts * config.capacity(row["tokens"])
    found = cost(config, sizes, busiest_rows=row["fill"] * slots)  # in balance all ranks are alike
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
    if num_gpus < 1:
        raise ValueError(
            "workers=0 is not possible: the model is of CUDA graphs, and PyTorch sees no GPU here"
        )
    # Each rank of a group has as many experts: of six GPUs, four.
    experts = math.gcd(*(MODELS[model].num_experts for model in models))
    workers = given.workers or max(n for n in range(1, num_gpus + 1) if experts % n == 0)
    eps = sorted({1, workers}, reverse=True)  # the wire first, should time run out
    flags = ["--device", "cuda", "--workers", workers, "--ep", *eps, "--models", *models]
    flags += ["--capacity-factors", 1.0, 2.0, "--contenders", "module-graphed", "packed-graphed"]
    flags += ["--minutes", given.minutes, "--no-phases", "--out", _rows_path(given.out)]
    flags += ["--command", " ".join(["padded-dispatch calibrate", *argv])]
    if given.commit is not None:
        flags += ["--commit", given.commit]
    return [str(flag) for flag in flags]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="padded-dispatch calibrate",
        description="Measure layers on this machine and fit the time model of `tune` to them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("out", type=Path, help="the calibration, for `tune --calibration`")
    parser.add_argument(
        "--from",
        dest="results",
        type=Path,
        metavar="RESULTS",
        help="measure nothing, fit this results file of `padded-dispatch bench`",
    )
    parser.add_argument(
        "--check",
        type=Path,
        metavar="RESULTS",
        help="of `padded-dispatch bench`, too: not fitted, but compared with",
    )
    parser.add_argument(
        "--workers", type=int, help="processes; None: as many GPUs as divide the models' experts"
    )
    parser.add_argument(
        "--minutes", type=float, default=2.0, help="begin no case later than this after starting"
    )
    parser.add_argument("--commit", help="of the code, for the results")
    return parser
