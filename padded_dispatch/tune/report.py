"""Report a study: text for one screen of a terminal, and one HTML page.

Both show the same tables. The page gives the answer first, then the settings, figures, what every
factor drops and costs, layer by layer, and the method. It is one file: figures are inline SVG, and
no script, font or picture comes from elsewhere, so it opens without a network and can be mailed.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from padded_dispatch.tune.recommend import Option, Study, percent
from padded_dispatch.tune.settings import Block, blocks

# A row of the terminal's table is the smallest factor that drops no more than this.
_SHARES = (0.3, 0.1, 0.05, 0.01, 0.001, 0.0)
_PAGE_ROWS = 12  # about so many factors are on the page
_COLUMNS = 80
_ROOM = {"expert": "slots", "store": "rows"}


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
        needed = math.ceil(float(answer.replay.needed.max()) * 100) / 100
        rows.append(
            (
                answer.replay.pool,
                f"{answer.overall.factor:g}",
                percent(answer.overall.dropped),
                percent(answer.retried),
                f"{needed:g}",
            )
        )
    headers = ("pool", "factor", "dropped", "steps with drops", "drops nothing at")
    marked = study.answers.index(study.chosen)
    return Table(headers=headers, rows=tuple(rows), marked=marked)


def factor_table(study: Study, options: Sequence[Option], *, brief: bool) -> Table:
    """Return the drop and the cost of some factors.

    Args:
        study: what the options are of.
        options: rows of the table.
        brief: only the columns that a terminal has room for.
    """
    columns = {
        "factor": [f"{option.factor:g}" for option in options],
        _ROOM[study.pool]: [f"{option.room:,}" for option in options],
        "dropped": [percent(option.dropped) for option in options],
        f"{percent(study.chosen.target.steps_share)} of steps": [
            f"<= {percent(option.in_most_steps)}" for option in options
        ],
    }
    if not brief:
        columns["steps with drops"] = [percent(option.retried) for option in options]
        columns["worst layer"] = [percent(option.worst_layer) for option in options]
        if study.pool == "expert":
            columns["balanced"] = [percent(option.balanced or 0.0) for option in options]
    if study.sizes is not None:
        columns["GiB"] = [f"{(option.kept_bytes or 0) / 2**30:.3g}" for option in options]
    factors = [option.factor for option in options]
    return Table(
        headers=tuple(columns),
        rows=tuple(zip(*columns.values(), strict=True)),
        marked=factors.index(study.chosen.overall.factor),
    )


def layer_table(study: Study) -> Table:
    """Return a factor for each layer by itself; the drops of each in a store."""
    replay = study.chosen.replay
    alone = dict(zip(replay.demand.layers.tolist(), replay.needed_alone.tolist(), strict=True))
    headers = ["layer", "drops nothing alone at", "dropped", "worst step"]
    own = study.pool == "expert"
    if own:
        headers += ["factor", "slots", "halves"]
    rows = []
    for layer, advice in study.chosen.layers.items():
        row = [str(layer), f"{alone[layer]:.3g}", percent(advice.dropped), percent(advice.worst)]
        if own:
            halves = f"{advice.halves[0]:g}, {advice.halves[1]:g}"
            row += [f"{advice.factor:g}", f"{advice.room:,}", halves]
        rows.append(tuple(row))
    return Table(headers=tuple(headers), rows=tuple(rows))


def summary(study: Study, report: Path) -> str:
    """Return the text for the terminal, at most 80 columns wide.

    Args:
        study: its content.
        report: the path of the page.
    """
    chosen = study.chosen
    prose = [chosen.sentence(), *chosen.warnings()]
    factors = [advice.factor for advice in chosen.layers.values()]
    if len(factors) > 1 and study.pool == "expert":
        prose.append(f"Each layer by itself: {min(factors):g} to {max(factors):g}.")
    shown = {chosen.overall.factor}
    for share in _SHARES:
        shown.update([option.factor for option in study.options if option.dropped <= share][:1])
    options = [option for option in study.options if option.factor in shown]
    block, *others = blocks(study)
    names = " and ".join(other.target for other in others)
    parts = [
        "\n".join(_filled(text) for text in prose),
        str(pool_table(study)) if len(study.answers) > 1 else "",
        str(factor_table(study, options, brief=True)),
        _filled(f"{block.target}, {block.about} ({names}: {report}):") + f"\n{block.text}",
    ]
    return "\n\n".join(part for part in parts if part)


def _filled(text: str) -> str:
    return textwrap.fill(text, _COLUMNS, break_on_hyphens=False, break_long_words=False)


_STYLE = """
body { margin: 0 auto; max-width: 66rem; padding: 2rem 1.5rem; color: #222; background: #fff;
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1rem; color: #666; }
h2 { font-size: 1.25rem; margin-top: 2.5rem; }
p { max-width: 46rem; }
.answer { font-size: 1.3rem; border-left: 5px solid #D55E00; background: #FFF5EE; padding: 1rem; }
.warning { border-left: 5px solid #888; padding-left: 1rem; }
.note, figcaption { color: #666; font-size: .9rem; }
.scroll { overflow-x: auto; overflow-wrap: normal; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem; }
th, td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid #e3e3e3; }
td { white-space: nowrap; }
tr.marked td { background: #FFF5EE; font-weight: 600; }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; font-size: .88rem; }
figure { margin: 1.5rem 0 0; }
figure svg { width: 100%; height: auto; }
"""

_POOLS = (
    "Which rows share room (capacity_pool), at the factor that keeps the target; equal factors "
    'are equal bytes. Steps with drops: on_overflow="retry" would run them again.'
)
_FACTORS = "Dropped: of all rows."
_BALANCED = " Balanced: what a perfectly balanced router drops, since tokens choose at random."
_COSTS = " GiB: kept for backward on a rank, of all its layers, for each micro-batch in flight."
_CAPTIONS = {
    "dropped": "Below the dotted line the target is kept.",
    "need": "One point per step: the smallest factor that would have kept the target.",
    "load": "Demand before anything is dropped, over the whole trace.",
}


def html(study: Study, svgs: dict[str, str]) -> str:
    """Return the page.

    Args:
        study: its content.
        svgs: figures as `<svg>` elements, by the names of `plots.figures`; may be empty.
    """
    title = f"Capacity for {study.name}"
    body = [
        f"<h1>{_text(title)}</h1>",
        _section("recommendation", "", _answer(study)),
        _section("settings", "What to set", _settings(study)),
        _section("figures", "Why", _figures(svgs)) if svgs else "",
        _section("factors", "What each factor does", _factors(study)),
        _section("layers", "Layer by layer", _table(layer_table(study))),
        _section("method", "How it was computed", _method(study)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


def _section(name: str, heading: str, content: str) -> str:
    head = f"<h2>{_text(heading)}</h2>\n" if heading else ""
    return f'<section id="{name}">\n{head}{content}\n</section>'


def _answer(study: Study) -> str:
    parts = [f'<p class="answer">{_text(study.chosen.sentence())}</p>']
    parts += [f'<p class="warning">{_text(text)}</p>' for text in study.chosen.warnings()]
    if len(study.answers) > 1:
        parts.append(f'<p class="note">{_text(_POOLS)}</p>\n{_table(pool_table(study))}')
    return "\n".join(parts)


def _settings(study: Study) -> str:
    parts = ["<p>Each block runs as it is printed.</p>"]
    parts += [_block(block) for block in blocks(study)]
    if len(study.chosen.layers) > 1 and study.pool == "expert":
        listed = "\n".join(_block(block) for block in blocks(study, per_layer=True))
        summary = "<summary>The same with a factor for each layer</summary>"
        parts.append(f"<details>\n{summary}\n{listed}\n</details>")
    return "\n".join(parts)


def _block(block: Block) -> str:
    about = f"<p><b>{_text(block.target)}</b>, {_text(block.about)}:</p>"
    return f"{about}\n<pre>{escape(block.text)}</pre>"


def _figures(svgs: dict[str, str]) -> str:
    return "\n".join(
        f'<figure id="figure-{name}">\n{svg}\n'
        f"<figcaption>{_text(_CAPTIONS[name])}</figcaption>\n</figure>"
        for name, svg in svgs.items()
    )


def _factors(study: Study) -> str:
    every, factor = max(1, len(study.options) // _PAGE_ROWS), study.chosen.overall.factor
    last = len(study.options) - 1
    shown = [
        option
        for i, option in enumerate(study.options)
        if i % every == 0 or i == last or option.factor == factor
    ]
    note = _FACTORS + (_BALANCED if study.pool == "expert" else "")
    note += _COSTS if study.sizes is not None else " For bytes, give --hidden-size and --ffn-size."
    return f'<p class="note">{_text(note)}</p>\n{_table(factor_table(study, shown, brief=False))}'


def _method(study: Study) -> str:
    demand, own = study.demand, study.pool == "expert"
    texts = [
        f"The trace: {study.chosen.replay.asked.sum():,} rows of {len(demand.steps):,} "
        f"micro-batches in {study.chosen.overall.num_steps:,} steps, {len(study.chosen.layers)} "
        f"layers; {demand.num_experts} experts, top-{demand.top_k}, {demand.num_sources} source "
        f"ranks of {demand.num_tokens:,} tokens each.",
        f"Every micro-batch was replayed at {len(study.options)} factors with the dispatcher's own "
        "rule: the counts are exact. The factor is the smallest that keeps the target in as many "
        "of the steps traced" + ("; each layer's keeps it for that layer alone." if own else "."),
        "The answer holds for steps like these. Routing changes with the data, the learning rate "
        "and with what is dropped: watch the dispatcher's telemetry, and trace again. Dropping "
        "changes what is learned; a trace does not show how much.",
    ]
    return "\n".join(f"<p>{_text(text)}</p>" for text in texts)


def _table(table: Table) -> str:
    head = "".join(f"<th>{_text(header)}</th>" for header in table.headers)
    rows = []
    for i, row in enumerate(table.rows):
        cells = "".join(f"<td>{_text(cell)}</td>" for cell in row)
        marked = ' class="marked"' if i == table.marked else ""
        rows.append(f"<tr{marked}>{cells}</tr>")
    body = "\n".join(rows)
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _text(text: str) -> str:
    """Escape text; a number and its percent sign stay on one line."""
    return escape(text).replace(" %", "\N{NO-BREAK SPACE}%")
