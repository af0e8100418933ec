"""Text of a run: a line for each row, tables at the end, and the roofline beside each time.

The roofline is the least time that NVIDIA H200s need for the real rows of a layer if each row
crosses the wire by itself. Each of the six GEMMs takes the longer of two times: its operations at
790 TFLOP/s, the best that torch reaches on these shapes in bf16, in a burst; and its operands and
result through memory once, at 4.3 TB/s, the rate of a large copy. Every real row crosses four times
(dispatch and combine, forward and backward) at 450 GB/s each way, NVLink's rated speed. A token
that crosses once for all its rows on a rank, as with direct writes, needs less. Nothing overlaps,
nothing is padded, and nothing else costs anything. The slowest rank decides.

Results files call this time `floor_ms`. For other GPUs it is None.

Shape suffixes: S source ranks, R receiving ranks, E experts.
"""

from itertools import product
from typing import Any

from torch import Tensor

from padded_dispatch.bench.cases import CONTENDERS, README_FLAGS
from padded_dispatch.utils.logs import aligned
from padded_dispatch.utils.shapes import LayerShape

_COLUMNS = (
    *("contender", "CF", "dropped", "ms", "/ stock", "/ roofline", "sustained ms", "joules"),
    *("host ms", "GiB"),
)
HOST_BOUND = 0.8  # share of host time in a pass above which the host is the bottleneck
_GPU = "NVIDIA H200"
_FLOP_PER_S = 790e12
_MEMORY_BYTES_PER_S = 4.3e12
_WIRE_BYTES_PER_S = 450e9
_HOPS = 4
_ELEMENT_BYTES = 2  # bf16
_SUM_BYTES = 8  # fp32, read and written
# What the README's own run had, by the keys of `results.about`.
README_CONDITIONS = {
    "machine": f"2 x {_GPU}",
    "python": "3.12.3",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "megatron-core": "0.19.0",
    "transformer-engine": "2.20.2",
}
# Names of the cases of `README_FLAGS` and, below, of its contenders, in their order.
_README_LINES = (
    "MoE layer of Qwen3-30B-A3B",
    "with gradients added to fp32 buffers",
    "of GPT-OSS-20B",
    "with gradients added to fp32 buffers",
)
_README_COLUMNS = ("ours", "ours over NCCL", "stock drop-and-pad")


def roofline(
    rows_SE: Tensor, shape: LayerShape, gpu: str, *, main_grad: bool = False
) -> float | None:
    """Return the least milliseconds of a pass for the rows that source ranks send to experts.

    A row costs `2 * D * 2F` FLOPs in fc1 and `2 * F * D` in fc2, and twice as many backward.

    Args:
        rows_SE: numbers of rows, any dtype; rank r holds the r-th of R equal parts of the experts.
        shape: sizes of the layer.
        gpu: the name of the GPU; for any but NVIDIA H200 the result is None.
        main_grad: weight gradients are added to fp32 buffers, instead of written in bf16.

    Example: 8 ranks that send 256 rows to each of 128 experts of Qwen3-30B-A3B (T = 4,096, K = 8)
    need 1.17 ms for GEMMs and 1.04 ms for the wire.
    """
    if gpu != _GPU:
        return None
    num_ranks = rows_SE.shape[0]
    rows_SR = rows_SE.double().unflatten(1, (num_ranks, -1)).sum(2)
    stay_R = rows_SR.diagonal()
    crossing = max((rows_SR.sum(1) - stay_R).max().item(), (rows_SR.sum(0) - stay_R).max().item())
    num_rows, num_experts = rows_SR.sum(0).max().item(), rows_SE.shape[1] // num_ranks
    seconds = _HOPS * crossing * shape.hidden_size * _ELEMENT_BYTES / _WIRE_BYTES_PER_S
    for width_in, width_out in (
        (shape.hidden_size, 2 * shape.ffn_size),
        (shape.ffn_size, shape.hidden_size),
    ):
        at_rate = 2 * num_rows * width_in * width_out / _FLOP_PER_S
        row_bytes = num_rows * (width_in + width_out) * _ELEMENT_BYTES
        num_weights = num_experts * width_in * width_out
        product = (row_bytes + num_weights * _ELEMENT_BYTES) / _MEMORY_BYTES_PER_S
        per_weight = _SUM_BYTES if main_grad else _ELEMENT_BYTES
        gradient = (row_bytes + num_weights * per_weight) / _MEMORY_BYTES_PER_S
        seconds += 2 * max(at_rate, product) + max(at_rate, gradient)
    return seconds * 1e3


def line(row: dict[str, Any]) -> str:
    """Return one row as text.

    Example: qwen3-30b-a3b EP8 T4096 uniform CF1 ours module: 4.200 ms, host 1.100 (5 s).
    """
    factor = "" if row["capacity_factor"] is None else f" CF{row['capacity_factor']:g}"
    where = f"{row['model']} EP{row['ep']} T{row['tokens']} {row['skew']}{factor}"
    if row["error"] is not None:
        found = f"FAILED: {row['error']}"
    else:
        found = f"{row['ms']:.3f} ms, host {row['host_ms']:.3f}"
    return f"{where} {_name(row)}: {found} ({row['seconds']:.0f} s)"


def table(rows: list[dict[str, Any]]) -> str:
    """Return all rows as text, one block per layer, layout and routing.

    `(host)`: the host is the bottleneck. `/ stock`: time divided by that of stock drop-and-pad with
    the same factor, precision and graph. `/ roofline`: time divided by the roofline. `sustained
    ms`, `joules`: see `Timing`. `GiB`: peak memory of tensors.
    """
    blocks: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        title = f"{row['model']}, EP {row['ep']}, {row['tokens']} tokens per rank, {row['skew']}"
        blocks.setdefault(title, []).append(row)
    lines = []
    for title, block in blocks.items():
        cells = [_COLUMNS, *(_cells(row, block) for row in block)]
        # A column that no row fills is left out: a CPU has no roofline, joules or GiB.
        filled = [column for column in zip(*cells, strict=True) if set(column[1:]) != {"-"}]
        text = aligned(list(zip(*filled, strict=True)))
        lines += [title, *(f"  {line}" for line in text.splitlines()), ""]
    return "\n".join(lines)


def _cells(row: dict[str, Any], block: list[dict[str, Any]]) -> tuple[str, ...]:
    factor = "-" if row["capacity_factor"] is None else f"{row['capacity_factor']:g}"
    if row["error"] is not None:
        return (_name(row), factor, "failed", *["-"] * 7)
    stock = next((other for other in block if _is_baseline(other, row)), None)
    on_gpu = row["allocated_gib"] is not None
    is_host_bound = on_gpu and row["host_ms"] > HOST_BOUND * row["ms"]
    return (
        _name(row),
        factor,
        "-" if row["dropped"] is None else f"{row['dropped']:.1%}",
        f"{row['ms']:.3f}{' (host)' if is_host_bound else ''}",
        "-" if stock is None else f"{row['ms'] / stock['ms']:.3f}",
        "-" if row["floor_ms"] is None else f"{row['ms'] / row['floor_ms']:.2f}",
        "-" if row["sustained_ms"] is None else f"{row['sustained_ms']:.3f}",
        "-" if row["joules"] is None else f"{row['joules']:.2f}",
        f"{row['host_ms']:.3f}",
        "-" if row["allocated_gib"] is None else f"{row['allocated_gib']:.2f}",
    )


def _is_baseline(other: dict[str, Any], row: dict[str, Any]) -> bool:
    alike = all(other[key] == row[key] for key in ("capacity_factor", "graph", "main_grad"))
    is_stock = other["contender"] == "stock-drop-pad" and other["error"] is None
    return is_stock and alike and _fp8(other) == _fp8(row)


def _fp8(row: dict[str, Any]) -> str | None:
    """Return the recipe of a row in fp8."""
    return row["flags"].get("fp8_recipe")


def _name(row: dict[str, Any]) -> str:
    graphed = None if row["graph"] == "none" else "graphed"
    summed = "" if row["main_grad"] == "none" else f"main_grad {row['main_grad']}"
    fp8 = f"fp8 {_fp8(row)}" if _fp8(row) else None
    parts = row["contender"], row["variant"], fp8, graphed, summed
    return " ".join(part for part in parts if part)


def readme_table(rows: list[dict[str, Any]]) -> str | None:
    """Return the README's table, in Markdown, of one command's rows; None if a cell is missing."""
    flags = README_FLAGS
    names = {"tokens": "tokens", "skew": "skews", "capacity_factor": "capacity_factors"}
    same = {name: flags[flag][0] for name, flag in names.items()}
    ms = {
        (row["model"], row["main_grad"], row["contender"], row["variant"], row["graph"]): row["ms"]
        for row in rows
        if same.items() <= row.items() and row["error"] is None and _fp8(row) is None
    }
    contenders = [CONTENDERS[key] for key in flags["contenders"]]
    lines = []
    cases = product(flags["models"], flags["main_grad"])
    for name, case in zip(_README_LINES, cases, strict=True):
        cells = [ms.get((*case, one.name, one.variant, one.graph)) for one in contenders]
        if None in cells:
            return None
        lines.append([name, *(f"{cell:.2f}" for cell in cells)])
    head = ["milliseconds, forward and backward", *_README_COLUMNS]
    if all(row.get("ep") == 1 for row in rows):  # One rank sends nothing over NCCL.
        at = _README_COLUMNS.index("ours over NCCL") + 1
        for cells in (head, *lines):
            del cells[at]
    return markdown(head, lines)


def markdown(head: list[str], lines: list[list[str]]) -> str:
    """Return a table in Markdown."""
    rows = [f"| {' | '.join(line)} |" for line in (head, *lines)]
    return "\n".join([rows[0], "|---" * len(head) + "|", *rows[1:]])


def differences(about: dict[str, Any]) -> str:
    """Return one line with the conditions in which a run differs from the README's."""
    here = {"machine": about["machine"], **about["versions"]}
    found = [
        f"{name} {here.get(name)}, there {value}"
        for name, value in README_CONDITIONS.items()
        if here.get(name) != value
    ]
    return f"Different from the README's run: {'; '.join(found) or 'nothing'}."
