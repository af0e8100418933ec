"""Draw the pictures of the top README, and write its tables, from the results files.

    python notebooks/readme_figures.py

writes pictures to `.github/images`. Numbers come from `notebooks/results/*.json` alone: the newest
row of each contender counts, and of one layer the last run that holds every cell.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from padded_dispatch.bench.report import README_CONDITIONS, markdown, readme_table
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

# Runs of `pretrain_gpt.py` by model and GPUs.
SHOWN = {
    ("qwen3-30b-a3b, 6 layers", 2): "Qwen3-30B-A3B, 6 layers, 2 GPUs",
    ("qwen3-30b-a3b, 12 layers", 2): "Qwen3-30B-A3B, 12 layers, 2 GPUs",
    ("qwen3-30b-a3b, 48 layers", 4): "Qwen3-30B-A3B, 48 layers, 4 GPUs",
    ("gpt-oss-20b, 6 layers", 2): "GPT-OSS-20B, 6 layers, 2 GPUs",
}
FACTOR = 1.25
OURS, PADDED, DROPLESS = "ours", "stock drop-and-pad", "stock dropless"
PARTIAL = f"{DROPLESS}, graphs of attention and router"
LOOKS = {
    OURS: BLUE,
    "ours, fp8": GREEN,
    PADDED: ORANGE,
    PARTIAL: GREY,
    DROPLESS: RED,
}
TIMED = OURS, PADDED, PARTIAL
BARS = {
    OURS: "padded_dispatch",
    PADDED: "stock drop-and-pad, in the same CUDA graphs",
    PARTIAL: "stock dropless, graphs of attention and router",
}


def main() -> None:
    """Write the pictures and the tables."""
    README.write_text(with_tables(README.read_text()))
    with matplotlib.rc_context(STYLE):
        drawn = {"idea": draw_idea(), "real_run": draw_real_run()}
        for name, figure in drawn.items():
            path = IMAGES / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None, "Creator": None})
            plt.close(figure)
            # matplotlib ends some lines with a space.
            lines = [line.rstrip() for line in path.read_text().splitlines()]
            path.write_text("\n".join(lines) + "\n")


# The tables: a real run of the whole script, and milliseconds of one layer, ours beside stock.


def newest_table() -> tuple[str, dict[str, Any]]:
    """Return the table of a layer in Markdown, and the metadata of the run that measured it."""
    for run in reversed(runs_in("layer_bench")):
        at_home = run["about"]["machine"] == README_CONDITIONS["machine"]
        if at_home and (table := readme_table(run["rows"])) is not None:
            return table, run["about"]
    raise ValueError("layer_bench.json must hold a run with all of the README's table, got none")


def real_runs() -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    """Return the newest rows of `pretrain_gpt.py`, by model and GPUs, then by contender.

    Each has `about` of its run. Steps have the usual number of micro-batches and the usual seed, on
    real GPUs: ranks on pretended hosts share one.
    """
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for run in runs_in("store"):
        if re.search(r"--seed (?!1234\b)", run["about"]["command"]):
            continue
        for row in run["rows"]:
            usual = row.get("kind") == "pretrain_gpt" and row.get("micro_batches", 4) == 4
            usual = usual and row.get("hosts") is None
            if usual and not row.get("exit_code") and row["capacity_factor"] in (FACTOR, None):
                of_model = found.setdefault((row["model"], row["ep"]), {})
                of_model[row["contender"]] = row | {"about": run["about"]}
    return found


def runs_in(name: str) -> list[dict[str, Any]]:
    """Return the runs of a results file."""
    return json.loads((RESULTS / f"{name}.json").read_text())["runs"]


def real_table() -> str:
    """Return the table of real runs in Markdown: milliseconds, and how many times ours."""
    runs, lines = real_runs(), []
    for key, title in SHOWN.items():
        ms = {name: row["median_ms"] for name, row in runs[key].items()}
        cells = [f"{ms[name]:,.0f}" if name in ms else "" for name in (*TIMED, "ours, fp8")]
        ratios = [f"{ms[name] / ms[OURS]:.1f}x" if name in ms else "" for name in TIMED[1:]]
        lines.append([title, cells[0], cells[3], cells[1], ratios[0], cells[2], ratios[1]])
    head = ["ms a step", "ours", "ours, fp8", "drop-and-pad", "", "dropless", ""]
    return markdown(head, lines)


def commits(rows: Iterable[dict[str, Any]]) -> str:
    """Return which commits rows hold for, and whether ours ran with kernels of before."""
    rows = list(rows)
    ours = [row for row in rows if not row.get("contender", "ours").startswith("stock")]
    older = any(row["about"].get("kernels") != kernels() for row in ours)
    words = ", ".join(dict.fromkeys(row["about"]["commit"] for row in rows))
    return f"{words}, older kernels" if older else words


def with_tables(text: str) -> str:
    """Return the README with its tables."""
    layers, about = newest_table()
    tables = {
        "run": f"{real_table()}\n\n[store.json](notebooks/results/store.json).",
        "table": f"{layers}\n\n[layer_bench.json](notebooks/results/layer_bench.json), "
        f"commit {commits([{'about': about}])}.",
    }
    for mark, table in tables.items():
        written = rf"(<!-- {mark}: .*? -->\n).*?(<!-- {mark}: end -->)"
        text = re.sub(written, rf"\1{table}\2", text, flags=re.DOTALL)
    return text


# The plot: median milliseconds of a step of real runs, as bars.


def draw_real_run() -> Figure:
    """Draw a bar for each contender, one plot per model, with its time beside that of ours."""
    runs = real_runs()
    figure, axes = plt.subplots(1, len(SHOWN), figsize=(8.8, 2.3), layout="constrained")
    for ax, (key, title) in zip(axes, SHOWN.items(), strict=True):
        ms = {name: runs[key][name]["median_ms"] for name in BARS if name in runs[key]}
        for at, (name, time) in enumerate(ms.items()):
            ax.barh(at, time, color=LOOKS[name], height=0.7)
            ratio = "" if name == OURS else f"  {time / ms[OURS]:.1f}x"
            ax.text(time, at, f" {time:,.0f}{ratio}", va="center", fontsize=9, fontweight="bold")
        ax.set_title(title.replace(", ", "\n", 1), loc="left", fontsize=9, fontweight="bold")
        ax.set_xlim(0, 1.55 * max(ms.values()))
        ax.set_ylim(len(BARS) - 0.4, -0.6)
        ax.set_yticks([])
        ax.set_xticks([])
        ax.spines[["bottom"]].set_visible(False)
    handles = [Rectangle((0, 0), 1, 1, color=LOOKS[name]) for name in BARS]
    figure.legend(handles, BARS.values(), loc="outside lower center", ncols=3, fontsize=9)
    return figure


# The picture: four experts, twenty rows.


def draw_idea() -> Figure:
    """Draw the same routing three times: dropless, stock drop-and-pad, padded_dispatch."""
    demand, capacity = (4, 7, 0, 5), 5
    figure, axes = plt.subplots(1, 3, figsize=(8.4, 2.9), layout="constrained")
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
            "One store of fixed size holds the real rows\nof all layers. When it is full, "
            "backward\nrecomputes the rows that do not fit.",
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
            axes[1].text(
                rows + 0.3, y - 0.2, "dropped", fontsize=7, ha="right", va="bottom", color=RED
            )
    looks = [{"facecolor": BLUE}] * sum(demand) + [{"facecolor": GREEN}] * 9
    looks += [{"facecolor": "white", "edgecolor": GREY}] * (28 - len(looks))
    for number, look in enumerate(looks):
        _cell(axes[2], number % 7, 1.3 * (number // 7), **look)
    labels = ((0, "layer 1", -0.35, "right"), (2, "layer 2", -0.35, "right"))
    marks = {
        "row of a token": {"facecolor": BLUE},
        "row of the next layer": {"facecolor": GREEN},
        "padding, computed too": {"facecolor": ORANGE, "alpha": 0.55},
        "free": {"facecolor": "white", "edgecolor": GREY},
        "dropped": {"facecolor": "white", "edgecolor": RED, "linestyle": ":"},
    }
    patches = [Rectangle((0, 0), 1, 1, **look) for look in marks.values()]
    where = {"loc": "outside lower center", "ncols": 5, "handlelength": 1, "handleheight": 1}
    figure.legend(patches, marks, fontsize=8, **where)
    for line, name, x, side in (*labels, (3, "free", 7.1, "left")):
        axes[2].text(x, 1.3 * line + 0.45, name, fontsize=8, ha=side, va="center")
    return figure


def _cell(ax: Axes, x: float, y: float, **look: Any) -> None:
    ax.add_patch(Rectangle((x, y), 0.88, 0.9, **({"edgecolor": "none", "linewidth": 0.9} | look)))


if __name__ == "__main__":
    main()
