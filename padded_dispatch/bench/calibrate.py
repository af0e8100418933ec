"""`padded-dispatch calibrate`: a time model of your own GPUs for `padded-dispatch tune`.

Two minutes of `padded-dispatch bench` on shapes, layouts and factors that tell the coefficients
apart, then a fit; or the fit alone, to results that are already there.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from padded_dispatch.bench.cases import MODELS
from padded_dispatch.capacity.calibration import (
    NAMES,
    START,
    Calibration,
    Measured,
    Work,
    fit,
    save,
)
from padded_dispatch.capacity.cost import LayerSizes, cost
from padded_dispatch.config import DispatchConfig


def main(argv: list[str]) -> int:
    """Measure and fit; 0 when a calibration was written, 1 when a measurement failed.

    Raises:
        ValueError: the user's mistakes, and rows that the model does not fit.
        SystemExit: see `start_workers`.
    """
    given = _parser().parse_args(argv)
    results = given.results
    if results is None:
        results = given.out.with_suffix(".rows.json")
        if results.exists():
            raise ValueError(f"out={given.out} is not possible: {results} is there already")
        from padded_dispatch.bench import command as bench  # needs Megatron; a fit alone does not

        failed = bench.main(_bench_flags(given, results))
        if failed:
            return failed
    calibration = calibrate(_read(results))
    save(calibration, given.out)
    sys.stdout.write(f"{table(calibration)}\n\n{calibration.describe()}\n")
    return 0


def calibrate(results: dict[str, Any]) -> Calibration:
    """Fit the model to what a results file of `padded-dispatch bench` holds.

    It is fitted to our own rows in a graph, with routing in balance: Megatron's experts (module)
    and packed ones. Rows that compute as many slots otherwise are compared with it: stock
    drop-and-pad's, and batched experts, which are modelled as padded ones with one launch for all.
    Direct stores are left out: they send full slots only, over another wire.

    Raises:
        ValueError: when rows are of different machines, or do not fit the model.
    """
    measured, sources = [], []
    for run in results["runs"]:
        rows = [row for row in run["rows"] if _is_usable(row)]
        measured += [_measured(row) for row in rows]
        sources += [run["about"]] if rows else []
    # "8 x NVIDIA H200": how many does not matter.
    kinds = sorted({about["machine"].split(" x ")[-1] for about in sources})
    if len(kinds) > 1:
        raise ValueError(f"results of {' and '.join(kinds)} are not possible: calibrate for one")
    return fit(measured, sources)


def table(calibration: Calibration) -> str:
    """The coefficients, one a line, and which of them the rows decide."""
    lines = []
    for name in NAMES:
        value = getattr(calibration.coefficients, name)
        start = getattr(START, name)
        how = "from the rows" if name in calibration.determined else f"near its start, {start:g}"
        lines.append(f"{name:20} {value:10.4g}  {how}")
    return "\n".join(lines)


def _is_usable(row: dict[str, Any]) -> bool:
    return (
        row["contender"] in ("ours", "stock-drop-pad")
        and row["variant"] != "direct"
        and row["graph"] == "layer"
        and row["skew"] == "uniform"
        and row["capacity_factor"] is not None
        and row["error"] is None
    )


def _measured(row: dict[str, Any]) -> Measured:
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
    return Measured(
        work=Work(
            packed=packed,
            num_launched=0 if variant in ("packed", "batched") else config.num_local_experts,
            wire_bytes=found.wire_bytes,
            flops=found.packed_flops if packed else found.padded_flops,
        ),
        ms=row["ms"],
        name=" ".join(part for part in (row["contender"], variant) if part),
        num_ranks=row["ep"],
        fits=variant in ("module", "packed"),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"from={path} is not possible: {error}") from error


def _bench_flags(given: argparse.Namespace, results: Path) -> list[str]:
    workers = given.workers or torch.cuda.device_count()
    if workers < 1:
        raise ValueError(
            "workers=0 is not possible: the model is of CUDA graphs, and PyTorch sees no GPU here"
        )
    eps = sorted({1, workers}, reverse=True)  # the wire first, should time run out
    flags = ["--device", "cuda", "--workers", workers, "--ep", *eps]
    flags += ["--models", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite"]
    flags += ["--capacity-factors", 1.0, 2.0, "--contenders", "module-graphed", "packed-graphed"]
    flags += ["--minutes", given.minutes, "--no-phases", "--out", results]
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
    parser.add_argument("--workers", type=int, help="processes (None: all GPUs)")
    parser.add_argument("--minutes", type=float, default=2.0, help="begin no case later than this")
    parser.add_argument("--commit", help="of the code, for the results")
    return parser
