"""Figures and tables of `04_performance.ipynb`, drawn from `results/*.json`."""

import itertools
from statistics import mean
from typing import Any

import figures
import matplotlib.pyplot as plt
import numpy as np
import readme_figures
from IPython.display import Markdown

from padded_dispatch.bench import report

Rows = list[dict[str, Any]]

FUSED = "stock dropless, fused experts"
NAMES = {"stock-drop-pad": "stock drop-and-pad", "stock-dropless": FUSED, "ours": "ours"}
COLOURS = dict(zip(NAMES, (figures.ORANGE, figures.GREEN, figures.BLUE), strict=True))
# The steps of a real run before this one compile, capture, and warm up.
FIRST_STEP = 21
COLUMNS = [name + end for end in ("", ", NCCL", ", fp8") for name in ("ours", "stock drop-and-pad")]
VARIANTS = {"packed": ", NCCL", "hybridep": ", HybridEP"}
COLUMNS += [FUSED, FUSED + VARIANTS["hybridep"]]
FACTOR = 1.25
GRADIENTS = {"none": "in bf16", "fused": "added in fp32", "first": "stored in fp32"}
SUMS = {"none": ("-", ""), "fused": ("--", ", gradients added to fp32 buffers")}


def load(name: str, **conditions: Any) -> Rows:
    """Return the rows of a results file that have these values, each with `about` of its run."""
    runs = readme_figures.runs_in(name)
    rows = [row | {"about": run["about"]} for run in runs for row in run["rows"]]
    return [row for row in rows if all(row.get(k) == v for k, v in conditions.items())]


def runs_of(rows: Rows) -> list[Rows]:
    """Return the rows of each run."""
    return [list(run) for _, run in itertools.groupby(rows, key=lambda row: row["about"])]


def layers(ep: int) -> Rows:
    """Return the rows of layers in graphs, of commands that measured stock, too.

    Those of a contender without a factor stand beside `FACTOR`.
    """
    rows = load("layer_bench", ep=ep, graph="layer")
    rows = [row | {"capacity_factor": row["capacity_factor"] or FACTOR} for row in rows]
    runs = runs_of(rows)
    return [row for run in runs if any(row["contender"] != "ours" for row in run) for row in run]


def layer_table(rows: Rows) -> Markdown:
    """Return a table of uniform routing: a line for each case, the newest row of each contender."""
    cases: dict[tuple[str, int, float, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["skew"] == "uniform" and row["ms"]:
            case = row["model"], row["tokens"], row["capacity_factor"], row["main_grad"]
            cases.setdefault(case, {})[_column(row)] = row
    names = sorted({name for of_case in cases.values() for name in of_case}, key=COLUMNS.index)
    lines = []
    for case, of_case in sorted(cases.items()):
        (model, tokens, factor, sums), some = case, [of_case.get(name) for name in names]
        ms = [f"{row['ms']:.2f}" if row else "" for row in some]
        gib = ", ".join(f"{row['allocated_gib']:.1f}" if row else "-" for row in some)
        lines.append([model, f"{tokens:,}", f"{factor:g}", GRADIENTS[sums], *ms, gib])
    return Markdown(
        report.markdown(["model", "tokens", "factor", "gradients", *names, "GiB"], lines)
    )


def _column(row: dict[str, Any]) -> str:
    """Return the name of a row's contender."""
    name = NAMES[row["contender"]] + VARIANTS.get(row["variant"], "")
    return name + (", fp8" if row["flags"].get("fp8") else "")


def draw_layers(rows: Rows, x: str, label: str) -> None:
    """Draw ms of a layer against `x`, a panel for each model; grey is the roofline."""
    models = sorted({row["model"] for row in rows}, reverse=True)
    figure, (panels,) = plt.subplots(1, len(models), figsize=(8.6, 3.4), squeeze=False)
    for axes, model in zip(panels, models, strict=True):
        here = sorted((row for row in rows if row["model"] == model), key=lambda row: row[x])
        for contender, name in NAMES.items():
            for sums, (style, words) in SUMS.items():
                wanted = {"contender": contender, "main_grad": sums}
                line = {row[x]: row["ms"] for row in here if wanted.items() <= row.items()}
                look = {"marker": "o", "markersize": 4, "color": COLOURS[contender]}
                if line:
                    axes.plot(line.keys(), line.values(), style, label=name + words, **look)
        least = {row[x]: row["floor_ms"] for row in here if row["main_grad"] == "none"}
        axes.plot(least.keys(), least.values(), color=figures.GREY, linewidth=3, label="roofline")
        axes.set(title=model, xlabel=label)
        if x == "tokens":
            axes.set(xscale="log", yscale="log")
            axes.set_xticks(list(least), [f"{at:,}" for at in least])
            axes.xaxis.set_minor_locator(plt.NullLocator())
            axes.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
            axes.yaxis.set_minor_formatter(lambda ms, _: "")
        else:
            axes.set_ylim(bottom=0)
    panels[0].set_ylabel("ms")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    figures.show(figure, "One GPU, forward and backward, bf16, in a CUDA graph.")


def draw_losses() -> None:
    """Draw losses of `pretrain_gpt.py` minus those of ours, a panel for each model of the README.

    Each point is a mean over ten steps.
    """
    runs, shown = readme_figures.real_runs(), readme_figures.SHOWN
    figure, panels = plt.subplots(1, len(shown), figsize=(8.6, 3.4), sharey=True)
    for axes, (key, title) in zip(panels, shown.items(), strict=True):
        rows = runs[key]
        ours = rows[readme_figures.OURS]["loss"]
        for name, colour in reversed(readme_figures.LOOKS.items()):
            if name in rows:
                pairs = zip(rows[name]["loss"], ours, strict=False)
                apart = np.array([one - other for one, other in pairs])
                means = np.convolve(apart, np.full(10, 0.1), "valid")
                axes.plot(range(10, len(apart) + 1), means, color=colour, label=name)
        axes.set(title=title.replace(", ", "\n", 1), xlabel="step")
    panels[0].set_ylabel("loss minus ours")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    figures.show(figure)


def real_table() -> Markdown:
    """Return a table of the runs: time, its spread, memory, and what ours had no room for."""
    lines = []
    for (model, gpus), rows in readme_figures.real_runs().items():
        for contender, row in rows.items():
            times = row["ms"][FIRST_STEP - 1 :]
            spread = f"{min(times):,.0f}, {max(times):,.0f}"
            ms, gib = f"{row['median_ms']:,.0f}", f"{row['peak_mib'] / 1024:.0f}"
            lost = [f"{mean(row[of]):.2%}" if of in row else "" for of in ("dropped", "recomputed")]
            cells = [model, str(gpus), contender, ms, spread, gib, *lost]
            lines.append([*cells, readme_figures.commits([row])])
    head = ["model", "GPUs", "", "ms", "least, most", "GiB", "dropped", "recomputed", "commit"]
    return Markdown(report.markdown(head, lines))


def rivals() -> Markdown:
    """Return a table of one layer by other projects: ms in a graph, and eager."""
    cells: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in load("rivals"):
        case = row["model"], row.get("ep", 1), row["routing"], row["tokens"]
        if "eager" in row:
            times = [row[way].get("ms") for way in ("graph", "eager")]
            graph, eager = (f"{ms:.2f}" if ms else "-" for ms in times)
            cells.setdefault(case, {})[row["contender"]] = f"{graph} ({eager})"
    names = list(dict.fromkeys(name for of_case in cells.values() for name in of_case))
    lines = [
        [*map(str, case), *(of_case.get(name, "") for name in names)]
        for case, of_case in cells.items()
    ]
    return Markdown(report.markdown(["model", "EP", "routing", "tokens", *names], lines))
