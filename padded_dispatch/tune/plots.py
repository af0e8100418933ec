"""Draw the figures of a study: drop by factor, load by expert, need by step, and cost.

Colours are Okabe and Ito's, which people with any colour vision can separate; lines differ in style
or width as well. No other module of the package imports Matplotlib, and this one does only when it
draws: Matplotlib comes with the extra `tune`.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from padded_dispatch.tune.recommend import smallest_sufficient
from padded_dispatch.tune.study import Option, Study
from padded_dispatch.tune.target import percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLACK, GREY, BLUE, ORANGE, GREEN = "#222222", "#888888", "#0072B2", "#D55E00", "#009E73"

_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.labelcolor": BLACK,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "legend.frameon": False,
    "legend.fontsize": 10,
    "svg.fonttype": "none",  # Text stays text.
    "svg.hashsalt": "padded-dispatch",  # The same study gives the same file.
}
_LEAST = 1e-6  # The smallest share on an axis: one row in a million.


REMEDY = "run pip install 'matplotlib>=3.9,<4'"


def has_matplotlib() -> bool:
    """Return whether figures can be drawn."""
    return find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Raise if Matplotlib is not installed; call it before the work.

    Raises:
        ValueError: names the remedy.
    """
    if not has_matplotlib():
        raise ValueError(f"Matplotlib must be installed for --plots, got none; {REMEDY}")


def figures(study: Study) -> dict[str, "Figure"]:
    """Draw all figures, by name; `cost` only where the layer's sizes are known."""
    drawn = {"dropped": dropped, "load": load, "need": need}
    if len(study.pools) > 1:
        drawn["pools"] = pools
    if study.layer is not None:
        drawn["cost"] = costs
    with _style():
        return {name: draw(study) for name, draw in drawn.items()}


def svg(figure: "Figure") -> str:
    """Return the figure as an `<svg>` element without a prolog, for HTML."""
    text = io.StringIO()
    with _style():
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=nothing)
    return text.getvalue()[text.getvalue().index("<svg") :]


def dropped(study: Study) -> "Figure":
    """Draw the dropped share by factor: every layer, all layers, and a balanced router."""
    figure, axes = _figure(8.4, 4.2)
    factors = [option.factor for option in study.options]
    rows = study.replay.by_layer_and_step()
    shares = rows.dropped.sum(2) / np.maximum(rows.demand.sum(1), 1)  # [factors, layers]
    if shares.shape[1] > 1:
        for i, of_layer in enumerate(shares.T):
            label = "each layer" if i == 0 else None
            axes.plot(factors, _visible(of_layer), color=BLUE, alpha=0.35, lw=1, label=label)
    of_all = _visible([option.dropped for option in study.options])
    axes.plot(factors, of_all, color=BLACK, lw=2.2, marker="o", ms=3.5, label="all rows")
    if study.pool == "expert":
        balanced = _visible([option.balanced_drop for option in study.options])
        label = "perfectly balanced router"
        axes.plot(factors, balanced, color=GREEN, lw=1.8, ls="--", label=label)
    target, advice = study.question.target, study.training.overall
    if target.drop:
        axes.axhline(target.drop, color=GREY, lw=1, ls=":", label=f"target: {percent(target.drop)}")
    _mark(axes.axvline, advice.factor)
    axes.set_yscale("log")
    axes.set_ylim(_LEAST, 1)
    axes.set_xlim(left=factors[0])
    axes.yaxis.set_major_formatter(lambda share, _: f"{share * 100:g} %")
    axes.set_xlabel("capacity factor (slots per source and expert, relative to balance)")
    axes.set_ylabel("dropped rows")
    axes.set_title("What each factor drops")
    figure.legend(loc="outside right upper")
    return figure


def pools(study: Study) -> "Figure":
    """Draw the dropped share by factor for each kind of pool that was compared."""
    figure, axes = _figure(8.4, 4.2)
    for answer, color in zip(study.pools, (BLACK, BLUE, ORANGE), strict=False):
        found = answer.replay
        shares = _visible(found.dropped.sum(1) / max(1, int(found.demand.sum())))
        axes.plot(found.factors, shares, color=color, lw=2, marker="o", ms=3, label=answer.pool)
    axes.set_yscale("log")
    axes.set_ylim(_LEAST, 1)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share * 100:g} %")
    axes.set_xlabel("capacity factor (slots, and with the all-to-all bytes, relative to balance)")
    axes.set_ylabel("dropped rows")
    axes.set_title("What each kind of pool drops")
    figure.legend(loc="outside right upper")
    return figure


def load(study: Study) -> "Figure":
    """Draw a heat map of demand, layer by expert, relative to balance."""
    layers, layer_of_record = np.unique(study.replay.layers, return_inverse=True)
    demand = np.zeros((len(layers), study.num_experts))
    np.add.at(demand, layer_of_record, study.replay.demand_by_expert)
    demand /= np.maximum(demand.mean(1, keepdims=True), 1)
    figure, axes = _figure(8.4, min(7.0, 1.9 + 0.22 * len(layers)))
    image = axes.pcolormesh(
        np.arange(study.num_experts + 1),
        np.arange(len(layers) + 1),
        demand,
        cmap="cividis",
        vmin=0,
        rasterized=True,
    )
    axes.grid(visible=False)
    axes.invert_yaxis()
    every = max(1, len(layers) // 12)
    axes.set_yticks(np.arange(len(layers))[::every] + 0.5, [str(n) for n in layers[::every]])
    for rank in range(1, study.num_ranks):
        axes.axvline(rank * study.num_experts / study.num_ranks, color="white", lw=0.8)
    axes.set_xlabel("expert (white lines: ranks)" if study.num_ranks > 1 else "expert")
    axes.set_ylabel("MoE layer")
    axes.set_title("Demand by expert")
    figure.colorbar(image, ax=axes, label="rows, relative to balance", pad=0.02)
    return figure


def need(study: Study) -> "Figure":
    """Draw the factor that every step needs, and the recommended one."""
    figure, axes = _figure(8.4, 4.0)
    rows = study.replay.by_layer_and_step()
    factors, dropped = study.replay.factors, rows.dropped
    drop, advice = study.question.target.drop, study.training.overall
    needed = factors[smallest_sufficient(rows.demand.sum(0), dropped.sum(1), drop)]
    layers_need = [
        factors[np.minimum(smallest_sufficient(demand, lost, drop), len(factors) - 1)]
        for demand, lost in zip(rows.demand, dropped.swapaxes(0, 1), strict=True)
    ]
    worst, steps = np.stack(layers_need).max(0), rows.steps
    if len(rows.layers) > 1:
        axes.plot(steps, worst, color=BLUE, lw=0.8, alpha=0.5, label="layer that needs most")
    axes.plot(steps, needed, color=BLACK, lw=0, marker=".", ms=4, label="all layers together")
    axes.axhspan(advice.lowest, advice.factor, color=ORANGE, alpha=0.12, lw=0)
    _mark(axes.axhline, advice.factor)
    if len(advice.phases) > 1:
        starts = [phase.first_step for phase in advice.phases]
        axes.step(
            [*starts, int(steps[-1])],
            [*(phase.factor for phase in advice.phases), advice.phases[-1].factor],
            where="post",
            color=GREEN,
            lw=2,
            label="schedule",
        )
    axes.set_xlabel("training step")
    axes.set_ylabel("capacity factor needed")
    kept = f"drop at most {percent(drop)}" if drop else "drop nothing"
    axes.set_title(f"What each step needs to {kept}")
    axes.set_xlim(int(steps[0]), max(int(steps[-1]), int(steps[0]) + 1))
    axes.set_ylim(0, 1.1 * float(worst.max()))
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def costs(study: Study) -> "Figure":
    """Draw time and memory against dropped rows; every point is a factor."""
    figure, (left, right) = _figure(9.4, 4.4, columns=2)
    usual = [option for option in study.options if option.factor >= 1.0]
    chosen = study.option(study.training.overall.factor)
    padded = {"marker": "o", "color": BLACK}
    packed = {"marker": "s", "color": BLUE}
    padded_ms, packed_ms, gib = map(attrgetter, ("padded_ms", "packed_ms", "memory_gib"))
    _curve(left, padded_ms, usual, chosen, **padded, label="padded experts: every slot computed")
    _curve(left, packed_ms, usual, chosen, **packed, label="packed experts: empty slots skipped")
    _curve(right, gib, usual, chosen, **padded)
    left.plot([], [], color=ORANGE, marker="o", ms=9, lw=0, label=f"recommended: {chosen.factor:g}")
    for axes, of in ((left, padded_ms), (right, gib)):
        for option in _spaced(usual, of):
            place = {"xytext": (6, 3), "textcoords": "offset points", "fontsize": 9}
            axes.annotate(f"{option.factor:g}", (of(option), _drawn(option)), **place)
        axes.set_yscale("log")
        axes.set_ylim(_LEAST / 2, 1)
        axes.yaxis.set_major_formatter(
            lambda share, _: "none" if share <= _LEAST else f"{share * 100:g} %"
        )
        axes.margins(x=0.12)
    left.set_xlabel("ms per layer and micro-batch,\nforward and backward, modelled")
    left.set_ylabel("dropped rows")
    left.set_title("Time at each factor")
    right.set_xlabel("GiB on a rank, all its layers\nand micro-batches in flight")
    right.set_title("Memory at each factor")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _curve(
    axes: Any, of: Callable[[Option], float], options: list[Option], chosen: Option, **style: Any
) -> None:
    """Draw the drop of options against a cost, with a larger marker at the chosen one."""
    drawn = [_drawn(option) for option in options]
    axes.plot([of(option) for option in options], drawn, lw=1, ms=3.5, **style)
    axes.plot(of(chosen), _drawn(chosen), color=ORANGE, marker=style["marker"], ms=9, lw=0)


def _drawn(option: Option) -> float:
    """Return the dropped share for a logarithmic axis, with 0 at the bottom."""
    return max(option.dropped, _LEAST)


def _spaced(options: list[Option], of: Callable[[Option], float]) -> list[Option]:
    """Return the options with room for a label: an eighth of the axis between neighbours."""
    room = (of(options[-1]) - of(options[0])) / 8
    found = options[:1]
    for option in options[1:]:
        if of(option) - of(found[-1]) >= room:
            found.append(option)
    return found


def _visible(shares: Any) -> Any:
    """Return shares for a logarithmic axis, NaN (not drawn) where below it."""
    return np.where(np.asarray(shares) >= _LEAST, shares, np.nan)


def _mark(line: Callable[..., Any], factor: float) -> None:
    line(factor, color=ORANGE, lw=2, zorder=1.5, label=f"recommended: {factor:g}")


def _figure(width: float, height: float, *, columns: int = 1) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=144)
    return figure, figure.subplots(1, columns, sharey=columns > 1)


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield
