"""Figures and tables of `04_performance.ipynb`, drawn from `results/*.json`.

Of a case that was measured more than once, the last row counts for which the host was not the
limit, or the last row, if it always was.
"""

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import figures
import matplotlib.pyplot as plt
from IPython.display import Markdown

from padded_dispatch.bench.report import HOST_BOUND

Rows = list[dict[str, Any]]

KINDS = {
    "auto": ("ours, defaults", figures.INK),
    "direct": ("ours, packed experts, direct stores", figures.RED),
    "packed": ("ours, packed experts (all-to-all)", figures.PURPLE),
    "module": ("ours, Megatron's experts", figures.BLUE),
    "stock-drop-pad": ("stock drop-and-pad", figures.ORANGE),
    "stock-dropless": ("stock dropless", figures.GREEN),
}
GRAPHS = {
    "none": "no graph",
    "partial": "attn, router, preprocess",
    "layer": "whole layer",
    "full-iteration": "whole iteration",
}
ROOFLINE = "#8695a1"


def load(name: str) -> Rows:
    """Return all rows of a results file, each with `about` of its run."""
    runs = json.loads(Path("results", f"{name}.json").read_text())["runs"]
    return [row | {"about": run["about"]} for run in runs for row in run["rows"]]


def where(rows: Rows, **conditions: Any) -> Rows:
    """Return the rows that have these values."""
    return [row for row in rows if all(row.get(k) == v for k, v in conditions.items())]


def table(head: list[str], rows: list[Any]) -> Markdown:
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return Markdown("\n".join(f"| {' | '.join(map(str, line))} |" for line in lines))


def kind(row: dict[str, Any]) -> str:
    """Return a key of `KINDS`; another text for variants that no figure has."""
    if row["contender"] != "ours":
        return row["contender"]
    if "variant" in row and row["variant"] is not None:  # of a layer
        return row["variant"]
    padded = row["flags"]["dispatch"]["padded"]  # of a training job
    experts, exchange = padded.get("experts", "module"), padded.get("exchange")
    if padded.get("capacity_pool", "expert") != "expert":
        return "pool"
    if exchange == "direct":
        return "direct"
    return "packed" if (experts, exchange) == ("auto", "alltoall") else experts


def conditions(rows: Rows) -> str:
    """Return machine, versions, date and commits of the rows, as text."""
    seen: dict[str, dict[str, None]] = {}
    for row in rows:
        about = row["about"]
        versions = about["versions"]
        packages = ("megatron-core", "transformer-engine", "torch")
        named = [f"{name} {versions[name]}" for name in packages if versions[name]]
        text = f"{about['machine']}, {', '.join(named)}, {about['date']}"
        seen.setdefault(text, {})[str(about["commit"])] = None
    return "\n".join(f"{text}, commit {', '.join(commits)}" for text, commits in seen.items())


def newest(rows: Rows, *names: str) -> Rows:
    """Return one row for each kind and values of `names`; see the module."""
    waited_first = sorted(rows, key=lambda row: row["host_ms"] < HOST_BOUND * row["ms"])
    last = {(kind(row), *(row[name] for name in names)): row for row in waited_first}
    return [row for row in last.values() if kind(row) in KINDS]


# One layer


def layers(**given: Any) -> Rows:
    """Return the newest rows of layers without gradients added, those with `given` values."""
    rows = [row for row in load("layer_bench") if row.get("main_grad", "none") == "none"]
    return newest(where(rows, **given), "model", "ep", "tokens", "skew", "capacity_factor")


def draw_layers(rows: Rows, x: str, label: str) -> None:
    """Draw ms against `x`, a panel for each EP and model of several EP; grey is the roofline."""
    of_models: dict[str, set[int]] = {}
    for row in rows:
        of_models.setdefault(row["model"], set()).add(row["ep"])
    models = [model for model, eps in of_models.items() if len(eps) > 1]
    rows = [row for row in rows if row["model"] in models]
    eps = sorted({row["ep"] for row in rows})
    size = 3.2 * len(eps), 2.6 * len(models)
    figure, panels = plt.subplots(
        len(models), len(eps), figsize=size, squeeze=False, sharex=True, sharey="row"
    )
    for (i, model), (j, ep) in itertools.product(enumerate(models), enumerate(eps)):
        axes, here = panels[i, j], where(rows, model=model, ep=ep)
        for which, (name, colour) in KINDS.items():
            same = sorted((row for row in here if kind(row) == which), key=lambda row: row[x])
            if same:
                ms = [row["ms"] for row in same]
                low = [row["ms"] - min(row["samples_ms"]) for row in same]
                high = [max(row["samples_ms"]) - row["ms"] for row in same]
                look = {"marker": "o", "markersize": 4, "color": colour, "label": name}
                axes.errorbar([row[x] for row in same], ms, [low, high], **look)
        least = {row[x]: row["floor_ms"] for row in here}
        axes.plot(sorted(least), [least[at] for at in sorted(least)], color=ROOFLINE, linewidth=3)
        axes.set_title(f"{model}, EP {ep}", fontsize=10)
        axes.margins(x=0.1)
        if x == "tokens":
            ticks = sorted({row["tokens"] for row in rows})
            axes.set(xscale="log", yscale="log")
            axes.set_xticks(ticks, [f"{at:,}" for at in ticks])
            axes.xaxis.set_minor_locator(plt.NullLocator())
            axes.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
    for axes in panels[:, 0]:
        axes.set_ylabel("ms")
        if x != "tokens":
            axes.set_ylim(bottom=0)
    for axes in panels[-1]:
        axes.set_xlabel(label)
    shown = {
        name: line
        for axes in panels.flat
        for line, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(shown.values(), shown.keys(), loc="outside upper center", ncols=3)
    note = "Forward and backward, bf16, in a CUDA graph. Medians; bars span all samples.\n"
    figures.show(figure, note + conditions(rows))


def beside_stock() -> Markdown:
    """Return a table of times relative to stock drop-and-pad of the same command."""
    rows = load("layer_bench")
    names = ("model", "ep", "tokens", "skew", "capacity_factor", "main_grad", "about")
    beside: dict[tuple[Any, ...], dict[float, str]] = {}
    for row in rows:
        same = {name: row.get(name) for name in names}
        stock = where(rows, contender="stock-drop-pad", **same)
        if row["contender"] == "ours" and stock and kind(row) in KINDS:
            gradients = row.get("main_grad", "none")
            case = *(row[name] for name in names[:4]), gradients, KINDS[kind(row)][0]
            waits = stock[0]["host_ms"] > HOST_BOUND * stock[0]["ms"]
            text = f"{row['ms'] / stock[0]['ms']:.2f}{' (host)' if waits else ''}"
            beside.setdefault(case, {})[row["capacity_factor"]] = text
    factors = sorted({factor for of_factor in beside.values() for factor in of_factor})
    cases = sorted(beside.items(), key=lambda item: (*item[0][:2], item[0][4], item[0][2:]))
    lines = [[*case, *(of.get(factor, "") for factor in factors)] for case, of in cases]
    head = ["model", "EP", "tokens", "routing", "gradients", "way"]
    return table([*head, *(f"factor {factor:g}" for factor in factors)], lines)


# Whole training steps


def passes(row: dict[str, Any]) -> int:
    """Return the number of micro-batches of a step."""
    recipe, size = row["flags"]["recipe"], row["flags"]["layout"]
    replicas = size["workers"] // (size["tp"] * size["pp"])
    return recipe["global_batch"] // (recipe["micro_batch"] * replicas)


def steps() -> Rows:
    """Return the newest rows of training steps that measure time, repeats merged."""
    timed: dict[Any, Rows] = {}
    for row in load("full_layer_graph"):
        recipe = row["flags"]["recipe"]
        if not recipe["deterministic"] and kind(row) in KINDS:
            row |= {"layers": recipe["num_layers"], "passes": passes(row)}
            names = ("model", "ep", "tokens", "layers", "passes", "capacity_factor", "graph")
            key = (kind(row), *(row[name] for name in names), row["about"]["command"])
            timed.setdefault(key, []).append(row)
    merged = [
        same[-1]
        | {
            name: statistics.median(row[name] for row in same)
            for name in ("ms", "host_ms", "allocated_gib")
        }
        | {"samples_ms": [ms for row in same for ms in row["samples_ms"]]}
        for same in timed.values()
    ]
    return newest(merged, "model", "ep", "tokens", "layers", "passes", "capacity_factor", "graph")


def draw_steps(rows: Rows, most_ms: float = 170) -> None:
    """Draw step times by way and graph, a panel for each layout of four layers and one pass."""
    rows = [
        row for row in where(rows, layers=4, passes=1) if row["capacity_factor"] in (1.25, None)
    ]
    layouts = sorted({(-row["ep"], row["model"], row["tokens"]) for row in rows})
    counts = [
        len([row for row in rows if (-row["ep"], row["model"], row["tokens"]) == layout])
        for layout in layouts
    ]
    figure, panels = plt.subplots(
        len(counts),
        figsize=(8.6, 1.2 + 0.25 * sum(counts) + 0.5 * len(counts)),
        height_ratios=[count + 1 for count in counts],
        sharex=True,
        squeeze=False,
    )
    for axes, (ep, model, tokens) in zip(panels[:, 0], layouts, strict=True):
        here = sorted(where(rows, ep=-ep, model=model, tokens=tokens), key=lambda row: row["ms"])
        for i, row in enumerate(here):
            colour = KINDS[kind(row)][1]
            axes.barh(i, min(row["ms"], most_ms), 0.8, color=colour, alpha=0.5)
            axes.barh(i, min(row["host_ms"], most_ms), 0.8, color=colour)
            span = [min(of(row["samples_ms"]), most_ms) for of in (min, max)]
            axes.plot(span, [i, i], color=figures.INK, linewidth=1.5)
            axes.text(most_ms + 3, i, f"{row['ms']:.0f}", va="center", weight="bold", fontsize=9)
        labels = [f"{GRAPHS[row['graph']]}: {KINDS[kind(row)][0]}" for row in here]
        axes.set_yticks(range(len(here)), labels, fontsize=9)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set(title=f"{model}, EP {-ep}, {tokens:,} tokens", xlim=(0, most_ms + 12))
    panels[-1, 0].set_xlabel("ms per step (dark: host)")
    note = "Balanced routing, factor 1.25 (dropless: none), 4 layers, bf16, distributed Adam.\n"
    figures.show(figure, note + conditions(rows))


def all_steps(rows: Rows) -> Markdown:
    """Return a table of all timed steps."""
    head = ["model", "layers", "tokens", "passes", "EP", "factor", "way", "graph", "ms"]
    names = ("model", "layers", "tokens", "passes", "ep")
    ordered = sorted(rows, key=lambda row: (*(row[name] for name in names), row["ms"]))
    lines = [
        [
            *(row[name] for name in names),
            row["capacity_factor"] or "none",
            KINDS[kind(row)][0],
            row["graph"],
            f"{row['ms']:.1f}",
            f"{row['host_ms']:.1f}",
            f"{row['allocated_gib']:.1f}",
            row["about"]["commit"],
        ]
        for row in ordered
    ]
    return table([*head, "host ms", "GiB", "commit"], lines)


def equal_losses() -> Markdown:
    """Return a table of losses with graphs beside those without, same way and command."""
    exact = [row for row in load("full_layer_graph") if row["flags"]["recipe"]["deterministic"]]
    lines = []
    for row in exact:
        alike = {"capacity_factor": row["capacity_factor"], "about": row["about"]}
        for base in where(exact, graph="none", **alike):
            if kind(base) == kind(row) and base is not row:
                gap = max(abs(a - b) for a, b in zip(row["loss"], base["loss"], strict=True))
                version = row["about"]["versions"]["megatron-core"]
                named = [KINDS[kind(row)][0], row["graph"], row["ep"], version, len(row["loss"])]
                lines.append([*named, f"{gap:.2g}" if gap else "0: equal bits"])
    return table(["way", "graph", "EP", "Megatron-Core", "steps", "largest difference"], lines)


# The exchange, and checks


def beside_peer() -> Markdown:
    """Return a table of exchanges beside torchtitan's MinimalAsyncEP, newest command."""
    rows = where(load("direct"), measure="exchange beside a peer", ep=2)
    rows = where(rows, about=rows[-1]["about"])
    lines = []
    for row in rows:
        here = where(rows, model=row["model"], skew=row["skew"])
        (peer,) = where(here, contender="torchtitan-minimal-async-ep")
        times = [
            f"{row[us]:,.0f} ({row[us] / peer[us]:.2f})"
            for us in ("out_us", "forward_us", "forward_backward_us")
        ]
        name = f"ours, {row['variant']}" if row["contender"] == "ours" else "MinimalAsyncEP"
        sent = f"{row['sent'] / row['asked_for']:.0%}"
        factor = row["capacity_factor"] or "drops nothing"
        lines.append([row["model"], row["skew"], name, factor, sent, *times])
    print(f"{rows[0]['tokens']:,} tokens per rank, EP 2, bf16\n{conditions(rows)}")
    head = ["rows of", "routing", "exchange", "factor", "rows sent", "until at experts, us"]
    return table([*head, "forward, us", "forward and backward, us"], lines)


def draw_parity() -> None:
    """Draw our errors in units of the allowed error, a dot for each tensor."""
    checks = [row for row in load("foundation") if "errors" in row]
    figure, axes = plt.subplots(figsize=(8, 3.4))
    groups: dict[tuple[str, str], list[float]] = {}
    for row in checks:
        precision = "fp8" if row["name"].startswith("fp8") else row["dtype"]
        group = row["about"]["versions"]["megatron-core"], precision
        groups.setdefault(group, []).extend(
            error["ours"] / error["allowed"] for error in row["errors"].values() if error["allowed"]
        )
    for i, shares in enumerate(groups.values()):
        shares.sort()
        offsets = [i - 0.28 + 0.56 * ((j * 0.618) % 1) for j in range(len(shares))]
        axes.plot(shares, offsets, ".", color=figures.COLOURS[i % 4], alpha=0.6)
        text = f"{len(shares)} tensors\nlargest {shares[-1]:.3f}"
        axes.text(1.03, i, text, va="center", fontsize=9)
    axes.axvline(1, color=figures.RED)
    axes.set_yticks(range(len(groups)), [f"{version}\n{dtype}" for version, dtype in groups])
    axes.set(xlim=(0, 1.25), ylim=(len(groups) - 0.5, -0.5), xlabel="our error / allowed error")
    passed = sum(row["passed"] for row in checks)
    note = f"{passed} of {len(checks)} cases passed. Vertical place in a row has no meaning.\n"
    figures.show(figure, note + conditions(checks))


def situations() -> Markdown:
    """Return a table that counts the situations of graphs, and which passed."""
    tally: dict[tuple[str, str, int], Rows] = {}
    for row in load("graph_situations"):
        version = row["about"]["versions"]["megatron-core"]
        tally.setdefault((version, row["check"], row["ranks"]), []).append(row)
    lines = [
        [*key, len(rows), sum(row["passed"] for row in rows)] for key, rows in sorted(tally.items())
    ]
    return table(["Megatron-Core", "check", "GPUs", "situations", "passed"], lines)
