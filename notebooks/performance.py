"""Figures and tables of `04_performance.ipynb`, drawn from `results/*.json`.

A figure without rows shows the command that would measure them. Of a case that was measured more
than once, the last row counts.
"""

import itertools
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import figures
import matplotlib.pyplot as plt
from IPython.display import Markdown

from padded_dispatch.bench.measure import hidden_share

Rows = list[dict[str, Any]]

KINDS = {
    "ours auto": ("ours, defaults", figures.INK),
    "ours auto, all-to-all": ("ours, defaults, all-to-all", "#6b7885"),
    "ours module": ("ours, Megatron's experts", figures.BLUE),
    "ours packed": ("ours, packed experts", figures.PURPLE),
    "ours batched": ("ours, batched experts", "#2a9d8f"),
    "ours direct": ("ours, packed, direct stores", figures.RED),
    "ours direct each": ("ours, direct stores, each row by itself", "#e9a3a3"),
    "ours direct serial": ("ours, direct stores, rows home after products", "#c97b84"),
    "ours direct summed": ("ours, direct stores, sums go home", "#8c1c2b"),
    "stock-drop-pad": ("stock drop-and-pad", figures.ORANGE),
    "stock-dropless": ("stock dropless", figures.GREEN),
}
NAME = {kind: name for kind, (name, _) in KINDS.items()}
COLOUR = {kind: colour for kind, (_, colour) in KINDS.items()}
GRAPHS = {
    "none": "no graph",
    "partial": "attn, router, preprocess",
    "layer": "whole layer",
    "full-iteration": "whole iteration",
}
MARKS = {"none": "o", "partial": "s", "layer": "D", "full-iteration": "*"}
DASHES = {"layer": "-", "full-iteration": "--", "none": ":", "partial": "-."}
ROOFLINE = "#8695a1"
MOST_MS = 170  # where the bars of steps end


# Rows and their conditions


def load(name: str) -> Rows:
    """Return all rows of a results file, each with `about` of its run; none without a file."""
    path = Path("results", f"{name}.json")
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    return [row | {"about": run["about"]} for run in runs for row in run["rows"]]


def where(rows: Rows, **conditions: Any) -> Rows:
    """Return the rows that have these values."""
    return [row for row in rows if all(row.get(k) == v for k, v in conditions.items())]


def table(head: list[str], rows: list[Any]) -> Markdown:
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return Markdown("\n".join(f"| {' | '.join(map(str, line))} |" for line in lines))


def kind(row: dict[str, Any]) -> str:
    """Return a key of `KINDS`: the contender; for ours with its experts, or `direct`."""
    if row["contender"] != "ours":
        return row["contender"]
    if row["variant"]:  # of a layer
        return f"ours {row['variant']}"
    padded = row["flags"]["dispatch"]["padded"]  # of a training job
    exchange, which = padded.get("exchange"), f"ours {padded.get('experts', 'module')}"
    if exchange == "direct":
        return "ours direct"
    return f"{which}, all-to-all" if (which, exchange) == ("ours auto", "alltoall") else which


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


def show_empty(command: str) -> None:
    """Show an empty figure with the command that would fill it."""
    figure, axes = plt.subplots(figsize=(8, 1.2))
    text = f"not measured yet:\n{command}"
    axes.text(0.5, 0.5, text, ha="center", va="center", color="#5b6b78")
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    figures.show(figure)


# The defaults


def defaults() -> Markdown | None:
    """Return a table of the defaults' time over that of the best explicit choice."""
    rows = [row for row in load("defaults") if row.get("ms") is not None]
    last = {(*_layer(row), row["capacity_factor"], kind(row)): row for row in rows}
    ratios: dict[tuple[Any, ...], dict[float, str]] = {}
    found = []
    for (*layer, factor, which), row in last.items():
        others = [last.get((*layer, factor, other)) for other in KINDS if other != which]
        explicit = [other for other in others if other and other["about"] == row["about"]]
        if which == "ours auto" and explicit:
            best = min(explicit, key=lambda other: other["ms"])
            found.append(row["ms"] / best["ms"])
            chosen = ", ".join((row["chosen"] or {}).values())
            text = f"{found[-1]:.3f} ({chosen or 'choice not recorded'}; best: {best['variant']})"
            ratios.setdefault(tuple(layer), {})[factor] = text
    if not found:
        show_empty("padded-dispatch bench --contenders auto-graphed packed-graphed batched-graphed")
        return None
    near = sum(ratio <= 1.03 for ratio in found)
    print(f"within 3 % of the best explicit choice: {near} of {len(found)}; most {max(found):.3f}")
    print(conditions(rows))
    factors = sorted({factor for of_factor in ratios.values() for factor in of_factor})
    return table(
        ["model", "EP", "tokens", *(f"factor {factor:g}" for factor in factors)],
        [[*layer, *(of.get(factor, "") for factor in factors)] for layer, of in ratios.items()],
    )


def _layer(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["ep"], row["tokens"]


# Whole training steps


def routing(row: dict[str, Any]) -> str:
    """Return `balanced` or `untrained`."""
    return "balanced" if row["flags"]["recipe"]["balancing"] == "forced" else "untrained"


def num_layers(row: dict[str, Any]) -> int:
    """Return the number of layers of a training job."""
    return row["flags"]["recipe"]["num_layers"]


def _passes(row: dict[str, Any]) -> int:
    recipe, size = row["flags"]["recipe"], row["flags"]["layout"]
    replicas = size["workers"] // (size["tp"] * size["pp"])
    return recipe["global_batch"] // (recipe["micro_batch"] * replicas)


def _home_by_default(row: dict[str, Any]) -> bool:
    padded = row["flags"]["dispatch"]["padded"]
    return {padded.get(name, "auto") for name in ("rows_home", "gradients_home")} == {"auto"}


def layout(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what rows in one panel share."""
    return routing(row), row["model"], row["tokens"], row["ep"]


def way(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what repeated measurements share."""
    return *layout(row), num_layers(row), row["capacity_factor"], row["graph"], kind(row)


def medians(rows: Rows) -> Rows:
    """Merge repeats of one command into one row: medians, and the single steps of all."""
    repeats: dict[Any, Rows] = {}
    for row in rows:
        repeats.setdefault((way(row), row["about"]["command"]), []).append(row)
    merged = []
    for same in repeats.values():
        middle: dict[str, Any] = {
            name: statistics.median(row[name] for row in same)
            for name in ("ms", "host_ms", "allocated_gib")
        }
        middle["samples_ms"] = [ms for row in same for ms in row["samples_ms"]]
        middle["all_ms"] = [row["ms"] for row in same]
        merged.append(same[-1] | middle)
    return merged


class Steps:
    """Rows of `full_layer_graph.json`.

    `timed`: steps of one pass that measure time, repeats merged; those with `--shared-overlap` and
    with gradients that travel after products are left out.
    `usual`: those with the most frequent factor (or none: stock dropless) and number of layers.
    `layouts`: of `usual`; `main`: the layouts on most ranks, with balanced routing. `newest`: the
    last row of `usual` by (layout, graph, kind).
    """

    def __init__(self) -> None:
        self.rows = load("full_layer_graph")
        self.timed = medians(
            [
                row
                for row in self.rows
                if not row["flags"]["recipe"]["deterministic"]
                and not row["flags"]["dispatch"].get("shared_overlap")
                and _home_by_default(row)
                and _passes(row) == 1
            ]
        )
        self.factor = statistics.mode(
            row["capacity_factor"] for row in self.timed if row["capacity_factor"] is not None
        )
        self.num_layers = statistics.mode(map(num_layers, self.timed))
        self.usual = [
            row
            for row in self.timed
            if (row["capacity_factor"] == self.factor or row["contender"] == "stock-dropless")
            and num_layers(row) == self.num_layers
        ]
        self.layouts = sorted(
            {layout(row) for row in self.usual}, key=lambda s: (s[0], -s[3], -ord(s[1][0]), s)
        )
        first = self.layouts[0]
        self.main = [s for s in self.layouts if (s[0], s[3]) == (first[0], first[3])]
        self.newest: dict[tuple[Any, ...], dict[str, Any]] = {}
        for graph, which in itertools.product(GRAPHS, KINDS):
            for row in where(self.usual, graph=graph):
                if kind(row) == which:
                    self.newest[*layout(row), graph, which] = row

    def of_main(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        """Return `newest` on the `main` layouts."""
        return {key: row for key, row in self.newest.items() if key[:4] in self.main}


PAIRS = (
    (("ours module", "none"), ("stock-drop-pad", "none")),
    (("ours module", "none"), ("stock-dropless", "none")),
    (("ours packed", "none"), ("stock-drop-pad", "none")),
    (("ours module", "layer"), ("stock-drop-pad", "layer")),
    (("ours packed", "layer"), ("stock-drop-pad", "layer")),
    (("ours packed", "layer"), ("stock-dropless", "partial")),
    (("ours direct", "layer"), ("stock-drop-pad", "layer")),
    (("ours direct", "layer"), ("stock-dropless", "partial")),
    (("ours direct", "layer"), ("ours packed", "layer")),
    (("ours packed", "layer"), ("ours module", "layer")),
    (("ours batched", "layer"), ("ours module", "layer")),
    (("ours module", "layer"), ("ours module", "partial")),
    (("ours packed", "layer"), ("ours packed", "partial")),
    (("ours module", "full-iteration"), ("ours module", "layer")),
    (("ours packed", "full-iteration"), ("ours packed", "layer")),
)


def compare(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Return `faster` or `slower` where single samples do not overlap, else that they do."""
    if max(one["samples_ms"]) < min(other["samples_ms"]):
        return "faster"
    if min(one["samples_ms"]) > max(other["samples_ms"]):
        return "slower"
    return "samples overlap"


def judged(steps: Steps, layout_: tuple[Any, ...], pair: Any) -> tuple[Any, Any] | None:
    """Return the last two rows of a pair of ways, of one command where one holds both."""
    routed, model, tokens, ep = layout_
    rows = [
        r for r in where(steps.usual, model=model, tokens=tokens, ep=ep) if routing(r) == routed
    ]
    ways = [[row for row in rows if (kind(row), row["graph"]) == way] for way in pair]
    choices = list(itertools.product(*ways))
    same = [(a, b) for a, b in choices if a["about"] == b["about"]]
    return (same or choices)[-1] if choices else None


def summary(steps: Steps) -> Markdown:
    """Return ratios of whole steps with balanced routing; `~` where single steps overlap."""
    pairs = [pair for pair in PAIRS if pair[0][0] in ("ours packed", "ours direct")]
    pairs = [pair for pair in pairs if pair[0][1] == "layer" and pair[1][0].startswith("stock")]
    lines = []
    for shape in (shape for shape in steps.layouts if shape[0] == "balanced"):
        cells = []
        for pair in pairs:
            rows = judged(steps, shape, pair)
            overlap = rows is not None and compare(*rows) == "samples overlap"
            text = "" if rows is None else f"{rows[0]['ms'] / rows[1]['ms']:.2f}"
            cells.append(f"~ {text}" if overlap else text)
        lines.append([shape[1], f"{shape[2]:,}", shape[3], *cells])
    heads = [f"{NAME[a].removeprefix('ours, ')} / {NAME[b]}" for (a, _), (b, _) in pairs]
    return table(["model", "tokens", "EP", *heads], lines)


def verdicts(steps: Steps) -> Markdown:
    """Return a table of all `PAIRS` on all layouts."""
    lines = []
    for shape, pair in itertools.product(steps.layouts, PAIRS):
        rows = judged(steps, shape, pair)
        if rows is not None:
            one, other = rows
            commits = dict.fromkeys(row["about"]["commit"] for row in rows)
            same = one["about"] == other["about"]
            commands = "one" if same else f"two, commit {' and '.join(commits)}"
            names = [f"{NAME[which]}, {graph}" for which, graph in pair]
            ratio = f"{one['ms'] / other['ms']:.2f}"
            lines.append([*shape, *names, ratio, compare(one, other), commands])
    head = ["routing", "model", "tokens", "EP", "this", "beside", "ratio", "single steps"]
    return table([*head, "commands"], lines)


def draw_steps(steps: Steps) -> None:
    """Draw step times by way and graph, a panel for each of the main layouts."""
    here = steps.of_main()
    counts = [sum(key[:4] == shape for key in here) for shape in steps.main]
    figure, panels = plt.subplots(
        len(counts),
        figsize=(8.6, 1.2 + 0.25 * sum(counts) + 0.5 * len(counts)),
        height_ratios=[count + 1 for count in counts],
        sharex=True,
        squeeze=False,
    )
    for axes, shape in zip(panels[:, 0], steps.main, strict=True):
        ways = [(key[4:], row) for key, row in here.items() if key[:4] == shape]
        for i, ((_, which), row) in enumerate(ways):
            axes.barh(i, row["ms"], 0.8, color=COLOUR[which], alpha=0.5)
            axes.barh(i, row["host_ms"], 0.8, color=COLOUR[which])
            span = [min(of(row["samples_ms"]), MOST_MS) for of in (min, max)]
            axes.plot(span, [i, i], color=figures.INK, linewidth=1.5)
            axes.text(MOST_MS + 3, i, f"{row['ms']:.0f}", va="center", weight="bold", fontsize=9)
        labels = [f"{GRAPHS[graph]}: {NAME[which]}" for (graph, which), _ in ways]
        axes.set_yticks(range(len(ways)), labels, fontsize=9)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set(title=f"{shape[1]}, {shape[2]:,} tokens per rank", xlim=(0, MOST_MS + 12))
    panels[-1, 0].set_xlabel("ms per step (dark: host)")
    figures.show(
        figure,
        f"Balanced routing. {steps.num_layers} layers, EP {steps.main[0][3]}, bf16, factor "
        f"{steps.factor:g} (dropless: none).\nWhole step with Megatron's distributed Adam; median "
        f"of the second half of 24 steps. Lines end at {MOST_MS} ms.\n"
        + conditions(list(here.values())),
    )


def all_steps(steps: Steps) -> Markdown:
    """Return a table of all timed steps."""
    head = ["routing", "model", "layers", "tokens", "EP", "factor", "way", "graph", "ms"]
    head += ["single steps", "host ms", "dropped", "fill", "GiB", "commit"]

    def order(row: dict[str, Any]) -> tuple[Any, ...]:
        sizes = routing(row), -ord(row["model"][0]), num_layers(row), -row["ep"]
        return *sizes, row["tokens"], row["ms"]

    return table(
        head,
        [
            [
                routing(row),
                row["model"],
                num_layers(row),
                row["tokens"],
                row["ep"],
                "none" if row["capacity_factor"] is None else row["capacity_factor"],
                NAME[kind(row)],
                row["graph"],
                ", ".join(f"{ms:.1f}" for ms in row["all_ms"]),
                f"{min(row['samples_ms']):.0f} to {max(row['samples_ms']):.0f}",
                f"{row['host_ms']:.1f}",
                "not counted" if row["dropped"] is None else f"{row['dropped']:.0%}",
                "" if row["fill"] is None else f"{row['fill']:.0%}",
                f"{row['allocated_gib']:.1f}" if "allocated_before_gib" in row else "",
                row["about"]["commit"],
            ]
            for row in sorted(steps.timed, key=order)
        ],
    )


def repeated_steps(steps: Steps) -> Markdown:
    """Return a table of the ways that several commands measured, balanced routing."""
    again: dict[tuple[Any, ...], Rows] = {}
    for row in steps.timed:
        again.setdefault(way(row), []).append(row)
    lines = []
    for (routed, model, tokens, ep, _, _, graph, which), rows in again.items():
        times = [ms for row in rows for ms in row["all_ms"]]
        if len(rows) > 1 and routed == "balanced":
            by_commit = "; ".join(
                f"{row['about']['commit']}: {', '.join(f'{ms:.1f}' for ms in row['all_ms'])}"
                for row in rows
            )
            named = [model, f"{tokens:,}", ep, NAME[which], GRAPHS[graph], by_commit]
            lines.append((max(times) / min(times) - 1, named))
    lines.sort(key=lambda line: line[0])
    head = ["model", "tokens", "EP", "way", "graph", "ms, by commit", "largest over smallest"]
    return table(head, [[*named, f"{spread:.0%}"] for spread, named in lines])


def draw_host(steps: Steps) -> None:
    """Draw step time against host time, a point for each way."""
    here = steps.of_main()
    fills = dict(zip(steps.main, ("none", "full", "left"), strict=False))
    figure, axes = plt.subplots(figsize=(6.4, 4.2))
    for (*shape, graph, which), row in here.items():
        axes.plot(
            row["host_ms"],
            row["ms"],
            MARKS[graph],
            color=COLOUR[which],
            markerfacecoloralt="white",
            markersize=11 if graph == "full-iteration" else 7,
            fillstyle=fills[tuple(shape)],
        )
    top = max(row["ms"] for row in here.values()) * 1.08
    axes.plot([0, top], [0, top], color=figures.GREY)
    axes.text(top * 0.72, top * 0.67, "step = host", color="#5b6b78", rotation=36)
    axes.set(xlim=(-2, top), ylim=(0, top), xlabel="host, ms per step (passes)", ylabel="step, ms")
    for graph, mark in MARKS.items():
        axes.plot([], [], mark, color=figures.INK, label=GRAPHS[graph])
    for which in dict.fromkeys(key[5] for key in here):
        axes.plot([], [], "s", color=COLOUR[which], label=NAME[which])
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    names = {"none": "hollow", "full": "filled", "left": "half"}
    optimizer = [row["phases_ms"]["optimizer"] for row in here.values()]
    figures.show(
        figure,
        "; ".join(f"{names[fills[s]]}: {s[1]}, {s[2]:,} tokens per rank" for s in steps.main)
        + ". The rows of the figure above.\n"
        f"Optimizer: {min(optimizer):.0f} to {max(optimizer):.0f} ms per step.",
    )


def draw_steps_over_factor(steps: Steps) -> None:
    """Draw step times against the factor, for ways measured at several; stock dropless across."""
    curves: dict[Any, dict[Any, dict[Any, dict[str, Any]]]] = {}
    for row in steps.timed:
        axis = row["model"], num_layers(row), row["tokens"], row["ep"], routing(row)
        points = curves.setdefault(axis, {}).setdefault((kind(row), row["graph"]), {})
        points[row["capacity_factor"]] = row  # the last one
    for axis, ways in list(curves.items()):
        several = {key: points for key, points in ways.items() if len(points) > 1}
        across = {key: points for key, points in ways.items() if None in points}
        curves[axis] = across | several if several else {}
    curves = {axis: ways for axis, ways in curves.items() if ways}
    figure, panels = plt.subplots(len(curves), figsize=(8, 3.6 * len(curves)), squeeze=False)
    seen = []
    for axes, (axis, ways) in zip(panels[:, 0], curves.items(), strict=True):
        for (which, graph), points in ways.items():
            look: Any = {"color": COLOUR[which], "linestyle": DASHES[graph]}
            look["label"] = f"{NAME[which]}, {GRAPHS[graph]}"
            if None in points:
                axes.axhline(points[None]["ms"], **look)
            else:
                factors = sorted(points)
                axes.plot(factors, [points[f]["ms"] for f in factors], marker="o", **look)
                place, up = ("top", -3) if which == "ours direct" else ("bottom", 2)
                for f in factors:
                    ms = points[f]["ms"]
                    axes.text(f, ms + up, f"{ms:.1f}", ha="center", va=place, fontsize=9)
            seen += points.values()
        model, depth, tokens, ep, routed = axis
        axes.set_title(f"{model}, {depth} layers, EP {ep}, {tokens:,} tokens, {routed}")
        axes.set(xlabel="capacity factor", ylabel="ms per step", ylim=(0, None))
        axes.margins(x=0.1)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    figures.show(figure, conditions(seen))


# Losses


def gaps(row: dict[str, Any], base: dict[str, Any]) -> list[float]:
    """Return the differences of two runs' losses, step by step."""
    return [abs(a - b) for a, b in zip(row["loss"], base["loss"], strict=True)]


def equal_bits(steps: Steps) -> Markdown:
    """Return a table of losses with graphs beside those without, same way and command."""
    exact = [row for row in steps.rows if row["flags"]["recipe"]["deterministic"]]
    lines = []
    for row in exact:
        alike = {"capacity_factor": row["capacity_factor"], "about": row["about"]}
        for base in where(exact, graph="none", **alike):
            if kind(base) == kind(row) and base is not row:
                found = gaps(row, base)
                lines.append(
                    [
                        NAME[kind(row)],
                        row["graph"],
                        "none" if row["capacity_factor"] is None else row["capacity_factor"],
                        row["ep"],
                        row["about"]["versions"]["megatron-core"],
                        len(found),
                        f"{max(found):.2g}" if any(found) else "0: equal bits",
                    ]
                )
    head = ["way", "graph", "factor", "EP", "Megatron-Core", "steps", "largest difference"]
    return table(head, lines)


def beside_dropless(steps: Steps) -> Markdown:
    """Return a table of our losses without dropping beside stock dropless."""
    exact = [row for row in steps.rows if row["flags"]["recipe"]["deterministic"]]
    lines = []
    for base in where(exact, contender="stock-dropless", graph="none"):
        for row in where(exact, contender="ours", capacity_factor=None, about=base["about"]):
            found = gaps(row, base)
            warmup = row["flags"]["recipe"]["lr_warmup"]
            grown = ", ".join(f"{found[i]:.0e}" for i in (0, 4, 9, 14, 19))
            named = [NAME[kind(row)], row["graph"], row["ep"], warmup]
            lines.append([*named, f"{max(found[:20]):.1e}", grown])
    head = ["way", "graph", "EP", "warm-up", "largest of 20 steps", "steps 1, 5, 10, 15, 20"]
    return table(head, lines)


def print_direct_training() -> None:
    """Print how losses with direct stores differ from those with the all-to-all."""
    trained = load("direct_training")
    direct = {row["flags"]["dispatch"]["padded"]["exchange"] == "direct": row for row in trained}
    ours, other = direct[True], direct[False]
    differ = sum(a != b for a, b in zip(other["loss"], ours["loss"], strict=True))
    print(f"{ours['model']} preset, EP {ours['ep']}, {len(ours['loss']):,} steps: ", end="")
    print(f"losses differ in {differ} of them; last loss {ours['loss'][-1]:.4f}")
    print(f"dropped in the last report: {other['dropped']:.3%} and {ours['dropped']:.3%}")


# Single layers


def case(row: dict[str, Any]) -> str:
    """Return model, EP, tokens and skew, as text."""
    skew = "" if row["skew"] == "uniform" else f", {row['skew']}"
    return f"{row['model']}, EP {row['ep']}, {row['tokens']:,} tokens{skew}"


class Layers:
    """Graphed rows of `layer_bench.json` without gradients added, where stock ran at several EP.

    `measured`: all of them; `newest`: the last of each case; `balanced`: of `newest`, uniform
    routing and the most frequent number of tokens; `factor`: their most frequent factor.
    """

    def __init__(self) -> None:
        rows = [
            row
            for row in load("layer_bench")
            if row["ms"] is not None
            and row["graph"] == "layer"
            and row.get("main_grad", "none") == "none"
        ]
        stocked = {(row["model"], row["ep"]) for row in where(rows, contender="stock-drop-pad")}
        eps = Counter(model for model, _ in stocked)
        self.measured = sorted(
            (row for row in rows if eps[row["model"]] > 1),
            key=lambda row: (row["tokens"], row["ep"], -ord(row["model"][0])),
        )
        last = {(case(row), row["capacity_factor"], kind(row)): row for row in self.measured}
        self.newest = list(last.values())
        self.tokens = statistics.mode(row["tokens"] for row in self.newest)
        self.balanced = where(self.newest, tokens=self.tokens, skew="uniform")
        self.factor = statistics.mode(row["capacity_factor"] for row in self.balanced)


def _line(axes: Any, rows: Rows, x: str, **look: Any) -> None:
    """Draw medians, with bars that span the samples."""
    low = [row["ms"] - min(row["samples_ms"]) for row in rows]
    high = [max(row["samples_ms"]) - row["ms"] for row in rows]
    look = {"marker": "o", "markersize": 4} | look
    axes.errorbar([r[x] for r in rows], [r["ms"] for r in rows], [low, high], **look)


def _roofline(axes: Any, rows: Rows, x: str) -> None:
    of_x = {row[x]: row["floor_ms"] for row in rows}
    axes.plot(sorted(of_x), [of_x[value] for value in sorted(of_x)], color=ROOFLINE, linewidth=3)


def _show_layers(figure: Any, axes: Any, rows: Rows, note: str = "") -> None:
    """Show a figure with the legend of `rows` above it and their conditions below it."""
    for which in KINDS:
        if any(kind(row) == which for row in rows):
            axes.plot([], [], "o-", color=COLOUR[which], label=NAME[which])
    axes.plot([], [], color=ROOFLINE, linewidth=3, label="roofline: real rows alone, full rate")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    figures.show(
        figure,
        f"{note}Forward and backward, bf16, in a CUDA graph. Medians; bars span all samples, each "
        f"a mean of {rows[0]['iterations']} passes.\n" + conditions(rows),
    )


def draw_over_factor(rows: Rows, columns: int = 2, height: float = 2.4) -> None:
    """Draw ms against the capacity factor, a panel for each layer and layout."""
    cases = list(dict.fromkeys(case(row) for row in rows))
    columns = min(columns, len(cases))
    lines = -(-len(cases) // columns)
    size = max(9.2, 3.6 * columns), height * lines
    figure, panels = plt.subplots(
        lines, columns, figsize=size, squeeze=False, sharey="col", sharex=True
    )
    for axes, name in zip(panels.flat, cases, strict=False):
        here = [row for row in rows if case(row) == name]
        for which in KINDS:
            same = [row for row in here if kind(row) == which]
            same.sort(key=lambda row: row["capacity_factor"])
            if same:
                _line(axes, same, "capacity_factor", color=COLOUR[which])
        _roofline(axes, here, "capacity_factor")
        axes.set_title(name, fontsize=10)
        axes.margins(x=0.1)
    for axes in panels[0]:
        axes.set_ylim(bottom=0)  # of the whole column
    for axes in panels[:, 0]:
        axes.set_ylabel("ms")
    for axes in panels[-1]:
        axes.set_xlabel("capacity factor")
    for axes in panels.flat[len(cases) :]:
        axes.set_visible(False)
    _show_layers(figure, panels[0, 0], rows)


def draw_few_tokens(layers: Layers) -> None:
    """Draw ms against the factor at the fewest tokens, on one rank and on the most."""
    others = [r for r in where(layers.newest, skew="uniform") if r["tokens"] < layers.tokens]
    with_ours = {case(row) for row in others if row["contender"] == "ours"}
    others = [row for row in others if case(row) in with_ours]
    fewest, most = min(row["tokens"] for row in others), max(row["ep"] for row in others)
    rows = [row for row in where(others, tokens=fewest) if row["ep"] in (1, most)]
    draw_over_factor(rows, columns=3, height=3.0)


def beside_stock(layers: Layers) -> Markdown:
    """Print memory relative to stock; return a table of times relative to stock and roofline."""
    beside: dict[tuple[str, str], dict[float, Any]] = {}
    for row in layers.measured:
        names = ("model", "ep", "tokens", "skew", "capacity_factor", "about")
        stock = where(layers.measured, contender="stock-drop-pad", **{k: row[k] for k in names})
        if row["contender"] == "ours" and stock:
            of_factor = beside.setdefault((case(row), NAME[kind(row)]), {})
            of_factor[row["capacity_factor"]] = row, stock[0]
    memory: dict[str, list[float]] = {}
    for (_, name), of_factor in beside.items():
        for row, stock in of_factor.values():
            if row["variant"] != "direct":  # these rows lack the buffers of direct stores
                share = row["allocated_gib"] / stock["allocated_gib"]
                memory.setdefault(name, []).append(share)
    for name, shares in memory.items():
        print(f"{name}: allocate {min(shares):.2f} to {max(shares):.2f} of what stock does")
    factors = sorted({factor for of_factor in beside.values() for factor in of_factor})
    lines = []
    for key, of_factor in beside.items():
        ratios = []
        for factor in factors:
            text = ""
            if factor in of_factor:
                row, stock = of_factor[factor]
                note = " (overlap)" if compare(row, stock) == "samples overlap" else ""
                text = f"{row['ms'] / stock['ms']:.2f}{note}"
            ratios.append(text)
        above = ""
        if layers.factor in of_factor:
            row, _ = of_factor[layers.factor]
            above = f"{row['ms'] / row['floor_ms']:.1f}"
        lines.append([*key, *ratios, above])
    heads = [f"factor {factor:g}" for factor in factors]
    return table(["layer", "way", *heads, f"/ roofline, factor {layers.factor}"], lines)


def draw_over_tokens(layers: Layers) -> None:
    """Draw ms against tokens per rank, both logarithmic, a panel for each model and EP."""
    names = ("model", "ep", "capacity_factor", "variant")
    several: dict[tuple[Any, ...], set[int]] = {}
    rows = where(layers.newest, skew="uniform", capacity_factor=layers.factor)
    for row in rows:
        several.setdefault(tuple(row[name] for name in names), set()).add(row["tokens"])
    rows = [row for row in rows if len(several[tuple(row[name] for name in names)]) > 1]
    models = list(dict.fromkeys(row["model"] for row in rows))
    eps = sorted({row["ep"] for row in rows})
    size = 3.2 * max(2, len(eps)), 2.6 * len(models)
    figure, panels = plt.subplots(
        len(models), len(eps), figsize=size, squeeze=False, sharex=True, sharey="row"
    )
    for (i, model), (j, ep) in itertools.product(enumerate(models), enumerate(eps)):
        axes, here = panels[i, j], where(rows, model=model, ep=ep)
        for which in KINDS:
            same = sorted((r for r in here if kind(r) == which), key=lambda row: row["tokens"])
            if same:
                _line(axes, same, "tokens", color=COLOUR[which])
        if here:
            _roofline(axes, here, "tokens")
            axes.set_title(f"{model}, EP {ep}", fontsize=10)
    numbers = sorted({row["tokens"] for row in rows})
    for axes in panels.flat:
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(numbers, [f"{t:,}" for t in numbers])
        axes.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
        axes.yaxis.set_minor_formatter(lambda ms, _: f"{ms:g}" if ms in (2, 3, 5, 20) else "")
        axes.xaxis.set_minor_locator(plt.NullLocator())
    for axes in panels[:, 0]:
        axes.set_ylabel("ms")
    for axes in panels[-1]:
        axes.set_xlabel("tokens per rank")
    _show_layers(figure, panels[0, 0], rows, f"Capacity factor {layers.factor:g}. ")
    few = where(layers.measured, ep=1, tokens=min(numbers), model=models[0])
    for row in where(few, contender="stock-drop-pad", capacity_factor=layers.factor):
        print(
            f"{NAME[kind(row)]}, {case(row)}, commit {row['about']['commit']}: {row['ms']:.2f} ms, "
            f"of which the host takes {row['host_ms']:.2f}"
        )


def draw_uneven(layers: Layers) -> None:
    """Draw layers with uneven routing, on the most ranks that were measured so."""
    uneven = [row for row in layers.newest if row["skew"] != "uniform"]
    uneven = where(uneven, ep=max(row["ep"] for row in uneven))
    ours = {row["model"] for row in where(uneven, contender="ours")}
    uneven = [row for row in uneven if row["model"] in ours]
    names = ("model", "ep", "tokens", "capacity_factor")
    spots = list(dict.fromkeys(tuple(row[name] for name in names) for row in uneven))
    kinds = [which for which in KINDS if any(kind(row) == which for row in uneven)]
    figure, panels = plt.subplots(len(spots), figsize=(8, 2.5 * len(spots)), squeeze=False)
    drawn = []
    for axes, spot in zip(panels[:, 0], spots, strict=True):
        here = where(layers.newest, **dict(zip(names, spot, strict=True)))
        skews = list(dict.fromkeys(["uniform", *(row["skew"] for row in here)]))
        here = [row for row in here if kind(row) in kinds]
        for row in here:
            shift = (kinds.index(kind(row)) + 0.5) / len(kinds) - 0.5
            place = skews.index(row["skew"]) + 0.8 * shift
            axes.bar(place, row["ms"], 0.74 / len(kinds), color=COLOUR[kind(row)])
            axes.text(place, row["ms"], f"{row['ms']:.2f}", ha="center", va="bottom", fontsize=8)
        of_skew = {row["skew"]: row for row in here}
        for i, skew in enumerate(skews):
            if skew in of_skew:
                least = of_skew[skew]["floor_ms"]
                axes.plot([i - 0.42, i + 0.42], [least, least], color=ROOFLINE, linewidth=3)
        labels = [f"{s}\n{of_skew[s]['fill']:.0%} full" if s in of_skew else s for s in skews]
        axes.set_xticks(range(len(skews)), labels)
        axes.grid(axis="x", visible=False)
        model, ep, tokens, factor = spot
        axes.set(title=f"{model}, EP {ep}, {tokens:,} tokens, factor {factor:g}", ylabel="ms")
        axes.margins(y=0.12)
        drawn += here
    _show_layers(figure, panels[0, 0], drawn)


# Kernels and exchanges


def part_rows() -> dict[tuple[str, str, float], dict[str, Any]]:
    """Return the rows of the last `padded-dispatch parts`, by (model, part, fill)."""
    rows = [row for row in load("capacity_control") if "part" in row]
    rows = [row for row in rows if row["about"] == rows[-1]["about"]]
    return {(row["model"], row["part"], row["fill"]): row for row in rows}


def kernels() -> Markdown:
    """Return a table of the dispatcher's kernels and of experts at several fills."""
    parts = part_rows()
    models = list(dict.fromkeys(model for model, *_ in parts))
    copy = {model: parts[model, "copy", 1.0]["gb_per_s"] for model in models}
    lines: dict[str, dict[str, str]] = {}
    for (model, part, fill), row in parts.items():
        text = f"{row['us']:.0f} us"
        if part.endswith(" experts"):
            experts = lines.setdefault(f"{part}, {fill:.0%} full", {})
            experts[model] = f"{text}, {row['tflops']:.0f} TFLOP/s"
        elif part == "copy":
            lines.setdefault(part, {})[model] = f"{text}, {copy[model]:,.0f} GB/s"
        elif row["gb_per_s"]:
            share = row["gb_per_s"] / copy[model]
            lines.setdefault(part, {})[model] = f"{text}, {share:.0%} of a copy's rate"
        elif part in ("select and plan", "meta", "side"):  # "side": what older rows call "meta"
            lines.setdefault(part.replace("side", "meta"), {})[model] = text
    row = next(iter(parts.values()))
    print(f"{row['tokens']:,} tokens, EP {row['ep']}, capacity factor {row['capacity_factor']}")
    print(conditions(list(parts.values())))
    cells = [[part, *(of.get(model, "") for model in models)] for part, of in lines.items()]
    return table(["part", *models], cells)


def draw_control(layers: Layers) -> None:
    """Draw the time of each policy and remedy and of telemetry; print its share of a layer."""
    rows = [r for r in part_rows().values() if r["part"].startswith(("select ", "telemetry"))]
    rows = [row for row in rows if row["part"] != "select and plan"]
    names = list(dict.fromkeys(row["part"] for row in rows))
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plt.subplots(figsize=(8, 3.4))
    for i, model in enumerate(models):
        colour = figures.COLOURS[i]
        for row in where(rows, model=model):
            place = names.index(row["part"]) + 0.38 * (i - (len(models) - 1) / 2)
            axes.barh(place, row["us"], 0.36, color=colour)
            axes.text(row["us"], place, f" {row['us']:.0f}", va="center", fontsize=8)
        axes.barh(0, 0, color=colour, label=model)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel="us, one call")
    axes.legend()
    figures.show(
        figure,
        f"Medians. {rows[0]['tokens']:,} tokens on a rank, capacity factor "
        f"{rows[0]['capacity_factor']}.\n" + conditions(rows),
    )
    fastest = min(row["ms"] for row in where(layers.balanced, capacity_factor=layers.factor))
    print(f"of the fastest layer of section 4 at this factor, {fastest:.2f} ms:")
    for name in names:
        us = max(row["us"] for row in where(rows, part=name))
        print(f"  {name}: at most {us:.0f} us, {us / fastest / 1e3:.1%}")


def exchanges() -> Markdown:
    """Print the checks of direct stores; return a table of direct stores beside the all-to-all."""
    rows = load("direct")
    checks = [row for row in rows if "check" in row]
    equal = [row for row in checks if "equal" in row["check"]]
    ended = [row for row in checks if "all others end" in row["check"]]
    counted = [row for row in checks if "rows stored" in row["check"]]
    assert len(equal) + len(ended) + len(counted) == len(checks)
    print(f"{sum(row['passed'] for row in equal)} of {len(equal)} checks passed: equal bits")
    print(f"{sum(row['passed'] for row in counted)} of {len(counted)} passed: rows over the links")
    passed, slowest = sum(row["passed"] for row in ended), max(r["seconds_to_end"] for r in ended)
    print(
        f"{passed} of {len(ended)} passed: a rank dies or stalls in the middle of replays, and all "
        f"others end within {slowest:.0f} s"
    )
    layers = load("layer_bench")
    serial = where(layers, variant="direct serial")
    for after in serial:
        if after["about"]["commit"] != serial[-1]["about"]["commit"]:
            continue
        same = ("about", "model", "tokens", "main_grad", "capacity_factor")
        (row,) = where(layers, variant="direct", **{name: after[name] for name in same})
        hidden = ""
        if row["tokens"] == Layers().tokens and row["kernels_ms"]:
            share = hidden_share(row["kernels_ms"], after["kernels_ms"])
            hidden = f", which hides {share:.0%} of the exchange"
        print(
            f"{row['model']}, {row['tokens']:,} tokens, factor {row['capacity_factor']}, main_grad "
            f"{row['main_grad']}: {after['ms']:.2f} ms a layer whose rows go home after the "
            f"products, {row['ms']:.2f} inside of them{hidden}"
        )
    lines = []
    measured = where(rows, measure="exchange")
    for row in sorted(measured, key=lambda row: (row["ranks"], row["capacity_factor"])):
        us, rate = row["us"], row["gb_per_s_over_links"]
        both, how = "dispatch and combine", (row["ranks"], row["about"]["commit"])
        lines.append(
            [
                *(*how, row.get("model", "qwen3-30b-a3b"), row.get("capacity_pool", "expert")),
                *(row["capacity_factor"], row.get("link_rows", "each"), f"{us[both]:.0f}"),
                _either(us, f"{both}, alltoall", f"{both}, nccl"),
                f"{rate['push']:.0f}",
                _either(rate, "alltoall", "nccl"),
            ]
        )
    head = ["ranks", "commit", "model", "pool", "factor", "rows over a link", "direct, us"]
    return table([*head, "all-to-all, us", "stores, GB/s", "NCCL, GB/s"], lines)


def _either(values: dict[str, float], name: str, older: str) -> str:
    """Return the value of `name`, which older rows call `older`; "" if it was not measured."""
    value = values.get(name, values.get(older))
    return "" if value is None else f"{value:.0f}"


def beside_peer() -> Markdown:
    """Return a table of our exchange beside torchtitan's MinimalAsyncEP."""
    peers = where(load("direct"), measure="exchange beside a peer", ep=4)
    lines = []
    for row in peers:
        (peer,) = where(peers, contender="torchtitan-minimal-async-ep", model=row["model"])
        ours = row["contender"] == "ours"
        lines.append(
            [
                row["model"],
                "ours, direct stores" if ours else "MinimalAsyncEP",
                (row["capacity_factor"] or "drops nothing") if ours else "drops nothing",
                f"{row['sent'] / row['asked_for']:.1%}",
                *(
                    f"{row[us]:,.0f} ({row[us] / peer[us]:.2f})"
                    for us in ("forward_us", "forward_backward_us")
                ),
            ]
        )
    print(f"{peers[0]['tokens']:,} tokens per rank, EP {peers[0]['ep']}, bf16, uniform routing")
    print(conditions(peers))
    head = ["rows of", "exchange", "factor", "rows sent", "forward, us", "forward and backward, us"]
    return table(head, lines)


# Checks


def parity_rows() -> Rows:
    """Return the rows of parity checks, each with its precision."""
    rows = [row for row in load("foundation") if "errors" in row]
    return [
        row | {"precision": "fp8" if row["name"].startswith("fp8") else row["dtype"]}
        for row in rows
    ]


def draw_parity() -> None:
    """Draw our errors in units of the allowed error, a dot for each tensor."""
    checks = parity_rows()
    figure, axes = plt.subplots(figsize=(8, 3.4))
    groups: dict[tuple[str, str], list[float]] = {}
    for row in checks:
        group = row["about"]["versions"]["megatron-core"], row["precision"]
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
    figures.show(
        figure,
        f"{passed} of {len(checks)} cases passed. Vertical place within a row has no meaning.\n"
        + conditions(checks),
    )


def near_limit() -> Markdown:
    """Return a table of the tensors above 0.9 of the allowed error."""
    lines = []
    for row in parity_rows():
        for tensor, error in row["errors"].items():
            if error["allowed"] and (share := error["ours"] / error["allowed"]) > 0.9:
                version = row["about"]["versions"]["megatron-core"]
                lines.append([version, row["name"], row["dtype"], tensor, f"{share:.4f}"])
    return table(["megatron-core", "case", "dtype", "tensor", "our error / allowed"], lines)


def print_misses() -> None:
    """Print how many single draws break the rule, ours and with swapped roles."""
    for row in where(load("foundation"), check="single draws"):
        missed = [
            f"{tensor}: ours {found['ours']}, stock {found['stock']}"
            for tensor, found in row["misses"].items()
            if any(found.values())
        ]
        name = f"{row['name']}, {row['dtype']}, EP {row['ep']}"
        print(f"{name}: of {row['draws']} draws miss the rule")
        print(f"  {'; '.join(missed) or 'none'}; of {len(row['misses'])} tensors")


def draw_balancing() -> None:
    """Draw load and bias over the steps, ours beside stock drop-and-pad."""
    rows = [row for row in load("capacity_control") if "bias_range" in row]
    rows = [row for row in rows if row["about"] == rows[-1]["about"]]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.0))
    for row in rows:
        look = {"color": COLOUR[kind(row)], "label": NAME[kind(row)]}
        left.plot(range(1, len(row["overload"]) + 1), row["overload"], **look)
        right.plot(range(1, len(row["bias_range"]) + 1), row["bias_range"], **look)
    left.set(title="fullest expert, relative to balance", xlabel="step", ylim=(0, None))
    right.set(title="bias, largest minus smallest", xlabel="step")
    left.legend()
    row = rows[0]
    figures.show(
        figure,
        f"{row['model']} preset, EP {row['ep']}, {row['tokens']} tokens per rank, capacity factor "
        f"{row['capacity_factor']}, router started skewed.\n" + conditions(rows),
    )


def situations() -> Markdown:
    """Return a table that counts the situations of graphs, and which passed."""
    tally: dict[tuple[str, str, int], Rows] = {}
    for row in load("graph_situations"):
        version = row["about"]["versions"]["megatron-core"]
        tally.setdefault((version, row["check"], row["ranks"]), []).append(row)
    lines = [
        [*key, len({row["name"] for row in rows}), len(rows), sum(row["passed"] for row in rows)]
        for key, rows in sorted(tally.items())
    ]
    return table(["megatron-core", "check", "ranks", "situations", "rows", "passed"], lines)


def failed_situations() -> Markdown:
    """Return a table of the situations that did not pass, with their errors."""
    lines = []
    for row in where(load("graph_situations"), passed=False):
        about, failures = row["about"], row["failures"]
        text = " ".join(failures[:3]).replace("\n", " ") + " ..." * (len(failures) > 3)
        lines.append([about["versions"]["megatron-core"], row["name"], about["commit"], text])
    return table(["megatron-core", "situation", "commit", "error"], lines)


def traces() -> Markdown:
    """Print the checks of what-if; return a table of advice on held-out steps."""
    rows = load("traces")
    for row in (row for row in rows if row["check"] != "hold-out"):
        print(f"{row['check']}: {'passed' if row['passed'] else 'FAILED'}")
        dropped = f"{row['demand']:,} rows, {row['dropped']:.1%} of them dropped"
        print(f"{row['compared']:,} passes of a layer, {dropped}")
        print(conditions([row]))
    lines = [
        [
            f"`{row['tune']}`",
            row["num_steps"],
            f"{row['num_independent']:.0f}",
            f"{row['target']['steps_share']:.0%} of steps" if row["promised"] else "nothing",
            row["held_out"]["factor"],
            row["held_out"]["num_steps"],
            row["held_out"]["kept"],
        ]
        for row in where(rows, check="hold-out")
    ]
    head = ["tune", "seen", "independent", "promised", "factor", "steps held out"]
    return table([*head, "kept the target"], lines)
