"""The report: one HTML file that needs nothing else, to be read from top to bottom.

The answer first, then what to paste, then why: figures, what every factor drops and costs, layer
by layer, and at the end what it does not know and how it was computed. Figures are inline SVG; no
script, no font and no picture comes from elsewhere, so it opens without a network, and can be
mailed.
"""

from html import escape

from padded_dispatch.tune.recommend import percent
from padded_dispatch.tune.settings import NO_LAYERS, elsewhere, flags, yaml
from padded_dispatch.tune.study import Study
from padded_dispatch.tune.tables import Table, factor_table, layer_table

_STYLE = """
:root { --ink: #222; --soft: #666; --line: #e3e3e3; --accent: #D55E00; --wash: #FFF5EE; }
body { margin: 0 auto; max-width: 66rem; padding: 2.5rem 1.5rem 4rem; color: var(--ink);
  background: #fff; font: 16px/1.55 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
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
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }
th, td { text-align: right; padding: .28rem .6rem; border-bottom: 1px solid var(--line); }
td { white-space: nowrap; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
tr.marked td { background: var(--wash); font-weight: 600; }
pre { background: #f6f6f6; border-radius: 6px; padding: .9rem 1.1rem; overflow-x: auto;
  font-size: .88rem; }
figure { margin: 1.5rem 0 0; }
figure svg { width: 100%; height: auto; }
li.caveat { margin: .4rem 0; }
"""

_CAPTIONS = {
    "dropped": "The dashed line is what remains when all experts are equally popular, since tokens "
    "still choose at random; the distance to it is what better balance would save.",
    "need": "One point per step: the smallest factor that would have kept the target. The shaded "
    "band is what the recommendation could still become with more steps.",
    "load": "Demand before anything is dropped, over the whole trace.",
    "cost": "Every point is a factor. Down is fewer dropped rows, left is cheaper.",
}


def html(study: Study, svgs: dict[str, str]) -> str:
    """The report.

    Args:
        study: what it is about.
        svgs: figures as `<svg>` elements, by the names of `plots.figures`; none is fine.
    """
    title = f"Capacity for {study.name}"
    body = [
        f"<h1>{_text(title)}</h1>",
        _section("recommendation", None, _answer(study)),
        _section("settings", "What to set", _settings(study)),
        _section("figures", "Why", _figures(svgs)) if svgs else "",
        _section("factors", "What each factor does", _factors(study)),
        _section("layers", "Layer by layer", _layers(study)),
        _section("caveats", "What this does not know", _caveats(study)),
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
        (f"{study.evaluation.overall.factor:g}", "in evaluation"),
        (percent(advice.dropped), "of the rows seen dropped"),
        (percent(advice.worst), "of the rows in the worst step"),
    ]
    option = study.option(advice.factor)
    if option.cost is not None:
        tiles.append((f"{option.cost.memory_bytes / 2**30:.2f} GiB", "on a rank"))
        tiles.append((f"{option.padded_ms:.2f} ms", "per layer, modelled"))
    items = "\n".join(f"<li><b>{_text(big)}</b><span>{_text(s)}</span></li>" for big, s in tiles)
    answer = f'<p class="answer">{_text(study.training.sentence())}</p>'
    return f'{answer}\n<ul class="tiles">\n{items}\n</ul>'


def _settings(study: Study) -> str:
    parts = [
        "<p>Megatron-LM, through the launcher of padded_dispatch, one factor for all layers:</p>",
        _code(" \\\n".join(flags(study, per_layer=False))),
    ]
    if not study.layers_of_model:
        parts.append(f"<p>{_text(NO_LAYERS)}</p>")
    elif len(study.training.layers) > 1:
        parts += [
            "<p>The same with a factor for each layer:</p>",
            _code(" \\\n".join(flags(study, per_layer=True))),
        ]
    parts += ["<p>As fields of the two configs:</p>", _code(yaml(study, per_layer=False))]
    parts.append("<p>Elsewhere, a buffer of as many rows per rank (what it drops differs):</p>")
    items = [f"<li>{_text(name)}: {_text(value)}</li>" for name, value in elsewhere(study).items()]
    parts.append("<ul>\n" + "\n".join(items) + "\n</ul>")
    return "\n".join(parts)


def _figures(svgs: dict[str, str]) -> str:
    return "\n".join(
        f'<figure id="figure-{name}">\n{svg}\n<figcaption>{_text(_CAPTIONS[name])}</figcaption>\n'
        "</figure>"
        for name, svg in svgs.items()
    )


def _factors(study: Study) -> str:
    note = (
        "Dropped: of all rows. Floor: the same with equally popular experts. Lost tokens: "
        "those that keep none of their experts. Fill: kept rows per slot."
    )
    if study.layer is not None:
        note += (
            " Wire: sent by a rank per layer and micro-batch, forward and backward; empty slots "
            "travel, too. Memory: on a rank, an upper bound; in graphs: what CUDA graphs of its "
            "layers would hold for good. TFLOP: every slot computed / empty slots skipped. ms: see "
            "the end of this page."
        )
    return f'<p class="note">{note}</p>\n{_table(factor_table(study))}'


def _layers(study: Study) -> str:
    note = (
        "Every layer keeps the target for itself. Between: the bounds of the factor that is truly "
        "needed."
    )
    return f'<p class="note">{note}</p>\n{_table(layer_table(study))}'


def _caveats(study: Study) -> str:
    said = [f"Training: {caveat}." for caveat in study.training.overall.caveats]
    said += [f"Evaluation: {caveat}." for caveat in study.evaluation.overall.caveats]
    unsure = [str(n) for n, advice in study.training.layers.items() if not advice.promised]
    if unsure:
        said.append(f"Layers by themselves: no promise for {', '.join(unsure)}.")
    said += [
        "Routing changes with the data, the learning rate and with what is dropped: a promise is "
        "for steps like the ones in the trace. Watch the dispatcher's telemetry, and trace again.",
        "Dropping a share of the rows changes what is learned; how much, no trace can tell.",
    ]
    if study.layer is None:
        said.append("Costs are missing: give --hidden-size and --ffn-size.")
    else:
        said.append(study.layer.calibration.describe())
    items = "\n".join(f'<li class="caveat">{_text(text)}</li>' for text in said)
    return f"<ul>\n{items}\n</ul>"


def _method(study: Study) -> str:
    found, question = study.what_if, study.question
    training = study.training.overall
    split = f", each split over {question.etp}" if question.etp > 1 else ""
    texts = [
        f"The trace: {found.demand.sum():,} rows of {len(found.steps_N):,} passes, "
        f"{training.num_steps:,} steps, {len(study.training.layers)} layers; {study.num_experts} "
        f"experts on {study.num_ranks} ranks{split}, top-{study.top_k}, {study.num_tokens:,} "
        "tokens per rank.",
        f"Every pass was replayed at {len(study.options)} factors with the dispatcher's own rule "
        f"(policy {question.policy}, at least {question.min_capacity} slots, rows a multiple of "
        f"{question.alignment}): the counts are exact.",
        f"The factor is the upper {percent(question.target.confidence)} confidence bound, by order "
        f"statistics, of the quantile that the target names; steps come in runs, so "
        f"{training.num_steps:,} of them count as {training.num_independent:,.0f}.",
        f"Evaluation: {study.evaluation.target}.",
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
    """Escaped; a number and its percent sign stay on one line."""
    return escape(text).replace(" %", "\N{NO-BREAK SPACE}%")
