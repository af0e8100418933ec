"""Report a study: tables, and one HTML page.

The terminal and the page show the same tables. The page gives the answer first, then the settings,
then the reasons: figures, what every factor drops and costs, layer by layer, and at the end the
caveats and the method. It is one file: figures are inline SVG, and no script, font or picture comes
from elsewhere, so it opens without a network and can be mailed.
"""

from html import escape

from padded_dispatch.tune.convert import Meaning, RoutingSizes, from_source
from padded_dispatch.tune.hosts import ABOUT, exchange_table, sentence
from padded_dispatch.tune.menu import menu, notes, pool_table
from padded_dispatch.tune.recommend import Advice
from padded_dispatch.tune.settings import NO_LAYERS, Block, blocks
from padded_dispatch.tune.study import Option, Study
from padded_dispatch.tune.table import Table
from padded_dispatch.tune.target import percent

_ELSEWHERE: dict[Meaning, str] = {
    "source": "Megatron-Core, alltoall with padding to capacity: moe_expert_capacity_factor",
    "rank": "Megatron-Core, HybridEP or NCCL EP: moe_expert_rank_capacity_factor",
    "worst-case": "torchtitan, HybridEP: non_blocking_capacity_factor",
    "max-tokens": "DeepEP, low latency: num_max_dispatch_tokens_per_rank",
    "stash": "Megatron-Core: moe_paged_stash_buffer_size_factor_cuda",
}

_TABLE_ROWS = 12  # about so many factors are shown


def elsewhere(study: Study) -> dict[str, str]:
    """Return the factor in the field's other meanings, or why there is none, by name."""
    sizes = RoutingSizes(
        num_tokens=study.num_tokens,
        num_experts=study.num_experts,
        top_k=study.top_k,
        num_ranks=study.num_ranks,
    )
    found = {}
    for meaning, name in _ELSEWHERE.items():
        try:
            value = from_source(study.training.overall.factor, meaning, sizes)
            found[name] = f"{value:.0f}" if meaning == "max-tokens" else f"{value:.4g}"
        except ValueError as error:
            found[name] = str(error)
    return found


def factor_table(study: Study) -> Table:
    """Return the drop and the cost of some of the factors, the recommended one among them."""
    chosen = study.training.overall.factor
    every = max(1, len(study.options) // _TABLE_ROWS)
    shown = [
        option
        for i, option in enumerate(study.options)
        if i % every == 0 or option.factor == chosen or option is study.options[-1]
    ]
    headers = ("factor", "slots", "dropped")
    if study.pool == "expert":
        headers += ("balanced",)
    headers += ("worst layer", "lost tokens", "retried", "fill")
    if study.layer is not None:
        headers += ("wire MB", "memory GiB", "in graphs", "TFLOP", "ms padded", "ms packed")
    return Table(
        headers=headers,
        rows=tuple(_option_cells(option) for option in shown),
        marked=[option.factor for option in shown].index(chosen),
    )


def layer_table(study: Study) -> Table:
    """Return a factor for each layer, for training and for evaluation."""
    rows = []
    for layer, advice in study.training.layers.items():
        evaluation = study.evaluation.layers.get(layer)
        eval_factor = "-" if evaluation is None else f"{evaluation.factor:g}"
        rows.append((str(layer), *_advice_cells(advice), eval_factor))
    headers = ("layer", "factor", "slots", "between", "dropped", "worst step", "promised", "eval")
    return Table(headers=headers, rows=tuple(rows))


def _option_cells(option: Option) -> tuple[str, ...]:
    cells = (
        f"{option.factor:g}",
        str(option.capacity),
        percent(option.dropped),
    )
    if option.balanced_drop is not None:
        cells += (percent(option.balanced_drop),)
    cells += (
        percent(option.worst_layer),
        percent(option.lost),
        percent(option.retried),
        percent(option.fill),
    )
    if option.cost is not None:
        cells += (
            f"{option.cost.wire_bytes / 1e6:.1f}",
            f"{option.memory_gib:.2f}",
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


_STYLE = """
:root { --ink: #222; --soft: #666; --line: #e3e3e3; --accent: #D55E00; --wash: #FFF5EE; }
body { margin: 0 auto; max-width: 66rem; padding: 2.5rem 1.5rem 4rem; color: var(--ink);
  background: #fff; font: 16px/1.55 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1rem; font-weight: 600; color: var(--soft); margin: 0 0 1rem; }
h2 { font-size: 1.25rem; margin: 2.75rem 0 .5rem; }
p, ul { max-width: 46rem; }
.answer { font-size: 1.35rem; line-height: 1.45; border-left: 5px solid var(--accent);
  background: var(--wash); padding: 1.1rem 1.4rem; margin: 0; max-width: none; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: .7rem;
  margin: 1.25rem 0 0; padding: 0; list-style: none; max-width: none; }
.tiles li { border: 1px solid var(--line); border-radius: 6px; padding: .6rem .9rem; }
.tiles b { display: block; font-size: 1.4rem; font-weight: 600; white-space: nowrap; }
.tiles span, figcaption, .note { color: var(--soft); font-size: .9rem; }
.scroll { overflow-x: auto; overflow-wrap: normal; }
.scroll + .scroll { margin-top: 1.25rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .82rem; }
th, td { text-align: right; padding: .28rem .45rem; border-bottom: 1px solid var(--line); }
td { white-space: nowrap; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
tr.marked td { background: var(--wash); font-weight: 600; }
pre { background: #f6f6f6; border-radius: 6px; padding: .9rem 1.1rem; overflow-x: auto;
  font-size: .88rem; }
summary { cursor: pointer; }
figure { margin: 1.5rem 0 0; }
figure svg { width: 100%; height: auto; }
li.caveat { margin: .4rem 0; }
@media (max-width: 40rem) {
  body { padding: 1.25rem 1rem 3rem; }
  ul { padding-left: 1.25rem; }
  .answer { font-size: 1.1rem; padding: .9rem 1rem; }
  table { min-width: max-content; }
  th:first-child, td:first-child { position: sticky; left: 0; background: #fff;
    border-right: 1px solid var(--line); }
  pre { white-space: pre-wrap; }
  figure svg { width: 32rem; }
}
"""

_BALANCED = (
    " The dashed line is a perfectly balanced router, which still drops because tokens choose at "
    "random; better balance would save the distance to it."
)

_POOLS = (
    "Which rows share slots (capacity_pool), at the factor that keeps the target; equal factors "
    'are equal bytes. Retried: the share of steps that on_overflow="retry" would run again.'
)

_CAPTIONS = {
    "pools": "What each kind of pool drops at equal bytes.",
    "dropped": "Below the dotted line the target is kept.",
    "need": "One point per step: the smallest factor that would have kept the target. More steps "
    "may move the recommendation within the shaded band.",
    "load": "Demand before anything is dropped, over the whole trace.",
    "cost": "Every point is a factor. Down is fewer dropped rows, left is cheaper.",
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
        _section("recommendation", None, _answer(study)),
        _section("menu", "The choices", _menu(study)),
        _section("settings", "What to set", _settings(study)),
        _section("figures", "Why", _figures(study, svgs)) if svgs else "",
        _section("factors", "What each factor does", _factors(study)),
        _section("hosts", "Several hosts", _hosts(study)) if study.hosts else "",
        _section("layers", "Layer by layer", _layers(study)),
        _section("caveats", "Caveats", _caveats(study)),
        _section("method", "How it was computed", _method(study)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


def _section(name: str, heading: str | None, content: str) -> str:
    head = f"<h2>{_text(heading)}</h2>\n" if heading else ""
    return f'<section id="{name}">\n{head}{content}\n</section>'


def _answer(study: Study) -> str:
    advice = study.training.overall
    tiles = [
        (f"{advice.factor:g}", "capacity factor in training"),
        (f"{study.evaluation.overall.factor:g}", "in evaluation, if captured"),
        (percent(advice.dropped), "of the rows seen dropped"),
        (percent(advice.worst), "of the rows in the worst step"),
    ]
    option = study.option(advice.factor)
    if option.cost is not None:
        tiles.append((f"{option.memory_gib:.2f} GiB", "on a rank"))
        tiles.append((f"{option.padded_ms:.2f} ms", "per layer, modelled"))
    items = "\n".join(f"<li><b>{_text(big)}</b><span>{_text(s)}</span></li>" for big, s in tiles)
    answer = f'<p class="answer">{_text(study.training.sentence())}</p>'
    if study.warm_up is not None:
        answer += f"\n<p>{_text(study.warm_up.sentence())}</p>"
    return f'{answer}\n<ul class="tiles">\n{items}\n</ul>'


def _menu(study: Study) -> str:
    listed = "\n".join(f'<p class="note">{_text(text)}</p>' for text in notes(study))
    pools = ""
    if len(study.pools) > 1:
        pools = f'<p class="note">{_POOLS}</p>\n{_table(pool_table(study))}\n'
    return f"{pools}{_table(menu(study))}\n{listed}"


def _settings(study: Study) -> str:
    parts = ["<p>Each block runs as it is printed.</p>"]
    parts += [_block(block) for block in blocks(study, per_layer=False)]
    if not study.layers_of_model:
        parts.append(f"<p>{_text(NO_LAYERS)}</p>")
    elif len(study.training.layers) > 1:
        listed = "\n".join(_block(block) for block in blocks(study, per_layer=True))
        summary = "<summary>The same with a factor for each layer</summary>"
        parts.append(f"<details>\n{summary}\n{listed}\n</details>")
    parts.append("<p>Elsewhere, a buffer of as many rows per rank (what it drops differs):</p>")
    items = [f"<li>{_text(name)}: {_text(value)}</li>" for name, value in elsewhere(study).items()]
    parts.append("<ul>\n" + "\n".join(items) + "\n</ul>")
    return "\n".join(parts)


def _block(block: Block) -> str:
    return f"<p><b>{_text(block.target)}</b>, {_text(block.about)}:</p>\n{_code(block.text)}"


def _figures(study: Study, svgs: dict[str, str]) -> str:
    captions = dict(_CAPTIONS)
    if study.pool == "expert":
        captions["dropped"] += _BALANCED
    return "\n".join(
        f'<figure id="figure-{name}">\n<div class="scroll">\n{svg}\n</div>\n'
        f"<figcaption>{_text(captions[name])}</figcaption>\n</figure>"
        for name, svg in svgs.items()
    )


def _factors(study: Study) -> str:
    note = "Dropped: of all rows."
    if study.pool == "expert":
        note += " Balanced: the same if all experts were equally popular."
    note += (
        " Lost tokens: those that keep none of their experts. Retried: the share of steps in which "
        "any row is dropped. Fill: kept rows per slot."
    )
    if study.layer is not None:
        note += (
            " Wire: sent by a rank per layer and micro-batch, forward and backward; empty slots "
            "travel, too. Memory: on a rank, an upper bound; in graphs: held for good by CUDA "
            "graphs of its layers. TFLOP: every slot computed / empty slots skipped. ms: see the "
            "end of this page."
        )
    return f'<p class="note">{note}</p>\n{_table(factor_table(study))}'


def _hosts(study: Study) -> str:
    made = _table(exchange_table(study.hosts, study.num_ranks))
    return f'<p class="note">{ABOUT}</p>\n{made}\n<p>{_text(sentence(study.hosts))}</p>'


def _layers(study: Study) -> str:
    note = (
        "Each layer keeps the target by itself. Between: the confidence bounds of the factor that "
        "it needs."
    )
    return f'<p class="note">{note}</p>\n{_table(layer_table(study))}'


def _caveats(study: Study) -> str:
    items = [f"Training: {caveat}." for caveat in study.training.overall.caveats]
    items += [f"Evaluation: {caveat}." for caveat in study.evaluation.overall.caveats]
    unsure = [str(n) for n, advice in study.training.layers.items() if not advice.promised]
    if unsure:
        items.append(f"Layers by themselves: no promise for {', '.join(unsure)}.")
    items += [
        "Routing changes with the data, the learning rate and with what is dropped: a promise is "
        "for steps like the ones in the trace. Watch the dispatcher's telemetry, and trace again.",
        "Dropping a share of the rows changes what is learned; a trace does not show how much.",
    ]
    if study.layer is None:
        items.append("Costs are missing: give --hidden-size and --ffn-size.")
    else:
        items.append(study.layer.time_model.describe())
    listed = "\n".join(f'<li class="caveat">{_text(text)}</li>' for text in items)
    return f"<ul>\n{listed}\n</ul>"


def _method(study: Study) -> str:
    replayed, question = study.replay, study.question
    training = study.training.overall
    split = f", each split over {question.etp}" if question.etp > 1 else ""
    texts = [
        f"The trace: {replayed.demand.sum():,} rows of {len(replayed.steps):,} records, "
        f"{training.num_steps:,} steps, {len(study.training.layers)} layers; {study.num_experts} "
        f"experts on {study.num_ranks} ranks{split}, top-{study.top_k}, {study.num_tokens:,} "
        "tokens per rank.",
        f"Every record was replayed at {len(study.options)} factors with the dispatcher's own rule "
        f"(policy {question.policy}, at least {question.min_capacity} slots, rows a multiple of "
        f"{question.alignment}): the counts are exact.",
        f"The factor is the upper {percent(question.target.confidence)} confidence bound, by order "
        f"statistics, of the quantile in the target; steps come in runs, so "
        f"{training.num_steps:,} of them count as {training.num_independent:,.0f}.",
        f"Evaluation: eager passes drop nothing. For a captured one: {study.evaluation.target}.",
    ]
    if study.held_out is not None:
        texts.append(study.held_out_sentence())
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


def _code(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _text(text: str) -> str:
    """Escape text; a number and its percent sign stay on one line."""
    return escape(text).replace(" %", "\N{NO-BREAK SPACE}%")
