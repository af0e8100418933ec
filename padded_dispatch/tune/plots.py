"""Draw the figures of a study: rows that do not fit by factor, and need by step.

Colours are Okabe and Ito's, which people with any colour vision can separate; lines differ in style
or width as well. Matplotlib is imported when a figure is drawn: it comes with the extra `tune`.
"""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from padded_dispatch.tune.recommend import Study, percent
from padded_dispatch.tune.replay import Replay

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
_LABELS = {"store": "store: recomputed", "cells": "cells: dropped"}
_LEAST = 1e-6  # The smallest share on an axis: one row in a million.

REMEDY = "run pip install 'matplotlib>=3.9,<4'"


def figures(study: Study) -> dict[str, "Figure"]:
    """Draw all figures, by name."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        return {"dropped": dropped(study), "need": need(study)}


def svg(figure: "Figure") -> str:
    """Return the figure as an `<svg>` element without a prolog, for HTML."""
    import matplotlib

    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context(_STYLE):
        figure.savefig(text, format="svg", metadata=nothing)
    return text.getvalue()[text.getvalue().index("<svg") :]


def dropped(study: Study) -> "Figure":
    """Draw the share of rows that do not fit by factor: layers, all, other pools, in balance."""
    figure, axes = _figure(4.2)
    replay, drop = study.chosen.replay, study.chosen.drop

    def draw(drawn: Replay, shares: Any, **look: Any) -> None:
        axes.plot(drawn.factors, np.where(shares >= _LEAST, shares, np.nan), **look)

    # A layer whose rows always fit has no line.
    shares_by_layer = [shares for shares in replay.layer_shares.T if (shares >= _LEAST).any()]
    for i, shares in enumerate(shares_by_layer if len(replay.layer_shares.T) > 1 else ()):
        label = "single layers" if i == 0 else None
        draw(replay, shares, color=BLUE, alpha=0.35, lw=1, label=label)
    label = _LABELS[study.pool]
    draw(replay, replay.dropped_share, color=BLACK, lw=2.2, marker="o", ms=3.5, label=label)
    for other in (answer.replay for answer in study.answers if answer is not study.chosen):
        draw(other, other.dropped_share, color=GREY, lw=1.8, label=_LABELS[other.pool])
    if study.pool == "cells":
        label = "perfectly balanced router"
        draw(replay, np.array(replay.balanced), color=GREEN, lw=1.8, ls="--", label=label)
    if drop and study.pool == "cells":
        axes.axhline(drop, color=GREY, lw=1, ls=":", label=f"at most: {percent(drop)}")
    _mark(axes.axvline, study)
    axes.set_yscale("log")
    axes.set_xlim(0, 1.5 * float(replay.factors[-1]))
    axes.set_ylim(_LEAST, 1)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share * 100:g} %")
    axes.set_xlabel("capacity factor (room relative to balance)")
    axes.set_ylabel("rows that do not fit")
    axes.set_title("Rows that do not fit, by factor")
    figure.legend(loc="outside right upper")
    return figure


def need(study: Study) -> "Figure":
    """Draw the factor at which all rows of a step fit, and the recommended one."""
    figure, axes = _figure(4.0)
    replay = study.chosen.replay
    axes.plot(replay.steps, replay.needed, color=BLACK, lw=0, marker=".", ms=4, label="a step")
    _mark(axes.axhline, study)
    axes.set_xlabel("training step")
    axes.set_ylabel("capacity factor needed")
    axes.set_title("The factor at which all rows of a step fit")
    axes.set_ylim(0, 1.1 * float(replay.needed.max()))
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _mark(line: Callable[..., Any], study: Study) -> None:
    factor = study.chosen.overall.factor
    line(factor, color=ORANGE, lw=2, zorder=1.5, label=f"recommended: {factor:g}")


def _figure(height: float) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, height), layout="constrained", dpi=144)
    return figure, figure.subplots()
