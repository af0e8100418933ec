"""Terminal output: a line for each row when it is measured, and a table at the end."""

from typing import Any

_COLUMNS = ("contender", "CF", "fill", "ms", "/ stock", "/ roofline", "host ms", "GiB", "TFLOP/s")


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

    `/ stock`: time divided by that of stock drop-and-pad with the same factor and graph.
    `/ roofline`: time divided by the roofline at 790 TFLOP/s. `GiB`: peak memory of tensors.
    `TFLOP/s`: GEMMs of real rows, per GPU.
    """
    blocks: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        title = f"{row['model']}, EP {row['ep']}, {row['tokens']} tokens per rank, {row['skew']}"
        blocks.setdefault(title, []).append(row)
    lines = []
    for title, block in blocks.items():
        cells = [_COLUMNS, *(_cells(row, block) for row in block)]
        widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
        lines.append(title)
        for first, *others in cells:
            padded = [c.rjust(w) for c, w in zip(others, widths[1:], strict=True)]
            lines.append("  ".join(["  " + first.ljust(widths[0]), *padded]).rstrip())
        lines.append("")
    return "\n".join(lines)


def _cells(row: dict[str, Any], block: list[dict[str, Any]]) -> tuple[str, ...]:
    factor = "-" if row["capacity_factor"] is None else f"{row['capacity_factor']:g}"
    if row["error"] is not None:
        return (_name(row), factor, "failed", *["-"] * 6)
    stock = next((other for other in block if _is_baseline(other, row)), None)
    return (
        _name(row),
        factor,
        "-" if row["fill"] is None else f"{row['fill']:.1%}",
        f"{row['ms']:.3f}",
        "-" if stock is None else f"{row['ms'] / stock['ms']:.3f}",
        "-" if row["floor_ms"] is None else f"{row['ms'] / row['floor_ms']:.2f}",
        f"{row['host_ms']:.3f}",
        "-" if row["allocated_gib"] is None else f"{row['allocated_gib']:.2f}",
        f"{row['tflops_per_gpu']:.1f}",
    )


def _is_baseline(other: dict[str, Any], row: dict[str, Any]) -> bool:
    alike = all(other[key] == row[key] for key in ("capacity_factor", "graph", "main_grad"))
    return alike and other["contender"] == "stock-drop-pad" and other["error"] is None


def _name(row: dict[str, Any]) -> str:
    graphed = None if row["graph"] == "none" else "graphed"
    summed = "" if row["main_grad"] == "none" else f"main_grad {row['main_grad']}"
    return " ".join(part for part in (row["contender"], row["variant"], graphed, summed) if part)
