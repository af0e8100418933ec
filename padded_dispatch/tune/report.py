"""Report a study: text for one screen of a terminal, and one HTML page.

The page (`page.html`, a template of Jinja2, which comes with torch) has every factor, every layer,
and figures. It is one file: figures are inline SVG, and no script, font or picture is loaded, so it
opens without a network and can be mailed.

Both end with settings to paste, which run as they are printed. They set no factor of evaluation,
since eager evaluation drops nothing without one. A factor for cells is also right for stock
drop-and-pad, whose capacity has the same definition.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from padded_dispatch.tune.recommend import TIME_PER_ROW, Study, percent, shares_at
from padded_dispatch.utils.logs import aligned

# A row of the terminal's table is the smallest factor at which no more rows do not fit than this.
_SHARES = (0.3, 0.1, 0.05, 0.01, 0.001, 0.0)
_COLUMNS = 80
_JINJA: Any = dict.fromkeys(
    ("autoescape", "trim_blocks", "lstrip_blocks", "keep_trailing_newline"), True
)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of text cells; `marked` is the recommended row, if any."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: int | None = None

    def __str__(self) -> str:
        lines = [(" ", *self.headers), *((" ", *row) for row in self.rows)]
        if self.marked is not None:
            lines[self.marked + 1] = (">", *self.rows[self.marked])
        return aligned(lines)


def pool_table(study: Study) -> Table:
    """Return a row for each kind of pool; equal factors are equal bytes."""
    rows = []
    for answer in study.answers:
        replay = answer.replay
        dropped, recomputed = answer.shares
        first = int(np.argmax(replay.dropped_share == 0))  # The grid ends with one.
        enough = replay.factors[replay.last_alike[first]]
        shares = percent(dropped), percent(recomputed) if replay.pool == "store" else "-"
        affected = percent(replay.retried[answer.index])
        rows.append((replay.pool, f"{answer.overall.factor:g}", *shares, affected, f"{enough:g}"))
    headers = ("pool", "factor", "dropped", "recomputed", "steps affected", "none at factor")
    marked = study.answers.index(study.chosen)
    return Table(headers=headers, rows=tuple(rows), marked=marked)


def factor_table(study: Study, indices: Sequence[int], *, brief: bool) -> Table:
    """Return what does not fit, and the cost, at the factors with these numbers.

    Factors with the same store are one row. `brief`: only the columns that fit into a terminal.
    """
    replay, in_cells = study.chosen.replay, study.pool == "cells"
    shares, kept = [shares_at(replay, i) for i in range(len(replay.configs))], replay.kept_bytes
    last = replay.last_alike
    columns: dict[str, Any] = {
        "factor": [
            f"{factor:g}" if last[i] == i else f"{factor:g} to {replay.factors[last[i]]:g}"
            for i, factor in enumerate(replay.factors)
        ],
        "slots" if in_cells else "rows": [f"{room:,}" for room in replay.room],
    }
    if in_cells or any(dropped for dropped, _ in shares):
        columns["dropped"] = [percent(dropped) for dropped, _ in shares]
    if not in_cells:
        columns["recomputed"] = [percent(recomputed) for _, recomputed in shares]
        columns["longer step"] = [percent(TIME_PER_ROW * recomputed) for _, recomputed in shares]
    columns["worst step"] = map(percent, replay.worst_step)
    if not brief:
        columns["steps affected"] = map(percent, replay.retried)
        columns["worst layer"] = map(percent, replay.layer_shares.max(1))
        if in_cells:
            columns["balanced"] = map(percent, replay.balanced)
    columns["GiB"] = [f"{num_bytes / 2**30:.3g}" for num_bytes in kept]
    rows = list(zip(*columns.values(), strict=True))
    firsts = sorted({last.index(last[i]) for i in indices})
    return Table(
        headers=tuple(columns),
        rows=tuple(rows[i] for i in firsts),
        marked=firsts.index(last.index(study.chosen.index)),
    )


def layer_table(study: Study) -> Table:
    """Return what does not fit of each layer's rows and, with cells, a factor of its own."""
    replay = study.chosen.replay
    alone = dict(zip(replay.demand.layers.tolist(), replay.needed_alone.tolist(), strict=True))
    what = "dropped" if study.pool == "cells" else "recomputed"
    if study.pool == "store" and study.chosen.shares[0]:  # Lost rows are not known by layer.
        what = "recomputed or dropped"
    headers = "layer", "alone needs", what, "worst step", "factor", "slots"
    columns = 6 if study.pool == "cells" else 4  # Layers that share a store have no factors.
    rows = []
    for layer, advice in study.chosen.layers.items():
        shares = percent(advice.dropped), percent(advice.worst)
        own = f"{advice.factor:g}", f"{advice.room:,}"
        rows.append((str(layer), f"{alone[layer]:.3g}", *shares, *own)[:columns])
    return Table(headers=headers[:columns], rows=tuple(rows))


def blocks(study: Study, *, per_layer: bool = False) -> dict[str, str]:
    """Return blocks by title, for Megatron-LM's pretrain_gpt.py on all GPUs of a host, and Python.

    Args:
        study: its recommendation is used.
        per_layer: write one factor for each layer, unless layers share a store.
    """
    factor, fields = f"{study.chosen.overall.factor:g}", options(study, per_layer=per_layer)
    layers = ",".join(f"{layer}:{own:g}" for layer, own in fields.get("layer_factors", {}).items())
    command = [
        "torchrun --nproc-per-node auto -m padded_dispatch.megatron.run",
        'pretrain_gpt.py "${ARGS[@]}"',
        "--moe-token-dispatcher-type padded_alltoall",
        f"--moe-expert-capacity-factor {factor}",
        f"--padded-capacity-pool {study.pool}",
        *([f"--padded-layer-factors {layers}"] if layers else []),
    ]
    lines = [
        "from padded_dispatch.megatron import PaddedOptions, install",
        "",
        "install(PaddedOptions(",
        *(f"    {name}={value!r}," for name, value in fields.items()),
        "))",
        "moe = dict(",
        '    moe_token_dispatcher_type="padded_alltoall",',
        f"    moe_expert_capacity_factor={factor},",
        ")",
    ]
    shell = "Megatron-LM, with the flags of your model in the shell array ARGS"
    python = "Python, before the config is made, which is TransformerConfig(..., **moe)"
    return {shell: " \\\n  ".join(command), python: "\n".join(lines)}


def options(study: Study, *, per_layer: bool) -> dict[str, Any]:
    """Return the fields of `PaddedOptions`; see `blocks`."""
    fields: dict[str, Any] = {"capacity_pool": study.pool}
    if per_layer and study.pool == "cells":
        layers = study.chosen.layers.items()
        fields["layer_factors"] = {layer: advice.factor for layer, advice in layers}
    return fields


def summary(study: Study, report: Path) -> str:
    """Return the text for the terminal, at most 80 columns wide; `report`: path of the page."""
    shares = study.chosen.replay.dropped_share
    shown = {study.chosen.index, *(int(np.argmax(shares <= share)) for share in _SHARES)}
    title, block = next(iter(blocks(study).items()))
    tables = [str(pool_table(study))] if len(study.answers) > 1 else []
    parts = [
        "\n".join(_filled(text) for text in sentences(study)),
        *tables,
        str(factor_table(study, sorted(shown), brief=True)),
        _filled(f"{title} (all figures, and settings for Python: {report}):") + f"\n{block}",
    ]
    return "\n\n".join(parts)


def sentences(study: Study) -> list[str]:
    """Return the recommendation, the reasons to doubt it, and what holds for single layers."""
    found = [study.chosen.sentence(), *study.chosen.warnings()]
    few, many = study.chosen.replay.store_layers, len(study.chosen.replay.demand.layers)
    if study.pool == "store" and few < many:
        which = f"A store is shared by {few} of {many} layers, as in a pipeline stage"
        found.append(f"{which}; for several chunks of a stage give --store-layers.")
    factors = [advice.factor for advice in study.chosen.layers.values()]
    if len(factors) > 1 and study.pool == "cells":
        found.append(f"Each layer by itself: {min(factors):g} to {max(factors):g}.")
    return found


def _filled(text: str) -> str:
    return textwrap.fill(text, _COLUMNS, break_on_hyphens=False, break_long_words=False)


def html(study: Study, svgs: dict[str, str]) -> str:
    """Return the page; `svgs`: `<svg>` elements, by the names of `plots.figures`, or none."""
    from jinja2 import Environment

    replay, chosen = study.chosen.replay, study.chosen
    settings = blocks(study)
    if study.pool == "cells" and len(chosen.layers) > 1:
        per_layer = blocks(study, per_layer=True).items()
        settings |= {f"{title}, with a factor for each layer": block for title, block in per_layer}
    template = Path(__file__).with_name("page.html").read_text()
    page = Environment(**_JINJA).from_string(template)
    return page.render(
        study=study,
        answer=sentences(study),
        run=replay.demand.run,
        num_rows=int(replay.asked.sum()),
        num_passes=len(replay.demand.steps),
        settings=settings,
        pools=pool_table(study) if len(study.answers) > 1 else None,
        factors=factor_table(study, range(len(replay.configs)), brief=False),
        layers=layer_table(study),
        svgs=svgs,
    )
