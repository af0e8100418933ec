"""Report a study: text for one screen of a terminal, and one HTML page.

The page has a longer text, and figures. It is one file: figures are inline SVG, and no script, font
or picture is loaded, so it opens without a network and can be mailed.

Both end with settings to paste, which run as they are printed. They set no factor of evaluation,
since eager evaluation drops nothing without one. A factor for cells is also right for stock
drop-and-pad, whose capacity has the same definition.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from padded_dispatch.tune.recommend import Study, percent

# A row of the terminal's table is the smallest factor that leaves no more without room than this.
_SHARES = (0.3, 0.1, 0.05, 0.01, 0.001, 0.0)
_COLUMNS = 80


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of text cells; `marked` is the recommended row, if any."""

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


def pool_table(study: Study) -> Table:
    """Return a row for each kind of pool; equal factors are equal bytes."""
    rows = []
    for answer in study.answers:
        replay, advice = answer.replay, answer.overall
        no_room, retried = percent(advice.dropped), percent(replay.retried[answer.index])
        enough = replay.factors[replay.dropped_share == 0][0]  # The grid ends with one.
        rows.append((replay.pool, f"{advice.factor:g}", no_room, retried, f"{enough:g}"))
    headers = ("pool", "factor", "no room", "steps with such", "all have room at")
    marked = study.answers.index(study.chosen)
    return Table(headers=headers, rows=tuple(rows), marked=marked)


def factor_table(study: Study, indices: Sequence[int], *, brief: bool) -> Table:
    """Return the rows without room and the cost of the factors with these numbers.

    `brief`: only the columns that a terminal has room for.
    """
    replay = study.chosen.replay
    columns = {
        "factor": [f"{factor:g}" for factor in replay.factors],
        "slots" if study.pool == "cells" else "rows": [f"{room:,}" for room in replay.room],
        "no room": map(percent, replay.dropped_share),
        "worst step": map(percent, replay.worst_step),
    }
    if not brief:
        columns["steps with such"] = map(percent, replay.retried)
        columns["worst layer"] = map(percent, replay.layer_shares.max(1))
        if study.pool == "cells":
            columns["balanced"] = map(percent, replay.balanced)
    columns["GiB"] = [f"{kept / 2**30:.3g}" for kept in replay.kept_bytes]
    rows = list(zip(*columns.values(), strict=True))
    return Table(
        headers=tuple(columns),
        rows=tuple(rows[i] for i in indices),
        marked=indices.index(study.chosen.index),
    )


def layer_table(study: Study) -> Table:
    """Return each layer's rows without room and, with cells, a factor of its own."""
    replay = study.chosen.replay
    alone = dict(zip(replay.demand.layers.tolist(), replay.needed_alone.tolist(), strict=True))
    headers = "layer", "alone has room at", "no room", "worst step", "factor", "slots"
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
    parts = [
        *_answer(study),
        str(factor_table(study, sorted(shown), brief=True)),
        _filled(f"{title} (Python: {report}):") + f"\n{block}",
    ]
    return "\n\n".join(parts)


def whole(study: Study) -> str:
    """Return the text of the page."""
    replay, run = study.chosen.replay, study.chosen.replay.demand.run
    in_cells = study.pool == "cells"
    every_factor = range(len(replay.configs))
    if in_cells:
        fate = (
            'They are dropped; on_overflow="retry" would run such steps again. '
            "Balanced: what a perfectly balanced router drops, as tokens choose at random."
        )
    else:
        fate = (
            "In a store each overwrites another, which backward computes again; what one layer has "
            "beyond the store is dropped."
        )
    note = (
        f"No room: of all rows. {fate} GiB: kept by packed experts for backward on a rank, of the "
        "layers that share a store, for each micro-batch in flight."
    )
    method = (
        f"The trace: {replay.asked.sum():,} rows of {len(replay.demand.steps):,} "
        f"micro-batches in {study.chosen.num_steps:,} steps, {len(study.chosen.layers)} "
        f"layers; {run.num_experts} experts, top-{run.top_k}, {run.num_ranks} source "
        f"ranks of {run.num_tokens:,} tokens each. Every micro-batch was replayed at "
        f"{len(every_factor)} factors with the dispatcher's own rule: the counts are exact. "
        "Dropping changes what is learned; a trace does not show how much."
    )
    settings = [f"{title}:\n{block}" for title, block in blocks(study).items()]
    if in_cells and len(study.chosen.layers) > 1:
        settings.append("The same with a factor for each layer:")
        settings += blocks(study, per_layer=True).values()
    parts = [
        *_answer(study),
        *settings,
        f"{factor_table(study, every_factor, brief=False)}\n\n{_filled(note)}",
        str(layer_table(study)),
        _filled(method),
    ]
    return "\n\n".join(parts)


def _answer(study: Study) -> list[str]:
    """Return the recommendation and its warnings, and the table of pools if there are several."""
    prose = [study.chosen.sentence(), *study.chosen.warnings()]
    factors = [advice.factor for advice in study.chosen.layers.values()]
    if len(factors) > 1 and study.pool == "cells":
        prose.append(f"Each layer by itself: {min(factors):g} to {max(factors):g}.")
    tables = [str(pool_table(study))] if len(study.answers) > 1 else []
    return ["\n".join(_filled(text) for text in prose), *tables]


def _filled(text: str) -> str:
    return textwrap.fill(text, _COLUMNS, break_on_hyphens=False, break_long_words=False)


def html(study: Study, svgs: dict[str, str]) -> str:
    """Return the page; `svgs`: `<svg>` elements, by the names of `plots.figures`, or none."""
    title = escape(f"Capacity for {study.name}")
    figures = [
        f"<figure>\n{svg}\n<figcaption>{_CAPTIONS[name]}</figcaption>\n</figure>"
        for name, svg in svgs.items()
    ]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>\n<style>{_STYLE}</style>\n<h1>{title}</h1>",
            f"<pre>{escape(whole(study))}</pre>",
            *figures,
            "</html>\n",
        ]
    )


_STYLE = """
body { margin: 0 auto; max-width: 66rem; padding: 2rem 1.5rem; color: #222; background: #fff;
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.25rem; }
pre { overflow-x: auto; font-size: .88rem; }
svg { width: 100%; height: auto; }
"""

_CAPTIONS = {
    "dropped": "Below the dotted line no more than that share is without room.",
    "need": "One point per step: a factor with room for all of its rows.",
}
