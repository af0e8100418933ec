"""The tables of a study, as text: the same cells in the terminal and in the report."""

from dataclasses import dataclass

from padded_dispatch.tune.recommend import Advice, percent
from padded_dispatch.tune.study import Option, Study

_ROWS = 12


@dataclass(frozen=True, kw_only=True)
class Table:
    """`marked`: the row that is recommended, if any."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: int | None = None

    def __str__(self) -> str:
        lines = [self.headers, *self.rows]
        widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
        text = []
        for number, line in enumerate(lines, start=-1):
            cells = "  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True))
            text.append(f"{'>' if number == self.marked else ' '} {cells}")
        return "\n".join(text)


def factor_table(study: Study) -> Table:
    """What factors drop and cost: some of those tried, the recommended one among them."""
    chosen = study.training.overall.factor
    every = max(1, len(study.options) // _ROWS)
    shown = [
        option
        for i, option in enumerate(study.options)
        if i % every == 0 or option.factor == chosen or option is study.options[-1]
    ]
    headers = ("factor", "slots", "dropped", "floor", "worst layer", "lost tokens", "fill")
    if study.layer is not None:
        headers += ("wire MB", "memory GiB", "in graphs", "TFLOP", "ms padded", "ms packed")
    return Table(
        headers=headers,
        rows=tuple(_option_cells(option) for option in shown),
        marked=[option.factor for option in shown].index(chosen),
    )


def layer_table(study: Study) -> Table:
    """A factor for each layer, for training and for evaluation."""
    rows = []
    for layer, advice in study.training.layers.items():
        evaluation = study.evaluation.layers.get(layer)
        rows.append(
            (
                str(layer),
                *_advice_cells(advice),
                "-" if evaluation is None else f"{evaluation.factor:g}",
            )
        )
    return Table(
        headers=(
            "layer",
            "factor",
            "slots",
            "between",
            "dropped",
            "worst step",
            "promised",
            "eval",
        ),
        rows=tuple(rows),
    )


def _option_cells(option: Option) -> tuple[str, ...]:
    cells = (
        f"{option.factor:g}",
        str(option.capacity),
        percent(option.dropped),
        percent(option.floor),
        percent(option.worst_layer),
        percent(option.lost),
        percent(option.fill),
    )
    if option.cost is not None:
        cells += (
            f"{option.cost.wire_bytes / 1e6:.1f}",
            f"{option.cost.memory_bytes / 2**30:.2f}",
            f"{option.cost.graph_pool_bytes / 2**30:.2f}",
            f"{option.cost.padded_flops / 1e12:.3g} / {option.cost.packed_flops / 1e12:.3g}",
            f"{option.padded_ms:.2f}",
            f"{option.packed_ms:.2f}",
        )
    return cells


def _advice_cells(advice: Advice) -> tuple[str, ...]:
    return (
        f"{advice.factor:g}",
        str(advice.capacity),
        f"{advice.lowest:g} - {advice.factor:g}",
        percent(advice.dropped),
        percent(advice.worst),
        "yes" if advice.promised else "no",
    )
