"""Draw the pictures of the top README, and write its table, from the results files.

    python notebooks/readme_figures.py

writes pictures to `.github/images`. Numbers come from `notebooks/results/*.json` alone: of the runs
that hold every cell, the last one counts.
"""

import json
import re
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from padded_dispatch.bench.report import readme_table
from padded_dispatch.utils.results import kernels

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "notebooks" / "results"
IMAGES = ROOT / ".github" / "images"

INK, GREY, PALE = "#22303c", "#8a97a3", "#e3e8ec"
BLUE, ORANGE, GREEN, RED = "#2a6fb0", "#d9822b", "#3a8f5c", "#c0392b"
# The same picture from the same numbers has the same bytes.
STYLE = {
    "svg.hashsalt": "padded_dispatch",
    "svg.fonttype": "path",  # Looks the same on a machine without the font.
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}

FACTORS = (1.0, 1.25, 2.0)
MODELS = {"qwen3-30b-a3b": "Qwen3-30B-A3B", "gpt-oss-20b": "GPT-OSS-20B"}
STOCK = "stock drop-and-pad"
PACKED, DIRECT = "ours: packed experts, all-to-all", "ours: packed experts, direct stores"
LOOKS = {STOCK: (ORANGE, "o"), PACKED: (GREEN, "^"), DIRECT: (BLUE, "s")}


def main() -> None:
    """Write the pictures and the table."""
    README.write_text(with_table(README.read_text()))
    with matplotlib.rc_context(STYLE):
        drawn = {"idea": draw_idea(), "layer_time": draw_layer_time()}
        for name, figure in drawn.items():
            path = IMAGES / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None, "Creator": None})
            plt.close(figure)
            # matplotlib ends some lines with a space.
            lines = [line.rstrip() for line in path.read_text().splitlines()]
            path.write_text("\n".join(lines) + "\n")


# The table: milliseconds of one layer, ours beside stock.


def newest_table() -> tuple[str, dict[str, Any]]:
    """Return the README's table in Markdown, and the metadata of the run that measured it."""
    for run in reversed(json.loads((RESULTS / "store.json").read_text())["runs"]):
        if (table := readme_table(run["rows"])) is not None:
            return table, run["about"]
    raise ValueError("store.json must hold a run with all of the README's table, got none")


def with_table(text: str) -> str:
    """Return the README with the table, its commit, and whether kernels have changed since."""
    table, about = newest_table()
    older = "" if about.get("kernels") == kernels() else ", older kernels"
    source = f"[store.json](notebooks/results/store.json), commit {about['commit']}{older}"
    written = r"(<!-- table: .*? -->\n).*?(<!-- table: end -->)"
    return re.sub(written, rf"\1{table}\n\n{source}.\2", text, flags=re.DOTALL)


# The plot: milliseconds of one layer over the capacity factor.


def layer_times(path: Path = RESULTS / "layer_bench.json") -> dict[tuple[str, str, float], float]:
    """Return milliseconds by (model, contender, factor), of 4 GPUs with EP 4 and 4,096 tokens.

    All of them are medians of one command.

    Raises:
        ValueError: if no run of the file has every cell.
    """
    wanted = {(model, name, factor) for model in MODELS for name in LOOKS for factor in FACTORS}
    for run in reversed(json.loads(path.read_text())["runs"]):
        cells = {
            (row["model"], _contender(row), row["capacity_factor"]): row["ms"]
            for row in run["rows"]
            if (row["ep"], row["tokens"], row["skew"]) == (4, 4096, "uniform") and row["ms"]
        }
        if cells.keys() >= wanted:
            return {cell: cells[cell] for cell in wanted}
    raise ValueError(f"path must hold one run with all of {sorted(wanted)}, got {path}")


def _contender(row: dict[str, Any]) -> str | None:
    if row["graph"] != "layer":
        return None
    if row["contender"] == "stock-drop-pad":
        return STOCK
    return {"packed": PACKED, "direct": DIRECT}.get(row["variant"])


def draw_layer_time() -> Figure:
    """Draw ours as a flat line and stock as a rising one, one plot per model."""
    times = layer_times()
    figure, axes = plt.subplots(1, 2, figsize=(8.2, 3.1), layout="constrained")
    for ax, (model, title) in zip(axes, MODELS.items(), strict=True):
        for name, (colour, marker) in LOOKS.items():
            ms = [times[model, name, factor] for factor in FACTORS]
            ax.plot(FACTORS, ms, color=colour, marker=marker, linewidth=2, label=name)
            for factor, value in zip(FACTORS, ms, strict=True):
                if (name, factor) == (PACKED, 1.0):
                    continue  # No room between its neighbours; the line shows it.
                below = name == DIRECT
                ax.annotate(
                    f"{value:.2f}",
                    (factor, value),
                    xytext=(0, -13 if below else 6),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8,
                    color=colour,
                )
        ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
        ax.set_ylim(0, max(times[model, STOCK, factor] for factor in FACTORS) * 1.12)
        ax.set_xlim(0.9, 2.1)
        ax.set_xticks(FACTORS, [f"{factor:g}" for factor in FACTORS])
        ax.set_xlabel("capacity factor")
        ax.grid(axis="y", color=PALE)
        ax.set_axisbelow(True)
    axes[0].set_ylabel("ms per layer")
    axes[0].legend(loc="lower left", fontsize=8.5)
    return figure


# The picture: four experts, twenty rows.


def draw_idea() -> Figure:
    """Draw the same routing three times: dropless, stock drop-and-pad, padded_dispatch."""
    demand, capacity = (4, 7, 0, 5), 5
    figure, axes = plt.subplots(1, 3, figsize=(8.4, 2.5), layout="constrained")
    titles = (
        (
            "Dropless",
            "Sizes follow the router: the host waits\nfor them, and no CUDA graph can hold them.",
        ),
        (
            "Stock drop-and-pad",
            "Sizes are fixed, but experts compute\nfree slots as if they were real rows.",
        ),
        (
            "padded_dispatch",
            "One store of fixed size holds the real\nrows of all layers, and nothing else.",
        ),
    )
    for ax, (title, text) in zip(axes, titles, strict=True):
        ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
        ax.text(-2.2, 5.3, text, fontsize=8.5, va="top")
        ax.set_axis_off()
        ax.set_aspect("equal")
        ax.set_xlim(-2.3, 7.7)
        ax.set_ylim(6.6, -0.4)
    for expert, rows in enumerate(demand):
        y = 1.3 * expert
        for ax in axes[:2]:
            ax.text(-0.35, y + 0.45, f"expert {expert}", fontsize=8, ha="right", va="center")
        for row in range(rows):
            _cell(axes[0], row, y, facecolor=BLUE)
        if not rows:
            axes[0].text(0, y + 0.45, "no rows at all", fontsize=8, va="center", color=RED)
        padding = {"facecolor": ORANGE, "alpha": 0.55}
        for row in range(capacity):
            _cell(axes[1], row, y, **({"facecolor": BLUE} if row < rows else padding))
        for row in range(capacity, rows):
            _cell(axes[1], row + 0.15, y, facecolor="none", edgecolor=RED, linestyle=":")
        if rows > capacity:
            at = rows + 0.3, y - 0.2
            axes[1].text(*at, "dropped", fontsize=7, ha="right", color=RED, va="bottom")
    looks = [{"facecolor": BLUE}] * sum(demand) + [{"facecolor": GREEN}] * 9
    looks += [{"facecolor": "white", "edgecolor": GREY}] * (28 - len(looks))
    for number, look in enumerate(looks):
        _cell(axes[2], number % 7, 1.3 * (number // 7), **look)
    for line, name in ((0, "layer 1"), (2, "layer 2"), (3, "free")):
        place = (-0.35, "right") if name != "free" else (7.1, "left")
        axes[2].text(place[0], 1.3 * line + 0.45, name, fontsize=8, ha=place[1], va="center")
    return figure


def _cell(ax: Axes, x: float, y: float, **look: Any) -> None:
    ax.add_patch(Rectangle((x, y), 0.88, 0.9, **({"edgecolor": "none", "linewidth": 0.9} | look)))


if __name__ == "__main__":
    main()
